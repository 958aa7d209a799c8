"""Statistics on finished samples; scipy does the mathematics, and is imported only when some is done.

Knows numbers and how sure one can be of them. Drops nothing: an outlier is a sample. What cannot be said is None, and
a sample that is no finite number is an InstrumentError that names it.

Which interval for what, each aiming at 95 %, with its coverage over 2,000 simulated runs (test_harness_coverage.py):

- A quantile or a median, and the median ratio of pairs: order statistics, interpolated to the level asked for. 94.4 to
  95.5 % for medians of 6 to 41 samples, p90, p95 and p99. Without interpolation it is never below 95 %, and as much as
  97.9 % (median of 10); BCa on the median of 12 samples reaches 93.3 %.
- A mean: BCa bootstrap at a widened level (`bootstrap_interval` says why, and which n each kind of noise needs).
- A share of successes: Wilson.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.errors import InstrumentError

CONFIDENCE = 0.95
MIN_BOOTSTRAP = 8
_NUM_RESAMPLES = 2000
_MAX_EXACT = 40


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval; an end that the data cannot bound is None."""

    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number, how sure one can be of it, and from how many samples. `value` is None without samples."""

    value: float | None
    interval: Interval
    num_samples: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Percentile:
    """The q-quantile, or that the samples are too few to bound it from above: then `value` and both ends are None."""

    q: float
    value: float | None
    interval: Interval
    num_samples: int
    num_needed: int

    @property
    def is_too_small(self) -> bool:
        return self.num_samples < self.num_needed

    def describe(self, scale: float = 1.0, unit: str = "") -> str:
        """For people: "p99 12.3 ms (n = 400)" or "p99: n too small (10 of 299)"."""
        if self.value is None:
            return f"p{100 * self.q:g}: n too small ({self.num_samples} of {self.num_needed})"
        return f"p{100 * self.q:g} {self.value * scale:.3g} {unit}".rstrip() + f" (n = {self.num_samples})"


def finite_array(samples: Sequence[float], what: str = "sample") -> NDArray[np.float64]:
    """The samples as float64, shape (n,). Raises InstrumentError with the first one that is not finite."""
    array = np.asarray(samples, dtype=np.float64).reshape(-1)
    is_bad = ~np.isfinite(array)
    if is_bad.any():
        index = int(is_bad.argmax())
        raise InstrumentError(f"{what} {index} is {array[index]}; statistics need finite numbers")
    return array


def quantile(samples: Sequence[float], q: float) -> float | None:
    """The q-quantile by linear interpolation (numpy's default), or None for no samples."""
    array = finite_array(samples)
    return float(np.quantile(array, q)) if array.size else None


def median(samples: Sequence[float]) -> float | None:
    """The middle sample, or the mean of the middle two; None for no samples.

    Not `quantile`: interpolating between two large numbers of opposite signs loses their sum.
    """
    array = finite_array(samples)
    return float(np.median(array)) if array.size else None


def hodges_lehmann(samples: Sequence[float]) -> float | None:
    """The median of all pairs' means, each sample with itself too (Hodges and Lehmann 1963); None for no samples.

    On normal noise as sure as the mean (of 5 samples the median needs a third more), yet one wild sample of 5 cannot
    carry it away.
    """
    array = finite_array(samples)
    first, second = np.triu_indices(array.size)
    return median(((array[first] + array[second]) / 2).tolist())


def median_absolute_deviation(samples: Sequence[float]) -> float | None:
    """Median distance from the median, not scaled to a standard deviation. None below two samples: no spread."""
    from scipy.stats import median_abs_deviation

    array = finite_array(samples)
    return float(median_abs_deviation(array)) if array.size >= 2 else None


def min_samples_for(q: float) -> int:
    """How many samples an upper 95 % bound on the q-quantile needs: 5 for the median, 29 for p90, 299 for p99.

    The largest of n samples lies above the quantile with probability 1 - q**n. Raises for a q outside (0, 1).
    """
    if not 0 < q < 1:
        raise InstrumentError(f"no number of samples bounds the {q}-quantile; q lies between 0 and 1")
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(q))


def percentile(samples: Sequence[float], q: float) -> Percentile:
    """The q-quantile where `min_samples_for(q)` samples stand behind it; "n too small" otherwise."""
    needed, n = min_samples_for(q), len(samples)
    value, interval = quantile(samples, q), quantile_interval(samples, q)
    if n < needed:
        value, interval = None, Interval(None, None)
    return Percentile(q=q, value=value, interval=interval, num_samples=n, num_needed=needed)


def quantile_interval(samples: Sequence[float], q: float, confidence: float = CONFIDENCE) -> Interval:
    """Order-statistic interval of the q-quantile, for independent samples of any continuous distribution.

    Each end lies between the two samples that miss the quantile a little too rarely and a little too often
    (Hettmansperger and Sheather 1986 for the median, Nyblom 1992 for every q). An end is None where even the extreme
    sample is not sure enough to bound the quantile from that side: for the median, below six samples.
    """
    ordered, level = np.sort(finite_array(samples)), (1 + confidence) / 2
    low, high = _upper_end(-ordered[::-1], 1 - q, level), _upper_end(ordered, q, level)
    return Interval(None if low is None else -low, high)


