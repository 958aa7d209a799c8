"""Quantiles and their intervals, against a slow computation in exact fractions and against simulation."""

import itertools
import json
import math
import statistics
import warnings
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.metrics import metric
from benchmarks.harness.results import BenchmarkResult, Measurement, summarise_values
from benchmarks.harness.stats import (
    Interval,
    bootstrap_interval,
    mann_whitney,
    median,
    median_absolute_deviation,
    min_samples_for,
    paired_ratio,
    percentile,
    quantile,
    quantile_interval,
    relative_spread,
    wilson_interval,
)

FINITE = st.floats(-1e9, 1e9)


@given(samples=st.lists(FINITE, min_size=1, max_size=40), q=st.floats(0, 1))
def test_quantile_is_numpys(samples, q):
    assert quantile(samples, q) == float(np.quantile(np.array(samples), q))


def test_nothing_is_known_without_samples():
    assert quantile([], 0.5) is None
    assert quantile_interval([], 0.5) == Interval(None, None)
    assert relative_spread([]) is None


def test_one_sample_is_a_value_without_bounds():
    assert quantile([3.0], 0.9) == 3.0
    assert quantile_interval([3.0], 0.5) == Interval(None, None)
    assert relative_spread([3.0]) is None


@pytest.mark.parametrize(("q", "expected"), [(0.5, 5), (0.9, 29), (0.95, 59), (0.99, 299)])
def test_how_many_samples_an_upper_bound_needs(q, expected):
    assert min_samples_for(q) == expected
    assert q**expected <= 0.05 < q ** (expected - 1)


@pytest.mark.parametrize("confidence", ["0.83", "0.95", "0.99"])
@pytest.mark.parametrize("q", ["0.05", "0.5", "0.9"])
def test_interval_against_exact_sums(q, confidence):
    for n in [*range(1, 12), 35, 36, 60]:
        found = quantile_interval(range(1, n + 1), float(q), float(confidence))
        low, high = slow_interval(n, Fraction(q), Fraction(confidence))
        assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def slow_interval(n, q, confidence):
    """The ranks, fractions between two where need be, that bound the q-quantile of n samples.

    The number of samples below the quantile is binomial. The sample of rank r lies above it when fewer than r do,
    and below it when at least r do.
    """
    tail = (1 - confidence) / 2
    mass = [math.comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(n + 1)]
    low = slow_end({r: sum(mass[:r]) for r in range(1, n + 1)}, q, tail)
    mirrored = slow_end({n + 1 - r: sum(mass[r:]) for r in range(1, n + 1)}, 1 - q, tail)
    return low, None if mirrored is None else n + 1 - mirrored


def slow_end(misses, q, tail):
    """Of the ranks that miss at most that often the last, moved towards the next as Nyblom (1992) weighs the two."""
    n, rank = len(misses), max((r for r, miss in misses.items() if miss <= tail), default=None)
    if rank in (None, n):
        return rank
    rarely, often = tail - misses[rank], misses[rank + 1] - tail
    return rank + 1 / (1 + rank * (1 - q) * often / ((n - rank) * q * rarely)) if rarely else rank


@pytest.mark.parametrize(("n", "q"), [(6, 0.5), (10, 0.5), (41, 0.5), (60, 0.9)])
def test_a_95_percent_interval_holds_the_truth_that_often(n, q):
    """On uniform samples, where the q-quantile is q itself. Which ranks bound it depends on n alone."""
    draws = np.random.default_rng(7).random((2000, n))
    intervals = [quantile_interval(draw, q) for draw in draws]
    assert 0.935 <= np.mean([each.low <= q <= each.high for each in intervals]) <= 0.965


@given(samples=st.lists(FINITE, min_size=6, max_size=60), q=st.sampled_from([0.1, 0.5, 0.9]))
def test_an_interval_holds_its_own_quantile_and_stays_among_the_samples(samples, q):
    interval, value = quantile_interval(samples, q), quantile(samples, q)
    slack = 1e-9 * max(map(abs, samples))
    assert interval.low is None or min(samples) - slack <= interval.low <= value + slack
    assert interval.high is None or value - slack <= interval.high <= max(samples) + slack


