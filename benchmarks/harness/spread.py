"""Measures on several GPUs at once: `pytest --benchmark-only -n 4 --dist loadgroup`, one worker of xdist per GPU.

Knows xdist's processes and pytest-benchmark's session: a worker measures and writes no file, the controller runs
nothing and gathers what the workers have measured into one file and one report. Refuses to know how a GPU is chosen
(`gpu/choice.py`) and how anything is measured.
"""

import functools
import json
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness.archive import read_result
from benchmarks.harness.errors import DeviceError
from benchmarks.harness.gpu.choice import asks_for_gpu, refuse_workers
from benchmarks.harness.gpu.driver import driver
from benchmarks.harness.machine import num_usable_cpus
from benchmarks.harness.publishing import RESULTS

_GATHERED = pytest.StashKey[dict[str, list[dict[str, Any]]]]()
"""On the controller's config: what the workers have told so far; what was measured, in the order of collection."""

_HIDDEN = pytest.StashKey[str]()
_OUTPUT = "nanoserve_measured"
_SWITCH = "PYTEST_XDIST_WORKER"
_THREADS = "OMP_NUM_THREADS"
_STORES = ("json", "save", "autosave", "compare", "compare_fail", "histogram")
"""What the controller alone does, by the names of pytest-benchmark's options."""


def prepare(config: pytest.Config) -> None:
    """Before pytest-benchmark reads the options of a session that measures. Alone, a session is left as it is.

    Raises UsageError where workers would measure beside each other on anything but GPUs of their own.
    """
    if hasattr(config, "workerinput"):
        _prepare_worker(config)
    elif config.getoption("numprocesses", None) or config.getoption("tx", None):
        _refuse(config)
        _prepare_controller(config)


def _refuse(config: pytest.Config) -> None:
    """Workers are counted by -n: --tx may start them on other machines."""
    asked, num_workers = config.getoption("--device"), config.getoption("numprocesses", None)
    may_spread = num_workers and config.getoption("dist") == "loadgroup" and asks_for_gpu(asked)
    gpus = driver().gpus() if may_spread else []
    if not gpus:
        raise pytest.UsageError(
            "benchmarks are not timed beside other workers (xdist is on): leave out -n; on N GPUs, one worker each: "
            "-n N --dist loadgroup"
        )
    if config.getoption("--resume"):
        raise pytest.UsageError("--resume goes on in one process: leave out -n")
    try:
        refuse_workers(asked, len(gpus), num_workers)
    except DeviceError as error:
        raise pytest.UsageError(str(error)) from None


def _prepare_worker(config: pytest.Config) -> None:
    """pytest-benchmark goes by one variable, and switches itself off where it sees it: it does not see it."""
    config.stash[_HIDDEN] = os.environ.pop(_SWITCH)
    for name in _STORES:
        setattr(config.option, f"benchmark_{name}", None)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Runs after pytest-benchmark has read its options: it was registered earlier."""
    if _HIDDEN in config.stash:
        os.environ[_SWITCH] = config.stash[_HIDDEN]


def _prepare_controller(config: pytest.Config) -> None:
    """It runs no test: switched off, pytest-benchmark still writes and shows what it is given.

    A worker that died is not replaced: what it had measured is lost, and the session is red.
    """
    option, num_workers = config.option, config.getoption("numprocesses")
    option.benchmark_only, option.benchmark_enable, option.benchmark_disable = False, False, True
    option.maxworkerrestart = "0"
    config.stash[_GATHERED] = {name: list[dict[str, Any]]() for name in ("measured", "gaps")}
    if _THREADS not in os.environ:
        # Threads of several workers on one core would wait for each other: each worker inherits its part of them.
        os.environ[_THREADS] = str(max(1, num_usable_cpus() // num_workers))
        config.add_cleanup(functools.partial(os.environ.__delitem__, _THREADS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """All cases of a benchmark go to one worker: a curve is of one device."""
    if _GATHERED not in config.stash:
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByBenchmark(LoadGroupScheduling):  # type: ignore[misc] # xdist tells no types
        def _split_scope(self, nodeid: str) -> str:
            return str(super()._split_scope(nodeid)).partition("[")[0]

    return ByBenchmark(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells the controller what it has measured; xdist sends it when all have finished."""
    config: Any = session.config
    if _HIDDEN in config.stash:
        places = {item.nodeid: number for number, item in enumerate(session.items)}
        measured = [_told(each, places[each.fullname]) for each in config._benchmarksession.benchmarks]
        gaps = [each.as_dict() for each in config.stash.get(RESULTS, []) if each.is_gap]
        config.workeroutput[_OUTPUT] = json.dumps({"measured": measured, "gaps": gaps}, default=str)


def _told(measured: Any, place: int) -> dict[str, Any]:
    """pytest-benchmark's own words of one case, with everything that it stores."""
    return {**measured.as_dict(include_data=True), "place": place, "has_error": measured.has_error}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker has ended: take over what it has told."""
    config, output = node.config, getattr(node, "workeroutput", {})
    if _GATHERED not in config.stash:
        return
    if _OUTPUT not in output:
        config.issue_config_time_warning(
            pytest.PytestWarning(f"what worker {node.gateway.id} has measured is lost: {error}"), stacklevel=1
        )
    gathered = config.stash[_GATHERED]
    for name, more in json.loads(output.get(_OUTPUT, "{}")).items():
        gathered[name] += more
    gathered["measured"].sort(key=lambda each: each["place"])
    config._benchmarksession.benchmarks[:] = map(_measured, gathered["measured"])
    config.stash[RESULTS] = [read_result(each) for each in (*_ours(gathered["measured"]), *gathered["gaps"])]


def _ours(gathered: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our results, without the tests that use pytest-benchmark by themselves."""
    return [each["extra_info"] for each in gathered if "measurements" in each["extra_info"]]


def _measured(told: dict[str, Any]) -> Any:
    """One case as pytest-benchmark keeps it in the process that has measured it."""
    from pytest_benchmark.stats import Metadata

    names = ("name", "fullname", "group", "param", "params", "extra_info", "has_error")
    fixture = SimpleNamespace(**{name: told[name] for name in names}, cprofile_stats=None)
    make: Any = Metadata
    made = make(fixture, told["stats"]["iterations"], told["options"])
    made.stats.data = told["stats"]["data"]
    return made
