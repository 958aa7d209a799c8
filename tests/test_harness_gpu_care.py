"""What is done around a benchmark on a GPU, which is scripted here: reset, leak check, a case without enough memory."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from child_process import inherited
from scripted_gpus import ScriptedGpu

import nanoserve
from benchmarks.harness import count_gate, publishing
from benchmarks.harness.archive import GAPS, read_archives
from benchmarks.harness.clock import DeviceClock
from benchmarks.harness.doubts import doubts
from benchmarks.harness.fixtures import WATCH
from benchmarks.harness.gpu import care, memory
from benchmarks.harness.gpu.driver import NoGpu
from benchmarks.harness.gpu.memory import Kept, is_out_of_memory, let_go, out_of_memory
from benchmarks.harness.gpu.readings import GpuState
from benchmarks.harness.loop import Plan
from benchmarks.harness.measure import Measure
from benchmarks.harness.page import render_page
from benchmarks.harness.report import render
from benchmarks.harness.watch import Seen

ROOT = Path(__file__).parents[1]
MIB = 1 << 20


class Subject:
    """Only what care asks of it, and a log of that."""

    vocab_size, relative_tolerance = 100, 0.0

    def __init__(self, log=None):
        self.log = [] if log is None else log

    def release(self):
        self.log.append("release")

    def describe(self):
        return {"model": "tiny", "device": "cuda:0"}


def item_of(subject, *, timed=False, quantities=("ttft_s",), arms=("a", "b")):
    """A test that measures, as far as the hook looks at it."""
    plan = Plan(name="x", quantities=quantities, arms={arm: {} for arm in arms})
    measured = Measure(plan, subject, DeviceClock("cpu"))
    marks = {
        "arms": SimpleNamespace(args=(), kwargs=dict(plan.arms)), "quantities": SimpleNamespace(args=quantities),
    }  # fmt: skip
    return SimpleNamespace(
        nodeid="benchmarks/bench_x.py::test_growth[64]",
        callspec=SimpleNamespace(id="64", params={"x": 64}),
        fixturenames=("measure",),
        get_closest_marker=marks.get,
        stash={},
        config=SimpleNamespace(
            stash={WATCH: SimpleNamespace(end=lambda runs: Seen(facts={"seen": dict(runs)}, flags=()))},
            getoption=lambda name: None,
        ),
        funcargs={
            "gpu": None, "model": subject, "measure": measured, "benchmark": SimpleNamespace(enabled=timed),
        },
    )  # fmt: skip


def run(item, body, gpu):
    """The hook around a body, as pytest calls it."""
    item.funcargs["gpu"] = gpu
    around = care.pytest_pyfunc_call(item)
    next(around)
    caught = None
    try:
        body()
    except Exception as error:
        caught = error  # thrown outside of this block, as pluggy does
    with contextlib.suppress(StopIteration):
        around.send(None) if caught is None else around.throw(caught)


def flags_of(item):
    return [flag.kind for flag in item.funcargs["measure"].flags]


# Leaks.


def test_memory_is_reset_before_and_asked_again_after_the_subject_gave_back_its_own():
    gpu = ScriptedGpu(held=(100, 100))
    item = item_of(Subject(gpu.log))
    run(item, lambda: gpu.log.append("body"), gpu)
    assert gpu.log == ["reset", "held", "body", "release", "held"]
    assert item.funcargs["measure"].details["device_memory"] == {
        "before_bytes": 100, "after_bytes": 100, "peak_bytes": 70,
    }  # fmt: skip


def test_what_stays_behind_fails_a_test_and_says_how_much():
    gpu = ScriptedGpu(held=(100, 100 + 3 * MIB))
    with pytest.raises(pytest.fail.Exception, match=f"{3 * MIB} bytes of device memory stayed behind") as caught:
        run(item_of(Subject()), lambda: None, gpu)
    assert not caught.value.pytrace


def test_what_stays_behind_is_a_doubt_about_what_was_timed():
    item = item_of(Subject(), timed=True)
    run(item, lambda: None, ScriptedGpu(held=(100, 100 + 3 * MIB)))
    [flag] = item.funcargs["measure"].flags
    assert (flag.kind, flag.arm) == ("leak", "")
    assert flag.what.startswith(f"{3 * MIB} bytes of device memory stayed behind (100 before, ")


@pytest.mark.parametrize(
    ("before", "after"),
    [(0, 0), (5, 5 + 2 * MIB), (9 * MIB, 0), (None, 9 * MIB), (9, None), (None, None)],
)
def test_little_nothing_less_and_what_is_not_known_are_no_leak(before, after):
    item = item_of(Subject())
    run(item, lambda: None, ScriptedGpu(held=(before, after)))
    assert flags_of(item) == []
    assert Kept(before_bytes=before, after_bytes=after, peak_bytes=None).leak == ""


def test_one_byte_more_than_the_tolerance_is_a_leak():
    assert Kept(before_bytes=5, after_bytes=6 + memory.TOLERANCE_BYTES, peak_bytes=None).leak


def test_on_a_cpu_nothing_is_reset_asked_or_given_back():
    item = item_of(Subject())
    run(item, lambda: None, NoGpu())
    assert item.funcargs["model"].log == []
    assert item.funcargs["measure"].details == {}


def test_a_failure_of_another_kind_is_passed_on_and_what_failed_is_given_back():
    item = item_of(Subject())
    with pytest.raises(ValueError, match="another"):
        run(item, lambda: (_ for _ in ()).throw(ValueError("another")), ScriptedGpu())
    assert item.funcargs["model"].log == ["release"]
    assert flags_of(item) == []


def test_captures_are_watched_while_a_benchmark_runs_on_a_gpu_and_no_longer():
    graph, inside = torch.cuda.graphs.CUDAGraph, []
    own = graph.capture_begin
    run(item_of(Subject()), lambda: inside.append(graph.capture_begin), ScriptedGpu())
    assert inside != [own]
    assert graph.capture_begin is own


def test_what_an_engine_says_of_itself_is_a_doubt_about_the_case():
    subject = Subject()
    subject.notes = lambda: ["steps run eagerly: out of memory"]
    item = item_of(subject)
    run(item, lambda: None, ScriptedGpu())
    flags = item.funcargs["measure"].flags
    assert [(flag.kind, flag.what) for flag in flags] == [("engine", "steps run eagerly: out of memory")]


# Out of memory.


def test_kinds_of_running_out_of_memory():
    class Derived(torch.OutOfMemoryError):
        pass

    assert all(map(is_out_of_memory, (torch.OutOfMemoryError("x"), Derived("x"), MemoryError())))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."))
    assert not is_out_of_memory(RuntimeError("out of patience"))
    assert not is_out_of_memory(ValueError("CUDA out of memory"))


def test_an_error_that_came_of_running_out_of_memory_is_one():
    with pytest.raises(RuntimeError, match="a step with") as caught:
        raise_with([])
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    assert is_out_of_memory(caught.value)


LONG = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of ...\nmore"
)


def test_the_message_says_what_where_how_full_and_what_mends_it():
    gpu = ScriptedGpu(GpuState(memory_total_bytes=80 * 10**9), device="cuda:1", held=(70 * 10**9,), free_bytes=10**9)
    assert out_of_memory(LONG, gpu, arm="naive", case="bench_x.py::test_growth[a b]") == (
        "out of memory on cuda:1, arm naive: CUDA out of memory. Tried to allocate 20.00 GiB (80.00 GB in all, 1.00 GB "
        "free, 70.00 GB in this process's tensors). The other cases go on; this one needs a smaller parameter, or a "
        "smaller model: pytest 'bench_x.py::test_growth[a b]' --benchmark-only --dtype bfloat16 --model smollm2-135m"
    )
    bare = out_of_memory(MemoryError(), NoGpu(), arm="", case="x")
    assert bare.startswith("out of memory on cpu: MemoryError. The other cases go on")


def test_a_device_that_refuses_to_say_how_full_it_is_hides_nothing():
    gpu = ScriptedGpu(held=lambda: (_ for _ in ()).throw(RuntimeError("CUDA error: unspecified")), free_bytes=10**9)
    told = out_of_memory(LONG, gpu, arm="", case="x")
    assert "Tried to allocate 20.00 GiB (1.00 GB free). The other" in told


def raise_with(tensors):
    """A frame that holds a tensor, in a chain of two errors."""
    held = torch.ones(1000)
    tensors.append(weakref.ref(held))
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
    except torch.OutOfMemoryError as error:
        raise RuntimeError(f"a step with {len(held)} numbers failed") from error


def test_the_tensors_of_the_frames_are_given_back():
    tensors = []
    try:
        raise_with(tensors)
    except RuntimeError as error:
        assert tensors[0]() is not None
        let_go(error)
        assert tensors[0]() is None


def test_a_case_without_enough_memory_fails_in_one_line_and_leaves_nothing():
    tensors, gpu = [], ScriptedGpu(held=(0,))
    item = item_of(Subject(gpu.log))
    with pytest.raises(pytest.fail.Exception, match=r"out of memory on cpu.*Tried to allocate 1 GiB") as caught:
        run(item, lambda: raise_with(tensors), gpu)
    assert (caught.value.pytrace, caught.value.__context__) == (False, None)
    assert tensors[0]() is None
    assert gpu.log[-2:] == ["release", "reset"]
    assert item.funcargs["measure"].measurements == []  # untimed, nothing is kept


def test_without_a_gpu_it_is_told_as_well():
    item = item_of(Subject())
    with pytest.raises(pytest.fail.Exception, match="out of memory on cpu: MemoryError"):
        run(item, lambda: (_ for _ in ()).throw(MemoryError()), NoGpu())
    assert item.funcargs["model"].log == ["release"]


@pytest.fixture
def gap():
    """What is kept of a timed case without enough memory."""
    item = item_of(Subject(), timed=True, quantities=("ttft_s", "speedup", "reuse_speedup"))
    with pytest.raises(pytest.fail.Exception):
        run(item, lambda: raise_with([]), ScriptedGpu())
    assert len(item.config.stash[publishing._KEPT]) == len(item.config.stash[publishing._COSTS]) == 1
    [result] = item.config.stash[publishing.RESULTS]
    return result, item.config


def test_timed_everything_that_the_case_declares_is_undefined_and_a_flag_says_why(gap):
    result, _ = gap
    told = [(m.metric.name, m.arm, m.value) for m in result.measurements]
    assert told[:2] == [("ttft_s", "a", None), ("ttft_s", "b", None)]
    assert [name for name, *_ in told] == ["ttft_s", "ttft_s", "speedup", "reuse_speedup"]
    assert [(flag.kind, flag.what[:13]) for flag in result.flags] == [("out of memory", "out of memory")]
    assert (result.case, result.runs, result.provenance["seen"]) == ("64", {}, {})


def test_what_has_no_values_is_no_result_of_a_pass(gap):
    result, config = gap
    assert result.is_gap
    assert publishing.take_results(config) == []
    assert config.stash[publishing.RESULTS] == []


def test_it_goes_into_the_file_beside_the_others_and_can_be_read_back(gap, tmp_path):
    result, config = gap
    written = {"benchmarks": [], "machine_info": {}, "commit_info": {}, "datetime": "2026-11-30T10:00:00+00:00"}
    publishing.pytest_benchmark_update_json(config, written)
    assert len(written[GAPS]) == 1
    path = tmp_path / "0001.json"
    path.write_text(json.dumps(written, allow_nan=False))
    [archive] = read_archives([path])
    [again] = archive.results
    assert (again.case, again.flags, again.measurements) == (result.case, result.flags, result.measurements)
    assert doubts([archive])[0].kind == "out of memory"


# Whole sessions.


BENCHMARKS = """
import pytest
import torch

