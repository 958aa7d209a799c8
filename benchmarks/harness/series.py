"""What is odd about a series of durations, in the order in which one process took them.

Knows positive numbers in order. Judges no code and drops no sample: a finding is a reason to look twice. All checks
work on logarithms, so that "15 % slower" means the same everywhere; a series of fewer than six samples, or with one
that is zero or less, is beyond them: None. Give rates as their reciprocals: the words are those of durations. Samples
count from 0, as they are stored.

Each check flags independent noise, however loud, in less than 2 % of series. Measured on 5,000 series each of normal
noise of 10 % and of lognormal noise of sigma 0.3, without the least amounts, in percent (the worse of both kinds):

                 n = 6    12    30
    drift          0.3   1.0   0.9
    slow first     1.5   1.1   1.1
    step           1.5   1.7   1.3
    outliers       1.1   0.9   1.0
    any of them    4.1   3.9   3.3

Noise with a long tail (exponential) has what these checks look for: 5 to 7 % slow firsts, 2 to 3 % steps, and outliers
in 5 % of series of 6 and a third of series of 30. A change below the least amount of a check is never reported.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.stats import finite_array

MIN_SAMPLES = 6
LEAST_DRIFT = 0.03
LEAST_FIRST = 0.10
LEAST_STEP = 0.05
LEAST_OUTLIER = 0.05

_DRIFT_P = 0.01
_STEP_P = 0.015
_MAD_TO_SIGMA = 1.4826
_Table = tuple[tuple[int, float], ...]
_FIRST_Z: _Table = ((6, 8.0), (7, 5.4), (8, 5.1), (9, 4.15), (10, 4.1), (12, 3.6), (15, 3.15), (20, 2.9), (60, 2.4))
"""Robust z of one sample against n - 1 others that normal noise exceeds in 1.5 % of series of n, by simulation."""
_OUTLIER_Z: _Table = (
    *((6, 9.2), (7, 9.2), (9, 7.3), (11, 6.45), (13, 5.85), (15, 5.5), (20, 4.95), (30, 4.55), (60, 4.25)),
    *((200, 4.2), (1000, 4.5), (10_000, 5.0)),
)
"""The same for the largest robust z of n samples among themselves. 3.5, as often used, flags 16 % of series of six."""

Logs = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A trend over the whole series. `change` is the last third's median over the first third's, less one."""

    kind: ClassVar[str] = "drift"
    tau: float
    p: float
    change: float
    what: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlowFirst:
    """The first sample is far above the rest. `z` is None where at least half of the rest are equal."""

    kind: ClassVar[str] = "first"
    ratio: float
    z: float | None
    what: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """From sample `start` on, the level is another: `ratio` is the median from there over the median before."""

    kind: ClassVar[str] = "step"
    start: int
    ratio: float
    p: float
    what: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outliers:
    """Samples far from the median, as indices; `scores` are their modified z, None where half of all are equal."""

    kind: ClassVar[str] = "outlier"
    indices: tuple[int, ...]
    scores: tuple[float | None, ...]
    what: str


Finding = Drift | SlowFirst | Step | Outliers


def find_drift(samples: Sequence[float], least: float = LEAST_DRIFT) -> Drift | None:
    """A trend by Kendall's tau (1938) at p <= 0.01, exact up to 33 samples without ties, of `least` or more.

    Six samples have to be in perfect order to be a trend.
    """
    from scipy.stats import kendalltau

    logs = _logs(samples)
    if logs is None or np.ptp(logs) == 0:
        return None
    found, third = kendalltau(np.arange(logs.size), logs), logs.size // 3
    change = math.exp(np.median(logs[-third:]) - np.median(logs[:third])) - 1
    if found.pvalue > _DRIFT_P or abs(change) < least:
        return None
    what = f"the samples drift: the last third is {_by(change)} than the first"
    return Drift(tau=float(found.statistic), p=float(found.pvalue), change=change, what=what)


def find_slow_first(samples: Sequence[float], least: float = LEAST_FIRST) -> SlowFirst | None:
    """A first sample above the median of the rest by `least` or more, and by more than their noise explains."""
    logs = _logs(samples)
    if logs is None:
        return None
    above = float(logs[0] - np.median(logs[1:]))
    z = _robust_z(above, logs[1:])
    if above <= 0 or math.expm1(above) < least or (z is not None and z <= _critical(_FIRST_Z, logs.size)):
        return None
    ratio = math.exp(above)
    return SlowFirst(ratio=ratio, z=z, what=f"the first sample is {ratio:.3g} times the median of the rest")


def find_step(samples: Sequence[float], least: float = LEAST_STEP) -> Step | None:
    """The one place where the level changes most, by `least` or more, if noise alone seldom does so.

    Student's t between both sides, at least two samples each, over all places, with Bonferroni's correction: exact
    bound on the false alarms for lognormal noise. An outlier inside hides a small step; the trend then often shows it.
    """
    logs = _logs(samples)
    if logs is None or np.ptp(logs) == 0:
        return None
    start, p = _likeliest_step(logs)
    ratio = math.exp(np.median(logs[start:]) - np.median(logs[:start]))
    if p > _STEP_P or abs(ratio - 1) < least:
        return None
    what = f"samples {start}..{logs.size - 1} are {_by(ratio - 1)} than those before"
    return Step(start=start, ratio=ratio, p=p, what=what)


