"""Which terms the cost of a prefill has, and what they are: a floor, an overhead, a slope, a bend.

Knows times by the number of tokens. Refuses to know what follows from them (`prefill_cost.py`).

There is a floor where the data refute that there is none (the 95 % profile interval of the knot of a floor-limited
curve has a low end), a bend where its interval excludes 0, a slope where its does; and a floor instead of a parabola
that falls somewhere, as no prefill gets cheaper by a token. All samples go into that choice, less what all lengths of a
sample share; into the coefficients go the medians of each length, so that one stalled run moves none of them.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.fits import Fit, best_fit, fit_floor_limited
from benchmarks.harness.least_squares import Array, powers
from benchmarks.harness.stats import finite_array

Samples = Mapping[int, Sequence[float]]
"""Seconds of every sample, by the number of tokens."""

_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Which terms a curve has, and which of its lengths, in order, lie on the floor; `degree` 0 is all floor."""

    lengths: Sequence[int]
    num_floor: int
    degree: int
    fit: Fit

    @classmethod
    def of(cls, lengths_s: Samples) -> "Shape":
        _check_samples(lengths_s)
        xs, ys = _points(_steadied(lengths_s))
        fit, lengths = _chosen(xs, ys), sorted(lengths_s)
        knot = fit.knot.value if fit.knot else 0.0
        degree = 2 if "quadratic" in fit.kind else 1
        if knot is None or _is_flat(fit):
            return cls(lengths=lengths, num_floor=len(lengths), degree=0, fit=fit)
        return cls(lengths=lengths, num_floor=sum(n <= knot for n in lengths), degree=degree, fit=fit)

    def solve(self, times: Array) -> tuple[Array, Array]:
        """a, b and c (B, 3) and the floor (B,) of curves through these times of each length (B, lengths).

        A rise with too few lengths of its own begins at the last one on the floor.
        """
        floor = times[:, : self.num_floor].mean(-1) if self.num_floor else np.zeros(len(times))
        terms = np.zeros((len(times), 3))
        if not self.degree:
            terms[:, 0] = floor
            return terms, floor
        first = min(self.num_floor, len(self.lengths) - self.degree - 1)
        xs = np.array(self.lengths[first:], float)
        weights = 1 / np.array([self.fit.predict(x) for x in xs])
        basis = powers(xs / xs[-1], self.degree) * weights[:, None]
        solved = np.linalg.lstsq(basis, (times[:, first:] * weights).T, rcond=None)[0].T
        terms[:, : self.degree + 1] = solved / xs[-1] ** np.arange(self.degree + 1)
        return terms, floor


def _check_samples(lengths_s: Samples) -> None:
    if len(lengths_s) < 2:
        raise InstrumentError(f"a curve needs two lengths, not {sorted(lengths_s)}")
    for tokens, samples in lengths_s.items():
        times = finite_array(samples, f"time of {tokens} tokens")
        if tokens < 1 or not times.size or times.min() <= 0:
            raise InstrumentError(f"a curve needs times above 0 of 1 token or more, not {samples!r} of {tokens}")


def _steadied(lengths_s: Samples) -> Samples:
    """The samples without what all times of a place share, which would hide a bend: a slow moment of the host."""
    num = min(map(len, lengths_s.values()))
    if any(len(samples) % num for samples in lengths_s.values()):
        return lengths_s
    rows = {n: np.reshape(samples, (-1, num)) for n, samples in lengths_s.items()}
    shared = np.exp(np.mean(np.concatenate([np.log(row / np.median(row)) for row in rows.values()]), 0))
    return {n: (row / shared).ravel().tolist() for n, row in rows.items()}


def _points(lengths_s: Samples) -> tuple[list[float], list[float]]:
    pairs = [(float(tokens), each) for tokens, samples in lengths_s.items() for each in samples]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _chosen(xs: Sequence[float], ys: Sequence[float]) -> Fit:
    """The fit with the terms that the data ask for."""
    num_places = len(set(xs))
    best = best_fit(xs, ys)
    if num_places < 3 or _is_flat(best):
        return best
    limited = fit_floor_limited(xs, ys, is_quadratic=num_places > 3)
    has_floor = limited.knot is not None and limited.knot.low is not None
    if has_floor and num_places > 3 and limited["c"].is_zero:
        limited = fit_floor_limited(xs, ys)
    return limited if has_floor else fit_floor_limited(xs, ys) if _falls(best) else best


def _is_flat(fit: Fit) -> bool:
    """Whether a straight line may have no slope, or has one of rounding only."""
    if fit.kind != "affine":
        return False
    slope = fit["b"]
    is_rounding = slope.value * (fit.x_max - fit.x_min) <= _ROUNDING * fit.predict(0)
    return is_rounding or (slope.low is not None and slope.is_zero)


def _falls(fit: Fit) -> bool:
    """Whether a parabola falls at either end of what was measured."""
    ends = (fit.x_min, fit.x_max)
    return fit.kind == "quadratic" and min(fit["b"].value + 2 * fit["c"].value * x for x in ends) < 0
