"""Every command of asv's, by real asv on a repository of real commits; one of them runs one more operator per layer.

On the smallest shape, with packages borrowed from this interpreter: it is about what asv understands, not about times.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from asv_repository import (
    LAYERS,
    ONE_MORE,
    asv,
    borrow_packages,
    commit,
    commit_of,
    copy_tree,
    git,
    lines_beside,
    make_environment,
    results_of,
    run,
)
from test_harness_page_browser import browser  # noqa: F401 (a fixture)

from benchmarks.harness.unreadable import unreadable_results

ARGUMENTS = "--model tiny --device cpu --samples 2 -k '16 and (prompt_length or decode_step or prefill)'"
SERIES = "bench_work.test_decode_step.track_num_operators"
NUM_COMMITS, PLANTED = 17, 9

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("home"), ARGUMENTS)


@pytest.fixture(scope="module")
def repository(tmp_path_factory, environment):
    """Commits c00 to c16, in each of them another comment; from c09 on, one more addition in each layer."""
    folder = tmp_path_factory.mktemp("repository")
    copy_tree(folder)
    borrow_packages(folder)
    git(folder, environment, "init", "-q", "-b", "main")
    model = folder / "nanoserve" / "models" / "llama.py"
    assert LAYERS in model.read_text()
    for number in range(NUM_COMMITS):
        source = model.read_text().replace(LAYERS, ONE_MORE) if number == PLANTED else model.read_text()
        model.write_text(f"{source}# {number}\n")
        commit(folder, environment, f"commit {number}")
        git(folder, environment, "tag", f"c{number:02}")
    assert asv(folder, environment, "machine", "--yes").returncode == 0
    return folder


@pytest.fixture(scope="module")
def found(repository, environment):
    """asv's search for the planted commit among sixteen."""
    return asv(repository, environment, "find", "c00..c16", SERIES)


@pytest.fixture
def asv_here(repository, environment):
    return lambda *arguments: asv(repository, environment, *arguments)


def told(done):
    return done.stdout + done.stderr


def test_check_finds_no_problems(asv_here):
    done = asv_here("check")
    assert "No problems found" in told(done)
    assert done.returncode == 0


def test_borrowed_packages_are_found_and_a_borrowed_nanoserve_is_not(repository, found):
    (python,) = (repository / ".asv" / "env").glob("*/bin/python")
    script = "import sys, nanoserve, torch; print(nanoserve.__file__, torch.__file__, sys.meta_path)"
    done = subprocess.run([python, "-c", script], text=True, capture_output=True, check=True, cwd=python.parent)
    nanoserve, torch, finders = done.stdout.split(" ", 2)
    assert Path(nanoserve).is_relative_to(repository)
    assert not Path(torch).is_relative_to(repository)
    assert "editable" not in finders


def test_find_names_the_planted_commit(repository, found):
    assert found.returncode == 0
    assert f"Greatest regression found: {commit_of(repository, 'c09')[:8]}" in told(found)


def test_nothing_is_measured_that_was_not_selected(repository, found):
    """`find` wants one series of one test, of a file with three tests."""
    lines = lines_beside(repository, "c09")
    assert [(line["benchmark"], line["case"]) for line in lines] == [
        ("benchmarks/bench_work.py::test_decode_step", "16")
    ]


def test_continuous_and_compare_see_one_more_operator(repository, asv_here):
    quick = ["--bench", r"num_operators", "--quick", "--launch-method", "forkserver"]
    done = asv_here("continuous", "c08", "c09", "--factor", "1.001", *quick)
    assert done.returncode == 1
    flagged = re.findall(r"^\| \+ .*(test_\w+)\.track_num_operators\(", done.stdout, re.MULTILINE)
    assert set(flagged) == {"test_decode_step", "test_prefill"}
    assert {line["name"].partition(".")[0] for line in lines_beside(repository, "c08")} == {"bench_work"}
    done = asv_here("compare", "c08", "c09", "--factor", "1.001", "--split")
    assert done.returncode == 0
    assert re.search(r"got worse:\s.*track_num_operators\('cached', '16'\)", done.stdout, re.DOTALL)


