"""How a token's cost grows, on scripted times: constant costs have no slope, affine data are not linear."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.fits import growth
from benchmarks.harness.slopes import (
    batch_knee_requests,
    batch_line,
    batch_scaling,
    itl_growth,
    itl_line,
    itl_ratio,
    itl_ratio_growth,
    itl_ratio_slope,
    itl_slope_s,
    read_exponent,
    robust_line,
    speedup_if_constant,
    step_overhead_s,
    step_per_request_s,
    ttft_coefficient,
    ttft_crossover_tokens,
    ttft_degree,
    ttft_growth,
)
from benchmarks.harness.timing import RunTiming, Stamp, speedup


def run(ttft_s, gaps_s=(), *, prompt=16):
    """A run whose tokens come one by one at exactly these times."""
    times = itertools.accumulate([ttft_s, *gaps_s])
    stamps = tuple(Stamp(at_ns=round(at_s * 1e9), num_tokens=1) for at_s in times)
    return RunTiming(sent_ns=0, stamps=stamps, num_prompt_tokens=prompt, finish_reason="length")


def cached(num_tokens, *, prefill_s=2.0, itl_s=0.25):
    return run(prefill_s, [itl_s] * (num_tokens - 1))


def constant(num_tokens, *, step_s=2.0):
    """A naive path whose every step costs the same."""
    return run(step_s, [step_s] * (num_tokens - 1))


def growing(num_tokens, *, first_s=2.0, more_s=0.01):
    return run(first_s, [first_s + more_s * place for place in range(1, num_tokens)])


# r(L) against the speedup of totals.


def test_a_constant_naive_cost_has_no_slope_although_its_speedup_widens():
    totals = [speedup(constant(n).e2e_s, cached(n).e2e_s) for n in (8, 16, 32, 64)]
    assert totals == sorted(totals)
    assert totals[-1] > 1.5 * totals[0]
    for n in (8, 16, 32, 64):
        slow, fast = constant(n), cached(n)
        assert itl_ratio_slope(slow, fast) == pytest.approx(0, abs=1e-9)
        assert itl_ratio_growth(slow, fast) == pytest.approx(1)
        assert itl_ratio(slow, fast) == pytest.approx(8)
        assert speedup_if_constant(slow, fast) == pytest.approx(speedup(slow.e2e_s, fast.e2e_s))


def test_a_growing_naive_cost_has_the_slope_that_it_grows_by():
    slow, fast = growing(64), cached(64)
    assert itl_ratio_slope(slow, fast) == pytest.approx(1000 * 0.01 / 0.25)
    assert itl_ratio(slow, fast) == pytest.approx((2.0 + 63 * 0.01) / 0.25)
    assert itl_ratio_growth(slow, fast) == pytest.approx((2.0 + 63 * 0.01) / (2.0 + 0.01))
    assert speedup(slow.e2e_s, fast.e2e_s) > speedup_if_constant(slow, fast)


@pytest.mark.parametrize(("tokens", "cached_s", "expected"), [(8, 4.27, 4.02), (16, 6.35, 5.41), (32, 11.34, 6.07)])
def test_the_published_totals_at_a_constant_naive_cost(tokens, cached_s, expected):
    """The study's own arithmetic: its first eight naive tokens took 17.19 s."""
    slow = constant(tokens, step_s=17.19 / 8)
    fast = run(2.0, [(cached_s - 2.0) / (tokens - 1)] * (tokens - 1))
    assert speedup_if_constant(slow, fast) == pytest.approx(expected, abs=0.01)


def test_pairs_of_other_contexts_have_no_ratio():
    assert itl_ratio(growing(8), run(2.0, [0.25] * 7, prompt=32)) is None
    assert itl_ratio(growing(8), cached(9)) is None
    assert itl_ratio(growing(8), run(2.0, [0.25] * 6 + [0.0])) is None


# ITL against context.


def test_itl_slope_is_told_per_thousand_tokens_of_context():
    line = itl_line(run(1.0, [0.1 + 0.00002 * context for context in range(17, 48)]))
    assert line.at(0) == pytest.approx(0.1)
    assert (line.x_min, line.x_max) == (17, 47)
    assert itl_slope_s(run(1.0, [0.1 + 0.00002 * context for context in range(17, 48)])) == pytest.approx(0.02)


def test_one_stalled_step_turns_no_line():
    gaps = [0.1] * 40
    gaps[20] = 5.0
    assert itl_slope_s(run(1.0, gaps)) == pytest.approx(0)
    assert itl_growth(run(1.0, gaps)) == pytest.approx(1)


@pytest.mark.parametrize(
    "timing",
    [run(1.0), run(1.0, [0.1]), RunTiming(sent_ns=0, stamps=(Stamp(1, 1), Stamp(2, 1), Stamp(3, 1)))],
    ids=["one token", "one gap", "no prompt length"],
)
def test_what_two_places_do_not_determine_is_none(timing):
    assert itl_line(timing) is itl_slope_s(timing) is itl_growth(timing) is itl_ratio(timing, timing) is None


@given(st.lists(st.floats(0.001, 10), min_size=2, max_size=30), st.floats(-0.01, 0.01))
def test_a_tilt_of_all_points_is_added_to_the_slope(ys, tilt):
    xs = range(len(ys))
    tilted = [y + tilt * x for x, y in zip(xs, ys, strict=True)]
    assert robust_line(xs, tilted).slope == pytest.approx(robust_line(xs, ys).slope + tilt, abs=1e-9)


