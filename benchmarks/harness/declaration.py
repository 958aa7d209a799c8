"""What a metric is: its declaration, and everything that follows from it: asv's name and cost, summaries, floors.

Direction, unit and floor belong to the declaration, so no report and no gate can get them wrong on its own. Which
metrics there are stands in `metrics.py`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.fits import Root
from benchmarks.harness.stats import quantile
from benchmarks.harness.timing import RunTiming
from benchmarks.harness.traffic import Limits

Observations = Sequence[float]
ByState = Mapping[str, Sequence[RunTiming]]
"""The windows of one sample, by the state that their arm was in."""

Pooled = Sequence[Mapping[str, Sequence[Sequence[RunTiming]]]]
"""For each load the windows of all samples, in their order, by the state that their arm was in."""

Weighting = Literal["gap", "request", "token", "pair", "sweep", "window", "ceiling", "count"]

_UNITS = {
    "s": "seconds", "x": "ratio", "share": "ratio", "bytes": "bytes", "FLOP": "FLOP", "operators": "operators",
    "launches": "launches", "breaks": "breaks", "forwards": "forwards", "tokens": "tokens", "blocks": "blocks",
    "steps": "steps", "requests": "requests", "preemptions": "preemptions",
}  # fmt: skip
"""Units of metrics that are no rates, and what asv calls them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One declaration.

    How it comes about, exactly one of: `observe` turns a run into its observations (one per run, or one per gap),
    which are pooled and summed up by their quantile `q`; `over` turns all runs into one number; `judged` does so
    under stated limits; `paired` compares a run of a slow arm with one of a fast arm, `between` a whole window with
    another; `along` turns the runs of one sample, one for each length of a sweep, and the degree of the curve through
    them into one number; `across` does so with the windows of one sample, one for each size of a batch; `among` with
    those of one sample in each of some `states` of the prefix cache; `pooled` with those of all samples and loads, into
    one number that has its own interval, or says why it is none; none of them, for a share of a ceiling and for a count
    of work (`weighting` "ceiling", "count").

    What comes about `among` states or `pooled` tells in its `label` what it is of, in place of an arm. `spans_loads`
    where it needs several loads: else it is of one. `of_sizes` where these are sizes of a batch. `in_sequence` says of
    a number of a window that it is as good where its requests ran one after another: nothing between two of them
    counts.

    `weighting` says what weighs the same: each gap, each request, each token, each pair, each sweep; "window" is one
    number for everything together. `gate` says whether a regression may fail a build; the others are reported only. A
    change below `floor_relative` or below `floor_absolute` (in `unit`) is no change; counts have no floor.
    A `coefficient` of a curve may be below zero, and may be left open by the points: no gate judges it. `shown_in` is
    the unit in which people read it, where that does not follow from its size.
    """

    name: str
    title: str
    unit: str
    formula: str
    weighting: Weighting
    better: Literal["lower", "higher"]
    gate: bool
    floor_relative: float = 0.0
    floor_absolute: float = 0.0
    q: float = 0.5
    observe: Callable[[RunTiming], Observations] | None = None
    over: Callable[[Sequence[RunTiming]], float | None] | None = None
    judged: Callable[[Sequence[RunTiming], Limits], float | None] | None = None
    paired: Callable[[RunTiming, RunTiming], float | None] | None = None
    between: Callable[[Sequence[RunTiming], Sequence[RunTiming]], float | None] | None = None
    along: Callable[[Sequence[RunTiming], int], float | None] | None = None
    across: Callable[[Sequence[Sequence[RunTiming]]], float | None] | None = None
    among: Callable[[ByState], float | None] | None = None
    pooled: Callable[[Pooled], Root] | None = None
    states: tuple[str, ...] = ()
    label: str = ""
    spans_loads: bool = False
    of_sizes: bool = False
    in_sequence: bool = False
    coefficient: bool = False
    shown_in: str | None = None

    def __post_init__(self) -> None:
        ways = (self.observe, self.over, self.judged, self.paired, self.between, self.along, self.across)
        of_states = (self.among, self.pooled, self.weighting in ("ceiling", "count") or None)
        num_ways = sum(way is not None for way in (*ways, *of_states))
        if num_ways != 1:
            raise InstrumentError(f"metric {self.name!r} has to come about in exactly one way, not in {num_ways}")
        if self.unit not in _UNITS and not re.fullmatch("[a-z]+/s", self.unit):
            raise InstrumentError(
                f"metric {self.name!r} has the unknown unit {self.unit!r}; known: {', '.join(_UNITS)}"
            )
        if self.better not in self._directions:
            choices = ", ".join(self._directions)
            raise InstrumentError(f"metric {self.name!r} in {self.unit} cannot be better when {self.better}: {choices}")
        if self.coefficient and self.gate:
            raise InstrumentError(f"metric {self.name!r} is a coefficient: none can be a gate, as it may be below zero")
        if self.is_of_states != bool(self.label and self.states):
            raise InstrumentError(f"metric {self.name!r} names states and a label exactly where it is of states")
        if self.is_exact and (self.floor_relative or self.floor_absolute):
            raise InstrumentError(f"metric {self.name!r} is a count: counts have no floor")

    @property
    def _directions(self) -> tuple[str, ...]:
        """What can be better in this unit: less time and less work, a higher rate. A ratio goes either way.

        A coefficient in seconds may be a saving, of which more is better.
        """
        if self.unit.endswith("/s"):
            return ("higher",)
        goes_either_way = _UNITS[self.unit] == "ratio" or (self.unit == "s" and self.coefficient)
        return ("lower", "higher") if goes_either_way else ("lower",)

    @property
    def compares_arms(self) -> bool:
        """Whether it is a number of several arms together: none of them is its own."""
        return self.weighting == "pair"

    @property
    def compares_two(self) -> bool:
        """Whether it comes about by `measure.compare` or `measure.price`, of two arms that are named there."""
        return self.paired is not None or self.between is not None

    @property
    def is_of_states(self) -> bool:
        return self.among is not None or self.pooled is not None

    @property
    def is_of_runs(self) -> bool:
        """Whether it comes about from the runs of one arm alone, one after another."""
        return self.observe is not None or self.weighting == "token"

    @property
    def ways(self) -> frozenset[str]:
        """The methods of `measure` by which it comes about without two arms being named."""
        if self.is_of_runs:
            return frozenset({"stream", "serve", "reuse", "converse", "revisit"})
        if self.weighting == "window":
            return frozenset({"serve", "converse", "revisit"} if self.in_sequence else {"serve"})
        if self.is_of_states:
            return frozenset({"sharing"} if self.of_sizes else {"reuse"})
        return frozenset({"sweep"} if self.along else {"batches"} if self.across else ())

    @property
    def has_ratio(self) -> bool:
        """Whether two builds can be compared by it: a coefficient may be zero, and a ceiling is the machine's."""
        return not self.coefficient and self.weighting != "ceiling"

    @property
    def is_exact(self) -> bool:
        """Whether it counts work: the same on every run, so that any change is a change."""
        return self.weighting == "count"

    @property
    def asv_name(self) -> str:
        """asv knows nothing but lower-is-better: what is better when higher is stored as a cost, and named so."""
        if self.better == "lower":
            return self.name
        if self.unit.endswith("/s"):
            return re.sub("([a-z]+)s_per_s$", r"s_per_\1", self.name)
        return f"one_minus_{self.name}" if self.unit == "share" else f"inverse_{self.name}"

    @property
    def asv_unit(self) -> str:
        return "seconds" if self.unit.endswith("/s") else _UNITS[self.unit]

    def cost(self, value: float) -> float:
        """The lower-is-better number that asv stores, in `asv_unit`: never a negated one.

        Raises InstrumentError for a value that has none: a saving of nothing, whose reciprocal is no number.
        """
        if self.better == "lower":
            return value
        if self.unit == "share":
            return 1 - value
        if isinstance(value, int | float) and value <= 0:  # an array is of simulated values, which lie above 0
            raise InstrumentError(f"{self.name} of {value} has no cost to store as {self.asv_name}: it lies above 0")
        return 1 / value

    def value_of(self, cost: float) -> float:
        """The value whose cost it is: what asv stores, read back. Raises InstrumentError where no value costs that."""
        if self.better == "lower":
            return cost
        if self.unit == "share":
            return 1 - cost
        if cost <= 0:
            raise InstrumentError(f"{cost} is no cost of {self.name}, which is stored as {self.asv_name}: above 0")
        return 1 / cost

    def sample(self, run: RunTiming) -> float | None:
        """This metric of a single run, or None where it is undefined."""
        return self.summary([run])

    def summary(self, runs: Sequence[RunTiming], limits: Limits | None = None) -> float | None:
        """This metric of all runs together, or None where it is undefined. Raises where it lacks limits."""
        if self.over is not None:
            return self.over(runs)
        if self.judged is not None:
            if limits is None:
                raise InstrumentError(f"metric {self.name!r} means nothing without stated limits")
            return self.judged(runs, limits)
        assert self.observe is not None, f"{self.name} is not computed from runs"
        return quantile([value for run in runs for value in self.observe(run)], self.q)

    def is_worse(self, base: float, head: float) -> bool:
        """Whether head is worse than base by more than both floors."""
        loss = head - base if self.better == "lower" else base - head
        return loss > 0 and loss >= self.floor_absolute and loss >= self.floor_relative * abs(base)