def test_one_bad_sample_does_not_inflate_the_spread():
    assert relative_spread([9.0, 10.0, 11.0]) == pytest.approx(0.1)
    assert relative_spread([9.0, 10.0, 10.0, 11.0, 1000.0]) == pytest.approx(0.1)
    assert relative_spread([5.0, 5.0]) == 0.0
    assert relative_spread([-1.0, 0.0, 1.0]) is None


# Medians, spreads and percentiles.


@example(samples=[536870913.0, -536870912.9999999])
@given(samples=st.lists(FINITE, min_size=1, max_size=40))
def test_median_and_deviation_are_those_of_the_standard_library(samples):
    middle = statistics.median(samples)
    assert median(samples) == pytest.approx(middle)
    if len(samples) > 1:
        assert median_absolute_deviation(samples) == pytest.approx(statistics.median(abs(x - middle) for x in samples))


def test_empty_and_single_samples_have_a_defined_result():
    assert [median([]), median([3.0])] == [None, 3.0]
    assert [median_absolute_deviation([]), median_absolute_deviation([3.0])] == [None, None]
    assert bootstrap_interval([]) == bootstrap_interval([3.0]) == Interval(None, None)
    assert paired_ratio([], []).value is None
    assert paired_ratio([3.0], [2.0]).value == pytest.approx(1.5)
    assert paired_ratio([], []).interval == paired_ratio([3.0], [2.0]).interval == Interval(None, None)
    assert [mann_whitney([], [1.0]), mann_whitney([1.0], []), mann_whitney([1.0], [2.0])] == [None, None, 1.0]
    assert wilson_interval(0, 0) == Interval(None, None)
    assert percentile([], 0.5).describe() == "p50: n too small (0 of 5)"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "act",
    [
        lambda samples: quantile(samples, 0.5),
        lambda samples: quantile_interval(samples, 0.5),
        lambda samples: percentile(samples, 0.5),
        median,
        median_absolute_deviation,
        relative_spread,
        bootstrap_interval,
        lambda samples: paired_ratio(samples, samples),
        lambda samples: mann_whitney([1.0], samples),
    ],
)
def test_a_sample_that_is_no_number_is_named(act, bad):
    with pytest.raises(InstrumentError, match=rf"sample 2 is {bad}"):
        act([1.0, 2.0, bad, 4.0, math.nan, 5.0, 6.0, 7.0, 8.0, 9.0])


@pytest.mark.parametrize(("q", "needed"), [(0.5, 5), (0.9, 29), (0.95, 59), (0.99, 299)])
def test_a_percentile_of_too_few_samples_says_so_and_nothing_else(q, needed):
    few, enough = percentile(range(needed - 1), q), percentile(range(needed), q)
    assert (few.value, few.interval, few.is_too_small) == (None, Interval(None, None), True)
    assert few.describe() == f"p{100 * q:g}: n too small ({needed - 1} of {needed})"
    assert (enough.value, enough.is_too_small) == (quantile(range(needed), q), False)
    assert enough.interval == quantile_interval(range(needed), q)


def test_p99_of_ten_samples_is_too_small():
    assert percentile([0.01] * 10, 0.99).describe(1000, "ms") == "p99: n too small (10 of 299)"
    assert percentile([0.01234] * 300, 0.99).describe(1000, "ms") == "p99 12.3 ms (n = 300)"


@pytest.mark.parametrize("q", [0, 1, -0.1, 1.5])
def test_no_number_of_samples_bounds_an_end(q):
    with pytest.raises(InstrumentError, match=f"the {q}-quantile"):
        min_samples_for(q)


# Bootstrap.


def test_bootstrap_is_repeatable_and_wider_than_scipys_bare_bca():
    samples = np.random.default_rng(1).lognormal(0, 0.5, 20)
    found = bootstrap_interval(samples)
    bare = scipy.stats.bootstrap((samples,), np.mean, rng=np.random.default_rng(0)).confidence_interval
    assert found == bootstrap_interval(samples)
    assert found.low < bare.low < samples.mean() < bare.high < found.high
    assert found.high - samples.mean() > samples.mean() - found.low  # skewed, as the samples are
    assert found.high - found.low == pytest.approx(bare.high - bare.low, rel=0.25)


