"""What a benchmark leaves behind: plain, finite, serialisable values.

Knows how samples become a `Measurement`. Refuses to know who prints, stores or judges it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.declaration import ByState
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.fits import Root
from benchmarks.harness.metrics import Metric
from benchmarks.harness.series import outliers
from benchmarks.harness.stats import (
    Estimate,
    min_samples_for,
    paired_ratio,
    quantile,
    quantile_interval,
    relative_spread,
)
from benchmarks.harness.timing import RunTiming
from benchmarks.harness.traffic import Limits, check_all_finished

SCHEMA = 2
"""The version of what `BenchmarkResult.as_dict` writes."""


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
        return not self.metric.is_exact and self.num_observations < min_samples_for(self.metric.q)

    @property
    def best(self) -> float | None:
        """The best run. Whatever else runs on the machine can only worsen a run, so this moves least between passes."""
        choose = min if self.metric.better == "lower" else max
        return choose(self.samples, default=None)

    @property
    def spread(self) -> float | None:
        return relative_spread(self.samples)

    @property
    def outliers(self) -> tuple[int, ...]:
        """Which samples lie far from the others. They are labelled and stay in."""
        return () if self.metric.is_exact else outliers(self.samples)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, self-describing: name, unit and direction stand beside the numbers."""
        return {
            "metric": self.metric.name,
            "arm": self.arm,
            "unit": self.metric.unit,
            "better": self.metric.better,
            "gate": self.metric.gate,
            "exact": self.metric.is_exact,
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "n": self.num_observations,
            "n_too_small": self.is_too_small,
            "spread": self.spread,
            "outliers": list(self.outliers),
            "samples": list(self.samples),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """Why a number is not to be trusted without a second look.

    `kind` is one of out of memory, contaminated, one-time, leak, engine, client, server, short, bundled, endpoint,
    warm-up, first, drift, step, outlier, near-tie, resolution, ceiling, resumed, undefined; `arm` is "" where it
    concerns the whole case.
    """

    kind: str
    arm: str
    what: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """Everything that one case of one benchmark test measured.

    `benchmark` is the test's node id without its parameters, `case` the parameters' id ("" without any). `runs` holds
    the event log of every run, `details` what is too long for a table, such as the histogram of operators.
    """

    benchmark: str
    case: str
    params: Mapping[str, Any]
    measurements: tuple[Measurement, ...]
    provenance: Mapping[str, Any]
    flags: tuple[Flag, ...] = ()
    runs: Mapping[str, Sequence[RunTiming]] = dataclasses.field(default_factory=dict)
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_contaminated(self) -> bool:
        """Whether something else ran on the machine meanwhile: such a result is shown, and never used."""
        return any(flag.kind == "contaminated" for flag in self.flags)

    @property
    def is_gap(self) -> bool:
        """Whether the case could not be measured at all; a flag says why."""
        return bool(self.measurements) and all(each.value is None for each in self.measurements)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready. `archive.py` reads it back."""
        return {
            "schema": SCHEMA,
            "benchmark": self.benchmark,
            "case": self.case,
            "params": {name: value if _is_plain(value) else str(value) for name, value in self.params.items()},
            "measurements": [measurement.as_dict() for measurement in self.measurements],
            "runs": {arm: [_log_of(run) for run in runs] for arm, runs in self.runs.items()},
            "flags": [dataclasses.asdict(flag) for flag in self.flags],
            "details": dict(self.details),
            "provenance": dict(self.provenance),
        }


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _log_of(run: RunTiming) -> dict[str, Any]:
    """The event log, its times counted from sending; what is None or empty stays out."""
    log: dict[str, Any] = {
        "request_id": run.request_id,
        "sent_ns": 0,
        "scheduled_ns": _since(run.sent_ns, run.scheduled_ns),
        "admitted_ns": _since(run.sent_ns, run.admitted_ns),
        "stamps": [[stamp.at_ns - run.sent_ns, stamp.num_tokens] for stamp in run.stamps],
        "num_prompt_tokens": run.num_prompt_tokens,
        "num_cached": run.num_cached,
        "num_prefilled": run.num_prefilled,
        "finish_reason": run.finish_reason,
        "error": run.error,
        "broke_off_ns": _since(run.sent_ns, run.broke_off_ns),
    }
    return {name: value for name, value in log.items() if value is not None and value != ""}


def _since(start_ns: int, at_ns: int | None) -> int | None:
    return None if at_ns is None else at_ns - start_ns


def summarise_runs(metric: Metric, arm: str, runs: Sequence[RunTiming], limits: Limits | None = None) -> Measurement:
    """Sum up all runs together; every run also gives one sample of its own where it is defined.

    `limits` are what goodput judges by. A window's metric has one sample, the window. Every other metric raises
    WrongOutputError where a request failed: the latency of those that did not is no result.
    """
    if metric.weighting != "window" and any(run.error for run in runs):
        check_all_finished(runs)
    if metric.weighting == "window":
        value = metric.summary(runs, limits)
        return _measurement(metric, arm, value, () if value is None else (value,), len(runs))
    samples = [value for value in map(metric.sample, runs) if value is not None]
    pooled = [value for run in runs for value in metric.observe(run)] if metric.observe else samples
    return _measurement(metric, arm, metric.summary(runs), samples, len(pooled))


def summarise_values(metric: Metric, arm: str, values: Sequence[float]) -> Measurement:
    """A measurement from finished numbers, one per run, however they came about."""
    return _measurement(metric, arm, quantile(values, metric.q), values, len(values))


def summarise_windows(
    metric: Metric, arm: str, windows: Sequence[Sequence[RunTiming]], limits: Limits | None = None
) -> Measurement:
    """Sum up windows of requests that ran together; every window gives one sample where it is defined.

    A median is that of the median window. A tail is taken over all windows together: one has too few observations.
    """
    runs = [run for window in windows for run in window]
    if metric.weighting != "window":
        check_all_finished(runs)
    samples = [value for window in windows if (value := metric.summary(window, limits)) is not None]
    if metric.weighting == "window":
        return summarise_values(metric, arm, samples)
    pooled = [value for run in runs for value in metric.observe(run)] if metric.observe else samples
    value = quantile(samples, 0.5) if metric.q == 0.5 else metric.summary(runs)
    return _measurement(metric, arm, value, samples, len(pooled))


def summarise_batches(metric: Metric, arm: str, samples: Sequence[Sequence[Sequence[RunTiming]]]) -> Measurement:
    """What tells of the windows of a sample, one for each size of a batch; a number for each sample that has one."""
    assert metric.across is not None, f"{metric.name} tells of no sizes"
    values = [value for windows in samples if (value := metric.across(windows)) is not None]
    return summarise_values(metric, arm, values)


def summarise_pairs(
    metric: Metric, arm: str, pairs: Sequence[tuple[Sequence[RunTiming], Sequence[RunTiming]]]
) -> Measurement:
    """What compares two arms, within each pair of a window of the slow and one of the fast arm where it is defined.

    Two windows give one sample, as their requests share their luck.
    """
    by_window = [_pair_values(metric, slow, fast) for slow, fast in pairs]
    samples = [value for values in by_window if (value := _middle(metric, values)) is not None]
    return _compared(metric, arm, samples, sum(map(len, by_window)))


def summarise_states(metric: Metric, samples: Sequence[ByState]) -> Measurement:
    """What the windows of a sample tell together, one in each state; one number for each sample that has one."""
    assert metric.among is not None, f"{metric.name} compares no states"
    values = [value for by_state in samples if (value := metric.among(by_state)) is not None]
    return _compared(metric, metric.label, values, len(values))


def root_of_pool(metric: Metric, root: Root, num_samples: int) -> Measurement:
    """What all samples say together, with the interval that it brought along: no sample has a number of its own."""
    return Measurement(
        metric=metric, arm=metric.label, value=root.value, samples=(), num_observations=num_samples,
        low=root.low, high=root.high,
    )  # fmt: skip


def _compared(metric: Metric, arm: str, samples: Sequence[float], num_observations: int) -> Measurement:
    """Ratios on logarithms; a coefficient may be below zero."""
    interval = quantile_interval(samples, 0.5) if metric.coefficient else _middle_ratio(samples).interval
    return Measurement(
        metric=metric, arm=arm, value=_middle(metric, samples), samples=tuple(samples),
        num_observations=num_observations, low=interval.low, high=interval.high,
    )  # fmt: skip


def _middle(metric: Metric, values: Sequence[float]) -> float | None:
    if len(values) == 1:
        return values[0]  # to the last bit
    return quantile(values, 0.5) if metric.coefficient else _middle_ratio(values).value


def _middle_ratio(ratios: Sequence[float]) -> Estimate:
    return paired_ratio(ratios, [1.0] * len(ratios))


def _pair_values(metric: Metric, slow: Sequence[RunTiming], fast: Sequence[RunTiming]) -> list[float]:
    if metric.between is not None:
        values = [metric.between(slow, fast)]
    else:
        assert metric.paired is not None, f"{metric.name} compares no arms"
        values = [metric.paired(*pair) for pair in zip(slow, fast, strict=True)]
    return [value for value in values if value is not None]


def summarise_sweeps(metric: Metric, arm: str, samples: Sequence[Sequence[RunTiming]], degree: int) -> Measurement:
    """What tells of the curve through the lengths of a sample; one number for each sample where it is defined."""
    assert metric.along is not None, f"{metric.name} tells of no curve"
    values = [value for runs in samples if (value := metric.along(runs, degree)) is not None]
    return summarise_values(metric, arm, values)


def exact_count(metric: Metric, arm: str, count: float | None) -> Measurement:
    """A measurement of work: one number, the same on every run, and so its own interval."""
    assert metric.is_exact, f"{metric.name} is no count"
    samples = () if count is None else (count,)
    return Measurement(
        metric=metric, arm=arm, value=count, samples=samples, num_observations=len(samples), low=count, high=count
    )


def _measurement(
    metric: Metric, arm: str, value: float | None, samples: Sequence[float], num_observations: int
) -> Measurement:
    interval = quantile_interval(samples, 0.5)
    return Measurement(
        metric=metric, arm=arm, value=value, samples=tuple(samples), num_observations=num_observations,
        low=interval.low, high=interval.high,
    )  # fmt: skip
