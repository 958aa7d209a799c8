"""Several GPUs at once: what is refused, what a worker tells, and whole sessions on two scripted GPUs."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from child_process import inherited
from pytest_benchmark.stats import Metadata
from sample_results import streamed_case
from scripted_gpus import ScriptedDriver, ScriptedGpu
from typer.testing import CliRunner
from xdist.remote import Producer

from benchmarks.__main__ import app
from benchmarks.harness import spread
from benchmarks.harness.archive import read_archives
from benchmarks.harness.gpu.driver import use_driver
from benchmarks.harness.publishing import RESULTS

ROOT = Path(__file__).parents[1]
TWO = ScriptedDriver([ScriptedGpu(device="cuda:0"), ScriptedGpu(device="cuda:1")])


def config_of(**options):
    """As much of pytest's config as a session with xdist has when it is configured."""
    told = {"numprocesses": 2, "tx": ["popen"] * 2, "dist": "loadgroup", "device": "auto", "resume": False} | options
    option, cleanups = SimpleNamespace(benchmark_only=True, benchmark_enable=True, **told), []
    return SimpleNamespace(
        option=option,
        stash=pytest.Stash(),
        getoption=lambda name, default=None: getattr(option, name.removeprefix("--"), default),
        add_cleanup=cleanups.append,
        cleanups=cleanups,
        _benchmarksession=SimpleNamespace(benchmarks=[]),
    )


# The controller.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numprocesses": None}, "on N GPUs, one worker each: -n N --dist loadgroup"),  # --tx
        ({"dist": "load"}, "leave out -n; on N GPUs"),
        ({"device": "cpu"}, "benchmarks are not timed beside other workers"),
        ({"device": "cuda:1"}, "--device cuda:1 is one GPU, and 2 workers want one each"),
        ({"numprocesses": 3}, "3 workers are more than GPUs here, 2"),
        ({"resume": True}, "--resume goes on in one process: leave out -n"),
    ],
)
def test_workers_that_cannot_have_a_gpu_each_are_refused(options, message):
    with use_driver(TWO), pytest.raises(pytest.UsageError, match=message):
        spread.prepare(config_of(**options))


def test_without_a_gpu_nothing_is_timed_beside_other_workers():
    with use_driver(ScriptedDriver()), pytest.raises(pytest.UsageError, match="leave out -n"):
        spread.prepare(config_of())


def test_a_session_alone_is_left_as_it_is():
    config = config_of(numprocesses=None, tx=None)
    before = dict(vars(config.option))
    spread.prepare(config)
    assert vars(config.option) == before


