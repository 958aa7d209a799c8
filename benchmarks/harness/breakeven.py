"""From how many requests on a shared prefix pays for the request that filled it, and what a hit rate is worth.

Knows times that were taken in turns, sample by sample. Refuses to decide what a store with no sure saving breaks even
at: where the interval of the saving holds 0, the answer is "undefined", and where sharing never wins it is "none in
range"; `why` begins with these words.

A prefix is stored by whoever asks for it first. If it is run once, apart, and N requests then hit it one by one, they
take T(P) + N T(S | P) instead of N T(P + S): N* = T(P) / (T(P + S) - T(S | P)). A hit saves less than the prefill of
its prefix, so that one request never wins.

The intervals are percentile bootstraps (Efron 1979) of medians: of whole resampled samples for one by one, turned over,
as 1 over a number that may be 0 has no quantiles worth having; of the samples of each size for batches, on a line
through the sizes' medians. With 3 % of normal or skewed noise they cover 93 to 98 % from 5 samples on; a noise that
all times of a sample share divides out of each sample and not of each median, and so the first covers up to 99.5 %
(test_harness_breakeven.py). Student's interval of an unweighted line covers 78 to 100 % of such batches: the noise of a
window grows with it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.fits import Root
from benchmarks.harness.least_squares import Array
from benchmarks.harness.stats import CONFIDENCE, finite_array

MIN_SAMPLES = 5
"""Below it the resamples of a median say next to nothing of its spread."""

BEYOND = 4.0
"""A batched breakeven at more than this many times the largest batch measured is none in range."""

_NUM_RESAMPLES = 2000
_ROUNDING = 1e-12
_TOO_FEW = f"too few samples for an interval: it takes {MIN_SAMPLES}"


def breakeven(
    prefix_s: Sequence[float], full_s: Sequence[float], hit_s: Sequence[float], *, most: float = 1024.0
) -> Root:
    """N* = T(P) / (T(P + S) - T(S | P)) of medians, for requests one after another; samples are paired by place.

    Without a value where the interval of the saving holds 0 ("undefined: ..."), where a hit surely costs more than a
    full prefill, and where N* > `most` ("none in range: ..."). Below 5 samples there is a value without an interval.
    Raises InstrumentError for sides of unequal length and for a time that is not finite or not above 0.
    """
    prefix, full, hit = _sides(prefix=prefix_s, full=full_s, hit=hit_s)
    share, low, high = _share(prefix, full, hit)
    if low is None or high is None:
        return _few(share, most)
    if low <= 0 <= high:
        return _none(f"undefined: a hit saves {_percent(low)} to {_percent(high)} of T(P), which may be nothing")
    if share <= 0:
        return _none("none in range: a hit takes longer than the full prefill, so that no number of requests wins")
    if 1 / share > most:
        return _none(f"none in range: {1 / share:.0f} requests, more than {most:g}")
    return Root(value=1 / share, low=1 / high, high=1 / low)


def _share(prefix: Array, full: Array, hit: Array) -> tuple[float, float | None, float | None]:
    """The saving in prefixes with its interval, whose ends are None below MIN_SAMPLES."""
    value = _of_medians(prefix[None], full[None], hit[None])[0]
    if prefix.size < MIN_SAMPLES:
        return float(value), None, None
    places = resampled_places(prefix.size, _NUM_RESAMPLES)
    low, high = percentile_ends(_of_medians(prefix[places], full[places], hit[places]))
    return float(value), low, high


def _of_medians(prefix: Array, full: Array, hit: Array) -> Array:
    return np.asarray((np.median(full, -1) - np.median(hit, -1)) / np.median(prefix, -1))


def resampled_places(num_samples: int, num_resamples: int) -> NDArray[np.int64]:
    """Which samples each resample draws, (resamples, samples); the same on every call."""
    return np.random.default_rng(0).integers(0, num_samples, (num_resamples, num_samples))


def percentile_ends(values: Array, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Between which that share of the values lies."""
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _few(share: float, most: float) -> Root:
    if share <= 0 or 1 / share > most:
        return _none(f"undefined: {_TOO_FEW}, and those here show no saving to speak of")
    return Root(value=1 / share, low=None, high=None, why=_TOO_FEW)


def _none(why: str) -> Root:
    return Root(value=None, low=None, high=None, why=why)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def batched_breakeven(
    sizes: Sequence[int],
    unshared_s: Sequence[Sequence[float]],
    shared_s: Sequence[Sequence[float]],
    prefix_s: Sequence[Sequence[float]],
) -> Root:
    """The zero of D(N) = W(N, not shared) - W(N, shared) - T(P) on a straight line: N requests at once, one window W.

    A row of samples for each size, paired by place. A value below 1 says that one request wins already. "none in
    range" beyond `BEYOND` times the largest size, and where sharing surely wins less the more requests there are;
    "undefined" where the line may be flat. Few samples and bad ones as in `breakeven`; two different sizes at least.
    """
    rows = _rows(sizes, unshared_s, shared_s, prefix_s)
    line = _Line.through(sizes, rows)
    middle = [np.array([np.median(row.difference)]) for row in rows]
    slope, zero = (float(each[0]) for each in line.of(middle))
    if min(row.difference.size for row in rows) < MIN_SAMPLES:
        why = _TOO_FEW if slope > 0 else f"undefined: {_TOO_FEW}, and those here show no saving that grows"
        return _within(Root(value=zero if slope > 0 else None, low=None, high=None, why=why), sizes)
    rng = np.random.default_rng(0)
    slopes, zeros = line.of([_resampled_medians(row.difference, rng) for row in rows])
    low, high = percentile_ends(slopes)
    if low <= 0 <= high:
        return _none("undefined: what sharing saves may not grow with the number of requests")
    if slope < 0:
        return _none("none in range: the more requests share a prefix, the less they save")
    low, high = percentile_ends(zeros)
    return _within(Root(value=zero, low=low, high=high), sizes)


