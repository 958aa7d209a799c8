"""Curves through points: against closed forms and scipy, on exact data, and what is said where little is known."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.fits import (
    Root,
    best_fit,
    crossover,
    fit_affine,
    fit_floor_limited,
    fit_quadratic,
    growth,
    is_quadratic_needed,
    root,
    root_of_difference,
)
from benchmarks.harness.stats import Interval

LENGTHS = np.repeat([16.0, 64, 256, 1024, 4096], 3)
MORE_LENGTHS = np.repeat([16.0, 32, 64, 128, 256, 512, 1024, 2048, 4096], 2)
FITS = (fit_affine, fit_quadratic, fit_floor_limited)


def noisy(ys, relative=0.03, seed=0):
    ys = np.asarray(ys, dtype=float)
    return ys * (1 + relative * np.random.default_rng(seed).normal(size=ys.size))


def values(fit):
    return {each.name: each.value for each in fit.coefficients}


def has_ends(each):
    return each.low is not None and each.high is not None


# Against somebody else's arithmetic.


@pytest.mark.parametrize("num_points", [3, 4, 15])
def test_a_line_with_constant_noise_is_scipys(num_points):
    rng = np.random.default_rng(1)
    xs, ys = rng.uniform(1, 100, num_points), rng.normal(5, 1, num_points)
    fit, theirs = fit_affine(xs, ys, "constant"), stats.linregress(xs, ys)
    t = stats.t.ppf(0.975, num_points - 2)
    for name, value, error in (("a", theirs.intercept, theirs.intercept_stderr), ("b", theirs.slope, theirs.stderr)):
        found = (fit[name].value, fit[name].low, fit[name].high)
        assert found == pytest.approx((value, value - t * error, value + t * error))


def test_a_parabola_and_its_band_are_scipys():
    ys = noisy(0.02 + 1e-4 * LENGTHS + 1e-8 * LENGTHS**2)
    fit = fit_quadratic(LENGTHS, ys, "constant")
    theirs, covariance = optimize.curve_fit(lambda x, a, b, c: a + b * x + c * x * x, LENGTHS, ys)
    assert list(values(fit).values()) == pytest.approx(theirs, rel=1e-5)
    at = np.array([1, 700, 700**2])
    half = stats.t.ppf(0.975, 12) * math.sqrt(at @ covariance @ at)
    band = fit.band(700)
    assert (band.low, band.high) == pytest.approx((at @ theirs - half, at @ theirs + half), rel=1e-4)


def test_relative_noise_weights_by_the_fitted_curve():
    """Its weights, given to scipy, lead back to the same line."""
    ys = noisy(0.02 + 1e-4 * LENGTHS)
    fit = fit_affine(LENGTHS, ys)
    sigma = [fit.predict(x) for x in LENGTHS]
    theirs, covariance = optimize.curve_fit(lambda x, a, b: a + b * x, LENGTHS, ys, p0=(0, 1e-4), sigma=sigma)
    assert list(values(fit).values()) == pytest.approx(theirs, rel=1e-5)
    half = stats.t.ppf(0.975, 13) * np.sqrt(np.diag(covariance))
    assert [each.high - each.value for each in fit.coefficients] == pytest.approx(half, rel=1e-4)
    assert fit.noise == "relative"
    assert fit_affine(LENGTHS, ys - 0.05).noise == "constant"


def test_a_floor_is_where_a_search_over_all_three_parameters_finds_it():
    ys = noisy(np.maximum(0.03, 0.005 + 1e-4 * MORE_LENGTHS))
    fit = fit_floor_limited(MORE_LENGTHS, ys, "constant")

    def rss(p):
        return np.sum((np.maximum(p[0], p[1] + p[2] * MORE_LENGTHS / 1e4) - ys) ** 2) * 1e6

    theirs = optimize.minimize(rss, (0.03, 0.005, 1.0), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-9})
    found = values(fit)
    assert (found["floor"], found["a"], found["b"] * 1e4) == pytest.approx(theirs.x, rel=1e-3)


def test_the_crossover_interval_is_fiellers():
    """The ends are where (a - b x) / its standard error is t: solved here for the ends by search."""
    fit = fit_affine(LENGTHS, noisy(0.02 + 1e-4 * LENGTHS), "constant")
    found, x, t = crossover(fit), LENGTHS, stats.t.ppf(0.975, 13)
    ys = noisy(0.02 + 1e-4 * LENGTHS)
    X = np.stack([np.ones_like(x), x], axis=1)
    covariance = np.linalg.inv(X.T @ X) * np.sum((ys - X @ np.linalg.lstsq(X, ys)[0]) ** 2) / 13
    for end in (found.low, found.high):
        at = np.array([1, -end])
        assert abs(fit["a"].value - fit["b"].value * end) == pytest.approx(t * math.sqrt(at @ covariance @ at))
    assert found.value == pytest.approx(fit["a"].value / fit["b"].value)
    assert found.low < found.value < found.high


# On exact data.


@settings(deadline=None)
@example(a=5e-324, b=0.0, c=0.0)
@given(a=st.floats(-5, 5), b=st.floats(-5, 5), c=st.floats(-5, 5))
def test_exact_points_give_the_curve_back(a, b, c):
    xs = np.array([1.0, 2, 3, 5, 8])
    line, parabola = fit_affine(xs, a + b * xs), fit_quadratic(xs, a + b * xs + c * xs**2)
    assert list(values(line).values()) == pytest.approx([a, b], abs=1e-9)
    assert list(values(parabola).values()) == pytest.approx([a, b, c], abs=1e-9)
    for each in (*line.coefficients, *parabola.coefficients):
        assert each.low <= each.value <= each.high
        assert each.high - each.low < 1e-6
    assert parabola.predict(100) == pytest.approx(a + 100 * b + 10000 * c)


@settings(deadline=None)
@given(a=st.floats(0.01, 5), b=st.floats(0.01, 5), num_points=st.integers(4, 12))
def test_rounding_is_not_taken_for_curvature_or_overhead(a, b, num_points):
    xs = np.arange(1.0, num_points + 1) * 16
    assert growth(xs, a + b * xs) == "affine"
    assert growth(xs, b * xs) == "proportional"
    assert growth(xs, a + 0 * xs) == "flat"


@pytest.mark.parametrize("c", [0, 1e-8])
def test_an_exact_floor_is_found(c):
    ys = np.maximum(0.03, 0.005 + 1e-4 * MORE_LENGTHS + c * MORE_LENGTHS**2)
    fit = fit_floor_limited(MORE_LENGTHS, ys, is_quadratic=c > 0)
    expected = {"floor": 0.03, "a": 0.005, "b": 1e-4} | ({"c": c} if c else {})
    assert values(fit) == pytest.approx(expected, rel=1e-3)
    assert crossover(fit).value == pytest.approx(250 if not c else 244.2, rel=1e-3)
    assert [fit.predict(x) for x in (1, 200)] == pytest.approx([0.03, 0.03], rel=1e-4)
    assert fit.predict(8192) == pytest.approx(0.005 + 0.8192 + c * 8192**2, rel=1e-3)
    assert fit.kind == ("floor-limited quadratic" if c else "floor-limited")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), relative=st.sampled_from([0.001, 0.03, 0.3]))
def test_intervals_and_bands_hold_the_fit_itself(seed, relative):
    for make, xs in zip(FITS, (LENGTHS, LENGTHS, MORE_LENGTHS), strict=True):
        fit = make(xs, np.abs(noisy(np.maximum(0.03, 0.005 + 1e-4 * xs), relative, seed)) + 1e-6)
        for each in fit.coefficients:
            assert each.low is None or each.low <= each.value
            assert each.high is None or each.high >= each.value
        for x in (1, 100, 5000):
            band, value = fit.band(x), fit.predict(x)
            assert band.low is None or band.low <= value * (1 + 1e-9)
            assert band.high is None or band.high >= value * (1 - 1e-9)


# What little data say.


@pytest.mark.parametrize(("make", "num_points"), [(fit_affine, 2), (fit_quadratic, 3), (fit_floor_limited, 3)])
def test_no_more_points_than_coefficients_give_a_curve_without_intervals(make, num_points):
    fit = make([1, 2, 4][-num_points:], [3.0, 3.0, 7.0][-num_points:])
    assert not any(has_ends(each) for each in fit.coefficients)
    assert fit.band(3) == Interval(None, None)
    assert fit.predict(4) == pytest.approx(7)
    assert fit.num_free == 0


def test_a_line_through_too_few_points_has_no_crossover():
    assert crossover(fit_affine([1, 2], [1.0, 3.0])).why == "too few points for an interval"
    assert is_quadratic_needed([1, 2, 3], [1, 2, 9]) is None
    assert growth([1, 2], [1, 2]) is None


@pytest.mark.parametrize(
    ("make", "xs", "ys", "what"),
    [
        (fit_affine, [], [], r"needs 2 different xs, not \[\]"),
        (fit_affine, [3, 3, 3], [1, 2, 3], r"needs 2 different xs, not \[3.0\]"),
        (fit_quadratic, [1, 2, 2], [1, 2, 3], r"needs 3 different xs, not \[1.0, 2.0\]"),
        (fit_floor_limited, [1, 2, 2], [1, 2, 3], r"needs 3 different xs"),
        (fit_affine, [1, 2], [1, 2, 3], r"2 xs and 3 ys"),
        (fit_affine, [1, math.nan], [1, 2], r"x 1 is nan"),
        (fit_affine, [1, 2], [1, math.inf], r"y 1 is inf"),
    ],
)
def test_what_cannot_be_fitted_is_refused(make, xs, ys, what):
    with pytest.raises(InstrumentError, match=what):
        make(xs, ys)


def test_misuse_names_the_choices():
    line, parabola = fit_affine([1, 2, 3], [1, 2, 4]), fit_quadratic(LENGTHS, noisy(LENGTHS))
    floor = fit_floor_limited(LENGTHS, noisy(LENGTHS))
    with pytest.raises(InstrumentError, match=r"no coefficient 'c', only: a, b"):
        line["c"]
    with pytest.raises(InstrumentError, match="no crossover of a quadratic fit"):
        crossover(parabola)
    with pytest.raises(InstrumentError, match="no crossing of a floor-limited fit"):
        root_of_difference(line, floor)
    with pytest.raises(InstrumentError, match=r"ys above 0, not -1.0; the other choice is 'constant'"):
        fit_affine([1, 2], [-1, 1], "relative")


def test_all_floor_is_a_level_that_does_not_rise():
    fit = fit_floor_limited(MORE_LENGTHS, noisy(np.full(18, 0.03), seed=3))
    assert fit["floor"].low < 0.03 < fit["floor"].high
    assert not has_ends(fit["a"])
    assert not has_ends(fit["b"])
    assert not has_ends(crossover(fit))
    falling = fit_floor_limited([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0])
    assert (values(falling)["b"], crossover(falling).why) == (0, "the points do not rise")


def test_no_floor_in_sight_leaves_it_open_below():
    fit = fit_floor_limited(MORE_LENGTHS, noisy(0.02 + 1e-4 * MORE_LENGTHS, seed=1))
    assert (fit["floor"].low, crossover(fit).low, fit.band(1).low) == (None, None, None)
    assert fit["floor"].high < 0.03
    assert fit["b"].low < 1e-4 < fit["b"].high


def test_a_rise_at_the_last_place_only_leaves_the_slope_open_above():
    fit = fit_floor_limited([1, 2, 3, 4, 5, 6] * 2, noisy([1, 1, 1, 1, 1, 2] * 2))
    assert (fit["b"].high, fit["a"].low, crossover(fit).high, fit.band(7).high) == (None,) * 4
    assert fit["b"].low > 0
    assert fit["floor"].low < 1 < fit["floor"].high


# How a curve grows.


@pytest.mark.parametrize(
    ("law", "expected"),
    [
        (lambda x: 2.247 + 9.56e-3 * x, "affine"),
        (lambda x: 9.56e-3 * x, "proportional"),
        (lambda x: 0.02 + 0 * x, "flat"),
        (lambda x: 2.247 + 1e-6 * x * x, "quadratic"),
        (lambda x: 0.02 + 1e-4 * x + 5e-8 * x * x, "quadratic"),
    ],
)
@pytest.mark.parametrize("relative", [0, 0.02])
def test_growth_is_named_after_the_terms_that_are_needed(law, expected, relative):
    """An overhead of seconds makes any curve look shallow on logarithms: a line is not proportional."""
    ys = noisy(law(LENGTHS), relative, seed=2)
    assert growth(LENGTHS, ys) == expected
    assert is_quadratic_needed(LENGTHS, ys) == (expected == "quadratic")
    assert best_fit(LENGTHS, ys).kind == ("quadratic" if expected == "quadratic" else "affine")


def test_a_line_is_called_a_parabola_by_one_in_twenty():
    found = [is_quadratic_needed(LENGTHS, noisy(0.02 + 1e-4 * LENGTHS, seed=seed)) for seed in range(300)]
    assert 0.01 < np.mean(found) < 0.1


# Where curves cross.


def test_lines_cross_where_they_should_in_either_order():
    f, g = (LENGTHS, noisy(0.02 + 1e-4 * LENGTHS)), (LENGTHS, noisy(0.05 + 5e-5 * LENGTHS, seed=1))
    found, swapped = root_of_difference(f, g), root_of_difference(fit_affine(*g), fit_affine(*f))
    assert found.low < 600 < found.high
    assert (found.value, found.low, found.high) == pytest.approx((swapped.value, swapped.low, swapped.high))


def test_exact_curves_cross_in_a_point():
    found = root_of_difference((LENGTHS, 0.02 + 1e-4 * LENGTHS), (LENGTHS, 0.05 + 5e-5 * LENGTHS))
    assert (found.value, found.low, found.high) == pytest.approx((600, 600, 600))


def test_of_two_crossings_the_lowest_in_range_counts_else_the_nearest():
    xs = np.arange(1.0, 11)
    zero = fit_affine(xs, 0 * xs)

    def crossing(*zeros):
        return root_of_difference(fit_quadratic(xs, (xs - zeros[0]) * (xs - zeros[1])), zero).value

    assert crossing(3, 7) == pytest.approx(3)
    assert crossing(-5, 7) == pytest.approx(7)
    assert crossing(-5, 12) == pytest.approx(12)


@pytest.mark.parametrize("seed", range(1, 6))
def test_what_does_not_cross_for_certain_has_no_crossing(seed):
    line = (LENGTHS, noisy(0.02 + 1e-4 * LENGTHS, seed=seed))
    same = fit_affine(LENGTHS, noisy(0.02 + 1e-4 * LENGTHS, seed=seed + 100))
    flat = fit_affine(LENGTHS, noisy(np.full(15, 0.02), seed=seed))
    above = fit_quadratic(LENGTHS, 1 + LENGTHS**2)
    for found in (root_of_difference(fit_affine(*line), same), crossover(flat), root_of_difference(above, flat)):
        assert (found.value, found.low, found.high) == (None, None, None)
        assert "no crossing" in found.why


def test_pairs_that_share_their_noise_are_fitted_as_differences():
    host = noisy(np.ones(15), 0.3, seed=4)
    slow, fast = (0.05 + 5e-5 * LENGTHS) * host, (0.02 + 1e-4 * LENGTHS) * host
    paired = root(fit_affine(LENGTHS, (slow - fast) / host))
    assert paired.high - paired.low < 1e-3
    assert paired.value == pytest.approx(600)
    apart = root_of_difference((LENGTHS, slow), (LENGTHS, fast))
    assert apart == Root(value=None, low=None, high=None, why=apart.why) or apart.high - apart.low > 100


# Words.


@pytest.mark.parametrize(
    ("ys", "told", "expected"),
    [
        ([12.75, 13.2, 14.1], {"x_name": "prompt tokens", "unit": "ms"}, "12.3 ms + 0.45 ms/token · prompt tokens"),
        ([0.01275, 0.0132, 0.0141], {"x_name": "steps", "scale": 1e3, "unit": "ms"}, "12.3 ms + 0.45 ms/step · steps"),
        ([12.75, 13.2, 14.1], {}, "12.3 + 0.45 x"),
        ([12.75, 13.2, 14.1], {"x_name": "n", "unit": "ms"}, "12.3 ms + 0.45 ms · n"),
        ([11.0, 10.0, 8.0], {"x_name": "hits", "unit": "s"}, "12 s - 1 s/hit · hits"),
        ([12345.0, 12346.0, 12348.0], {"unit": "s"}, "12300 s + 1 s x"),
    ],
)
def test_an_equation_reads_well(ys, told, expected):
    assert fit_affine([1, 2, 4], ys).equation(**told) == expected


def test_equations_of_the_other_kinds():
    xs = np.array([1.0, 2, 3, 4, 5, 6])
    assert fit_quadratic(xs, 3 + 2 * xs + xs**2).equation("tokens", unit="ms") == (
        "3 ms + 2 ms/token · tokens + 1 ms/token^2 · tokens^2"
    )
    assert fit_floor_limited(xs, np.maximum(3, 2 * xs - 2)).equation("tokens", unit="ms") == (
        "max(3 ms, -2 ms + 2 ms/token · tokens)"
    )
