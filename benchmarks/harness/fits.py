"""A curve through measured points, and how sure one can be of it: slopes, overheads, floors and crossings.

Knows points (x, y). Refuses to guess: with no more points than coefficients there are no intervals, and what the data
do not determine is None. Points may repeat an x: all samples go in, not their medians.

Noise of timings grows with what is timed, so points are weighted by the fitted curve where all ys are positive
("relative" noise), and alike elsewhere or on request ("constant"). It matters: over 16 to 4,096 tokens with 3 % noise,
the unweighted 95 % interval of the slope covers 43 to 68 % of runs, and the overhead's is five times too wide.

Coverage over 2,000 simulated runs, normal noise and noise of skewness 1, 3 % (test_harness_coverage.py): coefficients,
bands and crossovers of lines and parabolas 93.5 to 96 % from 5 points, where the intervals are Student's and
Fieller's; floor, knot, slope and band of a floor-limited curve 93.5 to 95.5 % from 18 points on both sides of the knot;
crossings of two curves 94 to 95.6 % from 5 points each.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from benchmarks.harness.equations import joined, term
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.hinges import Hinge, fit_hinge, hinge, hinge_values, rough_hinge
from benchmarks.harness.least_squares import Array, Family, bounded_root, powers, reweighted, solve, student, threshold
from benchmarks.harness.stats import Interval, finite_array

_LEAST_POSITIVE = 1e-300
"""What lies below has no reciprocal to weigh by, and counts as zero."""

Noise = Literal["relative", "constant"]
Growth = Literal["flat", "proportional", "affine", "quadratic"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """A coefficient in the units of y over powers of x, with its 95 % interval; an unbounded end is None."""

    name: str
    value: float
    low: float | None
    high: float | None

    @property
    def is_zero(self) -> bool:
        """Whether 0 is inside the interval, or the interval is unknown."""
        return self.low is None or self.high is None or self.low <= 0 <= self.high


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """An x with its 95 % interval, or None three times and `why`."""

    value: float | None
    low: float | None
    high: float | None
    why: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted curve: "affine" a + b x, "quadratic" a + b x + c x^2, "floor-limited" the larger of one and a floor.

    `knot` is where a floor-limited curve leaves its floor, and None for the others.
    """

    kind: str
    noise: Noise
    coefficients: tuple[Coefficient, ...]
    num_points: int
    x_min: float
    x_max: float
    knot: Root | None = None
    family: Family | None = dataclasses.field(compare=False, repr=False)

    def __getitem__(self, name: str) -> Coefficient:
        """The coefficient of that name: a, b, c or floor."""
        for each in self.coefficients:
            if each.name == name:
                return each
        raise InstrumentError(f"no coefficient {name!r}, only: {', '.join(each.name for each in self.coefficients)}")

    @property
    def num_free(self) -> int:
        """Points beyond those that any such curve passes through; a knot takes two."""
        return max(0, self.num_points - len(self.coefficients) - (self.knot is not None))

    def predict(self, x: float) -> float:
        """The curve at x, inside or outside the measured range."""
        terms = [each.value for each in self.coefficients if each.name != "floor"]
        value = sum(term * x**power for power, term in enumerate(terms))
        return max(value, self["floor"].value) if self.knot else value

    def band(self, x: float) -> Interval:
        """The 95 % interval of the curve at this x (not of a new sample); ends None where it is not bounded."""
        if self.family is None:
            return Interval(None, None)
        at, degree = np.array([float(x)]), self.family.centre.shape[1] - 1
        if self.knot is None:
            return self.family.interval(powers(at, degree)[0])
        found = self.family.interval(hinge(at, self.family.knots, degree)[:, 0])
        is_below, is_above = x < self.x_min and self.knot.low is None, x > self.x_max and self.knot.high is None
        return Interval(None if is_below else found.low, None if is_above else found.high)

    def equation(self, x_name: str = "x", scale: float = 1.0, unit: str = "") -> str:
        """For people, three digits: "12.3 ms + 0.45 ms/token · prompt tokens". `scale` turns y into `unit`."""
        by_name = {each.name: each.value * scale for each in self.coefficients}
        floor = by_name.pop("floor", None)
        text = joined([term(value, power, x_name, unit) for power, value in enumerate(by_name.values())])
        return text if floor is None else f"max({term(floor, 0, x_name, unit)}, {text})"


