"""What is odd about a series of samples: planted oddities are found and told, noise is left alone."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.series import (
    find_drift,
    find_outliers,
    find_slow_first,
    find_step,
    findings,
    is_settled,
    outliers,
    what_is_odd,
)

CHECKS = (find_drift, find_slow_first, find_step, find_outliers)
SIZES = (6, 12, 30)


def noise(n, relative=0.02, seed=0):
    return 1 + relative * np.random.default_rng(seed).normal(size=n)


def share_found(check, series, num_runs):
    return np.mean([check(series(seed)) is not None for seed in range(num_runs)])


# Noise.


def normal(n):
    return lambda seed: np.random.default_rng(seed).normal(1, 0.1, n)


def lognormal(n):
    return lambda seed: np.random.default_rng(seed).lognormal(0, 0.3, n)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", [normal, lognormal])
def test_noise_is_seldom_odd(check, n, kind):
    assert share_found(lambda samples: check(samples, least=0), kind(n), 400) <= 0.035


@pytest.mark.slow
@pytest.mark.simulated
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("n", [*SIZES, 7, 9, 100])
@pytest.mark.parametrize("kind", [normal, lognormal])
def test_noise_is_odd_in_less_than_two_percent(check, n, kind):
    """4,000 series: their own sampling error is 0.2 points. Without a least amount, so that only the noise decides."""
    assert share_found(lambda samples: check(samples, least=0), kind(n), 4000) <= 0.022


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_is_too_little_is_never_odd(check):
    """A microscopic spread makes any change certain; it still matters to nobody."""
    ramp = 1 + 1e-6 * np.arange(12)
    assert check(ramp) is None
    assert check([1.02, *noise(11, 1e-5)]) is None


# Planted oddities.


@pytest.mark.parametrize("factor", [1.15, 1 / 1.15])
@pytest.mark.parametrize(("n", "start"), [(6, 3), (9, 4), (12, 6), (12, 9), (30, 11)])
def test_a_step_is_found_where_it_is(n, start, factor):
    samples = noise(n, 0.01, seed=1)
    samples[start:] *= factor
    found = find_step(samples)
    assert found.start == start
    assert found.ratio == pytest.approx(factor, rel=0.02)
    assert found.p < 0.015
    percent = round(abs(found.ratio - 1) * 100)
    word = "slower" if factor > 1 else "faster"
    assert found.what == f"samples {start}..{n - 1} are {percent} % {word} than those before"


@pytest.mark.parametrize(("n", "relative", "least_share"), [(6, 0.01, 0.95), (8, 0.02, 0.9), (12, 0.03, 0.9)])
def test_fifteen_percent_in_the_middle_seldom_escape(n, relative, least_share):
    def throttled(seed):
        return noise(n, relative, seed) * np.where(np.arange(n) < n // 2, 1, 1.15)

    assert share_found(find_step, throttled, 100) >= least_share


def test_the_certainty_of_a_step_is_students_times_the_places_it_could_be_at():
    samples = noise(9, 0.02, seed=1) * np.where(np.arange(9) < 4, 1, 1.3)
    found, logs = find_step(samples), np.log(samples)
    theirs = [stats.ttest_ind(logs[:k], logs[k:]).pvalue for k in range(2, 8)]
    assert found.start == 2 + int(np.argmin(theirs))
    assert found.p == pytest.approx(6 * min(theirs))


def test_a_perfect_step_needs_no_noise_to_be_found():
    found = find_step([1.0] * 5 + [1.2] * 5)
    assert (found.start, found.ratio, found.p) == (5, pytest.approx(1.2), pytest.approx(0, abs=1e-9))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("slope", [1, -1])
def test_a_drift_is_found(n, slope):
    samples = np.exp(slope * 0.3 * np.arange(n) / n) * noise(n, 0.003)
    found = find_drift(samples)
    assert found.tau * slope > 0.9
    assert found.change * slope > 0.1
    assert ("slower" if slope > 0 else "faster") in found.what
    assert "the last third is" in found.what


def test_the_change_of_a_drift_is_that_between_its_thirds():
    assert find_drift(1.1 ** np.arange(6)).change == pytest.approx(1.1**4 - 1)


def test_six_samples_must_be_in_perfect_order_to_be_a_drift():
    ordered = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    assert find_drift(ordered).p == pytest.approx(2 / math.factorial(6))
    assert find_drift([1.1, 1.0, *ordered[2:]]) is None


@pytest.mark.parametrize("n", SIZES)
def test_a_slow_first_sample_is_found(n):
    samples = noise(n)
    samples[0] = 1.5
    found = find_slow_first(samples)
    assert found.ratio == pytest.approx(1.5, rel=0.03)
    assert found.z > 8
    assert found.what == f"the first sample is {found.ratio:.3g} times the median of the rest"
    assert find_slow_first([0.5, *samples[1:]]) is None
    assert find_slow_first([1.0, 1.5, *samples[2:]]) is None


def test_a_first_sample_is_compared_with_the_rest_alone():
    assert find_slow_first([2.0, 1.0, 1.01, 1.02, 1.03, 1.04]).ratio == pytest.approx(2 / 1.02)
    assert find_slow_first([1.0, 1.0, 1.0, 1.0, 1.0, 1.5], least=0) is None


def test_a_slow_first_sample_is_seen_past_an_outlier_among_the_rest():
    assert find_slow_first([2.0, 1.0, 1.01, 5.0, 0.99, 1.0, 1.02, 0.98]) is not None


@pytest.mark.parametrize(("index", "value"), [(0, 1.5), (7, 1.5), (11, 0.6)])
def test_an_outlier_is_labelled_by_its_index(index, value):
    samples = noise(12)
    samples[index] = value
    found = find_outliers(samples)
    assert found.indices == outliers(samples) == (index,)
    assert np.sign(found.scores[0]) == np.sign(value - 1)
    assert found.what.startswith(f"far from the median: sample {index} (")


def test_several_outliers_do_not_hide_each_other():
    samples = noise(12)
    samples[[2, 5, 9]] = 3.0
    assert outliers(samples) == (2, 5, 9)
    assert "samples 2 (200 % slower)" in find_outliers([3.0 if i in (2, 5) else 1.0 for i in range(12)]).what


def test_scores_are_defined_where_most_samples_are_equal():
    found = find_outliers([1.0, 1.0, 1.0, 1.2, 1.0, 1.0, 1.01])
    assert (found.indices, found.scores) == ((3,), (None,))
    first = find_slow_first([1.2, 1.0, 1.0, 1.0, 1.0, 1.01])
    assert (first.ratio, first.z) == (pytest.approx(1.2), None)


def test_what_is_odd_is_said_once():
    slow_first = [3.0, *noise(11)]
    step = noise(16, 0.005) * np.where(np.arange(16) < 8, 1, 1.3)
    ramp = noise(16, 0.005) * np.linspace(1, 1.3, 16)
    assert [kind for kind, _ in what_is_odd(slow_first)] == ["first"]
    assert [kind for kind, _ in what_is_odd(step)] == ["step"]
    assert [kind for kind, _ in what_is_odd(ramp)] == ["drift"]
    for both in (step, ramp):
        assert find_drift(both) is not None
        assert find_step(both) is not None
    assert what_is_odd(noise(12)) == ()


# What cannot be said.


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_nothing_is_said_of_few_equal_or_impossible_samples(check):
    for samples in ([], [1.0], [9.0, 1.0, 1.0, 1.0, 1.0], [2.0] * 12, [0.0] + [1.0] * 7, [-1.0, *range(1, 9)]):
        assert check(samples) is None
    assert what_is_odd([5.0]) == outliers([5.0]) == ()


@pytest.mark.parametrize("check", [*CHECKS, outliers, what_is_odd], ids=lambda check: check.__name__)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sample_that_is_no_number_is_named(check, bad):
    with pytest.raises(InstrumentError, match=f"sample 1 is {bad}"):
        check([1.0, bad])


@given(samples=st.lists(st.floats(1e-6, 1e6), min_size=6, max_size=40), factor=st.sampled_from([1e-3, 2.0, 1e6]))
def test_any_series_can_be_checked_and_its_unit_does_not_matter(samples, factor):
    found = findings(samples)
    scaled = findings([sample * factor for sample in samples])
    assert [each.kind for each in found] == [each.kind for each in scaled]
    for each in found:
        assert each.what
        assert "nan" not in each.what
        assert "inf" not in each.what


# Warm-up.


@pytest.mark.parametrize(
    ("durations", "settled"),
    [
        ([], False),
        ([1.0], False),
        ([1.0, 1.0], True),
        ([1.07, 1.0], False),  # two runs do not tell a fall from noise
        ([1.01, 1.0], True),
        ([5.0, 1.0], False),  # the first run compiled
        ([5.0, 1.0, 1.02], True),
        ([5.0, 1.0, 0.99], True),
        ([30.0, 2.0, 0.1], False),  # compiled, then captured a graph
        ([30.0, 2.0, 0.1, 0.1], True),
        ([8.0, 4.0, 2.0, 1.0], False),
        ([1.20, 1.12, 1.05], False),  # within tolerance each, and still falling
        ([1.15, 1.10, 1.02], False),  # falls faster and faster
        ([1.30, 1.10, 1.02, 1.00], True),  # most of the fall is over
        ([1.00, 0.99, 0.98], True),  # noise
        ([1.0, 1.05, 1.1], True),  # a slow rise is not for warm-up to cure
        ([1.0, 1.0, 1.2], False),
        ([1.2, 1.0, 1.11], False),  # relative to the smaller
        ([1.0, 0.0], False),
    ],
)
def test_warm_up_is_over_when_nothing_is_left_to_fall(durations, settled):
    assert is_settled(durations) is settled


def test_tolerance_decides_how_close_is_close():
    assert is_settled([1.0, 1.04], 0.05)
    assert not is_settled([1.0, 1.04], 0.03)
    with pytest.raises(InstrumentError, match="tolerance of 0"):
        is_settled([1.0, 1.0], 0)
    with pytest.raises(InstrumentError, match="duration 1 is nan"):
        is_settled([1.0, math.nan])


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_geometric_approach_settles_when_its_rest_is_within_tolerance(share):
    durations = [1 + 5 * share**i for i in range(200)]
    settled = next(i for i in itertools.count(1) if is_settled(durations[:i], 0.1))
    assert durations[settled - 1] - 1 <= 0.12
    assert settled > 2
