"""Discovery and one pass of the bridge to asv, in a process that believes to be asv's, on a suite written here."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import sample_results
from asv.results import Results
from asv.runner import BenchmarkResult
from child_process import inherited

from benchmarks.harness import apart, bridge, guards, passes, suite
from benchmarks.harness.errors import ForeignPackageError, InstrumentError
from benchmarks.harness.metrics import metric
from benchmarks.harness.passes import Taken
from benchmarks.harness.publishing import RESULTS
from benchmarks.harness.results import Flag

ROOT = Path(__file__).parents[1]

SUITE = '''
"""A suite for the bridge."""
import signal
import time

import pytest

COUNT = 2
IDS = ["plain", "a/b", "é,-x", "with space", "a[b]", "a::b", "plain", "-", "' ')"]


class Thing:
    def __init__(self, size):
        self.size = size


@pytest.fixture
def doubled(request):
    return 2 * request.param


@pytest.mark.arms(cached={"cache": "contiguous"}, naive={"cache": "none"})
@pytest.mark.quantities("ttft_s", "speedup")
@pytest.mark.parametrize("size", [2, 3, 2, 3, 2, 3, 2, 3, 2], ids=IDS)
def test_ids(measure, size):
    measure.stream(prompt_tokens=size, new_tokens=COUNT)
    measure.compare(slow="naive", fast="cached")


@pytest.mark.arms(only={})
@pytest.mark.quantities("ttft_s")
@pytest.mark.parametrize("thing", [Thing(2), Thing(3)], ids=repr)
@pytest.mark.parametrize("doubled", [1, 2], indirect=True)
def test_objects(measure, doubled, thing):
    measure.stream(prompt_tokens=doubled * thing.size, new_tokens=2)


@pytest.mark.arms(only={})
@pytest.mark.quantities("ttft_s", "itl_p90_s")
@pytest.mark.parametrize(
    "what",
    [
        "good",
        "raises",
        "skips",
        pytest.param("expected", marks=pytest.mark.xfail),
        "hangs",
        pytest.param("slow", marks=pytest.mark.desk),
        Thing(1),
        "hungry",
    ],
)
def test_fates(measure, what):
    if what == "hungry":
        raise MemoryError
    if what == "skips":
        pytest.skip("not here")
    if what in ("raises", "expected"):
        raise RuntimeError("broken on purpose")
    if what == "hangs":
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # the limit, long enough for busy machines, comes early
        time.sleep(300)
    measure.stream(prompt_tokens=2, new_tokens=2)


one_arm, two_arms = pytest.mark.arms(only={}), pytest.mark.arms(only={}, naive={"cache": "none"})
ttft = pytest.mark.quantities("ttft_s")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("plain", marks=[one_arm, ttft]),
        pytest.param("arms", marks=[two_arms, ttft]),
        pytest.param("metrics", marks=[one_arm, pytest.mark.quantities("e2e_s")]),
    ],
)
def test_unlike(measure, kind):
    measure.stream(prompt_tokens=2, new_tokens=2)


def made():
    @pytest.mark.arms(only={})
    @pytest.mark.quantities("ttft_s")
    def test(measure):
        measure.stream(prompt_tokens=2, new_tokens=2)

    return test


test_twin, test_other_twin = made(), made()
'''

OTHER = '''
"""A second file, whose name asv could not keep."""
import os

import pytest


@pytest.mark.arms(only={})
@pytest.mark.quantities("num_operators")
def test_counts(count_work):
    count_work.decode_step(context_tokens=4)


@pytest.mark.arms(only={})
@pytest.mark.quantities("num_operators")
def test_dies(count_work):
    os._exit(3)
'''

PROBE = """
import json, os, sys
from pathlib import Path
os.environ["ASV"] = "true"
sys.path[:0] = [os.environ.get("BUILD", os.getcwd()), os.getcwd()]
from benchmarks.harness import ceilings, passes
from benchmarks.harness.sources.nanoserve import NanoserveSubject
ceilings._READ_BYTES, ceilings._SQUARE = {"cpu": 1 << 20}, {"cpu": 64}
passes.prove_installed = lambda *_: None
load = NanoserveSubject.load
def counted(*told):
    with open("loads", "a") as file:
        file.write(".")
    return load(*told)