@pytest.mark.parametrize("n", [8, 20])
def test_bootstrap_is_scipys_at_a_level_widened_as_students_t_is(n):
    samples = np.random.default_rng(n).lognormal(0, 0.5, n)
    level = 1 - 2 * scipy.stats.norm.sf(math.sqrt(n / (n - 1)) * scipy.stats.t.ppf(0.975, n - 1))
    theirs = scipy.stats.bootstrap(
        (samples,), np.mean, n_resamples=2000, confidence_level=level, rng=np.random.default_rng(0)
    ).confidence_interval
    assert bootstrap_interval(samples) == Interval(pytest.approx(theirs.low), pytest.approx(theirs.high))


def test_bootstrap_takes_any_statistic_of_an_axis():
    samples = np.random.default_rng(1).normal(0, 2, 40)
    found = bootstrap_interval(samples, np.std)
    assert found.low < 2 < found.high


@settings(deadline=None, max_examples=50)
@given(samples=st.lists(st.one_of(FINITE, st.sampled_from([0.0, 1.0])), max_size=12))
def test_bootstrap_never_warns_and_holds_the_mean(samples):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = bootstrap_interval(samples)
    if found.low is not None:
        slack = 1e-9 * max(map(abs, samples))
        assert found.low <= np.mean(samples) + slack
        assert found.high >= np.mean(samples) - slack
        assert math.isfinite(found.low)
        assert math.isfinite(found.high)


@pytest.mark.parametrize(("n", "expected"), [(7, Interval(None, None)), (8, Interval(2.5, 2.5))])
def test_constant_samples_give_an_interval_without_width(n, expected):
    assert bootstrap_interval([2.5] * n) == expected


def test_a_statistic_that_no_resample_moves_is_unknown():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert bootstrap_interval([1.0] * 9 + [2.0], np.median) == Interval(None, None)
    assert told == []


# Pairs, sides and shares.


def test_the_ratio_of_pairs_is_the_median_of_their_ratios_not_the_ratio_of_medians():
    slow, fast = [2.0, 40.0, 9.0], [1.0, 10.0, 3.0]
    found = paired_ratio(slow, fast)
    assert found.value == pytest.approx(3)
    assert found.num_samples == 3
    assert median(slow) / median(fast) == pytest.approx(3)
    assert paired_ratio([1.0, 4.0, 100.0], [1.0, 2.0, 1.0]).value == pytest.approx(2)


@given(pairs=st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=20))
def test_swapping_the_sides_gives_the_reciprocal(pairs):
    slow, fast = zip(*pairs, strict=True)
    found, swapped = paired_ratio(slow, fast), paired_ratio(fast, slow)
    assert found.value == pytest.approx(1 / swapped.value)
    if found.interval.low is None:
        assert (len(pairs) < 6, swapped.interval) == (True, Interval(None, None))
    else:
        assert found.interval.low == pytest.approx(1 / swapped.interval.high)
        assert found.interval.high == pytest.approx(1 / swapped.interval.low)


@pytest.mark.parametrize(
    ("slow", "fast", "what"),
    [
        ([1.0, 2.0], [1.0], "2 and 1 samples"),
        ([1.0, 0.0, -3.0], [1.0, 1.0, 1.0], r"slow sample 1 is 0.0; a ratio needs positive ones"),
        ([1.0], [-2.0], r"fast sample 0 is -2.0"),
    ],
)
def test_pairs_that_make_no_ratio_are_refused(slow, fast, what):
    with pytest.raises(InstrumentError, match=what):
        paired_ratio(slow, fast)


