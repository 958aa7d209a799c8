"""Session policy: which device and model are measured, when timing is on, what the markers mean, one seed for all.

A bare `pytest` runs every benchmark once, untimed, as a test. Asking for a measurement turns timing on:
`--benchmark-only`, `--benchmark-enable`, or any option that stores or compares one.
"""

import gc
import math
import os
import random
import sys
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before anything imports torch: threads of several workers wait for each other, and tests run 20 times slower.
    # Workers that measure have been given their part of the cores by then (`spread.py`).
    os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = (  # in the order of their imports, or pytest could not rewrite the asserts of the later ones
    "benchmarks.harness.progress",
    "benchmarks.harness.http_fixtures",
    "benchmarks.harness.fixtures",
    "benchmarks.harness.publishing",
    "benchmarks.harness.spread",
    "benchmarks.harness.gpu.care",
    "benchmarks.harness.resume",
)

_ASKS_FOR_TIMING = ("only", "enable", "json", "save", "autosave", "compare", "compare_fail", "histogram")
_MARKERS = (
    "gpu: needs a CUDA device; skipped without one",
    "slow: takes minutes; runs with --slow or `-m slow`",
    "simulated: a slow test that draws by the thousand, or waits for long; it runs when it is named",
    "alone: times something; skipped beside other workers (-n)",
    "prove_red: swaps a wrong formula in and sees the tests fail; runs with --prove-red",
    "desk: a case too slow to be measured sixteen times; asv leaves it out",
    "full: a case that the default profile does without; asv as well",
    "study: a case that the profile `study` measures",
    "arms(name={option: value}, ...): the arms that take turns inside one benchmark",
    "quantities(name, ...): the metrics that a benchmark promises to measure",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nanoserve")
    group.addoption("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    group.addoption(
        "--gpu-wait-s",
        type=_amount("--gpu-wait-s", "seconds"),
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for a GPU that another session has (default: 600)",
    )
    group.addoption("--model", help="catalog name, folder, GGUF file or hub id (default: by device, or the profile's)")
    group.addoption("--dtype", help="auto, float32, bfloat16 or float16 (default: auto, or the profile's)")
    group.addoption(
        "--endpoint", metavar="URL", help="measure an OpenAI-compatible server there instead, as http://host:8000/v1"
    )
    group.addoption("--endpoint-key", metavar="KEY", help="what that server wants as its API key")
    group.addoption("--profile", default="default", metavar="NAME", help=f"what is measured: {_profiles()}")
    group.addoption(
        "--resume", action="store_true", help="go on with a session that was interrupted, after what it has measured"
    )
    group.addoption("--samples", type=_whole("--samples", 1), help="timed runs per arm (default: 6)")
    group.addoption(
        "--max-warmups", type=_whole("--max-warmups", 0), help="warm-up runs per arm, at most (default: 5; study: 1)"
    )
    group.addoption(
        "--max-warmup-s",
        type=_amount("--max-warmup-s", "seconds"),
        help="seconds of warm-up after which no further run begins (default: 10; study: 60)",
    )
    group.addoption(
        "--planted-slowdown",
        type=_amount("--planted-slowdown", "percent"),
        metavar="PERCENT",
        help="follow each timed step with so much more work: what a gate has to find",
    )
    group.addoption(
        "--prove-red", action="store_true", help="run nothing but the proof that wrong formulas turn the tests red"
    )
    group.addoption("--slow", action="store_true", help="also run the tests marked slow")


def _profiles() -> str:
    from benchmarks.harness.profiles import PROFILES

    return "; ".join(f"{name}: {each.purpose}" for name, each in PROFILES.items()) + " (default: default)"


def _whole(option: str, least: int):
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise pytest.UsageError(f"{option} must be a whole number of at least {least}, not {text!r}")
        return int(text)

    return read


def _amount(option: str, unit: str):
    def read(text: str) -> float:
        try:
            amount = float(text)
        except ValueError:
            amount = -1.0
        if not 0 <= amount < math.inf:
            raise pytest.UsageError(f"{option} must be a number of {unit}, not {text!r}")
        return amount

    return read


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Runs before pytest-benchmark reads its options."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    _apply_profile(config)
    if not any(config.getoption(f"benchmark_{name}", None) for name in _ASKS_FOR_TIMING):
        config.option.benchmark_disable = True
    elif config.getoption("benchmark_disable", False):
        raise pytest.UsageError("--benchmark-disable contradicts the other --benchmark options: leave out one of them")
    else:
        from benchmarks.harness.spread import prepare

        prepare(config)
    if config.getoption("dist", "no") == "load" and not config.getoption("--prove-red"):
        config.option.dist = "loadfile"  # what a file prepares for all its tests is prepared once, not by each worker


def _apply_profile(config: pytest.Config) -> None:
    """Fill in what the command line leaves open."""
    from benchmarks.harness.errors import InstrumentError
    from benchmarks.harness.profiles import profile

    try:
        implied = profile(config.getoption("--profile")).options
    except InstrumentError as error:
        raise pytest.UsageError(str(error)) from None
    for name, value in implied.items():
        if getattr(config.option, name) is None:
            setattr(config.option, name, value)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("benchmark_only"):
        _deselect(config, items, lambda item: "benchmark" not in getattr(item, "fixturenames", ()))
    _keep_profile(config, items)
    proves = config.getoption("--prove-red")
    _deselect(config, items, lambda item: (item.get_closest_marker("prove_red") is not None) != proves)
    if not config.getoption("--slow") and "slow" not in config.getoption("-m"):
        _deselect(config, items, lambda item: item.get_closest_marker("slow") is not None)


def _keep_profile(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the benchmarks, the cases that the profile measures. Untimed, no benchmark is left out as a whole."""
    from benchmarks.harness.profiles import profile

    chosen = profile(config.getoption("--profile"))
    cases = [item for item in items if "benchmark" in getattr(item, "fixturenames", ())]
    wanted = {item for item in cases if chosen.wants({mark.name for mark in item.iter_markers()})}
    if config.getoption("benchmark_disable") and config.getoption("--profile") == "default":
        first_of = {_benchmark_of(item): item for item in reversed(cases)}
        there = {_benchmark_of(item) for item in wanted}
        wanted |= {first for name, first in first_of.items() if name not in there}
    unwanted = set(cases) - wanted
    _deselect(config, items, lambda item: item in unwanted)


def _benchmark_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _deselect(config, items, unwanted) -> None:
    out = [item for item in items if unwanted(item)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what cannot be done here before any fixture prepares it."""
    if item.get_closest_marker("alone") and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("times something: leave out -n")
    if item.get_closest_marker("gpu"):
        from benchmarks.harness.gpu.driver import driver

        if item.config.getoption("--device").startswith("cpu") or not driver().gpus():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="module", autouse=True)
def _set_aside(pytestconfig: pytest.Config) -> Iterator[None]:
    """Untimed, what others left is nothing to collect: measuring code collects before each case, and tests do so often.

    Thawed afterwards, or extension modules complain, when the process ends, of what nobody collected.
    """
    if pytestconfig.getoption("benchmark_disable"):
        gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state, in any order and on any worker."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config):
    """Below pytest-benchmark's table, and also when its comparison fails: what disturbed a run may be why."""
    try:
        return (yield)
    finally:
        _print_results(terminalreporter, config)


def _print_results(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    from benchmarks.harness.publishing import RESULTS

    results = config.stash.get(RESULTS, [])
    if results:
        from benchmarks.harness.report import print_summary

        print_summary(results, config.rootpath / ".benchmarks" / "curves", terminalreporter)
        if config.getoption("--profile") == "study":
            _print_study(results, config.rootpath / ".benchmarks" / "study", terminalreporter)


def _print_study(results, folder, terminalreporter: pytest.TerminalReporter) -> None:
    """Each study that has results of its own."""
    from benchmarks.studies import cache_curve, cache_points, prefix_costs, prefix_points

    for study, own in ((cache_curve, cache_points.of_study(results)), (prefix_costs, prefix_points.of_study(results))):
        if own:
            terminalreporter.section(f"beside the published study: {study.NAME}")
            terminalreporter.write(study.tell(own))
            for path in study.write(own, folder):
                terminalreporter.write_line(f"study: {path}")