NanoserveSubject.load = counted
from benchmarks import asv_suite
from asv_runner.discovery import disc_benchmarks
found = {b.name: b for b in disc_benchmarks(str(Path("benchmarks").resolve()))}
told = {name: [b.params, b.param_names, b.unit, b.version, b.setup_cache_key, b.code] for name, b in found.items()}
passes = {}
for name, b in found.items():
    if b.setup_cache_key not in passes and "collect only" not in sys.argv:
        passes[b.setup_cache_key] = b._setup_cache()
def plain(by_key):
    return [[list(key), value] for key, value in by_key.items()]
kept = {
    key: {name: plain(p[name]) for name in ("values", "failed", "skipped", "absent")} | {"left_out": len(p["left_out"])}
    for key, p in passes.items()
}
print("TOLD" + json.dumps([told, kept]))
"""

KEY, OTHER_KEY = "bench_scratch:1", "bench_other-one:1"


def probe(folder, *arguments, prefix=(), **variables):
    """What asv would discover, and what each pass leaves; with "collect only" nothing is measured."""
    environment = inherited() | {
        "NANOSERVE_BENCH_ARGS": "--model tiny --device cpu --samples 1 --max-warmups 0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *prefix, "-c", PROBE, *arguments]
    if prefix:
        command = [sys.executable, *prefix]
    done = subprocess.run(command, cwd=folder, env=environment | variables, text=True, capture_output=True, check=False)
    assert "TOLD" in done.stdout, done.stdout + done.stderr
    return json.loads(done.stdout.partition("TOLD")[2])


def make_project(folder, **files):
    """A project with the real instrument and these benchmarks."""
    shutil.copytree(ROOT / "benchmarks", folder / "benchmarks", ignore=shutil.ignore_patterns("bench_*", "__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name, text in files.items():
        (folder / "benchmarks" / f"{name}.py").write_text(text, "utf-8")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp("project"), bench_scratch=SUITE, **{"bench_other-one": OTHER})


@pytest.fixture(scope="module")
def probed(folder):
    return probe(folder)


@pytest.fixture(scope="module")
def taken(probed):
    """What the pass of the first file left: values by (test, metric, arm, case), and reasons by (test, case)."""
    return by_test(probed[1][KEY])


def by_test(kept):
    """The same with short names of tests."""
    short = {name: {} for name in ("values", "failed", "skipped", "absent")}
    for name, found in short.items():
        for (node, *rest), value in kept[name]:
            found[node.rpartition("::")[2], *rest] = value
    return SimpleNamespace(**short, left_out=kept["left_out"])


def cases_of(taken, test):
    return {case for name, _, _, case in taken.values if name == test}


def test_gated_metrics_become_series_and_nothing_else(probed):
    told, _ = probed
    assert set(told) == {
        "bench_scratch.test_ids.track_ttft_s",
        "bench_scratch.test_ids.track_inverse_speedup",
        "bench_scratch.test_objects.track_ttft_s",
        "bench_scratch.test_fates.track_ttft_s",
        "bench_scratch.test_unlike.track_ttft_s",
        "bench_scratch.test_unlike.track_e2e_s",
        "bench_scratch.test_twin.track_ttft_s",
        "bench_scratch.test_other_twin.track_ttft_s",
        "bench_other_one.test_counts.track_num_operators",
        "bench_other_one.test_dies.track_num_operators",
    }
    assert {unit for _, _, unit, *_ in told.values()} == {"seconds", "ratio", "operators"}


def test_one_pass_measures_all_tests_of_a_file(folder, probed):
    """And loads the model once; once more after a case that ended its process."""
    told, kept = probed
    assert {key for *_, key, _ in told.values()} == set(kept) == {KEY, OTHER_KEY}
    assert len((folder / "loads").read_text()) == 1 + (1 + 1)


def test_asvs_page_shows_the_test_of_a_series_and_nothing_else(probed):
    told, _ = probed
    code = told["bench_scratch.test_ids.track_ttft_s"][5]
    assert code.startswith("@pytest.mark.arms(cached=")
    assert code.endswith('measure.compare(slow="naive", fast="cached")')


def test_counts_are_taken_once_and_need_no_statistics(probed):
    other = by_test(probed[1][OTHER_KEY])
    assert list(other.values) == [("test_counts", "num_operators", "only", "")]
    assert (other.skipped, other.absent, other.left_out) == ({}, {}, 0)


def test_ids_of_every_kind_survive_the_trip(probed, taken):
    params, names, *_ = probed[0]["bench_scratch.test_ids.track_ttft_s"]
    assert names == ["arm", "case"]
    assert params[0] == ["'cached'", "'naive'"]
    assert len(set(params[1])) == 9
    for arm in ("cached", "naive"):
        measured = [case for test, name, of, case in taken.values if (test, name, of) == ("test_ids", "ttft_s", arm)]
        assert list(map(repr, measured)) == params[1]
    assert sum(key[:2] == ("test_ids", "speedup") for key in taken.values) == 9


def test_an_objects_address_is_no_part_of_a_name(folder, probed, taken):
    """It is another one in each process, and asv hands parameters on by their names and places."""
    name = "bench_scratch.test_objects.track_ttft_s"
    params = probed[0][name][0]
    assert params == probe(folder, "collect only")[0][name][0]
    assert len(set(params[1])) == 4
    assert "0x" not in str(params)
    assert {repr(case) for case in cases_of(taken, "test_objects")} == set(params[1])


def test_one_bad_case_is_named_and_the_others_keep_their_numbers(taken):
    """One raises, one skips, one takes too long, one has too little memory."""
    assert cases_of(taken, "test_fates") == {"good", "what6"}
    assert {case for _, case in taken.failed} == {"raises", "hangs", "hungry"}
    assert "broken on purpose" in taken.failed["test_fates", "raises"]
    assert "took longer than 300 s" in taken.failed["test_fates", "hangs"]
    assert taken.failed["test_fates", "hungry"].startswith("out of memory on cpu: MemoryError.")
    assert set(taken.skipped) == {("test_fates", "skips"), ("test_fates", "expected")}
    assert taken.skipped["test_fates", "skips"] == "not here"


def test_a_case_that_takes_its_process_with_it_is_named_and_the_others_keep_their_numbers(probed):
    other = by_test(probed[1][OTHER_KEY])
    assert {test for test, *_ in other.values} == {"test_counts"}
    assert list(other.failed) == [("test_dies", "")]
    assert "its process ended with exit status 3" in other.failed["test_dies", ""]


def test_a_case_for_the_desk_is_left_out(probed):
    assert "'slow'" not in probed[0]["bench_scratch.test_fates.track_ttft_s"][0][1]


def test_cases_that_declare_unlike_things_have_what_each_declares(probed, taken):
    told, _ = probed
    assert told["bench_scratch.test_unlike.track_ttft_s"][0][0] == ["'only'", "'naive'"]
    assert {key[1:] for key in taken.values if key[0] == "test_unlike"} == {
        ("ttft_s", "only", "plain"),
        ("ttft_s", "only", "arms"),
        ("ttft_s", "naive", "arms"),
        ("e2e_s", "only", "metrics"),
    }


def test_tests_that_share_their_code_have_series_of_their_own(taken):
    assert cases_of(taken, "test_twin") == cases_of(taken, "test_other_twin") == {""}


@pytest.mark.slow
def test_versions_follow_what_can_move_a_number(folder, probed):
    """A constant that a test reads changes its version; another test's body does not."""

    def versions(told):
        return {name: version for name, (_, _, _, version, *_) in told[0].items() if "scratch" in name}

    before, path = versions(probed), folder / "benchmarks" / "bench_scratch.py"
    try:
        path.write_text(SUITE.replace("COUNT = 2", "COUNT = 4"), "utf-8")
        constant = versions(probe(folder, "collect only"))
        path.write_text(SUITE.replace("prompt_tokens=2, new_tokens=2", "prompt_tokens=2, new_tokens=3", 1), "utf-8")
        body = versions(probe(folder, "collect only"))
    finally:
        path.write_text(SUITE, "utf-8")
    assert all(constant[name] != before[name] for name in before)
    assert {name for name in before if body[name] != before[name]} == {"bench_scratch.test_fates.track_ttft_s"}