def fit_affine(xs: Sequence[float], ys: Sequence[float], noise: Noise | None = None) -> Fit:
    """a + b x with t intervals. Raises InstrumentError below two different xs; three points make one."""
    return _fit_polynomial(xs, ys, 1, noise)


def fit_quadratic(xs: Sequence[float], ys: Sequence[float], noise: Noise | None = None) -> Fit:
    """a + b x + c x^2 with t intervals. Raises InstrumentError below three different xs; four points make one."""
    return _fit_polynomial(xs, ys, 2, noise)


def fit_floor_limited(
    xs: Sequence[float], ys: Sequence[float], noise: Noise | None = None, *, is_quadratic: bool = False
) -> Fit:
    """max(floor, a + b x), or with c x^2 as well: a launch floor, then growth, with profile intervals.

    For curves that rise. Where the data may hold no floor, floor and knot have no low end; where they may not rise
    beyond the noise, or only the last places do, a, b, c and the knot have open ends. Data that do not rise at all are
    all floor: b is 0. Raises InstrumentError below three different xs (four with c); five points (six) make intervals.
    """
    points, degree = _Points.checked(xs, ys, 3 + is_quadratic, noise), 1 + is_quadratic
    weights = points.weights(lambda weights: rough_hinge(points.xs, points.ys, weights, degree), 2)
    found = fit_hinge(points.xs, points.ys, weights, degree)
    knot, kind = _knot(found), "floor-limited quadratic" if is_quadratic else "floor-limited"
    return points.fit(kind, hinge_values(found, degree), found.family, knot)


def best_fit(xs: Sequence[float], ys: Sequence[float], noise: Noise | None = None) -> Fit:
    """The parabola where c's interval excludes 0, else the straight line."""
    return fit_quadratic(xs, ys, noise) if is_quadratic_needed(xs, ys, noise) else fit_affine(xs, ys, noise)


def is_quadratic_needed(xs: Sequence[float], ys: Sequence[float], noise: Noise | None = None) -> bool | None:
    """Whether the interval of c excludes 0: wrongly so for 1 affine curve in 20. None with too few points to say."""
    if len(xs) <= 3 or len(set(xs)) < 3:
        return None
    return not fit_quadratic(xs, ys, noise)["c"].is_zero


def growth(xs: Sequence[float], ys: Sequence[float], noise: Noise | None = None) -> Growth | None:
    """How y grows: quadratic where c is needed, flat where b is not, proportional where a is not, else affine.

    A fixed overhead does not hide a curve, as it does from a slope on logarithms, and is not dropped for a short name.
    None with too few points to say.
    """
    if is_quadratic_needed(xs, ys, noise):
        return "quadratic"
    line = fit_affine(xs, ys, noise)
    if line.family is None:
        return None
    return "flat" if line["b"].is_zero else "proportional" if line["a"].is_zero else "affine"


def crossover(fit: Fit) -> Root:
    """Where growth begins to matter: b x = a of an affine fit (Fieller 1954), or the knot of a floor-limited one.

    None when the interval of b holds 0. Negative when the overhead is. Raises InstrumentError for a quadratic.
    """
    if fit.knot is not None:
        return fit.knot
    if fit.kind != "affine":
        raise InstrumentError(f"no crossover of a {fit.kind} fit; affine and floor-limited ones have one")
    flip = np.array([1.0, -1.0])
    return _root([fit], lambda centre, covariance: (centre * flip, covariance * np.outer(flip, flip)))


Data = tuple[Sequence[float], Sequence[float]]


def root_of_difference(f: Fit | Data, g: Fit | Data) -> Root:
    """Where two independent straight lines or parabolas cross: the xs at which a t test finds them equal.

    Of two crossings, the lowest inside the measured range, else the nearest to it. Points given as (xs, ys) go through
    `best_fit`. None where they do not cross, where a fit has no intervals, and where the xs that the test allows
    are not bounded on both sides: for lines, when the slopes differ by less than their noise. Points taken in pairs
    say more: fit the differences (their noise is "constant") and take `root`.
    """
    return _root([each if isinstance(each, Fit) else best_fit(*each) for each in (f, g)])


def root(fit: Fit) -> Root:
    """Where a straight line or a parabola is zero; undefined as in `root_of_difference`."""
    return _root([fit])


