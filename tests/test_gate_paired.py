"""The statistics of launches: what they say by hand, and how often they are right in simulated comparisons.

The slow tests redo the figures of `paired.py`'s docstring; the quick ones catch what is grossly wrong.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.gate.paired import (
    MIN_LAUNCHES,
    adjusted,
    centre,
    over_looks,
    p_of_centre,
    ratio_over_launches,
)
from benchmarks.harness.stats import Interval, wilson_interval

ALPHA, LAST, FLOOR = 0.01, 12, math.log(1.01)
NOISES = ("normal", "skewed", "heavy", "burst")


def draw(rng, shape, noise, sd=0.014):
    """Launch medians of equal builds; the last axis counts launches. In "burst" one of them is ridden by a burst."""
    if noise == "heavy":
        return rng.standard_t(3, shape) * sd / 3**0.5
    if noise == "skewed":
        return (rng.gamma(4, 1, shape) - 4) / 2 * sd
    found = rng.normal(0, sd, shape)
    if noise == "burst":
        place = rng.integers(shape[-1], size=(*shape[:1], *[1] * (len(shape) - 1)))
        size = rng.choice([-1, 1], shape[:-1]) * rng.uniform(0.05, 0.25, shape[:-1])
        found += np.where(np.arange(shape[-1]) == place, size[..., None], 0)
    return found


# By hand.


def test_few_launches_are_students_t_over_their_centres():
    logs = [[0.0, 0.1, 0.4], [0.2], [0.4, 0.2], [-0.1, -0.1, -0.1, 5.0, -5.0]]
    found = ratio_over_launches(logs)
    centres = [0.15, 0.2, 0.3, -0.1]  # means of two: 0, 0.05, 0.1, 0.2, 0.25, 0.4; of the last, 6 of 15 are -0.1
    by_scipy = scipy_stats.ttest_1samp(centres, 0)
    ends = by_scipy.confidence_interval(0.95)
    assert found.value == pytest.approx(0.1375)
    assert found.p == pytest.approx(by_scipy.pvalue)
    assert (found.interval.low, found.interval.high) == pytest.approx((ends.low, ends.high))
    assert found.num_launches == 4
    assert ratio_over_launches(logs) == found


@pytest.mark.parametrize(("n", "cut"), [(9, 0), (10, 1), (12, 1), (19, 1), (20, 2)])
def test_from_ten_launches_on_a_tenth_is_trimmed_at_each_end(n, cut):
    medians = np.random.default_rng(3).normal(0.01, 0.02, n)
    found = ratio_over_launches([[each] for each in medians])
    assert found.value == pytest.approx(scipy_stats.trim_mean(medians, cut / n))
    winsorised = np.sort(medians)
    winsorised[:cut], winsorised[n - cut :] = winsorised[cut], winsorised[n - cut - 1]
    kept = n - 2 * cut
    error = math.sqrt(((winsorised - winsorised.mean()) ** 2).sum() / (kept * (kept - 1)))  # Yuen 1974
    assert found.interval.high - found.value == pytest.approx(scipy_stats.t.ppf(0.975, kept - 1) * error)
    assert found.p == pytest.approx(2 * scipy_stats.t.sf(abs(found.value) / error, kept - 1))


def test_a_burst_in_one_of_twelve_launches_hardly_moves_the_answer():
    logs = [[0.03 + 0.001 * place] for place in range(12)]
    quiet, burst = ratio_over_launches(logs), ratio_over_launches([*logs[:11], [0.9]])
    assert burst.value == pytest.approx(quiet.value)
    assert burst.interval.high < 0.04


def test_a_burst_inside_a_launch_does_not_carry_it_away():
    logs = [[0.03, 0.031, 0.029, 0.03, 0.03]] * 4
    assert ratio_over_launches([*logs[:3], [0.03, 0.031, 0.029, 0.03, 0.9]]).value == pytest.approx(0.03, abs=3e-4)


@pytest.mark.parametrize("num", [0, 1, 2, 3])
def test_below_four_launches_there_is_neither_interval_nor_p(num):
    found = ratio_over_launches([[0.1], [0.3], [0.2]][:num])
    assert (found.interval, found.p, found.num_launches) == (Interval(None, None), None, num)
    assert found.value == [None, 0.1, 0.2, 0.2][num]


@given(st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=4), min_size=4, max_size=21))
def test_swapping_the_sides_turns_every_sign(logs):
    there, back = ratio_over_launches(logs), ratio_over_launches([[-log for log in each] for each in logs])
    assert there.value == pytest.approx(-back.value, abs=1e-12)
    assert there.p == pytest.approx(back.p, abs=1e-9)
    assert there.interval.low == pytest.approx(-back.interval.high, abs=1e-9)
    assert 0 <= there.p <= 1
    assert there.interval.low <= there.value <= there.interval.high


def test_launches_that_say_the_same_leave_no_doubt():
    assert ratio_over_launches([[math.log(10)]] * 4).p == pytest.approx(0, abs=1e-12)
    same = ratio_over_launches([[0.0]] * 4)
    assert (same.value, same.interval, same.p) == (0.0, Interval(0.0, 0.0), 1.0)


@pytest.mark.parametrize(
    ("logs", "what"),
    [([[0.1], []], "launch 2 has no pairs"), ([[0.1], [0.2, math.nan]], "launch 2: pair 1 is nan")],
)
def test_a_launch_that_says_nothing_is_refused(logs, what):
    with pytest.raises(InstrumentError, match=what):
        ratio_over_launches(logs)


def test_looks_share_alpha_and_the_last_has_half_of_it():
    shares = [0.001 / over_looks(0.001, n, first=4, last=12) for n in range(4, 13)]
    assert sum(shares) == pytest.approx(1)
    assert shares[-1] == pytest.approx(0.5, abs=1e-3)
    assert all(b == pytest.approx(2 * a) for a, b in itertools.pairwise(shares))
    assert over_looks(0.03, 8, first=8, last=8) == pytest.approx(0.03)
    assert over_looks(0.9, 4, first=4, last=12) == 1
    for n in (3, 13):
        with pytest.raises(InstrumentError, match=f"{n} launches; the looks .* after 4 to 12"):
            over_looks(0.5, n, first=4, last=12)


def test_a_family_is_adjusted_as_benjamini_and_hochberg_did():
    assert adjusted([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.04 * 4 / 3, 0.04 * 4 / 3, 0.5])
    assert adjusted([]) == []


# By simulation.


def coverage(n, noise, num_runs, seed=2024):
    """How often the interval holds the truth, in percent."""
    rng = np.random.default_rng(seed)
    pair = {"heavy": lambda size: rng.standard_t(2, size) * 0.02}.get(noise, lambda size: rng.normal(0, 0.03, size))
    medians = draw(rng, (num_runs, n), noise) + np.median(pair((num_runs, n, 12)), axis=2)
    value, error, degrees = centre(medians)
    return 100 * float(np.mean(np.abs(value) <= scipy_stats.t.ppf(0.975, degrees) * error))


def test_coverage_is_computed_as_the_interval_is():
    medians = draw(np.random.default_rng(7), (12,), "normal")
    found, (value, error, degrees) = ratio_over_launches([[each] for each in medians]), centre(medians)
    assert found.interval.low == pytest.approx(value - scipy_stats.t.ppf(0.975, degrees) * error)
    assert found.p == pytest.approx(float(p_of_centre(value, error, degrees)))


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("n", [5, 12])
def test_coverage_quickly(n, noise):
    assert coverage(n, noise, 1000) >= 92


@pytest.mark.slow
@pytest.mark.simulated
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("n", [4, 5, 6, 8, 9, 10, 12, 16, 20])
def test_coverage_within_two_points(n, noise):
    found = coverage(n, noise, 10_000)
    assert found >= 93
    assert found <= 97 or (noise == "burst" and n < 10)


def alarms(num_quantities, noise, *, num_runs, last=LAST, change=0.0, floor=0.0, seed=2024):
    """Runs that raise an alarm at any look, and after how many launches the average one stops.

    With a change, which is one of the first quantity, only the alarm on that counts, and nobody else helps it.
    """
    rng = np.random.default_rng(seed)
    medians = draw(rng, (num_runs, num_quantities, last), noise)
    medians[:, 0] += math.log1p(change)
    found, stopped = np.zeros(num_runs, bool), np.full(num_runs, last)
    for n in range(MIN_LAUNCHES, last + 1):
        value, error, degrees = centre(medians[..., :n])
        ps = over_looks(p_of_centre(value, error, degrees), n, first=MIN_LAUNCHES, last=last)
        ps = np.where(np.abs(value) < floor, 1.0, ps)
        now = ps[:, 0] * num_quantities <= ALPHA if change else _any_of_family(ps)
        stopped = np.where(now & ~found, n, stopped)
        found |= now
    return int(found.sum()), float(stopped.mean())


def _any_of_family(ps):
    """Whether `adjusted` would find anything: its smallest value is at most alpha."""
    ranks = np.arange(1, ps.shape[1] + 1)
    return (np.sort(ps, axis=1) * ps.shape[1] / ranks).min(axis=1) <= ALPHA


def test_a_family_is_adjusted_in_the_simulation_as_elsewhere():
    ps = np.random.default_rng(5).uniform(0, 0.1, (50, 12)) ** 2
    assert [min(adjusted(row.tolist())) <= ALPHA for row in ps] == _any_of_family(ps).tolist()


@pytest.mark.parametrize("num_quantities", [1, 12])
def test_false_alarms_and_power_quickly(num_quantities):
    false, _ = alarms(num_quantities, "normal", num_runs=1500)
    assert wilson_interval(false, 1500).low <= ALPHA
    found, launches = alarms(num_quantities, "normal", num_runs=1500, change=0.05)
    assert found > 0.97 * 1500
    assert launches < 9.5


@pytest.mark.slow
@pytest.mark.simulated
@pytest.mark.parametrize("noise", ["normal", "heavy", "burst"])
@pytest.mark.parametrize("num_quantities", [1, 3, 12])
@pytest.mark.parametrize("last", [6, 8, 12, 20])
def test_at_most_one_comparison_of_equal_builds_in_a_hundred_raises_an_alarm(num_quantities, noise, last):
    """Worse and better both count: of red ones there are half as many."""
    num_runs = 30_000
    false, _ = alarms(num_quantities, noise, num_runs=num_runs, last=last)
    assert wilson_interval(false, num_runs).low <= ALPHA
    assert wilson_interval(false // 2, num_runs).high <= ALPHA
    with_floor, _ = alarms(num_quantities, noise, num_runs=num_runs, last=last, floor=FLOOR)
    assert wilson_interval(with_floor, num_runs).high <= ALPHA


POWER = {
    (1, "normal"): (0.80, 0.98), (3, "normal"): (0.64, 0.96), (12, "normal"): (0.38, 0.86),
    (1, "burst"): (0.65, 0.95), (12, "burst"): (0.22, 0.69), (1, "heavy"): (0.93, 0.98), (12, "heavy"): (0.73, 0.95),
}  # fmt: skip
"""The least share of changes of 2 and of 3 % that twelve launches find."""


@pytest.mark.slow
@pytest.mark.simulated
@pytest.mark.parametrize(("num_quantities", "noise"), POWER)
def test_a_change_of_two_or_three_percent_is_found_that_often(num_quantities, noise):
    found = [alarms(num_quantities, noise, num_runs=6000, change=change)[0] / 6000 for change in (0.02, 0.03)]
    assert all(share >= least for share, least in zip(found, POWER[num_quantities, noise], strict=True)), found


@pytest.mark.slow
@pytest.mark.simulated
@pytest.mark.parametrize("sd", [0.003, 0.007, 0.014, 0.018, 0.03])
def test_a_change_as_large_as_the_margin_is_rarely_called_the_same(sd):
    """Each look is a chance to say so: 8 % at most in all, 3 % when the change is a quarter larger than the margin."""
    rng, margin = np.random.default_rng(1), math.log(1.02)
    noise = draw(rng, (20_000, LAST), "normal", sd)
    for change, most in ((0.02, 0.09), (0.025, 0.035), (0.03, 0.015)):
        same = np.zeros(20_000, bool)
        for n in range(MIN_LAUNCHES, LAST + 1):
            value, error, degrees = centre(noise[:, :n] + math.log1p(change))
            half = scipy_stats.t.ppf(0.975, degrees) * error
            same |= (value + half <= margin) & (value - half >= -margin)
        assert same.mean() <= most
