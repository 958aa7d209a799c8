"""Each kind of fault turns the gate red with a verdict of its own, and an untouched copy stays green.

Real commits, real builds, real pairs of processes: what `python -m benchmarks compare main BRANCH` says in a repository
made of this working tree. Counts need two launches of the smallest shape; time needs a few of a larger one.
"""

import json
import subprocess
import sys
import time

import psutil
import pytest
from asv_repository import LAYERS, ONE_MORE, SLOWER, commit, copy_tree, git, make_environment, run

UPSIDE_DOWN = '"s", "weighting": "request", "better": "higher"'

FAULTS = {
    "slower": ("nanoserve/models/llama.py", LAYERS, SLOWER),
    "operator": ("nanoserve/models/llama.py", LAYERS, ONE_MORE),
    "leak": ("nanoserve/leaving.py", "        self._memory.release(request_id)\n", ""),
    "nan": (
        "nanoserve/engine.py",
        "self._model.compute_logits(hidden[batch.last_rows])",
        'self._model.compute_logits(hidden[batch.last_rows]) * float("nan")',
    ),
    "renamed": ("benchmarks/bench_work.py", "def test_decode_step(", "def test_step_of_decoding("),
    "direction": ("benchmarks/harness/kinds.py", '"s", "weighting": "request", "better": "lower"', UPSIDE_DOWN),
    "untouched": ("nanoserve/engine.py", "", "# a comment\n"),
}

COUNTS = ("-k", "decode_step and 16", "--model", "tiny")
TIMES = ("-k", "prompt_length and 16", "--model", "small", "--budget-s", "40", "--launches", "8")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("home"), "")


@pytest.fixture(scope="module")
def repository(tmp_path_factory, environment):
    """main, and a branch off it for each fault."""
    folder = tmp_path_factory.mktemp("repository")
    copy_tree(folder)
    git(folder, environment, "init", "-q", "-b", "main")
    commit(folder, environment, "base")
    for name, (path, before, after) in FAULTS.items():
        git(folder, environment, "checkout", "-q", "-b", name, "main")
        source = (folder / path).read_text()
        assert before in source, name
        (folder / path).write_text(source.replace(before, after) if before else source + after)
        commit(folder, environment, name)
    return folder


@pytest.fixture
def compare(repository, environment, tmp_path):
    def run_gate(branch, *options):
        git(repository, environment, "checkout", "-q", branch)
        command = [sys.executable, "-m", "benchmarks", "compare", "main", branch, "--json", str(tmp_path / "out.json")]
        done = run([*command, *options], repository, environment)
        told = json.loads((tmp_path / "out.json").read_text()) if (tmp_path / "out.json").exists() else {}
        return done, told

    return run_gate


def told_of_times(compare, branch, *options):
    """What it says once the machine lets it: on a shared host a comparison may be disturbed, or end undecided."""
    for _ in range(4):
        done, told = compare(branch, *TIMES, *options)
        if told.get("verdict") not in ("contaminated", "cannot tell"):
            break
    return done, told


def rows(told, verdict):
    return {row["metric"] for row in told["rows"] if row["verdict"] == verdict and row["gate"]}


def test_an_untouched_copy_stays_green_in_its_counts(compare):
    done, told = compare("untouched", *COUNTS)
    assert (done.returncode, told["verdict"], told["launches"]) == (0, "same", 2)


def test_an_operator_more_in_each_layer_is_worse_by_exactly_those(compare):
    done, told = compare("operator", *COUNTS)
    assert (done.returncode, told["verdict"]) == (1, "worse")
    assert "num_operators" in rows(told, "worse")
    assert {"flops", "num_forwards"} <= rows(told, "same")


def test_what_a_request_leaves_behind_is_worse_in_kv_bytes(compare):
    done, told = compare("leak", *COUNTS)
    assert done.returncode == 1
    assert rows(told, "worse") == {"kv_bytes"}


def test_a_nan_is_no_data(compare):
    done, told = compare("nan", *COUNTS)
    assert (done.returncode, told["verdict"]) == (4, "no data")
    assert "nan" in done.stdout.lower()


def test_a_renamed_benchmark_is_no_data(compare):
    done, told = compare("renamed", "-k", "16 and (decode_step or step_of_decoding)", "--model", "tiny")
    assert (done.returncode, told["verdict"]) == (4, "no data")
    assert "has this benchmark, the checkout has not: deleted or renamed" in done.stdout


def test_a_wrong_direction_is_refused_before_anything_is_measured(compare):
    done, told = compare("direction", *COUNTS)
    assert (done.returncode, told) == (2, {})
    assert "cannot be better when higher" in done.stderr


def test_workers_end_when_their_leader_is_killed(repository, environment):
    git(repository, environment, "checkout", "-q", "untouched")
    command = [sys.executable, "-m", "benchmarks", "compare", "main", "untouched", "-k", "prompt_length and 16"]
    with subprocess.Popen([*command, "--model", "tiny"], cwd=repository, env=environment, text=True) as leader:
        workers = workers_of(leader)
        leader.kill()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []


def workers_of(leader):
    """Its two worker processes, once they are there."""
    for _ in range(600):
        children = psutil.Process(leader.pid).children() if leader.poll() is None else []
        found = [child for child in children if any(part.endswith("worker.py") for part in child.cmdline())]
        if len(found) == 2:
            return found
        time.sleep(0.2)
    raise AssertionError(f"no two workers of a leader that ended with {leader.poll()}")


@pytest.mark.alone
def test_a_slower_step_is_worse_in_itl_and_not_in_ttft(compare):
    done, told = told_of_times(compare, "slower")
    assert (done.returncode, told["verdict"]) == (1, "worse")
    assert "itl_p50_s" in rows(told, "worse")
    assert "ttft_s" not in rows(told, "worse")


@pytest.mark.alone
def test_an_untouched_copy_stays_green_in_its_times(compare):
    done, told = told_of_times(compare, "untouched", "--margin", "10")
    assert (done.returncode, told["verdict"]) == (0, "same")