def test_a_file_that_cannot_be_collected_is_no_small_suite(folder):
    broken = folder / "benchmarks" / "bench_broken.py"
    broken.write_text('"""Broken."""\nimport a_module_that_is_not_there\n')
    try:
        with pytest.raises(AssertionError, match="could not all be collected"):
            probe(folder)
    finally:
        broken.unlink()


def test_two_benchmarks_of_one_name_are_refused(tmp_path):
    folder = make_project(tmp_path, **{"bench_other-one": OTHER, "bench_other_one": OTHER})
    with pytest.raises(
        AssertionError, match=r"two series are called bench_other_one\.test_counts\.track_num_operators"
    ):
        probe(folder, "collect only")


# What asv's command line selects.

EVERY_TEST = {"test_ids", "test_objects", "test_fates", "test_unlike", "test_twin", "test_other_twin"}


@pytest.mark.parametrize(
    ("options", "tests", "num_cases"),
    [
        (["--bench", r"test_unlike.*e2e"], {"test_unlike"}, 3),
        (["-b", r"ttft_s\('only', 'plain'\)", "-b=test_twin"], {"test_unlike", "test_twin"}, 2),
        (["--an-option-of-another-version", "1", "--bench", "test_twin"], EVERY_TEST, 9 + 4 + 7 + 3 + 2),
        (["--bench", "test_counts"], None, None),
    ],
)
def test_what_was_not_selected_is_not_measured(folder, options, tests, num_cases):
    """The process that measures is not told; it reads the command line of the asv that started it."""
    asv = folder / "asv"
    words = [sys.executable, "-c", SELECTED]
    asv.write_text(f"import subprocess\nsubprocess.run({words!r}, check=True)\n")
    done = subprocess.run(
        [sys.executable, asv, "run", "HEAD^!", *options], cwd=folder, text=True, capture_output=True, check=True
    )
    selected = json.loads(done.stdout.partition("TOLD")[2])
    assert (selected and {node.rpartition("::")[2] for node, _ in selected}) == tests
    assert (selected and len(selected)) == num_cases