def _likeliest_step(logs: Logs) -> tuple[int, float]:
    """Where the second level begins, and the corrected p of that place."""
    from scipy.stats import t

    n, before = logs.size, np.arange(2, logs.size - 1)
    sums = np.cumsum(logs - logs.mean())[before - 1]
    between = sums**2 * n / (before * (n - before))
    within = np.maximum(np.sum((logs - logs.mean()) ** 2) - between, 1e-12 * between)
    best = int(np.argmax(between / np.maximum(within, np.finfo(float).tiny)))
    score = math.sqrt(between[best] / max(within[best], np.finfo(float).tiny) * (n - 2))
    return int(before[best]), min(1.0, float(2 * t.sf(score, n - 2)) * before.size)


def find_outliers(samples: Sequence[float], least: float = LEAST_OUTLIER) -> Outliers | None:
    """Samples whose modified z (Iglewicz and Hoaglin 1993) is beyond what n samples of noise reach, all labelled.

    It counts on the linear or the logarithmic scale, wherever it is smaller: normal and lognormal noise pass. They are
    off the median by `least` or more; where the median absolute deviation is 0, that alone decides.
    """
    logs = _logs(samples)
    if logs is None:
        return None
    off, scores = np.expm1(logs - np.median(logs)), _modified_z(logs)
    critical = _critical(_OUTLIER_Z, logs.size)
    is_far = (np.abs(off) >= max(least, 1e-9)) & (np.isnan(scores) | (np.abs(scores) > critical))
    found = np.flatnonzero(is_far).tolist()
    told = ", ".join(f"{i} ({_by(off[i])})" for i in found)
    what = f"far from the median: sample{'s' * (len(found) > 1)} {told}"
    z = tuple(None if math.isnan(scores[i]) else float(scores[i]) for i in found)
    return Outliers(indices=tuple(found), scores=z, what=what) if found else None


def _modified_z(logs: Logs) -> NDArray[np.float64]:
    """For each sample the smaller of its robust z on both scales; NaN where their deviations are 0."""
    by_scale = []
    for values in (logs, np.exp(logs)):
        off = values - np.median(values)
        mad = _MAD_TO_SIGMA * np.median(np.abs(off))
        by_scale.append(off / mad if mad else np.full(off.size, np.nan))
    return np.where(np.abs(by_scale[0]) < np.abs(by_scale[1]), by_scale[0], by_scale[1])


def outliers(samples: Sequence[float]) -> tuple[int, ...]:
    """Indices of the samples that `find_outliers` labels; () where it finds none or cannot say."""
    found = find_outliers(samples)
    return found.indices if found else ()


def findings(samples: Sequence[float]) -> tuple[Finding, ...]:
    """All that the checks find, each oddity once: a change is a step or a drift, a slow first no outlier as well."""
    first, strays = find_slow_first(samples), find_outliers(samples)
    step, drift = find_step(samples), find_drift(samples)
    if first and strays and strays.indices == (0,):
        strays = None
    if step and drift:
        step, drift = (None, drift) if _is_ramp(samples, step.start) else (step, None)
    return tuple(each for each in (first, step, drift, strays) if each is not None)


def _is_ramp(samples: Sequence[float], start: int) -> bool:
    """Whether a straight line leaves less unexplained than two levels do."""
    logs = np.log(samples)
    line = np.polynomial.Polynomial.fit(np.arange(logs.size), logs, 1)(np.arange(logs.size))
    levels = np.where(np.arange(logs.size) < start, logs[:start].mean(), logs[start:].mean())
    return bool(np.sum((logs - line) ** 2) < np.sum((logs - levels) ** 2))


def what_is_odd(samples: Sequence[float]) -> tuple[tuple[str, str], ...]:
    """The findings as (kind, what), ready to become flags."""
    return tuple((each.kind, each.what) for each in findings(samples))


def is_settled(durations: Sequence[float], tolerance: float = 0.1) -> bool:
    """Whether warm-up is over: the last two differ by at most `tolerance` of the smaller, and no more is left to fall.

    A compiler or a cache makes each run cost a share of the one before, so what is left after two falls in a row is
    their geometric rest (Aitken 1926): 1.00, 0.95, 0.90 still falls; 5.00, 1.01, 0.99 has arrived. A fall of less than
    a quarter of the tolerance over the last three (or both) is taken for noise, and a rise is not for warm-up to cure.
    Below two durations, or where one of the last three is zero or less, nothing is settled.
    """
    if not tolerance > 0:
        raise InstrumentError(f"nothing settles within a tolerance of {tolerance}; it must be above 0")
    last = finite_array(durations, "duration")[-3:].tolist()
    if len(last) < 2 or min(last) <= 0 or abs(last[-1] - last[-2]) > tolerance * min(last[-2:]):
        return False
    is_noise = last[0] - last[-1] < tolerance / 4 * last[-1]
    return is_noise or (len(last) == 3 and _left_to_fall(*last) <= tolerance * last[-1])


def _left_to_fall(before: float, between: float, last: float) -> float:
    """How far a geometric approach through three durations still goes; 0 where it does not fall any more."""
    falls, fall = before - between, between - last
    if falls <= 0 or fall <= 0:
        return 0.0
    return fall * fall / (falls - fall) if fall < falls else math.inf


def _logs(samples: Sequence[float]) -> Logs | None:
    array = finite_array(samples)
    return np.log(array) if array.size >= MIN_SAMPLES and array.min() > 0 else None


def _robust_z(off: float, among: Logs) -> float | None:
    """Distance in standard deviations, estimated from the median absolute deviation; None where that is 0."""
    mad = float(np.median(np.abs(among - np.median(among))))
    return off / (_MAD_TO_SIGMA * mad) if mad else None


def _critical(table: _Table, n: int) -> float:
    sizes, values = zip(*table, strict=True)
    return float(np.interp(n, sizes, values))


def _by(change: float) -> str:
    """A relative change of a duration, in words."""
    return f"{abs(change):.0%} {'slower' if change > 0 else 'faster'}".replace("%", " %")
