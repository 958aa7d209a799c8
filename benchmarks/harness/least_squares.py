"""The numerics behind a fitted curve: least squares, and the set of models that the data do not refute.

Knows arrays. A family is a stack of linear models, one per knot, each with how much worse than the best it may still
get (its slack). What every member allows, taken together, is the profile interval of a quantity that is linear once the
knot is given (Seber and Wild, Nonlinear Regression, 5.4). A straight line or a parabola is a family of one member, and
its profile interval is Student's t interval.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.stats import CONFIDENCE, Interval

Array = NDArray[np.float64]

_ROUNDING = 1e-24


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """G models of p parameters: `centre` (G, p), `root` (G, p, p), `knots`, `rss` and `slack` (G,).

    root @ root.T is the inverse of X'WX, the parameters' covariance over the noise's variance.
    """

    knots: Array
    centre: Array
    root: Array
    rss: Array
    slack: Array

    def interval(self, functional: Array) -> Interval:
        """95 % interval of functional @ parameters; `functional` is (p,), or (G, p) where it depends on the knot."""
        rows = np.broadcast_to(functional, self.centre.shape)
        middle = np.sum(rows * self.centre, axis=-1)
        spread = np.sqrt(self.slack * np.sum(np.einsum("gp,gpq->gq", rows, self.root) ** 2, axis=-1))
        return Interval(float(np.min(middle - spread)), float(np.max(middle + spread)))

    def covariance(self, factor: float) -> Array:
        """Of the parameters of the only member, whose slack is (factor * residual standard deviation)**2."""
        return np.asarray(self.slack[0] / factor**2 * self.root[0] @ self.root[0].T)

    def within(self, threshold: float) -> "Family":
        """The members whose residual sum of squares is at most `threshold`, each with what it has left as slack."""
        keep = self.rss <= threshold
        parts = (self.knots, self.centre, self.root, self.rss, threshold - self.rss)
        knots, centre, root, rss, slack = (part[keep] for part in parts)
        return Family(knots=knots, centre=centre, root=root, rss=rss, slack=slack)


def powers(xs: Array, degree: int) -> Array:
    """1, x, ... x**degree along a new last axis."""
    return xs[..., None] ** np.arange(degree + 1)


def solve(basis: Array, ys: Array, weights: Array, knots: Array | None = None) -> Family:
    """Weighted least squares for each model of a stack: `basis` (G, n, p), `ys` and `weights` (n,). No slack yet."""
    rows = basis * weights[:, None]
    norms = np.linalg.norm(rows, axis=-2, keepdims=True)
    q, r = np.linalg.qr(rows / norms)
    inverse = np.linalg.inv(r)
    centre = np.einsum("gpq,gnq,n->gp", inverse, q, ys * weights) / norms[:, 0]
    rss = np.sum((ys * weights - np.einsum("gnp,gp->gn", rows, centre)) ** 2, axis=-1)
    root = inverse / np.swapaxes(norms, -1, -2)
    knots = np.zeros(len(basis)) if knots is None else knots
    return Family(knots=knots, centre=centre, root=root, rss=rss, slack=np.zeros(len(basis)))


def reweighted(ys: Array, fitted: Callable[[Array], Array], num_rounds: int) -> Array:
    """Weights for noise that grows with the curve: the reciprocal of the fitted values, found by iteration.

    `fitted` takes weights. Reciprocals of the samples themselves would favour the low ones. The largest sample has a
    weight near 1, and none more than a million.
    """
    most = float(ys.max())
    least = max(float(ys.min()) / 10, most / 1e6)
    weights = most / np.maximum(ys, least)
    for _ in range(num_rounds):
        weights = most / np.maximum(fitted(weights), least)
    return weights


def threshold(rss: float, num_free: int, weighted: Array) -> float:
    """The residual sum of squares up to which a model is not refuted at 95 %, and a little more for rounding."""
    return rss * (1 + student(num_free) ** 2 / num_free) + _ROUNDING * float(weighted @ weighted)


def student(num_free: float) -> float:
    """How many standard errors the half-width of a 95 % interval has."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, num_free))


def bounded_root(
    centre: Array, covariance: Array, num_free: float, low: float, high: float
) -> tuple[float, ...] | None:
    """The zero of a polynomial (coefficients `centre`, lowest first) and the xs around it that a t test allows.

    These are where (value / standard error)**2 <= t**2, itself a polynomial inequality (Fieller 1954). Of several zeros
    the lowest inside [low, high], else the nearest. None without a zero, or where the set is not bounded on both sides.
    """
    scale = max(abs(low), abs(high))
    size = scale ** np.arange(centre.size)
    centre, covariance = centre * size, covariance * np.outer(size, size)
    zeros = _real_roots(centre)
    if not zeros.size:
        return None
    zero = min(zeros.tolist(), key=lambda x: (max(low / scale - x, x - high / scale, 0.0), x))
    factor = student(num_free)
    at = powers(np.array(zero), centre.size - 1)
    slope = abs(float(centre[1:] @ (np.arange(1, centre.size) * at[:-1])))
    if factor * np.sqrt(max(float(at @ covariance @ at), 0.0)) <= 1e-9 * slope:
        return zero * scale, zero * scale, zero * scale
    variance = np.array([np.trace(covariance[::-1], k) for k in range(1 - centre.size, centre.size)])
    ends = _real_roots(np.convolve(centre, centre) - factor**2 * variance)
    below, above = ends[ends <= zero], ends[ends >= zero]
    if not below.size or not above.size:
        return None
    return zero * scale, float(below.max()) * scale, float(above.min()) * scale


def _real_roots(coefficients: Array) -> Array:
    """Zeros of a polynomial, lowest power first; a leading coefficient of zero lowers the degree."""
    found = np.roots(coefficients[::-1])
    return np.asarray(found.real[np.abs(found.imag) <= 1e-9 * (1 + np.abs(found.real))], dtype=np.float64)