SELECTED = """
import json, os, sys
sys.path.insert(0, os.getcwd())
from pathlib import Path
from benchmarks.harness import bridge
bridge.run_pass = lambda cases, folder, selected, hear: selected
series = bridge.derive_series(Path("benchmarks").resolve())
selected = series["bench_scratch.test_twin.track_ttft_s"].setup_cache()
print("TOLD" + json.dumps(selected and sorted(selected)))
"""


@pytest.mark.parametrize(("command", "is_refused"), [("run", True), ("find", True), ("check", False)])
def test_what_every_pass_would_refuse_is_refused_before_asv_stores_anything(folder, command, is_refused):
    """asv stores a failed pass in the place of older results; a suite that cannot be listed stops it before."""
    listing = [sys.executable, "-c", LISTING, "discover", "benchmarks", "result.json"]
    (folder / "asv").write_text(f"import subprocess, sys\nsys.exit(subprocess.run({listing!r}).returncode)\n")
    environment = os.environ | {"ASV_ENV_DIR": "/somewhere/else"}
    done = subprocess.run(
        [sys.executable, "asv", command], cwd=folder, env=environment, text=True, capture_output=True, check=False
    )
    assert ("which is not the package installed in /somewhere/else" in done.stderr) is is_refused
    assert (done.returncode != 0) is is_refused


