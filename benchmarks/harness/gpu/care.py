"""Around each benchmark: a GPU's memory is reset before it and looked at after it, and a case without enough is told.

Knows pytest's hook around a test, and what a benchmark's fixtures hold. Refuses to know what a leak is and in which
words it is told (`memory.py`), and how a result is kept (`publishing.py`).
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from benchmarks.harness.fixtures import measured_of
from benchmarks.harness.gpu.driver import Gpu, NoGpu
from benchmarks.harness.gpu.memory import Kept, is_out_of_memory, let_go, out_of_memory
from benchmarks.harness.one_time import CAPTURES, KERNELS
from benchmarks.harness.publishing import publish_undefined
from benchmarks.harness.results import Flag
from benchmarks.harness.stash import RESUMED


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Inside of what publishes: so what is found here belongs to the result."""
    measured = measured_of(pyfuncitem)
    if measured is None or RESUMED in pyfuncitem.stash:
        return (yield)
    held: Any = pyfuncitem.funcargs
    gpu, subject, words = held["gpu"], held["model"], ""
    try:
        with _care(pyfuncitem, measured, gpu):
            result = yield
    except Exception as error:
        if is_out_of_memory(error):
            words = out_of_memory(error, gpu, arm=measured.running, case=pyfuncitem.nodeid)
            let_go(error)
        subject.release()  # nobody uses again what has failed
        if not words:
            raise
    if words:  # outside of the handler, or the new error would hold the old one
        _give_up(pyfuncitem, measured, gpu, words)
    return result


def _care(item: pytest.Function, measured: Any, gpu: Gpu) -> contextlib.AbstractContextManager[None]:
    """On a CPU nothing: there memory is the system's, and an engine is kept for the benchmarks to come."""
    return contextlib.nullcontext() if isinstance(gpu, NoGpu) else _care_on_gpu(item, measured, gpu)


@contextlib.contextmanager
def _care_on_gpu(item: pytest.Function, measured: Any, gpu: Gpu) -> Iterator[None]:
    """What the body leaves behind after the subject has given back its own is a leak: untimed, it fails the test."""
    subject: Any = item.funcargs["model"]
    gpu.reset_memory()
    before_bytes = gpu.held_bytes()
    with _captures_watched(), _compilations_heard():
        yield
    peak_bytes = gpu.peak_bytes()
    notes: Sequence[str] = getattr(subject, "notes", list)()
    measured.flags += [Flag(kind="engine", arm="", what=note) for note in notes]
    subject.release()
    kept = Kept(before_bytes=before_bytes, after_bytes=gpu.held_bytes(), peak_bytes=peak_bytes)
    measured.details["device_memory"] = kept.as_dict()
    if kept.leak and not _is_timed(item):
        pytest.fail(f"{item.nodeid}: {kept.leak}", pytrace=False)
    if kept.leak:
        measured.flags.append(Flag(kind="leak", arm="", what=kept.leak))


def _captures_watched() -> contextlib.AbstractContextManager[None]:
    """Where torch is loaded; without it nothing is captured."""
    graphs: Any = sys.modules.get("torch.cuda.graphs")
    return CAPTURES.watching(graphs.CUDAGraph) if graphs else contextlib.nullcontext()


def _compilations_heard() -> contextlib.AbstractContextManager[None]:
    """Where Triton is installed."""
    if importlib.util.find_spec("triton") is None:
        return contextlib.nullcontext()
    return KERNELS.listening(importlib.import_module("triton.knobs"))


def _give_up(item: pytest.Function, measured: Any, gpu: Gpu, words: str) -> None:
    """Give back all memory for the next case, keep the gap with its reason, and fail this case in one line."""
    gpu.reset_memory()
    measured.flags.append(Flag(kind="out of memory", arm=measured.running, what=words))
    if _is_timed(item):
        publish_undefined(item, measured)
    pytest.fail(words, pytrace=False)


def _is_timed(item: pytest.Function) -> bool:
    benchmark: Any = item.funcargs["benchmark"]
    return bool(benchmark.enabled)
