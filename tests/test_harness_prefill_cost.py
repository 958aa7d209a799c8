"""What a curve T(n) implies, on curves that are known: exact without noise, and honest about the launch floor."""

import math

import numpy as np
import pytest
from test_harness_coverage import coverage

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.prefill_cost import Curve, curve_of, derived_over_direct

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
PREFIX, SUFFIX = 1024, 64

CURVES = {
    "affine": Curve(floor_s=None, overhead_s=0.02, per_token_s=1e-4, per_token2_s=0.0),
    "quadratic": Curve(floor_s=None, overhead_s=0.02, per_token_s=1e-4, per_token2_s=2e-8),
    "floor": Curve(floor_s=0.02, overhead_s=-0.01, per_token_s=1e-4, per_token2_s=0.0),
    "floor, then a parabola": Curve(floor_s=0.02, overhead_s=-0.01, per_token_s=1e-4, per_token2_s=2e-8),
    "all floor": Curve(floor_s=0.02, overhead_s=0.02, per_token_s=0.0, per_token2_s=0.0),
}


def measured(rng, time_s, num=6, host=None):
    host = np.ones(num) if host is None else host
    return (time_s * host * (1 + 0.03 * rng.normal(0, 1, num))).tolist()


# The law, by hand.


def test_a_hit_pays_its_overhead_its_suffix_and_the_attention_to_all():
    curve = CURVES["quadratic"]
    assert curve.full_s(576) == pytest.approx(0.02 + 576e-4 + 2e-8 * 576**2)
    assert curve.hit_s(512, 64) == pytest.approx(0.02 + 64e-4 + 2e-8 * (576**2 - 512**2))
    assert curve.hit_s(512, 64) == pytest.approx(curve.full_s(576) - curve.full_s(512) + 0.02)
    assert curve.saving_s(512, 64) == pytest.approx(512e-4 + 2e-8 * 512**2)
    assert curve.hit_s(0, 64) == curve.full_s(64)
    assert curve.saving_s(0, 64) == 0
    assert curve.why_nothing(0, 64) == "there is no prefix"


def test_a_suffix_below_the_floor_pays_the_floor():
    curve = CURVES["floor"]
    assert curve.hit_s(1024, 64) == 0.02
    assert curve.saving_s(1024, 64) == pytest.approx(-0.01 + 1088e-4 - 0.02)


def test_below_the_knot_nothing_is_saved_and_the_curve_says_so():
    curve = CURVES["floor"]
    assert curve.floor_until_tokens == pytest.approx(300)
    assert curve.saving_s(200, 64) == 0.0
    assert curve.why_nothing(200, 64) == "all 264 tokens run on the launch floor, which lasts until 300 tokens"
    assert curve.breakeven(200, 64).why == f"undefined: {curve.why_nothing(200, 64)}"
    assert curve.breakeven(200, 64).value is None
    assert curve.why_nothing(512, 64) == ""
    assert CURVES["all floor"].why_nothing(4096, 64).endswith("nothing measured leaves it")


def test_breakeven_is_the_prefix_over_the_saving_and_one_request_never_wins():
    for name, curve in CURVES.items():
        found = curve.breakeven(PREFIX, SUFFIX)
        if name != "all floor":
            assert found.value == curve.full_s(PREFIX) / curve.saving_s(PREFIX, SUFFIX) > 1, name
    by_prefix = [CURVES["affine"].breakeven(prefix, SUFFIX).value for prefix in (128, 256, 512)]
    assert by_prefix == sorted(by_prefix, reverse=True)


def test_a_conversation_carries_all_but_the_last_token_of_an_answer():
    turns = CURVES["affine"].conversation(3, 64, 10)
    assert [turn.prompt_tokens for turn in turns] == [64, 138, 212]
    assert [turn.cached_tokens for turn in turns] == [0, 73, 147]
    assert turns[0].saved_so_far_s == 0.0
    assert turns[0].speedup == 1.0
    assert turns[2].saved_so_far_s == pytest.approx((73 + 147) * 1e-4)
    assert turns[2].full_s == pytest.approx(0.02 + 212e-4)
    assert turns[2].carried_s == pytest.approx(0.02 + 65e-4)


