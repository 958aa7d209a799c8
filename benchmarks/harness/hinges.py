"""Curves with a knot: flat up to it, a rising line or parabola from there on.

Knows arrays, one curve at a time. Given the knot such a curve is linear, so the best knot is sought in one dimension,
and all knots that the data do not refute make a family.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from benchmarks.harness.least_squares import Array, Family, powers, solve, threshold
from benchmarks.harness.stats import Interval

_NUM_MEMBERS = 101
_PER_GAP = 12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hinge:
    """What fits best: `best` holds the one member that does, `family` all that are not refuted, None without freedom.

    `is_flat`: no knot does better than no rise at all. The other three say what is not refuted: that nothing rises,
    that there is no floor, that the rise begins after all places but those that any rise passes through.
    """

    best: Family
    family: Family | None
    is_flat: bool
    may_be_flat: bool = True
    may_lack_floor: bool = True
    may_rise_late: bool = True


def hinge(xs: Array, knots: Array, degree: int) -> Array:
    """Powers of how far each x lies beyond each knot, (G, n, degree + 1): flat up to the knot."""
    return powers(np.maximum(xs[None, :] - knots[:, None], 0.0), degree)


def _candidate_knots(places: Array) -> Array:
    """Knots from the first place to the last one, evenly inside each gap: places may grow by factors."""
    steps = np.arange(_PER_GAP) / _PER_GAP
    between = places[:-1, None] + steps * np.diff(places)[:, None]
    return np.append(between.ravel(), places[-1])


def _best_knot(rss_at: Callable[[float], float], knots: Array, rss: Array) -> float:
    """The knot of least residuals, refined between the neighbours of the best candidate."""
    from scipy.optimize import minimize_scalar

    best = int(np.argmin(rss))
    low, high = knots[max(best - 1, 0)], knots[min(best + 1, len(knots) - 1)]
    if not np.isfinite(rss[best]) or low == high:
        return float(knots[best])
    found = minimize_scalar(rss_at, bounds=(low, high), method="bounded", options={"xatol": 1e-7 * (high - low)})
    return float(found.x) if found.fun < rss[best] else float(knots[best])


def _knots_around(rss_at: Callable[[float], float], knots: Array, rss: Array, best: float, most: float) -> Array:
    """Where residuals stay within `most`: from edge to edge around the best knot, and allowed candidates."""
    from scipy.optimize import brentq

    edges: list[float] = []
    for beyond, end in (
        (knots[(knots < best) & (rss > most)][-1:], knots[0]),
        (knots[(knots > best) & (rss > most)][:1], knots[-1]),
    ):
        has_edge = beyond.size and np.isfinite(rss_at(float(beyond[0])))
        edges.append(brentq(lambda knot: rss_at(knot) - most, best, float(beyond[0])) if has_edge else float(end))
    return np.unique(np.concatenate([np.linspace(edges[0], edges[1], _NUM_MEMBERS), knots[rss <= most], [best]]))


def rough_hinge(xs: Array, ys: Array, weights: Array, degree: int) -> Array:
    """Fitted values (n,) at the best of the candidate knots: good enough to weight by."""
    candidates = _candidate_knots(np.unique(xs)[:-degree])
    found = _rising(solve(hinge(xs, candidates, degree), ys, weights, candidates), xs)
    best = int(np.argmin(found.rss))
    if not np.isfinite(found.rss[best]):
        return np.full_like(ys, np.average(ys, weights=weights**2))
    return np.asarray(hinge(xs, candidates[best : best + 1], degree)[0] @ found.centre[best])


def num_free_beside_knot(num_points: int, degree: int) -> int:
    """Degrees of freedom: the search for a knot costs two (Friedman 1991); one would make intervals too short."""
    return num_points - (degree + 1) - 2


def fit_hinge(xs: Array, ys: Array, weights: Array, degree: int) -> Hinge:
    """Least squares over knots and a rise of that degree, by profile; shapes (n,), at least degree + 2 different xs."""

    def at(knots: Array) -> Family:
        return _rising(solve(hinge(xs, knots, degree), ys, weights, knots), xs)

    def rss_at(knot: float) -> float:
        return float(at(np.array([knot])).rss[0])

    flat = solve(np.ones((1, xs.size, 1)), ys, weights)
    candidates = _candidate_knots(np.unique(xs)[:-degree])
    rss = at(candidates).rss
    knot = _best_knot(rss_at, candidates, rss)
    least, num_free = rss_at(knot), num_free_beside_knot(xs.size, degree)
    if not least < flat.rss[0] * (1 - 1e-12):
        most = threshold(float(flat.rss[0]), xs.size - 1, weights * ys)
        return Hinge(best=flat, family=flat.within(most), is_flat=True)
    best = at(np.array([knot]))
    if num_free <= 0:
        return Hinge(best=best, family=None, is_flat=False)
    most = threshold(least, num_free, weights * ys)
    return Hinge(
        best=best,
        family=at(_knots_around(rss_at, candidates, rss, knot, most)).within(most),
        is_flat=False,
        may_be_flat=bool(flat.rss[0] <= most),
        may_lack_floor=bool(rss[0] <= most),
        may_rise_late=bool(rss[-1] <= most),
    )


def _rising(family: Family, xs: Array) -> Family:
    """The same, but a member that falls after its knot, or rises again before it, fits infinitely badly."""
    slope, span = family.centre[:, 1], np.maximum(xs.max() - family.knots, 0)
    bend = family.centre[:, 2] if family.centre.shape[1] > 2 else np.zeros_like(slope)
    rises_before = slope < bend * (family.knots - xs.min())
    is_bad = (slope + 2 * bend * span < 0) | rises_before
    return dataclasses.replace(family, rss=np.where(is_bad, np.inf, family.rss))


def hinge_values(found: Hinge, degree: int) -> dict[str, tuple[float, Interval]]:
    """floor, a, b (and c) of a hinge as a polynomial in x, with open ends where the data do not bound them."""
    if found.is_flat:
        level, none = float(found.best.centre[0, 0]), Interval(None, None)
        ends = found.family.interval(np.ones(1)) if found.family else none
        return {"floor": (level, ends), "a": (level, none), "b": (0.0, none)} | (
            {"c": (0.0, none)} if degree > 1 else {}
        )
    values = {}
    for name, rows in _functionals(found.best.knots, degree).items():
        values[name] = (float(rows[0] @ found.best.centre[0]), _hinge_interval(found, name, degree))
    return values


def _hinge_interval(found: Hinge, name: str, degree: int) -> Interval:
    if found.family is None:
        return Interval(None, None)
    ends = found.family.interval(_functionals(found.family.knots, degree)[name])
    if name == "floor":
        return Interval(None if found.may_lack_floor and not found.may_be_flat else ends.low, ends.high)
    if found.may_be_flat or (found.may_rise_late and degree > 1):
        return Interval(None, None)
    is_late = found.may_rise_late
    return Interval(None if is_late and name == "a" else ends.low, None if is_late and name == "b" else ends.high)


def _functionals(knots: Array, degree: int) -> dict[str, Array]:
    """What turns the parameters of hinges (floor, slope at the knot, bend) into coefficients in x: rows (G, p)."""
    one, zero = np.ones_like(knots), np.zeros_like(knots)
    columns = {
        "floor": (one, zero, zero),
        "a": (one, -knots, knots**2),
        "b": (zero, one, -2 * knots),
        "c": (zero, zero, one),
    }
    return {name: np.stack(columns[name][: degree + 1], axis=-1) for name in ("floor", *"abc"[: degree + 1])}
