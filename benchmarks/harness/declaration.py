"""What a metric is: its declaration, and everything that follows from it: asv's name and cost, summaries, floors.

Direction, unit and floor belong to the declaration, so no report and no gate can get them wrong on its own. Which
metrics there are stands in `metrics.py`.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Literal

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.stats import quantile
from benchmarks.harness.timing import RunTiming
from benchmarks.harness.traffic import Limits

Observations = Sequence[float]
Weighting = Literal["gap", "request", "token", "pair", "window", "count"]

_UNITS = {
    "s": "seconds", "x": "ratio", "share": "ratio", "bytes": "bytes", "FLOP": "FLOP", "operators": "operators",
    "launches": "launches", "breaks": "breaks", "forwards": "forwards", "tokens": "tokens", "blocks": "blocks",
}  # fmt: skip
"""Units of metrics that are no rates, and what asv calls them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One declaration.

    How it comes about, exactly one of: `observe` turns a run into its observations (one per run, or one per gap),
    which are pooled and summed up by their quantile `q`; `over` turns all runs into one number; `judged` does so
    under stated limits; none of them, for a ratio of two arms and for a count of work (`weighting` "pair", "count").

    `weighting` says what weighs the same: each gap, each request, each token, each pair; "window" is one number for
    everything together. `gate` says whether a regression may fail a build; the others are reported only. A change
    that is smaller than `floor_relative` or than `floor_absolute` (in `unit`) is no change; counts have no floor.
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

    def __post_init__(self) -> None:
        ways = (self.observe, self.over, self.judged, self.weighting in ("pair", "count") or None)
        num_ways = sum(way is not None for way in ways)
        if num_ways != 1:
            raise InstrumentError(f"metric {self.name!r} has to come about in exactly one way, not in {num_ways}")
        if self.unit not in _UNITS and not re.fullmatch("[a-z]+/s", self.unit):
            raise InstrumentError(
                f"metric {self.name!r} has the unknown unit {self.unit!r}; known: {', '.join(_UNITS)}"
            )
        if self.better not in self._directions:
            choices = ", ".join(self._directions)
            raise InstrumentError(f"metric {self.name!r} in {self.unit} cannot be better when {self.better}: {choices}")
        if self.is_exact and (self.floor_relative or self.floor_absolute):
            raise InstrumentError(f"metric {self.name!r} is a count: counts have no floor")

    @property
    def _directions(self) -> tuple[str, ...]:
        """What can be better in this unit: less time and less work, a higher rate. A ratio goes either way."""
        if self.unit.endswith("/s"):
            return ("higher",)
        return ("lower", "higher") if _UNITS[self.unit] == "ratio" else ("lower",)

    @property
    def compares_arms(self) -> bool:
        return self.weighting == "pair"

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
        """The lower-is-better number that asv stores, in `asv_unit`: never a negated one."""
        if self.better == "lower":
            return value
        return 1 - value if self.unit == "share" else 1 / value

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