def test_rounds_and_spawned_processes(repository, asv_here):
    """A plain run hands every round the pass of the first; no number may come twice, however readers are launched."""
    options = ["--launch-method", "spawn", "-a", "rounds=2", "--record-samples", "--bench", r"itl_p50_s\('cached'"]
    done = asv_here("run", "c04^!", *options)
    assert done.returncode == 0, told(done)
    stored = json.loads(results_of(repository, "c04").read_text())
    row = stored["results"]["bench_kv_cache.test_prompt_length.track_itl_p50_s"]
    samples = (dict(zip(stored["result_columns"], row, strict=False)).get("samples") or [[]])[0] or []
    lines = lines_beside(repository, "c04")
    clean = [line for line in lines if not any(flag["kind"] == "contaminated" for flag in line["flags"])]
    assert len({line["pass"] for line in lines}) == len(lines) == 2
    assert len(set(samples)) == len(samples) == len(clean)


def as_format_1(told):
    """A results file as older versions of asv wrote it."""
    rows = {name: dict(zip(told["result_columns"], row, strict=False)) for name, row in told["results"].items()}
    older = {name: {"result": row["result"], "params": row["params"]} for name, row in rows.items()}
    versions = {name: row["version"] for name, row in rows.items()}
    return told | {"version": 1, "results": older, "benchmark_version": versions}


def test_a_file_that_asv_cannot_read_is_named_and_mended(repository, environment, asv_here, found):
    """Cut off, it stops `run` for its commit; of an older format, every command passes over it."""
    cut, old = results_of(repository, "c01"), results_of(repository, "c16")
    whole, now = cut.read_text(), json.loads(old.read_text())
    cut.write_text(whole[: len(whole) // 2])
    old.write_text(json.dumps(as_format_1(now)))
    try:
        done = asv_here("run", "c01^!", "--quick", "--bench", SERIES)
        assert done.returncode == 1
        assert f"Error parsing JSON in file '{cut}'" in told(done)
        assert "is stored in an old file format" in told(asv_here("publish"))
        named = {each.path: each.mend for each in unreadable_results(repository / ".asv" / "results")}
        assert named == {cut: f"rm {cut}", old: "asv update"}
        for mend in named.values():
            words = shlex.split(mend.replace("asv ", f"{sys.executable} -m asv "))
            assert run(words, repository, environment).returncode == 0
    finally:
        cut.write_text(whole)
    assert unreadable_results(repository / ".asv" / "results") == []
    assert json.loads(old.read_text())["version"] == 2
    assert json.loads(old.read_text())["results"][SERIES][:3] == now["results"][SERIES][:3]


@pytest.fixture(scope="module")
def other_machine(repository, environment, found):
    """What asv said when the host came back with another GPU, and what it then said under the name it was told."""
    (record,) = (repository / ".asv" / "results" / "provenance").glob("*/machine.jsonl")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"gpu": "NVIDIA H100"}))
    options, before = ["run", "c16^!", "--quick", "--show-stderr", "--bench", SERIES], results_of(repository, "c16")
    kept = before.read_text()
    refused = asv(repository, environment, *options)
    assert before.read_text() == kept
    mending, name = re.search(r"asv (machine --machine (\S+) --yes)", told(refused)).groups()
    assert asv(repository, environment, *mending.split()).returncode == 0
    return refused, asv(repository, environment, *options, "--machine", name), name


def test_another_gpu_under_the_same_name_is_refused_and_a_new_name_mends_it(repository, other_machine):
    refused, mended, name = other_machine
    assert refused.returncode != 0
    assert "gpu was NVIDIA H100, is None" in told(refused)
    assert mended.returncode == 0
    assert results_of(repository, "c16", name)
    assert {line["case"] for line in lines_beside(repository, "c16", name)} == {"16"}


def put_together(results, elsewhere, machine):
    """Take one machine's results away and bring them back: one folder of asv's and one beside it, and that is all."""
    for kept in (results, results / "provenance"):
        shutil.move(kept / machine, elsewhere / kept.name / machine)
        shutil.copytree(elsewhere / kept.name / machine, kept / machine)
    assert [path for path in results.rglob("*") if machine in path.name] == [
        results / machine, results / "provenance" / machine
    ]  # fmt: skip


