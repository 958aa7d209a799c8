"""The whole way, on real commits: `asv continuous` sees a slowdown of a decode step, and nothing in a comment.

Builds a repository of three commits from this working tree, lets asv build its environment, and runs asv as a person
would, on a small shape. Takes minutes, so it runs with `pytest -m slow`.
"""

import json
import re
import shutil
import sys

import pytest
from asv_repository import (
    LAYERS,
    SLOWER,
    asv,
    commit,
    commit_of,
    copy_tree,
    git,
    lines_beside,
    make_environment,
    results_of,
    run,
)

CHOSEN = "-k '(prompt_length or decode_step) and 16'"
ARGUMENTS = f"--model small --device cpu {CHOSEN}"
QUICK = f"--model small --device cpu --samples 4 {CHOSEN}"

pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("home"), ARGUMENTS)


@pytest.fixture(scope="module")
def repository(tmp_path_factory, environment):
    """main, and two branches off it: `slower` with the planted slowdown, `comment` with nothing but a comment."""
    folder = tmp_path_factory.mktemp("repository")
    copy_tree(folder)
    git(folder, environment, "init", "-q", "-b", "main")
    commit(folder, environment, "base")
    model = folder / "nanoserve" / "models" / "llama.py"
    source = model.read_text()
    assert LAYERS in source
    for branch, changed in (("slower", source.replace(LAYERS, SLOWER)), ("comment", f"{source}# a comment\n")):
        git(folder, environment, "checkout", "-q", "-b", branch, "main")
        model.write_text(changed)
        commit(folder, environment, branch)
    assert asv(folder, environment, "machine", "--yes").returncode == 0
    git(folder, environment, "checkout", "-q", "main")
    asv(folder, environment, "setup")  # exits with 1 where all went well (asv 0.6.6 hands its list to sys.exit)
    assert list((folder / ".asv" / "env").glob("*/lib/python*/site-packages/torch"))
    return folder


def continuous(folder, environment, branch, *options):
    git(folder, environment, "checkout", "-q", branch)
    command = ["continuous", "main", "HEAD", "--factor", "1.05", "--record-samples", *options]
    return asv(folder, environment, *command)


def flagged(output):
    """The metrics in asv's table of what became slower (its lines begin with a plus)."""
    return re.findall(r"^\| \+ .*track_(\w+)\(", output, flags=re.MULTILINE)


def recorded_samples(folder, revision):
    """The samples that asv has stored for a commit, by metric; counts are plain numbers and have none."""
    stored = json.loads(results_of(folder, revision).read_text())
    found = {}
    for name, row in stored["results"].items():
        samples = dict(zip(stored["result_columns"], row, strict=False)).get("samples")
        if samples and samples[0] is not None:
            (found[name.rpartition("track_")[2]],) = samples
    return found


def passes_beside(folder, revision):
    """The passes of a commit, from the provenance beside asv's results: id -> its line of the streamed case."""
    lines = lines_beside(folder, revision)
    return {line["pass"]: line for line in lines if "prompt_length" in line["benchmark"]}


def test_a_comment_is_not_flagged(repository, environment):
    done = continuous(repository, environment | {"NANOSERVE_BENCH_ARGS": QUICK}, "comment")
    assert done.returncode == 0
    assert flagged(done.stdout) == []
    assert "BENCHMARKS NOT SIGNIFICANTLY CHANGED" in done.stdout
    for revision in ("main", "comment"):
        series = recorded_samples(repository, revision)
        assert len(series) == 3
        passes = passes_beside(repository, revision)
        assert len(passes) == 8, "each round is a process of its own"
        clean = [line for line in passes.values() if not is_contaminated(line)]
        for samples in series.values():
            assert len(samples) == len(set(samples)) == len(clean), "a contaminated pass is not used"
        assert {line["provenance"]["commit"] for line in passes.values()} == {commit_of(repository, revision)}


def is_contaminated(line):
    return any(flag["kind"] == "contaminated" for flag in line["flags"])


@pytest.fixture
def anchored(repository, environment):
    """main is the reference; results of raw passes are out of the way, and so are these afterwards."""
    results = repository / ".asv" / "results"
    shutil.rmtree(results, ignore_errors=True)
    done = run([sys.executable, "-m", "benchmarks", "reference", "set", "main"], repository, environment)
    assert done.returncode == 0
    yield
    shutil.rmtree(results)
    (repository / ".benchmarks" / "reference.json").unlink()


def test_a_slower_decode_step_is_flagged_in_itl_and_work_and_not_in_ttft(repository, environment, anchored):
    """Where the host disturbs passes, rounds are missing, and six against six can never speak: more are added."""
    done = continuous(repository, environment, "slower")
    for _ in range(2):
        if "itl_p50_s" in flagged(done.stdout):
            break
        done = continuous(repository, environment, "slower", "--append-samples")
    assert done.returncode == 1
    assert {"num_operators", "flops", "itl_p50_s"} <= set(flagged(done.stdout))
    assert "ttft_s" not in flagged(done.stdout)
    passes = passes_beside(repository, "slower")
    told = [line["details"]["anchored"] for line in passes.values() if not is_contaminated(line)]
    assert {each["reference"] for each in told} == {f"{commit_of(repository, 'main')[:12]}, generation 1"}
    stored = recorded_samples(repository, "slower")["itl_p50_s"]
    assert sorted(each["costs"]["cached itl_p50_s"]["stored"] for each in told) == sorted(stored)


def test_a_reference_chosen_later_does_not_continue_the_raw_series(repository, environment, anchored):
    """Nor the other way round: a silent jump in a history would be called a regression, or hide one."""
    git(repository, environment, "checkout", "-q", "main")
    options = ["run", "main^!", "--bench", "num_operators", "--show-stderr", "-a", "rounds=1"]
    assert asv(repository, environment, *options).returncode == 0
    raw = environment | {"NANOSERVE_BENCH_ARGS": f"{QUICK} --raw"}
    done = asv(repository, raw, *options)
    assert done.returncode != 0
    assert "reference was" in done.stdout + done.stderr
    assert "asv machine --machine" in done.stdout + done.stderr


def test_another_package_than_the_installed_one_is_refused(repository, environment):
    """With the checkout's own nanoserve first on the path, nothing is measured and the reason is told."""
    (site_packages,) = (repository / ".asv" / "env").glob("*/lib/python*/site-packages")
    shadow = site_packages / "shadow.pth"  # a sitecustomize.py would come after the system's own, and never run
    shadow.write_text(f"import sys; sys.path.insert(0, {str(repository)!r})\n")
    try:
        done = asv(repository, environment, "run", "HEAD^!", "--quick", "--show-stderr")
    finally:
        shadow.unlink()
    assert "which is not the package installed in" in done.stdout + done.stderr
    assert done.returncode != 0


def test_a_plain_run_measures_every_round_anew(repository, environment):
    """asv offers all rounds of a plain `run` the result of the first; no number may be handed out twice."""
    git(repository, environment, "checkout", "-q", "main")
    before = set(passes_beside(repository, "main"))
    options = ["--bench", "itl_p50_s", "--record-samples", "-a", "rounds=3"]
    quick = environment | {"NANOSERVE_BENCH_ARGS": QUICK}
    assert asv(repository, quick, "run", "main^!", *options).returncode == 0
    new = [line for name, line in passes_beside(repository, "main").items() if name not in before]
    samples = recorded_samples(repository, "main").get("itl_p50_s", [])
    assert len(new) == 3
    assert len(samples) == len(set(samples)) == sum(not is_contaminated(line) for line in new)