LISTING = """
import os, sys
sys.path.insert(0, os.getcwd())
from pathlib import Path
from benchmarks.harness.bridge import derive_series
derive_series(Path("benchmarks").resolve())
"""


# An older commit.


OLD_SUITE = '''
"""What older commits lack."""
import pytest


@pytest.mark.arms(only={"cache": "contiguous"})
@pytest.mark.quantities("kv_bytes", "num_operators")
def test_metric(count_work):
    count_work.decode_step(context_tokens=4)


@pytest.mark.arms(only={})
@pytest.mark.quantities("kv_bytes")
def test_nothing_else(count_work):
    count_work.decode_step(context_tokens=4)


@pytest.mark.arms(cached={"cache": "contiguous"}, naive={"cache": "none"})
@pytest.mark.quantities("num_operators")
def test_option(count_work):
    count_work.decode_step(context_tokens=4)


@pytest.mark.arms(only={"cache": "pagd"})
@pytest.mark.quantities("num_operators")
def test_misspelt(count_work):
    count_work.decode_step(context_tokens=4)


@pytest.mark.arms(only={"cash": "none"})
@pytest.mark.quantities("num_operators")
def test_misnamed(count_work):
    count_work.decode_step(context_tokens=4)
'''


@pytest.fixture(scope="module")
def old_project(tmp_path_factory):
    """A checkout of today, and beside it a build whose engine tells no bytes and knows one cache only."""
    folder = make_project(tmp_path_factory.mktemp("checkout"), bench_old=OLD_SUITE)
    build = tmp_path_factory.mktemp("build")
    for place in (folder, build):
        shutil.copytree(ROOT / "nanoserve", place / "nanoserve", ignore=shutil.ignore_patterns("__pycache__"))
    for name, now, then in (
        ("engine.py", "def kv_bytes(", "def _bytes_of_no_name("),
        ("config.py", 'CACHES = ("paged", "contiguous", "growing", "none")', 'CACHES = ("paged", "contiguous")'),
    ):
        path = build / "nanoserve" / name
        assert now in path.read_text()
        path.write_text(path.read_text().replace(now, then))
    return folder, build


@pytest.mark.slow
def test_what_an_older_commit_lacks_is_not_there_and_nothing_has_failed(old_project):
    folder, build = old_project
    old = by_test(probe(folder, BUILD=str(build))[1]["bench_old:1"])
    assert set(old.values) == {("test_metric", "num_operators", "only", "")}
    assert set(old.absent) == {("test_metric", "kv_bytes"), ("test_nothing_else", "kv_bytes")}
    assert set(old.skipped) == {("test_nothing_else", ""), ("test_option", "")}
    assert "this commit has no engine with cache='none': unknown cache 'none'" in old.skipped["test_option", ""]
    assert set(old.failed) == {("test_misspelt", ""), ("test_misnamed", "")}, "the checkout lacks these as well"


@pytest.mark.slow
def test_in_the_checkouts_own_build_a_misspelt_option_is_an_error(old_project):
    now = by_test(probe(old_project[0])[1]["bench_old:1"])
    assert {test for test, *_ in now.values} == {"test_metric", "test_nothing_else", "test_option"}
    assert (now.absent, now.skipped) == ({}, {})
    assert set(now.failed) == {("test_misspelt", ""), ("test_misnamed", "")}
    assert "unknown cache 'pagd'; choose one of" in now.failed["test_misspelt", ""]
    assert "unknown Engine option 'cash'" in now.failed["test_misnamed", ""]


# What asv is handed.


NODE = "benchmarks/bench_x.py::test_growth"
READ = {
    "id": "a pass",
    "values": {
        (NODE, "ttft_s", "cached", "16"): 0.5,
        (NODE, "num_operators", "cached", "16"): 146.0,
        (NODE, "ttft_s", "cached", "32"): 0.7,
    },
    "failed": {(NODE, "64"): "broken on purpose"},
    "skipped": {(NODE, "128"): "not here"},
    "contaminated": {(NODE, "32")},
    "absent": {(NODE, "kv_bytes"): "too old"},
    "left_out": set(),
}