@pytest.fixture(scope="module")
def site(repository, environment, other_machine):
    """The pages that asv makes of the results of two machines, on a server of asv's own."""
    put_together(repository / ".asv" / "results", repository / "elsewhere", other_machine[2])
    assert asv(repository, environment, "publish").returncode == 0
    command = [sys.executable, "-m", "asv", "preview", "--port", "0"]
    preview = subprocess.Popen(command, cwd=repository, env=environment, text=True, stdout=subprocess.PIPE)
    try:
        address = None
        while address is None:
            address = re.search(r"Serving at (http://\S+)", preview.stdout.readline())
        yield address[1]
    finally:
        preview.terminate()  # who was started in the background ignores SIGINT
        preview.communicate(timeout=30)
    assert preview.returncode == -signal.SIGTERM, "it served until it was told to end"


def fetch(site, name):
    with urllib.request.urlopen(f"{site}{name}", timeout=30) as answer:
        return answer.read().decode()


def test_published_series_have_units_sources_two_machines_and_the_regression(repository, site, other_machine):
    index = json.loads(fetch(site, "index.json"))
    assert other_machine[2] in index["machines"]
    assert len(index["machines"]) == 2
    for name, series in index["benchmarks"].items():
        assert series["unit"] != "unit", name
        assert f"def {name.split('.')[-2]}(" in series["code"], name
    revisions = {commit: int(revision) for revision, commit in index["revision_to_hash"].items()}
    found = {each[0]: each[-1] for each in json.loads(fetch(site, "regressions.json"))["regressions"]}
    for arm in ("cached", "naive"):
        ((since, at, before, after),) = found[f"{SERIES}('{arm}', '16')"]
        assert after == before + 2
        assert (since, at) == (None, revisions[commit_of(repository, "c09")])


class Page:
    """asv's pages take their scripts from the network; a folder of copies stands in where there is none."""

    def __init__(self, site, open_page):
        self.troubles, self._site = [], site
        self._page = open_page(viewport={"width": 1280, "height": 900})
        self._page.on("console", self._hear)
        self._page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self._page.on("requestfailed", lambda request: self.troubles.append(request.url))
        if "ASV_PAGE_SCRIPTS" in os.environ:
            self._page.route(re.compile("^https://"), self._from_folder)
            self._page.route(lambda url: url.partition("#")[0] == site, self._without_hashes)

    def _hear(self, said):
        """asv asks for the graph of each machine and series, also where there is none."""
        if said.type == "error" and "/graphs/" not in said.location["url"]:
            self.troubles.append(f"{said.text} {said.location['url']}")

    def _from_folder(self, route):
        path = Path(os.environ["ASV_PAGE_SCRIPTS"], route.request.url.rpartition("/")[2])
        route.fulfill(path=path, headers={"Access-Control-Allow-Origin": "*"})

    def _without_hashes(self, route):
        route.fulfill(body=re.sub(r'integrity="[^"]*"', "", route.fetch().text()), content_type="text/html")

    def open(self, fragment, seen):
        self._page.goto(f"{self._site}#{fragment}")
        if self._page.url.endswith("error.html"):
            pytest.skip("asv's pages take their scripts from the network, which is out of reach")
        self._page.wait_for_selector(seen)
        return self._page


AXIS_LABEL = "$('#main-graph').data('plot').getOptions().yaxes[0].axisLabel"


def test_the_pages_open_in_a_browser(request, site):
    """Each series has its test as the source, a graph its unit at the axis; nothing is amiss in the console."""
    index, page = json.loads(fetch(site, "index.json")), Page(site, request.getfixturevalue("browser").new_page)
    grid = page.open("/", ".benchmark-plot")
    for name in index["benchmarks"]:
        grid.locator(f'[id="summarygrid-{name}"]').hover()
        assert f"def {name.split('.')[-2]}(" in grid.locator(".tooltip-inner").inner_text()
    for name in (SERIES, "bench_work.test_prefill.track_num_operators"):
        shown = page.open(name, "#main-graph canvas")
        assert shown.evaluate(AXIS_LABEL) == index["benchmarks"][name]["unit"] == "operators"
    for fragment in ("summarylist", "regressions"):
        page.open(f"/{fragment}", f"#{fragment}-display :text('decode_step')")
    assert page.troubles == []
