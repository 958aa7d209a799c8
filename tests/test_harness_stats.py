"""Quantiles and their intervals, against a slow computation in exact fractions and against simulation."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.metrics import metric
from benchmarks.harness.results import BenchmarkResult, Measurement, summarise_values
from benchmarks.harness.stats import Interval, min_samples_for, quantile, quantile_interval, relative_spread

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
        assert found == slow_interval(n, Fraction(q), Fraction(confidence))


def slow_interval(n, q, confidence):
    """The ranks that bound the q-quantile of n samples: each end misses with at most half of what is left.

    The number of samples below the quantile is binomial. The sample of rank r lies above it when fewer than r do,
    and below it when at least r do.
    """
    tail = (1 - confidence) / 2
    mass = [math.comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(n + 1)]
    low = [r for r in range(1, n + 1) if sum(mass[:r]) <= tail]
    high = [r for r in range(1, n + 1) if sum(mass[r:]) <= tail]
    return Interval(max(low, default=None), min(high, default=None))


@pytest.mark.parametrize(("n", "q"), [(6, 0.5), (10, 0.5), (41, 0.5), (60, 0.9)])
def test_a_95_percent_interval_holds_the_truth_that_often(n, q):
    """On uniform samples, where the q-quantile is q itself. Which ranks bound it depends on n alone."""
    ranks = quantile_interval(range(n), q)
    ordered = np.sort(np.random.default_rng(7).random((2000, n)), axis=1)
    holds = (ordered[:, ranks.low] <= q) & (q <= ordered[:, ranks.high])
    assert holds.mean() >= 0.935


@given(samples=st.lists(FINITE, min_size=6, max_size=60), q=st.sampled_from([0.1, 0.5, 0.9]))
def test_an_interval_holds_its_own_quantile_and_its_ends_are_samples(samples, q):
    interval, value = quantile_interval(samples, q), quantile(samples, q)
    assert interval.low is None or (interval.low in samples and interval.low <= value)
    assert interval.high is None or (interval.high in samples and interval.high >= value)


def test_one_bad_sample_does_not_inflate_the_spread():
    assert relative_spread([9.0, 10.0, 11.0]) == pytest.approx(0.1)
    assert relative_spread([9.0, 10.0, 10.0, 11.0, 1000.0]) == pytest.approx(0.1)
    assert relative_spread([5.0, 5.0]) == 0.0
    assert relative_spread([-1.0, 0.0, 1.0]) is None


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
    assert (told["value"], told["low"], told["high"]) == {0: (None,) * 3, 1: (0.5, None, None), 6: (3.5, 1.0, 6.0)}[
        len(samples)
    ]


def test_a_result_is_strict_json():
    result = BenchmarkResult(
        benchmark="bench_x.py::test_x",
        case="16",
        params={"n": 16},
        measurements=(ttft(1.0, 2.0), ttft()),
        provenance={"commit": None},
        notes=("a note",),
    )
    told = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert [each["value"] for each in told["measurements"]] == [1.5, None]
    assert (told["provenance"], told["notes"]) == ({"commit": None}, ["a note"])