@pytest.fixture
def controller(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = config_of()
    with use_driver(TWO):
        spread.prepare(config)
    yield config
    os.environ.pop("OMP_NUM_THREADS", None)


def test_the_controller_measures_nothing_and_its_workers_share_the_cores(controller, monkeypatch):
    assert (controller.option.benchmark_only, controller.option.benchmark_disable) == (False, True)
    assert controller.option.maxworkerrestart == "0"
    assert int(os.environ["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    for undo in controller.cleanups:
        undo()
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with use_driver(TWO):
        spread.prepare(config_of())
    assert os.environ["OMP_NUM_THREADS"] == "7"


# A worker, and what becomes of its words.


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    config = config_of(numprocesses=None, tx=None, benchmark_json="out.json")
    config.workerinput, config.workeroutput = {}, {}
    spread.prepare(config)
    return config


def test_a_worker_hides_from_pytest_benchmark_while_it_reads_its_options_and_writes_nothing(worker):
    assert "PYTEST_XDIST_WORKER" not in os.environ
    assert worker.option.benchmark_json is worker.option.benchmark_compare is None
    spread.pytest_configure(worker)
    assert os.environ["PYTEST_XDIST_WORKER"] == "gw1"


def measured(name, result, seconds):
    fixture = SimpleNamespace(
        name=name, fullname=f"f.py::{name}", group="g", param=None, params=None, extra_info=result.as_dict(),
        cprofile_stats=None, has_error=False,
    )  # fmt: skip
    made = Metadata(fixture, 1, {"timer": len, "warmup": False})
    for each in seconds:
        made.update(each)
    return made


def told_by(config, *cases, order):
    """What a worker sends that has measured these, where the tests were collected in this order."""
    config._benchmarksession.benchmarks[:] = cases
    session = SimpleNamespace(config=config, items=[SimpleNamespace(nodeid=f"f.py::{name}") for name in order])
    spread.pytest_sessionfinish(session)
    return dict(config.workeroutput)


def node(config, output, name="gw0"):
    return SimpleNamespace(config=config, workeroutput=output, gateway=SimpleNamespace(id=name))


def test_what_workers_have_measured_comes_back_whole_and_in_the_order_of_collection(controller, worker):
    cases = {name: measured(name, streamed_case(x), [0.1 * x, 0.3]) for x, name in enumerate("abc", start=8)}
    for names in ("bc", "a"):
        output = told_by(worker, *(cases[name] for name in names), order="abc")
        spread.pytest_testnodedown(node(controller, output), None)
    found = controller._benchmarksession.benchmarks
    for include_data in (True, False):
        whole = [each.as_dict(include_data=include_data) for each in found]
        assert whole == [json.loads(json.dumps(cases[name].as_dict(include_data=include_data))) for name in "abc"]
    assert [each.has_error for each in found] == [False] * 3
    assert [result.case for result in controller.stash[RESULTS]] == ["8", "9", "10"]
    assert [result.as_dict() for result in controller.stash[RESULTS]] == [each.extra_info for each in found]


def test_a_worker_that_died_is_named(controller, worker):
    warned = []
    controller.issue_config_time_warning = lambda warning, stacklevel: warned.append(str(warning))
    spread.pytest_testnodedown(node(controller, {}, "gw1"), "Not properly terminated")
    assert warned == ["what worker gw1 has measured is lost: Not properly terminated"]
    assert controller.stash[RESULTS] == []


def test_other_sessions_with_workers_are_left_alone():
    config = config_of()
    spread.pytest_testnodedown(node(config, {}), None)
    assert spread.pytest_xdist_make_scheduler(config, None) is None
    assert RESULTS not in config.stash


@pytest.mark.parametrize(
    ("node_id", "scope"),
    [
        ("b.py::test_x[8]", "b.py::test_x"),
        ("b.py::test_x[a[b]@c]", "b.py::test_x"),
        ("b.py::test_y", "b.py::test_y"),
        ("b.py::test_x[8]@mine", "mine"),
    ],
)
def test_the_cases_of_a_benchmark_are_one_unit_unless_a_marker_says_otherwise(controller, node_id, scope):
    controller.getvalue = controller.getoption
    scheduler = spread.pytest_xdist_make_scheduler(controller, Producer("", enabled=False))
    assert scheduler._split_scope(node_id) == scope


# Whole sessions.


PLANTED = """
import os
import pytest

@pytest.mark.arms(only={})
@pytest.mark.quantities("ttft_s")
@pytest.mark.parametrize("tokens", [3, 4], ids=["a[b]-/,x y@z", "4"])
def test_one(measure, tokens):
    measure.stream(prompt_tokens=tokens, new_tokens=2)

@pytest.mark.arms(only={})
@pytest.mark.quantities("ttft_s")
@pytest.mark.parametrize("tokens", [3, 4])
def test_two(measure, tokens):
    measure.stream(prompt_tokens=tokens, new_tokens=2)
    if "CRASH" in os.environ:
        os._exit(3)
"""
SPANS = """
import json, time
from pathlib import Path
import pytest
from benchmarks.harness.fixtures import CLAIM

@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    start_ns = time.monotonic_ns()
    try:
        return (yield)
    finally:
        told = [item.config.stash[CLAIM].key, start_ns, time.monotonic_ns()]
        with Path("spans.jsonl").open("a") as file:
            file.write(json.dumps(told) + chr(10))
"""
"""A session's event log: which GPU a case had, from when to when, on one clock of all processes."""

ONE_FOR_ALL = """
from benchmarks.harness import claim
claim.meant = lambda asked, gpus, worker=None: gpus[:1]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "benchmarks", root / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    (root / "planted").mkdir()
    (root / "planted" / "bench_planted.py").write_text(PLANTED)
    (root / "planted" / "conftest.py").write_text(SPANS)
    (root / "one_for_all.py").write_text(ONE_FOR_ALL)
    return root


def session_on_two(project, *arguments, **settings):
    """Exit status and output. Its locks lie in the project: another run of these tests is no other session."""
    path = os.pathsep.join(map(str, (project, ROOT, ROOT / "tests")))
    (project / "spans.jsonl").unlink(missing_ok=True)
    environment = inherited() | {"PYTHONPATH": path, "TMPDIR": str(project), "OMP_NUM_THREADS": "1"} | settings
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "two_gpus", "planted", "--model=tiny"]
    spread_out = ["-n", "2", "--dist", "loadgroup", "--benchmark-only", "--samples=2", "--max-warmups=0"]
    done = subprocess.run(
        [*command, *spread_out, *arguments],
        cwd=project, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def spans_of(project):
    """By GPU, when each case ran."""
    found = defaultdict(list)
    for line in (project / "spans.jsonl").read_text().splitlines():
        gpu, start_ns, end_ns = json.loads(line)
        found[gpu].append((start_ns, end_ns))
    return found


def overlap(spans):
    return any(earlier[1] > later[0] for earlier, later in itertools.pairwise(sorted(spans)))


def test_spans_that_overlap_are_seen():
    assert overlap([(3, 9), (1, 2), (8, 10)])
    assert not overlap([(3, 8), (1, 2), (8, 10)])


@pytest.mark.slow
def test_two_gpus_measure_side_by_side_into_one_file(project):
    status, text = session_on_two(project, "--benchmark-json=out.json", "--benchmark-autosave")
    assert status == 0, text
    results = read_archives([project / "out.json"])[0].results
    assert [each.case for each in results] == ["a[b]-/,x y@z", "4", "3", "4"]
    gpu_of = defaultdict(set)
    for each in results:
        claim = each.provenance["claim"]
        assert (claim["gpu"], claim["num_workers"]) == (f"GPU-{claim['worker']}", 2)
        gpu_of[each.benchmark].add(claim["gpu"])
    assert sorted(map(tuple, gpu_of.values())) == [("GPU-0",), ("GPU-1",)]
    spans = spans_of(project)
    assert {gpu: len(each) for gpu, each in spans.items()} == {"GPU-0": 2, "GPU-1": 2}
    assert not any(map(overlap, spans.values()))
    assert text.count("nanoserve: what was measured") == 1
    assert len(list((project / ".benchmarks").glob("*/0001_*.json"))) == 1
    report = CliRunner().invoke(app, ["report", str(project / "out.json"), "--output", str(project / "report.html")])
    assert report.exit_code == 0, report.output


@pytest.mark.slow
def test_workers_that_would_meet_on_one_gpu_are_kept_apart_by_its_lock(project):
    status, text = session_on_two(project, "-p", "one_for_all", "--gpu-wait-s=0")
    assert status == pytest.ExitCode.INTERRUPTED, text
    assert "is locked by a session of ours" in text
    assert "INTERNALERROR" not in text
    assert not any(map(overlap, spans_of(project).values()))


@pytest.mark.slow
def test_a_worker_that_dies_makes_the_session_red_and_leaves_the_others_theirs(project):
    status, text = session_on_two(project, "--benchmark-json=died.json", CRASH="1")
    assert status == pytest.ExitCode.TESTS_FAILED, text
    assert "has measured is lost" in text
    found = {each.benchmark for each in read_archives([project / "died.json"])[0].results}
    assert found == {"planted/bench_planted.py::test_one"}