def _root(fits: Sequence[Fit], change: Callable[[Array, Array], tuple[Array, Array]] | None = None) -> Root:
    """The zero of one fit, or of the first less the second; Welch's degrees of freedom at the middle of the range."""
    for each in fits:
        if each.knot is not None:
            raise InstrumentError("no crossing of a floor-limited fit; affine and quadratic ones have one")
    families = [each.family for each in fits if each.family is not None]
    if len(families) < len(fits):
        return Root(value=None, low=None, high=None, why="too few points for an interval")
    low, high = min(each.x_min for each in fits), max(each.x_max for each in fits)
    centre, covariance, num_free = _difference(fits, families, (low + high) / 2)
    if change:
        centre, covariance = change(centre, covariance)
    found = bounded_root(centre, covariance, num_free, low, high)
    if found is None:
        return Root(value=None, low=None, high=None, why="no crossing that the noise of the points leaves bounded")
    return Root(value=found[0], low=found[1], high=found[2])


def _difference(fits: Sequence[Fit], families: Sequence[Family], x: float) -> tuple[Array, Array, float]:
    """Coefficients, their covariance, and Welch's degrees of freedom for the difference at x."""
    size = max(len(each.coefficients) for each in fits)
    centre, covariance, shares = np.zeros(size), np.zeros((size, size)), []
    for sign, fit, family in zip((1, -1), fits, families, strict=False):
        k, own = len(fit.coefficients), family.covariance(student(fit.num_free))
        centre[:k] += sign * family.centre[0]
        covariance[:k, :k] += own
        shares.append((float(powers(np.array(x), k - 1) @ own @ powers(np.array(x), k - 1)), fit.num_free))
    weight = sum(share**2 / num_free for share, num_free in shares)
    return centre, covariance, sum(share for share, _ in shares) ** 2 / weight if weight else 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Points:
    xs: Array
    ys: Array
    noise: Noise

    @classmethod
    def checked(cls, xs: Sequence[float], ys: Sequence[float], num_places: int, noise: Noise | None) -> "_Points":
        if len(xs) != len(ys):
            raise InstrumentError(f"a fit needs a y for each x, not {len(xs)} xs and {len(ys)} ys")
        x, y = finite_array(xs, "x"), finite_array(ys, "y")
        if np.unique(x).size < num_places:
            raise InstrumentError(f"this fit needs {num_places} different xs, not {sorted(set(x.tolist()))}")
        is_positive = y.min() >= _LEAST_POSITIVE
        if noise == "relative" and not is_positive:
            raise InstrumentError(f"relative noise needs ys above 0, not {y.min()}; the other choice is 'constant'")
        return cls(xs=x, ys=y, noise=noise or ("relative" if is_positive else "constant"))

    def weights(self, fitted: Callable[[Array], Array], num_rounds: int) -> Array:
        return reweighted(self.ys, fitted, num_rounds) if self.noise == "relative" else np.ones_like(self.ys)

    def fit(
        self, kind: str, values: Mapping[str, tuple[float, Interval]], family: Family | None, knot: Root | None = None
    ) -> Fit:
        named = [Coefficient(name=n, value=v, low=ends.low, high=ends.high) for n, (v, ends) in values.items()]
        return Fit(
            kind=kind,
            noise=self.noise,
            coefficients=tuple(named),
            num_points=self.xs.size,
            x_min=float(self.xs.min()),
            x_max=float(self.xs.max()),
            knot=knot,
            family=family,
        )


def _fit_polynomial(xs: Sequence[float], ys: Sequence[float], degree: int, noise: Noise | None) -> Fit:
    points = _Points.checked(xs, ys, degree + 1, noise)
    basis = powers(points.xs, degree)[None]
    weights = points.weights(lambda weights: basis[0] @ solve(basis, points.ys, weights).centre[0], 4)
    best = solve(basis, points.ys, weights)
    num_free = points.xs.size - degree - 1
    family = best.within(threshold(float(best.rss[0]), num_free, weights * points.ys)) if num_free else None
    values = {}
    for power, value in enumerate(best.centre[0].tolist()):
        ends = family.interval(np.eye(degree + 1)[power]) if family else Interval(None, None)
        values["abc"[power]] = (value, ends)
    return points.fit("quadratic" if degree == 2 else "affine", values, family)


def _knot(found: Hinge) -> Root:
    if found.is_flat or found.family is None:
        why = "the points do not rise" if found.is_flat else "too few points for an interval"
        return Root(value=None, low=None, high=None, why=why)
    low, high = float(found.family.knots.min()), float(found.family.knots.max())
    is_open = found.may_be_flat
    return Root(
        value=float(found.best.knots[0]),
        low=None if found.may_lack_floor or is_open else low,
        high=None if found.may_rise_late or is_open else high,
    )