def spot(name, case, arm="cached"):
    each = metric(name)
    declared = suite.Declared(("cached",), (each,))
    cases = dict.fromkeys(("16", "32", "64", "128", "256"), declared) | {"plain": suite.Declared((), ())}
    benchmark = suite.Benchmark(NODE, lambda: None, "bench_x", Path("bench_x.py"), cases, "", "")
    return suite.Series(benchmark, each).spot((arm, case))


def read(name, case, again=lambda wanted: pytest.fail("measured again"), **changes):
    return bridge._read(SimpleNamespace(measure=again), READ | changes, spot(name, case))


@pytest.fixture
def in_a_folder_of_asvs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("in_a_folder_of_asvs")
def test_a_time_is_one_sample_a_count_a_number_and_a_contaminated_case_no_sample():
    assert read("ttft_s", "16") == {"samples": [0.5], "number": 1}
    assert read("num_operators", "16") == 146.0
    assert read("ttft_s", "32") == {"samples": [], "number": 1}


@pytest.mark.usefixtures("in_a_folder_of_asvs")
@pytest.mark.parametrize(("case", "said"), [("64", "broken on purpose"), ("256", "'256' was not measured")])
def test_a_case_without_a_number_is_an_error(case, said):
    with pytest.raises(InstrumentError, match=said):
        read("ttft_s", case)


@pytest.mark.usefixtures("in_a_folder_of_asvs")
@pytest.mark.parametrize(
    ("name", "case", "said"),
    [("ttft_s", "128", "not here"), ("kv_bytes", "16", "too old"), ("ttft_s", "plain", "declares no ttft_s of cached")],
)
def test_what_does_not_apply_is_told_to_asv_as_skipped(name, case, said):
    with pytest.raises(NotImplementedError, match=said):
        read(name, case)


@pytest.mark.usefixtures("in_a_folder_of_asvs")
def test_a_number_is_never_handed_out_twice():
    fresh = READ | {"id": "another pass", "values": {(NODE, "ttft_s", "cached", "16"): 0.9}}
    assert read("ttft_s", "16") == {"samples": [0.5], "number": 1}
    assert read("ttft_s", "16", lambda wanted: fresh) == {"samples": [0.9], "number": 1}


@pytest.mark.usefixtures("in_a_folder_of_asvs")
def test_a_case_that_was_left_out_by_mistake_is_measured_after_all():
    asked = []
    found = read("ttft_s", "16", lambda wanted: asked.append(wanted) or READ, left_out={(NODE, "16")}, values={})
    assert (found, asked) == ({"samples": [0.5], "number": 1}, [(NODE, "16")])


@pytest.mark.parametrize(("rounds", "value"), [([[1.0], [], [1.2]], 1.1), ([[], [1.0], [1.1]], 1.05), ([[], []], None)])
def test_asv_leaves_a_contaminated_round_out_and_has_no_data_without_any_other(rounds, value):
    """What asv itself makes of rounds that hand it no sample."""
    results = Results({"machine": "m"}, {}, "c" * 40, 0, "3.11", "environment", {})
    series = {"name": "b", "version": "1", "params": [], "param_names": [], "type": "track", "unit": "seconds"}
    for number, samples in enumerate(rounds):
        taken = BenchmarkResult(result=[True], samples=[samples], number=[1], errcode=0, stderr="", profile=None)
        results.add_result(series, taken, record_samples=True, append_samples=number > 0)
    assert results.get_result_value("b", []) == [value if value is None else pytest.approx(value)]


@pytest.mark.usefixtures("in_a_folder_of_asvs")
def test_a_count_of_a_contaminated_case_is_as_good_as_any():
    assert read("num_operators", "16", contaminated={(NODE, "16")}) == 146.0