from hungry import KEPT

@pytest.mark.arms(paged={}, naive={"cache": "none"})
@pytest.mark.quantities("ttft_s", "speedup")
@pytest.mark.parametrize("prompt_tokens", [4, 10, 12, 16])
def test_growth(measure, prompt_tokens):
    measure.stream(prompt_tokens=prompt_tokens, new_tokens=2)
    measure.compare(slow="naive", fast="paged")

@pytest.mark.arms(only={})
@pytest.mark.quantities("ttft_s")
def test_forgets(measure):
    measure.stream(prompt_tokens=4, new_tokens=2)
    KEPT.append(torch.ones(1 << 20))

@pytest.mark.arms(only={"cache": "none"})
@pytest.mark.quantities("num_operators")
@pytest.mark.parametrize("context", [10, 12])
def test_counts(count_work, context):
    count_work.decode_step(context_tokens=context)
"""

PLUGIN = """
import weakref

import torch
from scripted_gpus import ScriptedDriver, ScriptedGpu

from benchmarks.harness.gpu import driver
from benchmarks.harness.sources.nanoserve import NanoserveSubject

KEPT, TENSORS = [], []

held = ScriptedGpu(held=lambda: sum(each.nbytes for each in KEPT), free_bytes=1 << 30)
driver._installed.append(ScriptedDriver([held]))
right = NanoserveSubject.stream