@pytest.mark.parametrize(("a", "b"), [((1, 2, 3), (4, 5, 6, 7)), ((1, 4, 6), (2, 3, 5)), ((1, 9), (2, 3, 4, 5))])
def test_mann_whitney_is_the_share_of_orders_that_are_as_extreme(a, b):
    """Every way to deal the ranks is as likely when both sides are alike: here they are all counted."""

    def distance(side):
        return abs(sum(x > y for x in side for y in set(a + b) - set(side)) - len(a) * len(b) / 2)

    deals = [distance(side) for side in itertools.combinations(a + b, len(a))]
    assert mann_whitney(a, b) == pytest.approx(sum(each >= distance(a) for each in deals) / len(deals))


def test_mann_whitney_with_ties_is_scipys_and_symmetric():
    a, b = [1.0, 2.0, 2.0, 3.0, 5.0, 8.0], [2.0, 4.0, 6.0, 8.0, 9.0, 9.0]
    assert mann_whitney(a, b) == pytest.approx(scipy.stats.mannwhitneyu(a, b, method="asymptotic").pvalue)
    assert mann_whitney(a, b) == pytest.approx(mann_whitney(b, a))
    assert mann_whitney([1.0] * 5, [1.0] * 5) == 1.0


def test_six_against_six_cannot_be_surer_than_two_orders_in_924():
    assert mann_whitney(range(6), range(6, 12)) == pytest.approx(2 / 924)


@pytest.mark.parametrize(("k", "n"), [(0, 10), (10, 10), (1, 200), (8, 200), (100, 200)])
def test_wilson_against_its_closed_form(k, n):
    z, p = scipy.stats.norm.ppf(0.975), k / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    found = wilson_interval(k, n)
    assert found.low == pytest.approx((middle - half) / (1 + z * z / n), abs=1e-12)
    assert found.high == pytest.approx((middle + half) / (1 + z * z / n))


@pytest.mark.parametrize(("k", "n"), [(-1, 5), (6, 5), (0, -1)])
def test_impossible_counts_are_refused(k, n):
    with pytest.raises(InstrumentError, match=f"{k} successes of {n}"):
        wilson_interval(k, n)


# What becomes of samples: results.


def ttft(*samples):
    return summarise_values(metric("ttft_s"), "arm", samples)


@pytest.mark.parametrize("field", ["value", "low", "high", "samples"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_refused(field, number):
    fields = {"value": 1.0, "low": 1.0, "high": 1.0, "samples": (1.0,)}
    fields[field] = (1.0, number) if field == "samples" else number
    with pytest.raises(InstrumentError, match=r"ttft_s of arm holds -?(nan|inf)"):
        Measurement(metric=metric("ttft_s"), arm="arm", num_observations=1, **fields)


def test_too_few_samples_are_flagged_up_to_the_very_number():
    assert [ttft(*range(n)).is_too_small for n in (0, 1, 4, 5, 6)] == [True, True, True, False, False]
    p90 = [summarise_values(metric("itl_p90_s"), "arm", range(n)).is_too_small for n in (28, 29)]
    assert p90 == [True, False]


@pytest.mark.parametrize("samples", [(), (0.5,), (3.0, 1.0, 2.0, 5.0, 4.0, 6.0)])
def test_a_measurement_is_strict_json_that_explains_itself(samples):
    told = json.loads(json.dumps(ttft(*samples).as_dict(), allow_nan=False))
    assert told["samples"] == list(samples)
    assert told["n"] == len(samples)
    assert told["n_too_small"] == (len(samples) < 5)
    assert (told["metric"], told["unit"], told["better"], told["gate"]) == ("ttft_s", "s", "lower", True)
    assert (told["value"], told["low"], told["high"]) == {
        0: (None,) * 3,
        1: (0.5, None, None),
        6: (3.5, pytest.approx(19 / 14), pytest.approx(79 / 14)),
    }[len(samples)]


def test_a_result_is_strict_json():
    result = BenchmarkResult(
        benchmark="bench_x.py::test_x",
        case="16",
        params={"n": 16},
        measurements=(ttft(1.0, 2.0), ttft()),
        provenance={"commit": None},
    )
    told = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert [each["value"] for each in told["measurements"]] == [1.5, None]
    assert (told["provenance"], told["flags"], told["runs"]) == ({"commit": None}, [], {})