def test_a_conversation_reuses_whole_blocks():
    """Prompt 100, output 50, then 50 more: 149 reusable, rounded down."""
    turns = CURVES["affine"].conversation(2, 100, 50, block_tokens=16)
    assert turns[1].cached_tokens == 144
    assert CURVES["affine"].conversation(2, 100, 50)[1].cached_tokens == 149
    assert CURVES["affine"].conversation(2, 100, 0)[1].cached_tokens == 100


# From measured times.


@pytest.mark.parametrize("name", CURVES)
def test_without_noise_the_curve_is_found_exactly(name):
    true = CURVES[name]
    found = curve_of({n: [true.full_s(n)] * 3 for n in LENGTHS})
    for term in ("overhead_s", "per_token_s", "per_token2_s"):
        assert getattr(found, term) == pytest.approx(getattr(true, term), rel=1e-9, abs=1e-15)
    assert found.floor_s == (true.floor_s and pytest.approx(true.floor_s, rel=1e-9))
    assert found.floor_until_tokens == (true.floor_until_tokens and pytest.approx(true.floor_until_tokens, rel=1e-9))
    for prefix in (64, 512, 1024):
        assert found.saving_s(prefix, SUFFIX) == pytest.approx(true.saving_s(prefix, SUFFIX), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", CURVES)
def test_noise_does_not_change_which_terms_there_are(name):
    rng, true = np.random.default_rng(1), CURVES[name]
    found = curve_of({n: measured(rng, true.full_s(n)) for n in LENGTHS})
    assert (found.floor_s is None, found.per_token2_s == 0) == (true.floor_s is None, true.per_token2_s == 0)
    assert found.saving_s(PREFIX, SUFFIX) == pytest.approx(true.saving_s(PREFIX, SUFFIX), rel=0.05)
    assert (found.saving_s(64, 64) == 0) == (true.floor_s is not None)


def test_a_slow_moment_of_the_host_hides_no_bend():
    rng, true = np.random.default_rng(0), CURVES["floor, then a parabola"]
    host = rng.lognormal(0, 0.3, 6)
    found = curve_of({n: measured(rng, true.full_s(n), host=host) for n in LENGTHS})
    assert found.floor_s is not None
    assert found.per_token2_s > 0


def test_one_stalled_run_moves_nothing():
    true = CURVES["affine"]
    times = {n: [true.full_s(n)] * 5 for n in LENGTHS}
    times[2048][2] *= 20
    assert curve_of(times).saving_s(PREFIX, SUFFIX) == pytest.approx(true.saving_s(PREFIX, SUFFIX), rel=1e-6)


def test_two_lengths_make_a_line_and_a_late_rise_a_curve():
    line = curve_of({64: [0.0264], 1088: [0.1288]})
    assert line.saving_s(PREFIX, SUFFIX) == pytest.approx(0.1024)
    late = curve_of({n: [max(0.02, 1e-4 * (n - 824))] * 3 for n in LENGTHS})
    assert late.floor_s == pytest.approx(0.02)
    assert late.full_s(2048) == pytest.approx(0.1224)


def test_times_that_fall_with_the_tokens_are_all_floor():
    assert curve_of({16: [0.03], 64: [0.02], 256: [0.01]}).floor_until_tokens == math.inf


@pytest.mark.parametrize(
    ("lengths", "named"),
    [
        ({16: [1.0]}, "two lengths, not"),
        ({16: [1.0], 32: []}, r"not \[\] of 32"),
        ({16: [1.0], 32: [0.0]}, r"not \[0.0\] of 32"),
        ({16: [1.0], 0: [1.0]}, "of 0"),
        ({16: [1.0], 32: [math.inf]}, "time of 32 tokens 0 is inf"),
    ],
)
def test_bad_times_are_named(lengths, named):
    with pytest.raises(InstrumentError, match=named):
        curve_of(lengths)


def test_bad_counts_are_named():
    with pytest.raises(InstrumentError, match="suffix_tokens is 0; the least is 1"):
        CURVES["affine"].hit_s(16, 0)
    with pytest.raises(InstrumentError, match="num_turns is 0; the least is 1"):
        CURVES["affine"].conversation(0, 64, 10)


# Derived against direct.


def experiment_of(name, *, num=6, host_sd=0.0, kept=0.0):
    """A store that keeps to the law, but for a share `kept` of the saving that it eats."""
    true = CURVES[name]

    def experiment(rng):
        host = 1 + host_sd * rng.normal(0, 1, num)
        lengths = {n: measured(rng, true.full_s(n), num, host) for n in LENGTHS}
        full = measured(rng, true.full_s(PREFIX + SUFFIX), num, host)
        hit = measured(rng, true.hit_s(PREFIX, SUFFIX) + kept * true.saving_s(PREFIX, SUFFIX), num, host)
        short = ([0.03] * num, [0.03] * num)
        return {name: (derived_over_direct(lengths, [16, PREFIX], SUFFIX, [short[0], full], [short[1], hit]), 1.0)}

    return experiment


@pytest.mark.parametrize("name", ["affine", "floor, then a parabola"])
def test_a_store_that_keeps_to_the_law_agrees_and_one_that_does_not_is_found(name):
    ((found, _),) = experiment_of(name)(np.random.default_rng(0)).values()
    assert found.low < 1 < found.high
    ((broken, _),) = experiment_of(name, kept=0.25)(np.random.default_rng(0)).values()
    assert 1.2 < broken.low < 4 / 3 < broken.high


def test_without_noise_the_two_are_equal_for_the_longest_prefix():
    true = CURVES["quadratic"]
    lengths = {n: [true.full_s(n)] * (12 if n == 64 else 6) for n in (64, 512, 576, 1024, 1088)}
    full = [[true.full_s(p + 64)] * 6 for p in (1024, 512)]
    hit = [[true.hit_s(p, 64)] * 6 for p in (1024, 512)]
    found = derived_over_direct(lengths, [1024, 512], 64, full, hit)
    assert [found.value, found.low, found.high] == pytest.approx([1, 1, 1], rel=1e-9)


def test_a_store_that_returns_nothing_has_no_ratio():
    rng, true = np.random.default_rng(0), CURVES["affine"]
    lengths = {n: measured(rng, true.full_s(n)) for n in LENGTHS}
    full, hit = (measured(rng, true.full_s(1088)) for _ in range(2))
    found = derived_over_direct(lengths, [1024], 64, [full], [hit])
    assert found.value is None
    assert found.why.startswith("undefined: a hit saved -")


def test_few_samples_make_no_interval_and_uneven_ones_are_refused():
    true = CURVES["affine"]
    lengths = {n: [true.full_s(n)] * 2 for n in LENGTHS}
    found = derived_over_direct(lengths, [1024], 64, [[true.full_s(1088)] * 2], [[true.hit_s(1024, 64)] * 2])
    assert (found.value, found.low) == (pytest.approx(1), None)
    assert found.why.startswith("too few samples")
    with pytest.raises(InstrumentError, match="multiple"):
        derived_over_direct(lengths, [1024], 64, [[1.0] * 3], [[0.5] * 3])
    with pytest.raises(InstrumentError, match="3 full and 2 hit"):
        derived_over_direct(lengths, [1024], 64, [[1.0] * 3], [[0.5] * 2])
    with pytest.raises(InstrumentError, match="a row"):
        derived_over_direct(lengths, [], 64, [], [])


@pytest.mark.slow
@pytest.mark.simulated
@pytest.mark.parametrize("host_sd", [0.0, 0.1])
@pytest.mark.parametrize("num", [6])
@pytest.mark.parametrize("name", [name for name in CURVES if name != "all floor"])
def test_the_interval_holds_one_as_often_as_it_says(name, num, host_sd):
    (share,) = coverage(experiment_of(name, num=num, host_sd=host_sd), 150).values()
    assert share >= 88