READING = """
import os, pickle, sys, time
from pathlib import Path
os.environ["ASV"] = "true"
sys.path.insert(0, os.getcwd())
from asv_runner.discovery import disc_benchmarks
from asv_runner.run import _run
root = str(Path("benchmarks").resolve())
name = "bench_other_one.test_counts.track_num_operators"
list(disc_benchmarks(root))  # as the server of forkserver does
measured = {"id": "1", "values": {("benchmarks/bench_other-one.py::test_counts", "num_operators", "only", ""): 7.0}}
measured |= {"failed": {}, "skipped": {}, "contaminated": set(), "absent": {}, "left_out": set()}
os.chdir(sys.argv[1])
Path("cache.pickle").write_bytes(pickle.dumps(measured))
opened, known = [], set(sys.modules)
sys.addaudithook(lambda event, told: opened.append(str(told[0])) if event == "open" else None)
begin = time.perf_counter()
_run((root, f"{name}-0", "{}", "None", "result.json"))
spent_ms = 1e3 * (time.perf_counter() - begin)
heavy = [name for name in ("torch", "scipy", "matplotlib", "hypothesis", "xdist") if name in sys.modules]
print("TOLD", len(opened), len(set(sys.modules) - known), heavy, Path("result.json").read_text())
print(f"{spent_ms:.1f} ms, opened {opened}")
"""


def test_reading_a_series_opens_three_files_and_imports_nothing(folder, tmp_path):
    """The pass, the mark that it was read, the answer: with spawn and with forkserver, this comes with each number.

    Nor has anything heavy been imported before, a plugin of pytest's that nobody asked for included.
    """
    done = subprocess.run(
        [sys.executable, "-c", READING, tmp_path], cwd=folder, text=True, capture_output=True, check=False
    )
    assert "TOLD 3 0 [] 7.0" in done.stdout, done.stdout + done.stderr


# One pass, without asv.


def contaminated(case):
    flags = (Flag(kind="contaminated", arm="", what="busy"),)
    return dataclasses.replace(sample_results.streamed_case(), case=case, flags=flags)


def taking(results, names):
    """A session's plugin that has these results, whose cases are called by other names."""
    plugin = Taken({NODE: names}, {(NODE, name) for name in names}, lambda place: None)
    plugin._places = {(NODE, each.case): (NODE, name) for each, name in zip(results, names, strict=True)}
    config = SimpleNamespace(stash={RESULTS: results})
    plugin.pytest_sessionfinish(SimpleNamespace(config=config))
    assert config.stash[RESULTS] == []
    return plugin


def test_a_pass_names_its_contaminated_cases():
    told = taking([sample_results.streamed_case(8), contaminated("16")], ["8", "sixteen"]).told("")
    assert told["contaminated"] == {(NODE, "sixteen")}
    assert told["failed"] == {}


def test_asv_gets_the_best_run_and_the_sidecar_everything():
    results = [sample_results.streamed_case(8)]
    plugin = taking(results, ["eight"])
    ttft = next(m for m in results[0].measurements if (m.metric.name, m.arm) == ("ttft_s", "cached"))
    assert plugin.told("")["values"][NODE, "ttft_s", "cached", "eight"] == min(ttft.samples) < ttft.value
    assert plugin.results == [dataclasses.replace(results[0], case="eight")]


def test_a_chosen_case_of_which_nothing_is_known_has_failed():
    plugin = taking([sample_results.streamed_case(8)], ["8"])
    plugin._chosen = {(NODE, "8"), (NODE, "16")}
    assert plugin.told("the session's last words")["failed"] == {
        (NODE, "16"): "was not measured:\nthe session's last words"
    }


def test_a_pass_measures_nothing_but_the_installed_package(monkeypatch):
    monkeypatch.setenv("ASV_ENV_DIR", "/somewhere/else")
    with pytest.raises(ForeignPackageError, match="which is not the package installed in /somewhere/else"):
        passes.run_pass({NODE: ["8"]}, ROOT / "benchmarks")


