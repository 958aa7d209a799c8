"""Statistics on finished samples; scipy does the mathematics, and is imported only when some is done.

Knows numbers and how sure one can be of them. Drops nothing: an outlier is a sample. What cannot be said is None.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval; an end that the data cannot bound is None."""

    low: float | None
    high: float | None


def quantile(samples: Sequence[float], q: float) -> float | None:
    """The q-quantile by linear interpolation (numpy's default), or None for no samples."""
    return float(np.quantile(samples, q)) if samples else None


def min_samples_for(q: float) -> int:
    """How many samples an upper 95 % bound on the q-quantile needs: 5 for the median, 29 for p90, 299 for p99.

    The largest of n samples lies above the quantile with probability 1 - q**n.
    """
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(q))


def quantile_interval(samples: Sequence[float], q: float, confidence: float = CONFIDENCE) -> Interval:
    """Order-statistic interval of the q-quantile: exact for independent samples of any continuous distribution.

    Takes the narrowest symmetric-in-tail pair of order statistics (David and Nagaraja, Order Statistics, 7.1).
    An end is None where even the extreme sample is not sure enough to bound the quantile from that side.
    """
    from scipy.stats import binom

    ordered, n, tail = sorted(samples), len(samples), (1 - confidence) / 2
    if n == 0:
        return Interval(None, None)
    below, above = int(binom.ppf(tail, n, q)), int(binom.ppf(1 - tail, n, q)) + 1
    return Interval(ordered[below - 1] if below >= 1 else None, ordered[above - 1] if above <= n else None)


def relative_spread(samples: Sequence[float]) -> float | None:
    """Median absolute deviation over the median: a spread that one bad sample cannot inflate."""
    from scipy.stats import median_abs_deviation

    if len(samples) < 2 or not np.median(samples):
        return None
    return float(median_abs_deviation(samples) / abs(np.median(samples)))
