"""The suite as asv will know it: tests that pytest collected, what each case declares, and the series that follow.

Knows pytest's collection and how asv names and numbers things. Refuses to run anything.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.fixtures import declaration_of
from benchmarks.harness.metrics import Metric, metric
from benchmarks.harness.passes import Collected, Place, asv_name_of, names_of_cases, run_pytest
from benchmarks.harness.profiles import TRACKED


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """What one case declares: its arms, and those of its metrics that have a gate."""

    arms: tuple[str, ...]
    metrics: tuple[Metric, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Benchmark:
    """One collected test function and what each of its cases declares.

    `text` is the function's own, `context` that of its file without the other tests: fixtures, constants and helpers
    can move its numbers as well.
    """

    node: str
    function: Callable[..., Any]
    module: str
    path: Path
    declared: Mapping[str, Declared]
    text: str
    context: str

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(arm for each in self.declared.values() for arm in each.arms))

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return tuple(dict.fromkeys(each for case in self.declared.values() for each in case.metrics))

    @property
    def series(self) -> Iterator["Series"]:
        return (Series(self, each) for each in self.metrics)


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """One metric of one benchmark, as asv keeps it."""

    benchmark: Benchmark
    metric: Metric

    @property
    def name(self) -> str:
        return f"{asv_name_of(self.benchmark.node)}.track_{self.metric.asv_name}"

    @property
    def axes(self) -> dict[str, list[str]]:
        """asv's parameters: arms, unless the metric compares them, and cases, unless there is only one."""
        axes = {} if self.metric.compares_arms else {"arm": list(self.benchmark.arms)}
        cases = list(self.benchmark.declared)
        return axes if cases == [""] else axes | {"case": cases}

    @property
    def spots(self) -> Iterator["Spot"]:
        return (self.spot(parameters) for parameters in itertools.product(*self.axes.values()))

    def spot(self, parameters: Sequence[str]) -> "Spot":
        chosen = dict(zip(self.axes, parameters, strict=True))
        return Spot(self, tuple(parameters), chosen.get("arm"), chosen.get("case", ""))


@dataclasses.dataclass(frozen=True, slots=True)
class Spot:
    """One number: a series at one set of asv's parameters."""

    series: Series
    parameters: tuple[str, ...]
    arm: str | None
    case: str

    @property
    def place(self) -> Place:
        return self.series.benchmark.node, self.case

    @property
    def key(self) -> tuple[str, str, str | None, str]:
        return self.series.benchmark.node, self.series.metric.name, self.arm, self.case

    @property
    def is_declared(self) -> bool:
        declared = self.series.benchmark.declared[self.case]
        return self.series.metric in declared.metrics and self.arm in (None, *declared.arms)


def collect(folder: Path) -> list[Benchmark]:
    """Every tracked benchmark below `folder`. Raises InstrumentError, with pytest's words, where one is unreadable."""
    found = Collected()
    status, output = run_pytest(folder, ["--collect-only", "-m", TRACKED, str(folder)], found)
    if status != pytest.ExitCode.OK or not found.items:
        raise InstrumentError(f"the benchmarks below {folder} could not all be collected:\n{output}")
    by_node = found.by_node()
    texts = {items[0].function: inspect.getsource(items[0].function) for items in by_node.values()}
    return [_benchmark(node, items, texts) for node, items in by_node.items()]


def _benchmark(node: str, items: Sequence[pytest.Function], texts: Mapping[Callable[..., Any], str]) -> Benchmark:
    first = items[0]
    context = first.path.read_text("utf-8")
    for function, text in texts.items():
        if function is not first.function:
            context = context.replace(text, "")
    return Benchmark(
        node=node,
        function=first.function,
        module=first.module.__name__,
        path=first.path,
        declared=dict(zip(names_of_cases(items), map(_declared, items), strict=True)),
        text=texts[first.function],
        context=context,
    )


def _declared(item: pytest.Function) -> Declared:
    arms, quantities = declaration_of(item)
    return Declared(arms=tuple(arms), metrics=tuple(each for each in map(metric, quantities) if each.gate))