def stream(self, prompt_ids, num_new_tokens, **arm):
    if len(prompt_ids) == 10 and arm.get("cache") == "none":
        large = torch.ones(1000)
        TENSORS.append(weakref.ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")
    yield from right(self, prompt_ids, num_new_tokens, **arm)

NanoserveSubject.stream = stream

def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"held by frames: {sum(each() is not None for each in TENSORS)} of {len(TENSORS)}")
"""


def session(folder, *options):
    """What a session says, in a folder with the planted benchmarks."""
    environment = inherited() | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}  # its own locks
    paths = [folder, ROOT / "tests", Path(nanoserve.__file__).parents[1]]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "hungry", "-rA", "planted", *options]
    done = subprocess.run(
        [*command, "--model", "tiny", "--device", "cuda"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "benchmarks", root / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    (root / "planted").mkdir()
    (root / "planted" / "bench_planted.py").write_text(BENCHMARKS)
    (root / "hungry.py").write_text(PLUGIN)
    return root


@pytest.fixture(scope="module")
def timed(folder):
    told = session(folder, "--benchmark-only", "--samples=2", "--max-warmups=1", "--benchmark-json=out.json")
    return told, read_archives([folder / "out.json"])[0]


def results_of(archive):
    return {(each.benchmark.partition("::test_")[2], each.case): each for each in archive.results}


@pytest.mark.slow
def test_in_a_session_one_case_runs_out_of_memory_and_the_following_are_measured(timed):
    told, archive = timed
    results = results_of(archive)
    growths = [("growth", str(number)) for number in (4, 10, 12, 16)]
    assert set(results) == {*growths, ("forgets", ""), ("counts", "10"), ("counts", "12")}
    for name, each in results.items():
        is_gap = name in (("growth", "10"), ("counts", "10"))
        assert {m.value is None for m in each.measurements if m.metric.gate} == {is_gap}, name
        assert [flag.kind for flag in each.flags].count("out of memory") == is_gap
    assert {m.arm for m in results["growth", "10"].measurements} == {"paged", "naive", "paged over naive"}
    assert "FAILED planted/bench_planted.py::test_growth[10]" in told
    assert "PASSED planted/bench_planted.py::test_growth[16]" in told
    assert "held by frames: 0 of 2" in told
    assert "arm naive: CUDA out of memory. Tried to allocate 20.00 GiB" in told
    assert "Traceback" not in told
    assert "loop.py" not in told


@pytest.mark.slow
def test_what_a_timed_benchmark_forgets_is_a_doubt(timed):
    [flag] = [each for each in results_of(timed[1])["forgets", ""].flags if each.kind == "leak"]
    assert flag.what.startswith(f"{4 * MIB} bytes of device memory stayed behind")
    assert "! leak: forgets: " in timed[0]


@pytest.mark.slow
def test_report_page_and_gate_of_counts_cope_with_a_case_without_values(timed, folder):
    told, archive = timed
    assert "! out of memory: growth[10] naive: out of memory on cpu" in told
    page = render_page([archive])
    assert "nothing at prompt_tokens=10: out of memory" in page
    assert "The device had too little memory for the case." in page
    assert "undefined" in render(archive.results)
    shutil.copy(folder / "out.json", folder / "again.json")
    status, words = count_gate.compare_counts(folder / "out.json", folder / "again.json")
    assert (status, "without data" in words) == (count_gate.NO_DATA, True)


@pytest.mark.slow
def test_untimed_both_are_red_and_the_others_are_not(folder):
    told = session(folder)
    assert f"test_forgets: {4 * MIB} bytes of device memory stayed behind" in told
    assert told.count("out of memory on cpu") >= 2
    assert "3 failed, 4 passed" in told
