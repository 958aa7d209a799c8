"""The bridge to asv: one pytest benchmark becomes one measured pass and several series that only read it.

    discovery     collect the tests, make a `track_*` function for each gated metric of each
    setup_cache   run one test, all its parameters, in this process; leave plain numbers behind
    track_*       look one number up

Knows pytest's collection and asv's conventions. Refuses to know how anything is measured. Facts about asv that this
relies on: a function's cache key is its module and first line, so functions here carry the file and line of the
test that they stand for; a `-` in a name is read as a parameter index; `{"samples": [x], "number": 1}` is one sample.
"""

import dataclasses
import hashlib
import inspect
import os
import pickle
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import INSTRUMENT_VERSION
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.fixtures import benchmark_id, case_id, declaration_of
from benchmarks.harness.metrics import Metric, metric
from benchmarks.harness.passes import ARGUMENTS, TRACKED, Collected, Pass, run_pass, run_pytest

ROUNDS = 8
"""Separate processes per commit. asv's own test can then tell commits apart; with 6 it never can."""

_TIMEOUT_S = 900


@dataclasses.dataclass(frozen=True, slots=True)
class _Benchmark:
    """One collected test function and its parameter sets."""

    node: str
    function: Callable[..., Any]
    path: Path
    cases: tuple[str, ...]
    arms: tuple[str, ...]
    metrics: tuple[Metric, ...]
    source: str

    @property
    def name(self) -> str:
        """The node id as asv likes names: `bench_kv_cache.test_prompt_length`."""
        path, *inside = self.node.split("::")
        return ".".join([*Path(path).with_suffix("").parts[1:], *inside])


def derive_series(folder: Path) -> dict[str, Callable[..., Any]]:
    """A `track_*` function per gated metric of each benchmark test below `folder`, under names that asv can keep."""
    series = {}
    places: dict[tuple[str, int], str] = {}
    for benchmark in _collect(folder):
        code = benchmark.function.__code__
        twin = places.setdefault((code.co_filename, code.co_firstlineno), benchmark.name)
        if twin != benchmark.name:
            raise InstrumentError(f"{twin} and {benchmark.name} share their code; asv would mix up their passes")
        setup_cache = _pass_of(benchmark, folder)
        for each in benchmark.metrics:
            series[f"{benchmark.name}.track_{each.asv_name}"] = _series(benchmark, each, setup_cache)
    return series


def _collect(folder: Path) -> Iterator[_Benchmark]:
    found = Collected()
    status, output = run_pytest(folder, ["--collect-only", "-m", TRACKED, str(folder)], found)
    if status != pytest.ExitCode.OK or not found.items:
        raise InstrumentError(f"the benchmarks below {folder} could not all be collected:\n{output}")
    by_test: dict[str, list[pytest.Function]] = {}
    for item in found.items:
        by_test.setdefault(benchmark_id(item), []).append(item)
    functions = {items[0].function for items in by_test.values()}
    return (_benchmark(items, functions) for items in by_test.values())


def _benchmark(items: Sequence[pytest.Function], functions: Iterable[Callable[..., Any]]) -> _Benchmark:
    first = items[0]
    arms, quantities = declaration_of(first)
    return _Benchmark(
        node=benchmark_id(first),
        function=first.function,
        path=first.path,
        cases=tuple(case_id(item) for item in items),
        arms=tuple(arms),
        metrics=tuple(each for each in map(metric, quantities) if each.gate),
        source=_source_of(first, functions),
    )


def _source_of(item: pytest.Function, functions: Iterable[Callable[..., Any]]) -> str:
    """The text of the test's file without the other tests: its fixtures, constants and helpers can move its numbers."""
    text = item.path.read_text("utf-8")
    others = (f for f in functions if f is not item.function and inspect.getsourcefile(f) == str(item.path))
    for other in others:
        text = text.replace(inspect.getsource(other), "")
    return text


def _series(benchmark: _Benchmark, each: Metric, setup_cache: Callable[[], Pass]) -> Callable[..., Any]:
    """The function that asv reads one metric of one benchmark through; asv's page shows the test as its source."""
    has_cases = benchmark.cases != ("",)
    axes = {"arm": list(benchmark.arms)} if not each.compares_arms else {}
    axes |= {"case": list(benchmark.cases)} if has_cases else {}

    def track(measured: Pass, *parameters: str) -> Any:
        chosen = dict(zip(axes, parameters, strict=True))
        return _read(measured, setup_cache, each, chosen.get("arm"), chosen.get("case", ""))

    function: Any = _stand_for(benchmark, track, f"track_{each.asv_name}")
    function.benchmark_name = f"{benchmark.name}.track_{each.asv_name}"
    function.pretty_name = f"{benchmark.function.__name__.removeprefix('test_')}: {each.title}"
    function.params, function.param_names = list(axes.values()), list(axes)
    function.unit = each.asv_unit
    function.setup_cache = setup_cache
    function.rounds = 1 if each.is_exact else ROUNDS
    function.timeout = _TIMEOUT_S
    function.version = _version(benchmark, each)
    return function  # type: ignore[no-any-return]


def _pass_of(benchmark: _Benchmark, folder: Path) -> Callable[[], Pass]:
    def setup_cache() -> Pass:
        return run_pass(benchmark.name, benchmark.node, benchmark.cases, folder)

    function: Any = _stand_for(benchmark, setup_cache, "setup_cache")
    function.timeout = _TIMEOUT_S
    return function  # type: ignore[no-any-return]


def _stand_for(benchmark: _Benchmark, function: Any, name: str) -> types.FunctionType:
    """The same function, seen by `inspect` as if it were written where the test is."""
    place = benchmark.function.__code__
    code = function.__code__.replace(
        co_filename=place.co_filename, co_firstlineno=place.co_firstlineno, co_name=name, co_qualname=name
    )
    twin = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    twin.__module__ = benchmark.function.__module__
    twin.__doc__ = benchmark.function.__doc__
    return twin


def _version(benchmark: _Benchmark, each: Metric) -> str:
    """Changes whenever older numbers stop being comparable: test, fixtures, metric, instrument or model changed."""
    parts = (
        benchmark.source,
        repr(benchmark.arms),
        each.formula,
        INSTRUMENT_VERSION,
        os.environ.get(ARGUMENTS, ""),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _read(measured: Pass, run_again: Callable[[], Pass], each: Metric, arm: str | None, case: str) -> Any:
    """One number of the pass. Raises for a case that failed, tells asv about one that was skipped.

    Of a contaminated case asv gets an empty list: this round adds nothing to the others. A count is a plain number:
    asv's statistics would ask for more of what is always the same.
    """
    if _was_read_before(measured, each, arm, case):
        measured = _replace_pass(run_again())
        _was_read_before(measured, each, arm, case)
    if case in measured["skipped"]:
        from asv_runner.benchmarks.mark import SkipNotImplemented

        raise SkipNotImplemented(measured["skipped"][case])
    if case in measured["contaminated"] and not each.is_exact:
        return {"samples": [], "number": 1}
    if case in measured["failed"] or (each.name, arm, case) not in measured["values"]:
        raise InstrumentError(measured["failed"].get(case, f"case {case!r} was not measured"))
    value = measured["values"][each.name, arm, case]
    return value if each.is_exact else {"samples": [value], "number": 1}


def _was_read_before(measured: Pass, each: Metric, arm: str | None, case: str) -> bool:
    """Whether this number was already handed out; a plain `asv run` offers every round the pass of the first one."""
    key = hashlib.sha256(repr((measured["id"], each.name, arm, case)).encode()).hexdigest()
    mark = Path(f"read-{key}")
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
