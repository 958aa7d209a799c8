"""What a benchmark leaves behind: plain, finite, serialisable values.

Knows how samples become a `Measurement`. Refuses to know who prints, stores or judges it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.metrics import Metric
from benchmarks.harness.stats import min_samples_for, quantile, quantile_interval, relative_spread
from benchmarks.harness.timing import RunTiming


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One metric of one arm of one benchmark case.

    `value` sums up `num_observations` observations; `samples` holds one number per run, all of them. `low` and
    `high` are the 95 % interval of the median run, None where the runs are too few for one: what a run observes shares
    its luck, so a thousand gaps of six runs are worth six. A `value` of None is undefined.
    """

    metric: Metric
    arm: str
    value: float | None
    samples: tuple[float, ...]
    num_observations: int
    low: float | None
    high: float | None

    def __post_init__(self) -> None:
        for number in (self.value, self.low, self.high, *self.samples):
            if number is not None and not math.isfinite(number):
                raise InstrumentError(f"{self.metric.name} of {self.arm} holds {number}, which is no measurement")

    @property
    def is_too_small(self) -> bool:
        """Whether the observations are too few to bound the value from above."""
        return self.num_observations < min_samples_for(self.metric.q)

    @property
    def best(self) -> float | None:
        """The best run. Whatever else runs on the machine can only worsen a run, so this moves least between passes."""
        choose = min if self.metric.better == "lower" else max
        return choose(self.samples, default=None)

    @property
    def spread(self) -> float | None:
        return relative_spread(self.samples)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, self-describing: name, unit and direction stand beside the numbers."""
        return {
            "metric": self.metric.name,
            "arm": self.arm,
            "unit": self.metric.unit,
            "better": self.metric.better,
            "gate": self.metric.gate,
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "n": self.num_observations,
            "n_too_small": self.is_too_small,
            "spread": self.spread,
            "samples": list(self.samples),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """Everything that one case of one benchmark test measured.

    `benchmark` is the test's node id without its parameters, `case` the parameters' id ("" without any).
    """

    benchmark: str
    case: str
    params: Mapping[str, Any]
    measurements: tuple[Measurement, ...]
    provenance: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "measurements": [measurement.as_dict() for measurement in self.measurements],
            "provenance": dict(self.provenance),
            "notes": list(self.notes),
        }


def summarise_runs(metric: Metric, arm: str, runs: Sequence[RunTiming]) -> Measurement:
    """Pool the observations of all runs; every run also gives one sample of its own where it is defined."""
    assert metric.observe is not None, f"{metric.name} compares arms"
    pooled = [value for run in runs for value in metric.observe(run)]
    samples = [value for value in map(metric.sample, runs) if value is not None]
    return _measurement(metric, arm, pooled, samples)


def summarise_values(metric: Metric, arm: str, values: Sequence[float]) -> Measurement:
    """A measurement from one finished number per pair of runs."""
    return _measurement(metric, arm, values, values)


def _measurement(metric: Metric, arm: str, pooled: Sequence[float], samples: Sequence[float]) -> Measurement:
    interval = quantile_interval(samples, 0.5)
    return Measurement(
        metric=metric,
        arm=arm,
        value=quantile(pooled, metric.q),
        samples=tuple(samples),
        num_observations=len(pooled),
        low=interval.low,
        high=interval.high,
    )
