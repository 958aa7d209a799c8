"""Breakeven by hand: exact without noise, undefined where nothing is surely saved, intervals that hold the truth."""

import numpy as np
import pytest
from test_harness_coverage import coverage

from benchmarks.harness.breakeven import (
    BEYOND,
    batched_breakeven,
    breakeven,
    effective_speedup,
    expected_ttft_s,
    memory_saved_bytes,
)
from benchmarks.harness.errors import InstrumentError

SIZES = (1, 2, 4, 8)


def noisy(rng, time_s, num=6, sigma=0.03, noise=None):
    draw = noise or (lambda rng, size: rng.normal(0, 1, size))
    return (time_s * (1 + sigma * draw(rng, num))).tolist()


def skewed(rng, size):
    """Of mean 0, standard deviation 1 and median -0.0818, with a long tail upwards, as timings have."""
    return (rng.gamma(4, 1, size) - 4) / 2


# One by one.


def test_breakeven_is_the_prefix_over_what_a_hit_saves():
    found = breakeven([3.0] * 6, [4.0] * 6, [1.5] * 6)
    assert (found.value, found.low, found.high, found.why) == (3 / 2.5, 3 / 2.5, 3 / 2.5, "")


def test_medians_keep_one_stalled_sample_out_of_it():
    found = breakeven([3.0] * 9, [4.0] * 8 + [90.0], [1.5] * 9)
    assert found.value == found.low == found.high == 1.2


def test_the_interval_holds_the_truth_and_is_the_same_on_every_call():
    rng = np.random.default_rng(0)
    sides = [noisy(rng, time_s) for time_s in (0.1, 0.13, 0.035)]
    found = breakeven(*sides)
    assert found == breakeven(*sides)
    assert 0.95 < found.low < 0.1 / 0.095 < found.high < 1.15


def test_what_may_save_nothing_is_undefined():
    rng = np.random.default_rng(0)
    found = breakeven(noisy(rng, 0.1), noisy(rng, 0.13), noisy(rng, 0.13))
    assert (found.value, found.low, found.high) == (None, None, None)
    assert found.why.startswith("undefined: a hit saves -")
    assert breakeven([0.1] * 6, [0.13] * 6, [0.13] * 6).why.startswith("undefined: ")


def test_what_never_wins_is_none_in_range():
    assert breakeven([3.0] * 6, [4.0] * 6, [5.0] * 6).why.startswith("none in range: a hit takes longer")
    assert breakeven([3.0] * 6, [4.0] * 6, [3.999] * 6).why == "none in range: 3000 requests, more than 1024"
    assert breakeven([3.0] * 6, [4.0] * 6, [3.999] * 6, most=4000).value == pytest.approx(3000)


def test_a_value_of_one_or_less_is_told_as_it_is():
    assert breakeven([1.0] * 6, [4.0] * 6, [2.0] * 6).value == 0.5


def test_four_samples_make_a_value_without_an_interval():
    found = breakeven([3.0] * 4, [4.0] * 4, [1.5] * 4)
    assert (found.value, found.low, found.high) == (1.2, None, None)
    assert found.why == "too few samples for an interval: it takes 5"
    assert breakeven([3.0] * 4, [4.0] * 4, [4.0] * 4).why.startswith("undefined: too few samples")


@pytest.mark.parametrize(
    ("sides", "named"),
    [
        (([1.0], [1.0, 2.0], [1.0]), "{'prefix': 1, 'full': 2, 'hit': 1}"),
        (([], [], []), "{'prefix': 0"),
        (([1.0, 2.0], [1.0, float("nan")], [1.0, 2.0]), "full time 1 is nan"),
        (([1.0, 2.0], [1.0, 2.0], [1.0, 0.0]), "hit time 1 is 0.0"),
    ],
)
def test_bad_sides_are_named(sides, named):
    with pytest.raises(InstrumentError, match=named.replace("{", r"\{")):
        breakeven(*sides)


# Many at once.


def windows(*, unshared=0.04, shared=0.02, prefix=0.1, num=6):
    return (
        [[unshared * n + 0.02] * num for n in SIZES],
        [[shared * n + 0.02] * num for n in SIZES],
        [[prefix] * num for _ in SIZES],
    )


def test_batched_breakeven_is_where_the_line_is_zero():
    found = batched_breakeven(SIZES, *windows())
    assert [found.value, found.low, found.high] == pytest.approx([5, 5, 5], abs=1e-9)


def test_one_request_that_wins_already_is_told_as_it_is():
    assert batched_breakeven(SIZES, *windows(prefix=0.01)).value == pytest.approx(0.5, abs=1e-9)
    unshared, shared, prefix = windows(prefix=0.01)
    unshared = [[each + 0.02 for each in row] for row in unshared]
    assert batched_breakeven(SIZES, unshared, shared, prefix).value == pytest.approx(-0.5, abs=1e-9)