def _within(found: Root, sizes: Sequence[int]) -> Root:
    if found.value is not None and found.value > BEYOND * max(sizes):
        return _none(f"none in range: {found.value:.0f} requests, where the most measured are {max(sizes)}")
    return found


class _Row(NamedTuple):
    """D(N) of each sample of one size, and how large the times are of which it is the difference."""

    difference: Array
    scale: float


def _rows(sizes: Sequence[int], *sides: Sequence[Sequence[float]]) -> list[_Row]:
    nums = [len(side) for side in sides]
    if set(nums) != {len(sizes)} or len(set(sizes)) < 2:
        raise InstrumentError(f"a line needs two sizes, a row of samples for each, not {list(sizes)} and {nums} rows")
    if not all(type(size) is int and size >= 1 for size in sizes):
        raise InstrumentError(f"sizes are numbers of requests, at least 1, not {list(sizes)}")
    rows = []
    for row in zip(*sides, strict=True):
        unshared, shared, prefix = _sides(unshared=row[0], shared=row[1], prefix=row[2])
        scale = math.sqrt(float(np.mean(unshared**2 + shared**2 + prefix**2)))
        rows.append(_Row(unshared - shared - prefix, scale))
    return rows


def _resampled_medians(samples: Array, rng: np.random.Generator) -> Array:
    return np.asarray(np.median(samples[rng.integers(0, samples.size, (_NUM_RESAMPLES, samples.size))], -1))


class _Line(NamedTuple):
    """Straight lines through one point for each size, weighted by what noise that grows with the times leaves it."""

    xs: Array
    weights: Array
    scale: float

    @classmethod
    def through(cls, sizes: Sequence[int], rows: Sequence[_Row]) -> "_Line":
        weights = np.array([row.scale**-2 for row in rows])
        return cls(np.asarray(sizes, float), weights / weights.sum(), max(row.scale for row in rows))

    def of(self, points: Sequence[Array]) -> tuple[Array, Array]:
        """Slope and zero of each line, from the points of all lines at each size; a flat line is zero nowhere."""
        ys, middle = np.stack(points, -1), self.weights @ self.xs
        height, lever = ys @ self.weights, self.weights * (self.xs - middle)
        rises = ys @ lever
        slopes = np.where(np.abs(rises) <= _ROUNDING * self.scale, 0.0, rises) / (lever @ (self.xs - middle))
        with np.errstate(divide="ignore", invalid="ignore"):
            return slopes, np.nan_to_num(middle - height / slopes, nan=0.0)


def _sides(**sides: Sequence[float]) -> list[Array]:
    """The samples of each side as arrays of one length, every time above 0."""
    nums = {name: len(samples) for name, samples in sides.items()}
    if len(set(nums.values())) != 1 or 0 in nums.values():
        raise InstrumentError(f"samples are paired by place, so that each side needs as many, not {nums}")
    arrays = []
    for name, samples in sides.items():
        array = finite_array(samples, f"{name} time")
        if array.min() <= 0:
            place = int(array.argmin())
            raise InstrumentError(f"{name} time {place} is {array[place]}; times lie above 0")
        arrays.append(array)
    return arrays


def memory_saved_bytes(num_requests: int, prefix_tokens: int, bytes_per_token: int) -> int:
    """What N requests at once save that hold one copy of their prefix instead of N: (N - 1) * P * bytes per token."""
    told = {"num_requests": num_requests, "prefix_tokens": prefix_tokens, "bytes_per_token": bytes_per_token}
    if num_requests < 1 or prefix_tokens < 0 or bytes_per_token < 0:
        raise InstrumentError(f"a prefix is shared by one request or more, none of it below 0, not {told}")
    return (num_requests - 1) * prefix_tokens * bytes_per_token


def expected_ttft_s(h: float, full_s: float, hit_s: float) -> float:
    """(1 - h) T_full + h T_hit: the mean TTFT where a share h of the requests hits. Raises for h outside [0, 1]."""
    h = _hit_rate(h)
    return (1 - h) * full_s + h * hit_s


def effective_speedup(h: float, s: float) -> float:
    """1 / ((1 - h) + h / s): what a hit rate h is worth where a hit is s times as fast. Raises for h outside [0, 1]."""
    h = _hit_rate(h)
    if not (math.isfinite(s) and s > 0):
        raise InstrumentError(f"a hit is a finite number of times as fast, above 0, not {s}")
    return 1 / ((1 - h) + h / s)


def _hit_rate(h: float) -> float:
    if not 0 <= h <= 1:
        raise InstrumentError(f"a hit rate is a share from 0 to 1, not {h}")
    return h