# TTFT against the prompt.

LENGTHS = (16, 32, 64, 128, 256, 512)


def sample(curve):
    return [run(curve(length), prompt=length) for length in LENGTHS]


def test_affine_prefill_is_affine_and_not_linear():
    runs = [each for bump in (0.999, 1.0, 1.001) for each in sample(lambda p, k=bump: k * (2.247 + 0.00956 * p))]
    assert ttft_degree(runs) == 1
    assert growth([each.num_prompt_tokens for each in runs], [each.ttft_s for each in runs]) == "affine"
    one = sample(lambda p: 2.247 + 0.00956 * p)
    assert ttft_coefficient(0, one) == pytest.approx(2.247)
    assert ttft_coefficient(1, one) == pytest.approx(0.00956)
    assert ttft_crossover_tokens(one) == pytest.approx(2.247 / 0.00956)
    assert ttft_coefficient(2, one) is None


def test_a_quadratic_with_a_fixed_overhead_is_still_found_quadratic():
    def curve(p):
        return 0.5 + 0.001 * p + 2e-6 * p * p

    runs = [each for bump in (0.99, 1.0, 1.01) for each in sample(lambda p, k=bump: k * curve(p))]
    assert ttft_degree(runs) == 2
    one = sample(curve)
    assert [ttft_coefficient(power, one, 2) for power in (0, 1, 2)] == pytest.approx([0.5, 0.001, 2e-6])
    crossing = ttft_crossover_tokens(one, 2)
    assert 0.001 * crossing + 2e-6 * crossing**2 == pytest.approx(0.5)


def test_growth_of_ttft_is_the_longest_over_the_shortest():
    assert ttft_growth(sample(lambda p: p / 16)) == pytest.approx(32)
    assert ttft_growth([]) is None


def test_too_few_lengths_and_falling_times_have_no_crossover():
    assert ttft_coefficient(0, sample(lambda p: 1.0)[:1]) is None
    assert ttft_crossover_tokens(sample(lambda p: 1.0 - 0.001 * p)) is None


@pytest.mark.parametrize("power", [0, 1, 2, 0.5])
def test_the_exponent_of_reading_is_the_power_that_time_grows_by(power):
    assert read_exponent(sample(lambda context: 0.001 * context**power)) == pytest.approx(power, abs=1e-6)


def test_an_overhead_lowers_the_exponent_and_one_length_has_none():
    assert 0 < read_exponent(sample(lambda context: 0.1 + 0.001 * context)) < 1
    assert read_exponent(sample(lambda context: 1.0)[:1]) is None
    assert read_exponent([run(1.0, prompt=8), run(2.0, prompt=8)]) is read_exponent([]) is None


# A decode step against the number of requests in it.


def batches(step_s, sizes=(1, 2, 4, 8, 16), *, num_tokens=5, prefill_s=0.125):
    """A window for each size, whose every decode step takes `step_s(size)`."""
    return [[run(prefill_s, [step_s(size)] * (num_tokens - 1)) for _ in range(size)] for size in sizes]


def test_an_affine_step_has_its_coefficients_its_knee_and_its_scaling():
    windows = batches(lambda size: 0.25 + 0.03125 * size)
    line = batch_line(windows)
    assert (line.intercept, line.slope, line.x_min, line.x_max) == pytest.approx((0.25, 0.03125, 1, 16))
    assert (step_overhead_s(windows), step_per_request_s(windows)) == pytest.approx((0.25, 0.03125))
    assert batch_knee_requests(windows) == pytest.approx(8)
    assert batch_scaling(windows) == pytest.approx(16 * (0.25 + 0.03125) / (0.25 + 0.5))


def test_at_the_knee_half_of_all_possible_throughput_is_reached():
    def throughput(size, step_s=lambda size: 0.25 + 0.03125 * size):
        return batch_scaling(batches(step_s, (1, size))) / step_s(1)

    assert throughput(8) == pytest.approx(0.5 / 0.03125)


def test_a_prefill_is_no_part_of_a_step():
    for figure in (step_overhead_s, step_per_request_s, batch_knee_requests, batch_scaling):
        short, long = (figure(batches(lambda size: 0.25 + 0.03125 * size, prefill_s=p)) for p in (0.01, 9.0))
        assert short == pytest.approx(long)


@pytest.mark.parametrize("step_s", [lambda size: 0.25, lambda size: 0.5 - 0.015625 * size])
def test_a_step_that_does_not_grow_has_no_knee(step_s):
    assert batch_knee_requests(batches(step_s)) is None
    assert batch_scaling(batches(step_s)) == pytest.approx(16 * step_s(1) / step_s(16))


def test_a_step_without_an_overhead_has_no_knee_and_does_not_scale():
    windows = batches(lambda size: 0.25 * size)
    assert batch_knee_requests(windows) is None
    assert batch_scaling(windows) == pytest.approx(1)


def test_windows_without_a_gap_have_no_line():
    windows = batches(lambda size: 0.25, num_tokens=1)
    assert batch_line(windows) is step_overhead_s(windows) is step_per_request_s(windows) is None
    assert batch_knee_requests(windows) is batch_scaling(windows) is batch_scaling([]) is None
    assert batch_line(batches(lambda size: 0.25, (4,))) is None