def test_batches_that_never_win_say_why():
    rng = np.random.default_rng(0)
    alike = [noisy(rng, 0.04 * n) for n in SIZES]
    assert batched_breakeven(SIZES, alike, alike[:], windows()[2]).why.startswith("undefined: ")
    assert "the less they save" in batched_breakeven(SIZES, *windows(shared=0.06)).why
    far = batched_breakeven(SIZES, *windows(prefix=0.02 * (BEYOND * 8 + 1)))
    assert far.why == "none in range: 33 requests, where the most measured are 8"
    assert batched_breakeven(SIZES, *windows(prefix=0.02 * (BEYOND * 8 - 1))).value == pytest.approx(31)


def test_few_samples_of_batches_make_no_interval():
    found = batched_breakeven(SIZES, *windows(num=2))
    assert (found.value, found.low, found.high) == (pytest.approx(5), None, None)
    assert batched_breakeven(SIZES, *windows(num=2, shared=0.06)).why.startswith("undefined: ")


def test_batches_need_two_sizes_with_a_row_each():
    for sizes in ((1, 2), (4, 4, 4, 4)):
        with pytest.raises(InstrumentError, match="two sizes"):
            batched_breakeven(sizes, *windows())


# Memory, and what a hit rate is worth.


def test_all_but_one_copy_of_a_prefix_are_saved():
    assert memory_saved_bytes(8, 512, 36_864) == 7 * 512 * 36_864
    assert memory_saved_bytes(1, 512, 36_864) == 0
    with pytest.raises(InstrumentError, match="'num_requests': 0"):
        memory_saved_bytes(0, 512, 36_864)


def test_a_hit_rate_is_worth_what_its_hits_save():
    assert expected_ttft_s(0.25, 4.0, 1.0) == 3.25
    assert effective_speedup(0.0, 5.0) == effective_speedup(0.7, 1.0) == 1
    assert effective_speedup(1.0, 5.0) == 5
    assert effective_speedup(0.9, 5.0) == pytest.approx(1 / (0.1 + 0.18))
    assert effective_speedup(0.9, 1e12) == pytest.approx(10)
    for rate in (-0.01, 1.01, float("nan")):
        with pytest.raises(InstrumentError, match="a hit rate is a share"):
            effective_speedup(rate, 2.0)
        with pytest.raises(InstrumentError, match="a hit rate is a share"):
            expected_ttft_s(rate, 2.0, 1.0)
    with pytest.raises(InstrumentError, match="not 0"):
        effective_speedup(0.5, 0)


# The intervals hold the truth as often as they say.


def one_by_one(num, noise, host=0.0):
    """Times of 3 % noise beneath what a sample's times share; the median of skewed noise is none of its mean."""

    def experiment(rng):
        shared = 1 + host * rng.normal(0, 1, num)
        sides = [(shared * noisy(rng, time_s, num, noise=noise)).tolist() for time_s in (0.1, 0.13, 0.035)]
        return {"breakeven": (breakeven(*sides), 0.1 / 0.095)}

    return experiment


def at_once(num, noise):
    def experiment(rng):
        sides = [[noisy(rng, each * n + 0.02, num, noise=noise) for n in SIZES] for each in (0.04, 0.02)]
        return {"batched": (batched_breakeven(SIZES, *sides, [noisy(rng, 0.1, num) for _ in SIZES]), 5.0)}

    return experiment


@pytest.mark.slow
@pytest.mark.simulated
@pytest.mark.parametrize("noise", [None, skewed], ids=["normal", "skewed"])
@pytest.mark.parametrize("num", [5, 12])
@pytest.mark.parametrize("kind", [one_by_one, at_once])
def test_intervals_cover_what_they_say(kind, num, noise):
    for name, share in coverage(kind(num, noise), 400).items():
        assert 91 <= share <= 99.5, name


@pytest.mark.slow
@pytest.mark.simulated
def test_noise_that_a_sample_shares_only_widens_the_interval():
    assert coverage(one_by_one(12, None, host=0.1), 200)["breakeven"] >= 97


@pytest.mark.parametrize("sizes", [[0, 1], [-1, 2], [float("nan"), 1], [True, 2]])
def test_sizes_are_numbers_of_requests(sizes):
    with pytest.raises(InstrumentError, match="sizes are numbers of requests"):
        batched_breakeven(sizes, [[1.0] * 5] * 2, [[1.0] * 5] * 2, [[1.0] * 5] * 2)