@pytest.mark.parametrize(("text", "is_blamed"), [("RuntimeError: CUDA error: an illegal access", True), ("oh", False)])
def test_a_case_after_which_every_call_on_the_device_fails_is_the_last_of_its_process(text, is_blamed):
    plugin = taking([sample_results.streamed_case(8)], ["8"])
    session = SimpleNamespace(shouldstop=False)
    item = SimpleNamespace(nodeid=f"{NODE}[8]", callspec=SimpleNamespace(id="8"), session=session)
    hook = plugin.pytest_runtest_makereport(item)
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(SimpleNamespace(failed=True, skipped=False, longreprtext=text))
    assert plugin.blame == (((NODE, "8"), text) if is_blamed else (None, ""))
    assert bool(session.shouldstop) is is_blamed


def planned(monkeypatch, fates):
    """Passes whose cases meet these fates: "good", how the process ends, or what spoils it."""

    def measure(cases, folder, chosen, say):
        values = {}
        for case in sorted(chosen):
            say(case)
            fate = fates[case[1]]
            if fate == "good":
                values[case] = 1.0
            elif fate == "spoils":
                return {"id": "x", "values": values, "failed": {}}, (case, "CUDA error: an illegal memory access")
            else:
                fate()
        return {"id": "x", "values": values, "failed": {}}, (None, "")

    monkeypatch.setattr(passes, "_measure", measure)
    monkeypatch.setattr(passes, "SILENCE_S", 3.0)
    heard = []
    return passes.run_pass({NODE: list(fates)}, ROOT / "benchmarks", hear=heard.append), heard


def deaf():
    """Hang where no signal but the last one is heard."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGTERM])
    time.sleep(300)


@pytest.mark.slow
def test_whatever_ends_a_process_costs_one_case(monkeypatch):
    fates = {
        "a": "good", "b": lambda: os._exit(7), "c": lambda: os.kill(os.getpid(), signal.SIGKILL), "d": "spoils",
        "e": "good", "f": deaf, "g": "good",
    }  # fmt: skip
    measured, heard = planned(monkeypatch, fates)
    assert set(measured["values"]) == {(NODE, case) for case in "aeg"}
    said = {case: why.partition("measured it: ")[2] for (_, case), why in measured["failed"].items()}
    assert said == {
        "b": "its process ended with exit status 7",
        "c": "its process was killed by SIGKILL",
        "d": "CUDA error: an illegal memory access",
        "f": "nothing was heard of it for 3 s, so it was killed",
    }
    assert heard[:2] == [f"{NODE}::a", f"{NODE}::b"]


def test_a_pass_in_which_every_case_ends_its_process_still_ends(monkeypatch):
    measured, _ = planned(monkeypatch, {"a": lambda: os._exit(1), "b": lambda: os._exit(2)})
    assert (measured["values"], set(measured["failed"])) == ({}, {(NODE, "a"), (NODE, "b")})


def test_a_pass_that_dies_before_its_first_case_is_an_error(monkeypatch):
    monkeypatch.setattr(passes, "_measure", lambda *_: os._exit(5))
    with pytest.raises(InstrumentError, match="before its first case: its process ended with exit status 5"):
        passes.run_pass({NODE: ["8"]}, ROOT / "benchmarks")


def test_what_work_apart_raises_is_raised_here_in_words_at_least():
    def fail(say):
        raise KeyError("told")

    with pytest.raises(KeyError, match="told"):
        apart.run_apart(fail, 30)

    class LocalError(Exception):
        pass

    def fail_untellably(say):
        raise LocalError("told as well")

    with pytest.raises(RuntimeError, match="LocalError: told as well"):
        apart.run_apart(fail_untellably, 30)


def test_a_time_limit_is_lifted_behind_its_block():
    with pytest.raises(InstrumentError, match=r"took longer than 0\.05 s"), guards.limited_to(0.05):
        time.sleep(30)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