def _upper_end(ordered: NDArray[np.float64], q: float, level: float) -> float | None:
    """What lies above the q-quantile with probability `level`. The sample of rank r does when fewer lie below it."""
    from scipy.stats import binom

    n = ordered.size
    rank = int(binom.ppf(level, n, q)) + 1
    if rank > n:
        return None
    if rank == 1:
        return float(ordered[0])
    surer, less_sure = binom.cdf(rank - 1, n, q), binom.cdf(rank - 2, n, q)
    outer, inner = (n - rank + 1) * q * (level - less_sure), (rank - 1) * (1 - q) * (surer - level)
    return float((outer * ordered[rank - 1] + inner * ordered[rank - 2]) / (outer + inner))


def bootstrap_interval(
    samples: Sequence[float], statistic: Callable[..., Any] = np.mean, confidence: float = CONFIDENCE
) -> Interval:
    """BCa bootstrap interval (Efron 1987) of a smooth statistic; the same samples give the same interval.

    `statistic` takes an array and `axis`, as numpy's do. Not for medians and quantiles: `quantile_interval` is exact.
    Plain BCa falls short on few samples (87 % at n = 6, 91 % at 12, 93 % at 30, normal noise, mean), so its level is
    widened by what Student's t adds to the normal (Hesterberg 2015, "expanded"). Then it covers the mean in 94 % of
    runs from n = 8 on normal noise. Tails need more samples: lognormal noise of sigma 0.3 has 93.2 % at n = 12 and
    94.5 % at 20; of sigma 0.5 92 % at n = 12 and 94 % at 60. Below 8 samples both ends are None; constant samples give
    an interval without width.
    """
    array = finite_array(samples)
    if array.size < MIN_BOOTSTRAP:
        return Interval(None, None)
    if np.ptp(array) == 0:
        value = float(statistic(array, axis=-1))
        return Interval(value, value)
    low, high = _bca(array, statistic, _expanded(confidence, array.size))
    return Interval(low, high) if math.isfinite(low) and math.isfinite(high) else Interval(None, None)


def _expanded(confidence: float, n: int) -> float:
    from scipy.stats import norm, t

    return float(1 - 2 * norm.sf(math.sqrt(n / (n - 1)) * t.isf((1 - confidence) / 2, n - 1)))


def _bca(array: NDArray[np.float64], statistic: Callable[..., Any], level: float) -> tuple[float, float]:
    """NaN where the resamples do not vary enough to say: scipy warns of it, and the caller turns it into None."""
    from scipy.stats import bootstrap

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = bootstrap(
            (array,),
            statistic,
            n_resamples=_NUM_RESAMPLES,
            batch=max(1, 2_000_000 // array.size),  # bounds the memory, not the result
            confidence_level=level,
            method="BCa",
            axis=-1,
            vectorized=True,
            rng=np.random.default_rng(0),
        ).confidence_interval
    return float(found.low), float(found.high)


def paired_ratio(slow: Sequence[float], fast: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Median of slow[i] / fast[i] over pairs, taken on logarithms, with its order-statistic interval.

    Of an even number of pairs it is the geometric mean of the middle two ratios, so that swapping the sides gives
    the reciprocal exactly. Raises InstrumentError for sides of unequal length and for a sample of zero or less.
    """
    if len(slow) != len(fast):
        raise InstrumentError(f"pairs need two sides of one length, not {len(slow)} and {len(fast)} samples")
    logs = _logs(slow, "slow") - _logs(fast, "fast")
    middle, ends = median(logs.tolist()), quantile_interval(logs.tolist(), 0.5, confidence)
    value, low, high = (None if log is None else math.exp(log) for log in (middle, ends.low, ends.high))
    return Estimate(value=value, interval=Interval(low, high), num_samples=len(slow))


def _logs(samples: Sequence[float], what: str) -> NDArray[np.float64]:
    array = finite_array(samples, f"{what} sample")
    is_bad = array <= 0
    if is_bad.any():
        index = int(is_bad.argmax())
        raise InstrumentError(f"{what} sample {index} is {array[index]}; a ratio needs positive ones")
    return np.log(array)


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p of "neither side tends to be larger" (Mann and Whitney 1947); None when a side is empty.

    Exact where no two samples are equal and the smaller side has at most 40; else normal, corrected for ties.
    """
    from scipy.stats import mannwhitneyu

    left, right = finite_array(a, "left sample"), finite_array(b, "right sample")
    if not left.size or not right.size:
        return None
    has_ties = np.unique(np.concatenate([left, right])).size < left.size + right.size
    is_exact = not has_ties and min(left.size, right.size) <= _MAX_EXACT
    return float(mannwhitneyu(left, right, method="exact" if is_exact else "asymptotic").pvalue)


def wilson_interval(num_successes: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Score interval of a share (Wilson 1927), inside [0, 1]; both ends None for n = 0.

    Covers 95 % on average over shares; at one share it swings by a point or two with n. Raises for impossible counts.
    """
    from scipy.stats import binomtest

    if not 0 <= num_successes <= n:
        raise InstrumentError(f"{num_successes} successes of {n} is no share")
    if n == 0:
        return Interval(None, None)
    found = binomtest(num_successes, n).proportion_ci(confidence_level=confidence, method="wilson")
    return Interval(float(found.low), float(found.high))


def relative_spread(samples: Sequence[float]) -> float | None:
    """Median absolute deviation over the median: a spread that one bad sample cannot inflate."""
    deviation, middle = median_absolute_deviation(samples), median(samples)
    return None if deviation is None or not middle else deviation / abs(middle)
