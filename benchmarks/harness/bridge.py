"""The bridge to asv: a file of pytest benchmarks becomes one measured pass and many series that only read it.

    discovery     collect the tests, make a `track_*` function for each gated metric of each
    setup_cache   run the tests of one file, all their cases, in a process apart; leave plain numbers behind
    track_*       look one number up

Knows pytest's collection and asv's conventions. Refuses to know how anything is measured. Facts about asv that this
relies on: series share a pass when the module and the first line of their `setup_cache` are the same; a `-` in a name
is read as a parameter index; `{"samples": [x], "number": 1}` is one sample; to find its series, each reader looks at
the sources of all, so they are handed over rather than looked up in files.
"""

import dataclasses
import hashlib
import linecache
import os
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import INSTRUMENT_VERSION
from benchmarks.harness.asv_process import asv_command, is_about_to_measure
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.metrics import Metric
from benchmarks.harness.passes import (
    ARGUMENTS,
    CASE_LIMIT_S,
    SILENCE_S,
    Pass,
    Place,
    refuse_what_cannot_count,
    run_pass,
)
from benchmarks.harness.suite import Benchmark, Series, Spot, collect

ROUNDS = 8
"""Separate processes per commit. asv's own test can then tell commits apart; with 6 it never can."""


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    """The benchmarks of one file: what a pass measures together."""

    folder: Path
    benchmarks: tuple[Benchmark, ...]

    def measure(self, hear: Callable[[str], None] = lambda text: None, wanted: Place | None = None) -> Pass:
        """What asv's command line selects of it; all of it, where that has been read wrongly and lacks `wanted`."""
        cases = {each.node: tuple(each.declared) for each in self.benchmarks}
        selected = self._selected()
        is_certain = bool(selected) and wanted in (None, *selected)
        return run_pass(cases, self.folder, selected if is_certain else None, hear)

    def _selected(self) -> set[Place]:
        command = asv_command()
        spots = (spot for benchmark in self.benchmarks for series in benchmark.series for spot in series.spots)
        return {spot.place for spot in spots if command.selects(spot.series.name, list(map(repr, spot.parameters)))}


def derive_series(folder: Path) -> dict[str, Callable[..., Any]]:
    """A `track_*` function per gated metric of each benchmark test below `folder`, under names that asv can keep.

    Raises InstrumentError, where asv is about to measure, for what every pass would refuse: asv then stops here, where
    it would store failures in the place of older results.
    """
    if is_about_to_measure():
        refuse_what_cannot_count(folder.parent)
    by_path: dict[Path, list[Benchmark]] = {}
    for benchmark in collect(folder):
        by_path.setdefault(benchmark.path, []).append(benchmark)
    functions: dict[str, Callable[..., Any]] = {}
    for path, benchmarks in by_path.items():
        file = _File(folder, tuple(benchmarks))
        setup_cache = _pass_of(file, path)
        for series in (each for benchmark in benchmarks for each in benchmark.series):
            if series.name in functions:
                raise InstrumentError(f"two series are called {series.name}: rename {series.benchmark.node}")
            functions[series.name] = _function(file, series, setup_cache)
    return functions


def _function(file: _File, series: Series, setup_cache: Callable[[], Pass]) -> Callable[..., Any]:
    """What asv reads a series through; its page shows the test as the source."""
    benchmark, each, axes = series.benchmark, series.metric, series.axes

    def track(measured: Pass, *parameters: str) -> Any:
        return _read(file, measured, series.spot(parameters))

    function: Any = track
    function.__name__ = f"track_{each.asv_name}"
    function.__module__, function.__doc__ = benchmark.function.__module__, benchmark.function.__doc__
    function.benchmark_name, function.pretty_source = series.name, benchmark.text
    function.pretty_name = f"{benchmark.function.__name__.removeprefix('test_')}: {each.title}"
    function.params, function.param_names = list(axes.values()), list(axes)
    function.unit = each.asv_unit
    function.setup_cache = setup_cache
    function.rounds = 1 if each.is_exact else ROUNDS
    function.timeout = SILENCE_S + CASE_LIMIT_S * sum(len(other.declared) for other in file.benchmarks)
    function.version = _version(benchmark, each)
    return function  # type: ignore[no-any-return]


def _pass_of(file: _File, path: Path) -> Callable[[], Pass]:
    def setup_cache() -> Pass:
        """Say where it is: what says nothing for its timeout is killed by asv."""
        return file.measure(lambda text: print(text, flush=True))  # noqa: T201

    function: Any = _on_line_1_of(path, setup_cache)
    function.__module__ = file.benchmarks[0].module
    function.timeout = SILENCE_S + 60
    function.pretty_source = ""  # asv's page shows the test
    return function  # type: ignore[no-any-return]


def _on_line_1_of(path: Path, function: Any) -> types.FunctionType:
    """The same function, as `inspect` sees it the only line of a file that stands for `path`."""
    name = f"<pass of {path}>"
    linecache.cache[name] = (0, None, [f"def {function.__name__}(): ...\n"], name)
    code = function.__code__.replace(co_filename=name, co_firstlineno=1)
    return types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)


def _version(benchmark: Benchmark, each: Metric) -> str:
    """Changes whenever older numbers stop being comparable: test, fixtures, metric, instrument or model changed."""
    parts = (
        benchmark.context,
        repr(benchmark.arms),
        each.formula,
        INSTRUMENT_VERSION,
        os.environ.get(ARGUMENTS, ""),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _read(file: _File, measured: Pass, spot: Spot) -> Any:
    """One number of the pass. Raises for a case that failed, tells asv about one that was skipped.

    Of a contaminated case asv gets an empty list: this round adds nothing to the others. A count is a plain number:
    asv's statistics would ask for more of what is always the same.
    """
    if spot.place in measured["left_out"] or _was_read_before(measured, spot):
        measured = _replace_pass(file.measure(wanted=spot.place))
        _was_read_before(measured, spot)
    if spot.is_declared and spot.place in measured["failed"]:
        raise InstrumentError(measured["failed"][spot.place])
    if why_not := _why_not(measured, spot):
        from asv_runner.benchmarks.mark import SkipNotImplemented

        raise SkipNotImplemented(why_not)
    is_exact = spot.series.metric.is_exact
    if spot.place in measured["contaminated"] and not is_exact:
        return {"samples": [], "number": 1}
    if spot.key not in measured["values"]:
        raise InstrumentError(f"{spot.series.metric.name} of case {spot.case!r} was not measured")
    value = measured["values"][spot.key]
    return value if is_exact else {"samples": [value], "number": 1}


def _why_not(measured: Pass, spot: Spot) -> str | None:
    """Why there is nothing to read without anything having failed: asv says n/a."""
    node, name, arm, case = spot.key
    if not spot.is_declared:
        return f"case {case!r} declares no {name}{f' of {arm}' if arm else ''}"
    why: str | None = measured["skipped"].get(spot.place) or measured["absent"].get((node, name))
    return why


def _was_read_before(measured: Pass, spot: Spot) -> bool:
    """Whether this number was already handed out; a plain `asv run` offers every round the pass of the first one."""
    mark = Path(f"read-{hashlib.sha256(repr((measured['id'], spot.key)).encode()).hexdigest()}")
    if mark.exists():
        return True
    mark.touch()
    return False


def _replace_pass(measured: Pass) -> Pass:
    """Put a fresh pass where asv keeps the one to share, for the other series of this round."""
    fresh = Path("cache.pickle.tmp")
    fresh.write_bytes(pickle.dumps(measured))
    fresh.replace("cache.pickle")
    return measured
