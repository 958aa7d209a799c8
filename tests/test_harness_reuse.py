"""Reuse of prefixes on a scripted subject with a store of its own: who asks what, what is found, and every number."""

import contextlib
import re
from collections import Counter
from types import SimpleNamespace

import pytest
from sample_results import PROVENANCE
from sample_stores import BLOCK, FOUR, MS, REUSE, Clock, Subject, found, in_states, measuring

from benchmarks.harness.archive import read_result
from benchmarks.harness.declaration import Metric
from benchmarks.harness.doubts import doubts_of_cell
from benchmarks.harness.errors import InstrumentError, UndeclaredMetricError, WrongOutputError
from benchmarks.harness.loop import Enough, Plan
from benchmarks.harness.metrics import METRICS, metric
from benchmarks.harness.report import render
from benchmarks.harness.results import BenchmarkResult
from benchmarks.harness.reuse_metrics import mean_ttft_s, ttft_floor_s, ttft_floor_until_tokens, ttft_over_expected
from benchmarks.harness.scenes import STATES, Prompts, reusing
from benchmarks.harness.slowed import Slowed
from benchmarks.harness.stepwise import Stepwise, StoppableClock
from benchmarks.harness.timing import Emission, RunTiming, Stamp

SPEEDS = (1, 3, 2, 5, 4, 6)
AMONG = {
    ("reuse_speedup", "primed over unseen"): 14 / 8,
    ("reuse_speedup_proxy", "suffix over unseen"): 14 / 6,
    ("cold_over_unseen", "cold against unseen"): 1.0,
    ("ttft_saved_s", "unseen less primed"): 0.006,
    ("prefill_removed_s", "unseen less suffix"): 0.008,
    ("kv_read_added_s", "primed less suffix"): 0.002,
}
NAMES = tuple(name for name, _ in AMONG)


# What is asked and what is found.


@pytest.mark.parametrize(
    ("state", "before", "asked", "hits"),
    [
        ("cold", [], "PS", 0),
        ("primed", ["P"], "PS", 8),
        ("unseen", ["P"], "other", 0),
        ("suffix", ["P"], "S", 0),
        ("prefix", [], "P", 0),
        ("warm", ["PS"], "PS", 8),
    ],
)
def test_each_state_has_its_prompts_and_its_hits(state, before, asked, hits):
    """A prefix of 9 tokens in blocks of 4; 9 + 4 = 13 with the suffix, whose last token has to be run."""
    states = {each: each for each in STATES}
    (act,) = reusing(
        Prompts(test="t", vocab_size=10**6), states, lambda arm: Subject(Clock()).num_reusable, prefix_tokens=[9],
        suffix_tokens=4, new_tokens=2,
    )  # fmt: skip
    whole, other = (act.scene(each, "sample", 3).asks[0].prompt_ids for each in ("primed", "unseen"))
    parts = {"P": whole[:9], "S": whole[9:], "PS": whole, "other": other}
    scene = act.scene(state, "sample", 3)
    assert list(scene.before) == [parts[each] for each in before]
    assert [(ask.prompt_ids, ask.new_tokens, ask.request_id) for ask in scene.asks] == [
        (parts[asked], 2, "sample-3-load-0-place-0")
    ]
    assert (scene.hits, scene.how) == ((12 if state == "warm" else hits,), "apart")
    assert (len(whole), len(other), set(whole) & set(other)) == (13, 13, set())


def test_before_each_run_all_is_forgotten_then_served_then_measured_inside_the_turn():
    measure, subject = measuring(in_states("primed", "cold", "warm"), "ttft_s", num_samples=2, num_warmups=1)
    measure.reuse(**REUSE)
    of = {told[-1][1]: told for told in subject.turns[1:]}  # the first turn is that of the proof
    assert {arm: [what for what, *_ in told] for arm, told in of.items()} == {
        "primed": ["forget", "stream", "stream"],
        "cold": ["forget", "stream"],
        "warm": ["forget", "stream", "stream"],
    }
    (_, _, served, before), (_, _, asked, after) = of["primed"][1:]
    assert (len(served), asked[:8], after - before) == (8, served, 1), "one read of the clock: the run's beginning"
    assert of["cold"][0][3] == of["cold"][1][3] - 1
    assert measure._loop._clock.num_reads == 3 * (2 + 1) * 2, "nothing else reads it"


def test_arms_of_a_sample_share_prompts_and_nothing_else_does():
    measure, subject = measuring(in_states(*FOUR, "warm"), "ttft_s", num_samples=3, num_warmups=2)
    measure.reuse(**REUSE)
    measure, other = measuring(in_states("cold"), "ttft_s", name="another test")
    measure.reuse(**REUSE)
    whole = subject.asked("cold")
    assert whole == subject.asked("primed") == subject.asked("warm")
    assert [prompt[:8] for prompt in whole] == subject.asked("prefix")
    assert [prompt[8:] for prompt in whole] == subject.asked("suffix")
    proofs = [told[2] for told in subject.log if told[0] == "proof"]
    begun = [*whole, *subject.asked("unseen"), *subject.asked("suffix"), *proofs, *other.asked()]
    assert len(whole) == 2 + 3
    assert len(proofs) == len(other.asked()) == 1
    assert len({prompt[:1] for prompt in begun}) == len(begun), "no two share a beginning, warm-ups and proofs neither"


def test_the_option_state_stays_with_the_instrument():
    plan = Plan(name="x", quantities=("ttft_s",), arms={"a": {"state": "cold", "cache": "paged"}, "b": {}})
    assert (plan.arms, plan.states) == ({"a": {"cache": "paged"}, "b": {}}, {"a": "cold"})
    measure, _ = measuring(in_states("cold"), "ttft_s")
    assert measure.arms == {"cold": {"name": "cold"}}


def test_the_runs_tell_which_sample_and_load_they_are_of():
    measure, _ = measuring(in_states("primed", "unseen", "suffix"), "derived_over_direct", num_samples=2)
    measure.reuse([8, 16], 4)
    told = [(run.request_id, run.num_prompt_tokens, run.num_cached) for run in measure.runs["primed"]]
    assert told == [
        (f"sample-{sample}-load-{load}-place-0", length + 4, length)
        for sample in (0, 1)
        for load, length in ((0, 8), (1, 16))
    ]


# What is no reuse.


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"found": lambda n: 0}, "primed found 0 of 12 tokens in a cache and ran 12, where it had to find 8 and run 4"),
        ({"said": lambda n: 0}, "primed found 0 of 12"),
        ({"found": lambda n: max(0, n - BLOCK)}, "primed found 4 of 12"),
        ({"said": lambda n: n + 1}, r"\w+ found \d+ of \d+"),
        ({"said": lambda n: n or 1}, r"\w+ found 1 of \d+"),
    ],
)
def test_a_store_that_returns_something_else_shows_no_saving(wrong, message):
    measure, _ = measuring(in_states("primed", "unseen"), "reuse_speedup", "ttft_saved_s", **wrong)
    with pytest.raises(WrongOutputError, match=message):
        measure.reuse(**REUSE)
    assert measure.measurements == []
    with pytest.raises(UndeclaredMetricError, match="not measured: reuse_speedup, ttft_saved_s"):
        measure.close()


def test_a_source_that_does_not_tell_its_hits_shows_none():
    measure, _ = measuring(in_states("cold"), "ttft_s")
    measure._loop._subject.stream = lambda *_, **__: iter([Emission(token_ids=(1,), finish_reason="length")])
    with pytest.raises(WrongOutputError, match="cold found None of 12 tokens in a cache and ran None"):
        measure.reuse(**REUSE)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"logits_off": 0.0036}, "primed, a prefix of 8: the logits behind a cached prefix are 0.0036 from those"),
        ({"logits_off": 1.1e-4}, "more than the 0.0001 that rounding explains"),
        ({"logits_off": float("nan")}, "the logits behind a cached prefix"),
        ({"logits_off": 0.09, "relative_tolerance": 0.01}, "more than the 0.08 that rounding explains"),
        ({"num_run_off": 8}, "12 positions ran behind a prefix that was served before, not 4"),
        ({"num_run_off": -4}, "0 positions ran"),
    ],
)
def test_wrong_logits_are_refused_before_anything_is_timed(wrong, message):
    measure, subject = measuring(in_states("unseen", "primed"), "reuse_speedup", num_warmups=1, **wrong)
    with pytest.raises(WrongOutputError, match=re.escape(message)):
        measure.reuse(**REUSE)
    assert [what for what, *_ in subject.log] == ["proof"]
    assert measure._loop._clock.num_reads == 0


@pytest.mark.parametrize("right", [{"logits_off": 0.9e-4}, {"logits_off": -0.07, "relative_tolerance": 0.01}])
def test_logits_within_rounding_are_right_and_proven_once_for_each_length_in_a_turn(right):
    measure, subject = measuring(in_states("primed", "unseen", "suffix"), "derived_over_direct", **right)
    measure.reuse([16, 8], 4)
    assert [len(told[0][2]) for told in subject.turns[:2]] == [20, 12]
    assert [told[0] for told in subject.log].count("proof") == 2


def test_arms_with_one_prompt_have_to_say_the_same():
    measure, _ = measuring(in_states("cold") | {"primed": {"state": "primed", "name": "p", "other": 1}}, "ttft_s")
    with pytest.raises(WrongOutputError, match="primed and cold differ at token 0"):
        measure.reuse(**REUSE)
    measure, _ = measuring(in_states("cold") | {"unseen": {"state": "unseen", "name": "u", "other": 1}}, "ttft_s")
    measure.reuse(**REUSE)


# Numbers of one length.


def test_every_number_among_the_states_of_a_sample():
    """Whatever the machine does from sample to sample: ratios do not move, times do."""
    measure, _ = measuring(in_states(*FOUR), *NAMES, num_samples=6, speeds=SPEEDS)
    measure.reuse(**REUSE)
    measure.close()
    by_key = {(m.metric.name, m.arm): m for m in measure.measurements}
    assert by_key.keys() == AMONG.keys()
    for key, value in AMONG.items():
        factors = SPEEDS if key[0].endswith("_s") else (1,) * 6
        assert by_key[key].samples == pytest.approx([value * factor for factor in factors])
        assert by_key[key].num_observations == 6
    assert found(measure)["reuse_speedup", "primed over unseen"] == pytest.approx(1.75)
    assert found(measure)["ttft_saved_s", "unseen less primed"] == pytest.approx(0.006 * 3.5)


def test_latencies_of_one_length_are_those_of_each_arm():
    measure, _ = measuring(in_states(*FOUR), "ttft_s", num_samples=2)
    measure.reuse(**REUSE)
    by_arm = {arm: value for (_, arm), value in found(measure).items()}
    assert by_arm == pytest.approx({"cold": 0.014, "primed": 0.008, "unseen": 0.014, "suffix": 0.006, "prefix": 0.010})


def test_case_9_what_is_slow_at_first_is_no_saving():
    """omlx 1803 said 12x. The first prefill ever takes 100 ms more, the first after a reset 20: neither is reuse."""
    arms = in_states("cold", "primed", "unseen")
    measure, _ = measuring(arms, "reuse_speedup", "cold_over_unseen", num_warmups=1, first_ms=100, wake_ms=20)
    measure.reuse(**REUSE)
    assert found(measure) == {
        ("reuse_speedup", "primed over unseen"): pytest.approx(14 / 8),
        ("cold_over_unseen", "cold against unseen"): pytest.approx(34 / 14),
    }


def test_a_hit_that_costs_what_it_saves_has_a_negative_saving_and_no_breakeven():
    measure, _ = measuring(in_states(*FOUR, read_ms=1.5), "ttft_saved_s", "breakeven_requests", num_samples=6)
    measure.reuse(**REUSE)
    measure.close()
    assert found(measure) == {
        ("ttft_saved_s", "unseen less primed"): pytest.approx(-0.004),
        ("breakeven_requests", "primed against unseen"): None,
    }
    assert measure.details["why"]["breakeven_requests"].startswith("none in range: a hit takes longer")


# Numbers of all samples.


def test_breakeven_is_t_of_the_prefix_over_the_saving():
    measure, _ = measuring(in_states("prefix", "unseen", "primed"), "breakeven_requests", num_samples=6, speeds=SPEEDS)
    measure.reuse(**REUSE)
    measure.close()
    (m,) = measure.measurements
    assert (m.value, m.arm, m.samples, m.num_observations) == (pytest.approx(10 / 6), "primed against unseen", (), 6)
    assert m.low <= m.value <= m.high
    assert "why" not in measure.details


def undefined_result():
    """Reading a stored position takes as long as running it."""
    arms = in_states("prefix", "unseen", "primed", read_ms=1.0)
    measure, _ = measuring(arms, "breakeven_requests", "ttft_s", num_samples=6)
    measure.reuse(**REUSE)
    measure.close()
    return BenchmarkResult(
        benchmark="b.py::test_reuse", case="", params={}, measurements=tuple(measure.measurements),
        provenance=PROVENANCE, flags=tuple(measure.flags), runs=measure.runs, details=measure.details,
    )  # fmt: skip


def test_a_number_that_does_not_exist_says_why_wherever_it_is_shown():
    result = undefined_result()
    (flag,) = result.flags
    why = "undefined: a hit saves 0 % to 0 % of T(P), which may be nothing"
    assert (flag.kind, flag.arm, flag.what) == ("undefined", "primed against unseen", f"Breakeven: {why}")
    again = read_result(result.as_dict())
    assert (again.flags, again.details["why"]) == ((flag,), {"breakeven_requests": why})
    (m,) = [each for each in again.measurements if each.metric.pooled]
    assert (m.value, m.samples, doubts_of_cell(again, m)) == (None, (), "undefined")
    assert f"! undefined: reuse primed against unseen: Breakeven: {why}" in render([again])


def test_a_number_without_an_interval_says_why_and_is_no_flag():
    measure, _ = measuring(in_states("prefix", "unseen", "primed"), "breakeven_requests", num_samples=2)
    measure.reuse(**REUSE)
    assert measure.details["why"]["breakeven_requests"].startswith("too few samples")
    assert [flag.kind for flag in measure.flags] == []
    assert found(measure)["breakeven_requests", "primed against unseen"] == pytest.approx(10 / 6)


@pytest.mark.parametrize(("read_ms", "value"), [(0, 1.0), (0.25, 4 / 3)])
def test_the_saving_derived_from_one_curve_over_the_direct_one(read_ms, value):
    """T(n) = 2 + n saves P; a store that reads for a quarter of the price of running saves three quarters of it."""
    arms = in_states(*FOUR, read_ms=read_ms)
    measure, _ = measuring(arms, "derived_over_direct", num_samples=6, speeds=SPEEDS)
    measure.reuse([8, 16, 32], 4)
    measure.close()
    assert found(measure) == {("derived_over_direct", "T(n) against unseen less primed"): pytest.approx(value)}


def shared(*, num_samples=6, **options):
    arms = in_states("primed", "prefix", **options) | {
        "apart": {"name": "apart", "state": "cold", "prefix_cache": "off"}
    }
    measure, subject = measuring(
        arms, "batched_breakeven_requests", num_samples=num_samples, num_warmups=1, speeds=SPEEDS
    )
    measure.sharing([1, 2, 4], prefix_tokens=8, suffix_tokens=4)
    measure.close()
    return measure, subject


def test_requests_at_once_pay_for_a_prefix_together():
    """Apart 2 + 12 N, shared 2 + 6 N, the prefix 10: they are even at 10 / 6."""
    measure, subject = shared()
    assert found(measure) == {("batched_breakeven_requests", "primed against cold"): pytest.approx(10 / 6)}
    asked = [told[-1] for told in subject.turns[1:]]
    assert Counter((arm, len(prompts)) for _, arm, prompts, _ in asked) == {
        ("prefix", 1): 3 * 7, **{(arm, size): 7 for arm in ("primed", "apart") for size in (1, 2, 4)}
    }  # fmt: skip
    windows = [prompts for _, arm, prompts, _ in asked if arm == "primed"]
    assert all(len({prompt[:8] for prompt in prompts}) == 1 for prompts in windows)
    suffixes = [prompt[8:] for prompts in windows for prompt in prompts]
    assert len(set(suffixes)) == len(suffixes)
    ids = [run.request_id for run in measure.runs["primed"][:7]]
    assert ids == [f"sample-0-load-{load}-place-{i}" for load, size in enumerate((1, 2, 4)) for i in range(size)]


def test_sharing_that_saves_nothing_has_no_breakeven_and_says_so():
    measure, _ = shared(read_ms=1.0)
    assert found(measure) == {("batched_breakeven_requests", "primed against cold"): None}
    assert measure.details["why"]["batched_breakeven_requests"].startswith("undefined: ")
    assert [flag.kind for flag in measure.flags if flag.kind == "undefined"] == ["undefined"]


# Requests one after another.

ON_OFF = {"on": {"name": "on"}, "off": {"name": "off", "prefix_cache": "off"}}
TURNS = {"num_turns": 3, "turn_tokens": 6, "answer_tokens": 3}


def test_a_conversation_carries_ids_and_its_first_turn_finds_nothing():
    """Prompts of 6, 15 and 24; the third finds the 17 that are stored by then, in whole blocks."""
    quantities = ("turns_speedup", "turns_saved_s", "mean_ttft_s", "hit_rate", "ttft_s", "ttft_price")
    measure, subject = measuring(ON_OFF, *quantities, num_samples=2, num_warmups=1)
    measure.converse(**TURNS)
    measure.compare(slow="off", fast="on")
    measure.price(of="on", against="off")
    measure.close()
    assert found(measure) == pytest.approx({
        ("turns_speedup", "on over off"): 26 / 14, ("turns_saved_s", "on over off"): 0.018,
        ("mean_ttft_s", "on"): 0.011, ("mean_ttft_s", "off"): 0.017,
        ("hit_rate", "on"): 24 / 45, ("hit_rate", "off"): 0.0,
        ("ttft_s", "on"): 0.011, ("ttft_s", "off"): 0.017, ("ttft_price", "on against off"): 11 / 17,
    })  # fmt: skip
    runs = measure.runs["on"][:3]
    assert [(run.num_cached, run.request_id) for run in runs] == [
        (0, "sample-0-load-0-place-0"), (8, "sample-0-load-0-place-1"), (16, "sample-0-load-0-place-2"),
    ]  # fmt: skip
    asked = [told[2] for told in subject.turns[2] if told[0] == "stream"]
    assert [told[0] for told in subject.turns[2]] == ["forget", "stream", "stream", "stream"]
    assert asked[1][:9] == asked[0] + runs[0].token_ids
    assert asked[2][:18] == asked[1] + runs[1].token_ids
    firsts = [told[1][2] for told in subject.turns if told[0][1] == "on"]
    assert len({prompt[0] for prompt in firsts}) == 1 + 2


def test_the_first_turn_saves_exactly_nothing():
    measure, _ = measuring(ON_OFF, "turns_saved_s")
    measure.converse(**TURNS)
    on, off = (measure.runs[arm][0].ttft_s for arm in ("on", "off"))
    assert (on, on - off, measure.runs["on"][0].num_cached) == (0.008, 0, 0)


def test_a_conversation_that_forgets_is_refused():
    measure, _ = measuring(ON_OFF, "mean_ttft_s", found=lambda n: 0)
    with pytest.raises(WrongOutputError, match="on's request 1 found 0 of 15 tokens in a cache"):
        measure.converse(**TURNS)


def test_turns_are_compared_until_a_near_tie_parts_the_conversations():
    arms = {"on": {"name": "on"}, "other": {"name": "other", "other": 1}}
    measure, _ = measuring(arms, "mean_ttft_s", relative_tolerance=0.01)
    measure.converse(**TURNS)
    assert [flag.what[:48] for flag in measure.flags] == ["other's request 0 and on's request 0 differ at t"]
    measure, _ = measuring(arms, "mean_ttft_s")
    with pytest.raises(WrongOutputError, match="other's request 0 and on's request 0 differ at token 0"):
        measure.converse(**TURNS)


def test_requests_that_come_back_find_what_is_predicted():
    """Four requests of 14 ms; two of them find 8 and take 8."""
    quantities = ("mean_ttft_s", "hit_rate", "effective_speedup", "ttft_over_expected")
    measure, subject = measuring(ON_OFF, *quantities, num_samples=2, num_warmups=1)
    measure.revisit([0, 1, 0, 0], prefix_tokens=8, suffix_tokens=4)
    measure.compare(slow="off", fast="on")
    measure.price(of="on", against="off")
    measure.close()
    assert found(measure) == pytest.approx({
        ("mean_ttft_s", "on"): 0.011, ("mean_ttft_s", "off"): 0.014,
        ("hit_rate", "on"): 16 / 48, ("hit_rate", "off"): 0.0,
        ("effective_speedup", "on over off"): 14 / 11, ("ttft_over_expected", "on against off"): 1.0,
    })  # fmt: skip
    assert [run.num_cached for run in measure.runs["on"]] == [0, 0, 8, 8] * 2
    asked = [told[2] for told in subject.turns[-1] if told[0] == "stream"]
    assert asked[0][:8] == asked[2][:8] == asked[3][:8] != asked[1][:8]
    assert len({prompt[8:] for prompt in asked}) == 4
    every = {told[2][:8] for turn in subject.turns for told in turn if told[0] == "stream"}
    assert len(every) == 2 * (1 + 2)


def test_a_prediction_that_does_not_come_true_is_refused():
    measure, subject = measuring(ON_OFF, "mean_ttft_s")
    subject.predict_hits = lambda prompts, **arm: [0, 0, 0]
    with pytest.raises(WrongOutputError, match=r"on's request 2 found 8 of 12 tokens .* had to find 0 and run 12"):
        measure.revisit([0, 1, 0], prefix_tokens=8, suffix_tokens=4)


def run_of(ttft_ms, num_cached=0, num_prompt_tokens=10):
    stamps = () if ttft_ms is None else (Stamp(round(ttft_ms * MS), 1),)
    return RunTiming(sent_ns=0, stamps=stamps, num_cached=num_cached, num_prompt_tokens=num_prompt_tokens)


def test_what_is_undefined_is_none():
    none, some = [run_of(None)], [run_of(1)]
    for name in ("turns_speedup", "turns_saved_s", "effective_speedup", "ttft_over_expected", "ttft_price"):
        assert metric(name).between(none, some) is None
        assert metric(name).between(some, none) is None
    assert mean_ttft_s([]) is mean_ttft_s([*some, *none]) is None
    assert ttft_over_expected([run_of(1, None)], some) is None
    for name in NAMES:
        for missing in metric(name).states:
            by_state = {state: none if state == missing else some for state in metric(name).states}
            assert metric(name).among(by_state) is None


def test_expected_is_what_hits_and_misses_would_take_alone():
    on, off = [run_of(6, 8), run_of(12), run_of(13)], [run_of(10)] * 3
    assert ttft_over_expected(on, off) == pytest.approx((31 / 3) / (2 / 3 * 10 + 6 / 3))


def test_a_floor_is_told_where_the_lengths_show_one():
    lengths = (16, 32, 64, 128, 256, 512, 1024)
    noise = (1.001, 0.999, 1.0, 1.002, 0.998, 1.001, 0.999)
    floored = [run_of(n * max(20, 4 + 0.125 * length), 0, length) for n, length in zip(noise, lengths, strict=True)]
    line = [run_of(n * (4 + 0.125 * length), 0, length) for n, length in zip(noise, lengths, strict=True)]
    assert ttft_floor_s(floored) == pytest.approx(0.020, rel=0.01)
    assert ttft_floor_until_tokens(floored) == pytest.approx(128, rel=0.05)
    assert ttft_floor_s(line) is ttft_floor_until_tokens(line) is ttft_floor_s(line[:2]) is None


# What cannot be measured.

PAIR = in_states("primed", "unseen")


@pytest.mark.parametrize(
    ("arms", "quantities", "call", "message"),
    [
        ({"a": {"state": "hot"}}, ("ttft_s",), {}, "arm 'a' has the state 'hot'; a state is one of: cold, prim"),
        ({"a": {}}, ("ttft_s",), {}, "arm 'a' has no option 'state'; it is one of: cold, primed"),
        (PAIR, ("ttft_s",), {"prefix_tokens": 0}, "prefix_tokens must be a whole number of at least 1, not 0"),
        (PAIR, ("ttft_s",), {"suffix_tokens": 0}, "suffix_tokens must be a whole number of at least 1, not 0"),
        (PAIR, ("ttft_s",), {"new_tokens": 0}, "new_tokens must be a whole number of at least 1, not 0"),
        (PAIR, ("ttft_s",), {"prefix_tokens": []}, "prefix_tokens is empty"),
        (PAIR, ("ttft_s",), {"prefix_tokens": [8, 16]}, "ttft_s does not come of 2 lengths of the prefix, but of one"),
        (PAIR, ("reuse_speedup",), {"prefix_tokens": [8, 16]}, "reuse_speedup does not come of 2 lengths"),
        (PAIR, ("derived_over_direct",), {}, "does not come of 1 lengths of the prefix, but of several"),
        (PAIR, ("kv_read_added_s",), {}, "one arm in each of the states primed, suffix; primed is primed, unse"),
        (PAIR | {"again": {"state": "primed"}}, ("reuse_speedup",), {}, "takes one arm in each of the states unseen"),
        (PAIR, ("batched_breakeven_requests",), {}, "does not come about by `measure.reuse`"),
        (PAIR, ("e2e_s", "steady_tokens_per_s"), {}, "steady_tokens_per_s does not come about by `measure.reuse`"),
    ],
)  # fmt: skip
def test_what_reuse_cannot_be_is_refused_before_anything_runs(arms, quantities, call, message):
    measure, subject = measuring(arms, *quantities)
    with pytest.raises(InstrumentError, match=re.escape(message)):
        measure.reuse(**REUSE | call)
    assert subject.log == []


@pytest.mark.parametrize(
    ("way", "quantity", "call", "message"),
    [
        ("converse", "mean_ttft_s", TURNS | {"num_turns": 1}, "num_turns is 1: a conversation has at least 2"),
        ("converse", "mean_ttft_s", TURNS | {"turn_tokens": 0}, "turn_tokens must be a whole number of at least 1"),
        ("converse", "mean_ttft_s", TURNS | {"answer_tokens": 0}, "answer_tokens must be a whole number of at least 1"),
        ("converse", "requests_per_s", TURNS, "requests_per_s does not come about by `measure.converse`"),
        ("converse", "reuse_speedup", TURNS, "reuse_speedup does not come about by `measure.converse`"),
        ("revisit", "mean_ttft_s", REUSE | {"order": []}, "order is []: it names at least one prefix"),
        ("revisit", "mean_ttft_s", REUSE | {"order": [0, -1]}, "order is [0, -1]: it names at least one prefix"),
        ("revisit", "mean_ttft_s", REUSE | {"order": [0], "prefix_tokens": 0}, "prefix_tokens must be a whole number"),
        ("stream", "breakeven_requests", {"prompt_tokens": 8, "new_tokens": 1}, "not come about by `measure.stream`"),
    ],
)  # fmt: skip
def test_what_cannot_run_one_after_another_is_refused(way, quantity, call, message):
    measure, subject = measuring(ON_OFF, quantity)
    with pytest.raises(InstrumentError, match=re.escape(message)):
        getattr(measure, way)(**call)
    assert subject.log == []


def test_a_size_of_no_requests_is_refused():
    arms = in_states("cold", "primed", "prefix")
    for sizes, message in (
        ((), "sizes is empty"),
        ((2, 0), "sizes must be"),
        ((2,), "does not come of 1 sizes, but of"),
    ):
        measure, _ = measuring(arms, "batched_breakeven_requests")
        with pytest.raises(InstrumentError, match=message):
            measure.sharing(sizes, prefix_tokens=8, suffix_tokens=4)


@pytest.mark.parametrize("way", ["stream", "converse"])
def test_a_state_means_nothing_where_nobody_puts_an_arm_into_it(way):
    measure, _ = measuring(in_states("cold"), "ttft_s")
    call = {"prompt_tokens": 8, "new_tokens": 1} if way == "stream" else TURNS
    with pytest.raises(InstrumentError, match=f"the option 'state' of cold means nothing to `measure.{way}`, only to"):
        getattr(measure, way)(**call)


def test_what_a_pair_is_compared_by_is_no_number_of_states():
    measure, _ = measuring(in_states("primed", "unseen"), "reuse_speedup")
    measure.reuse(**REUSE)
    with pytest.raises(UndeclaredMetricError, match="declares nothing that compares arms in this way"):
        measure.compare(slow="unseen", fast="primed")


def test_arms_that_reused_what_others_stored_tell_no_share_of_a_ceiling():
    for state, shares in (("cold", False), ("primed", True)):
        measure, _ = measuring(in_states(state), "ttft_s")
        measure.reuse(**REUSE)
        assert measure.shares_steps is shares


# Declarations.


def test_metrics_of_states_say_what_they_are_of():
    of_states = [each for each in METRICS.values() if each.is_of_states]
    assert len(of_states) == 9
    assert all(each.label and each.states and set(each.states) <= set(STATES) for each in of_states)
    with pytest.raises(InstrumentError, match="names states and a label exactly where it is of states"):
        Metric(
            name="x_s", title="X", unit="s", formula="as said here now", weighting="pair", better="lower", gate=False,
            among=lambda by_state: None,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["ttft_saved_s", "prefill_removed_s", "turns_saved_s"])
def test_a_saving_is_better_when_higher_and_nothing_infinite_or_negated_is_stored_of_it(name):
    each = metric(name)
    assert (each.better, each.coefficient, each.gate, each.has_ratio) == ("higher", True, False, False)
    assert each.cost(0.004) == 250
    for value in (0.0, -0.004):
        with pytest.raises(InstrumentError, match=f"{name} of {value} has no cost to store"):
            each.cost(value)
    with pytest.raises(InstrumentError, match="in s cannot be better when higher: lower"):
        Metric(
            name="x_s", title="X", unit="s", formula="as said here now", weighting="request", better="higher",
            gate=False, observe=lambda run: (),
        )  # fmt: skip


# Wrappers.


def test_a_planted_slowdown_leaves_what_is_untimed_as_it_is():
    lengthened = []

    class Telling(Slowed):
        def _lengthen(self, start_ns):
            lengthened.append(start_ns)

    measure, _ = measuring(
        in_states("primed", "warm"), "ttft_s", wrap=lambda subject, clock: Telling(subject, 1.0, clock)
    )
    measure.reuse(**REUSE)
    assert len(lengthened) == 2, "one step of each run; the store was filled as fast as ever"


def test_what_comes_before_a_run_is_one_turn_of_a_led_session():
    """Served in two steps or in none: begin and end as often, so that two builds go on side by side."""
    log = []

    def wrap(subject, clock):
        stoppable = StoppableClock(clock)
        return Stepwise(subject, stoppable, lambda: log.append("begin"), lambda: log.append("end"))

    measure, subject = measuring(in_states("primed", "cold"), "ttft_s", wrap=wrap)
    write = subject.log.append
    subject.log = SimpleNamespace(append=lambda told: (log.append(told[0]), write(told)), __len__=lambda: 0)
    measure._loop._turn = lambda arm, number: contextlib.nullcontext()
    measure.reuse(**REUSE)
    proof = ["begin", "proof", "end"]
    primed = ["begin", "forget", "stream", "end", "begin", "stream", "end"]
    cold = ["begin", "forget", "end", "begin", "stream", "end"]
    assert log in ([*proof, *primed, *cold], [*proof, *cold, *primed])


@pytest.mark.parametrize("raised", [RuntimeError("device lost"), Enough()])
def test_the_turn_is_given_back_whatever_ends_what_is_untimed(raised):
    log = []
    stepwise = Stepwise(
        Subject(Clock()), StoppableClock(Clock()), lambda: log.append("begin"), lambda: log.append("end")
    )

    def act(subject):
        raise raised

    with pytest.raises(type(raised)):
        stepwise.untimed(act)
    assert log == ["begin", "end"]


def test_wrappers_pass_on_what_a_subject_says_of_its_store():
    clock = Clock()
    subject = Subject(clock)
    for wrapped in (Slowed(subject, 0.0, clock), Stepwise(subject, StoppableClock(clock), int, int)):
        wrapped.forget(name="x")
        assert subject.log[-1][:2] == ("forget", "x")
        assert wrapped.num_reusable(8, 12) == 8
        assert wrapped.predict_hits([(1,) * 8, (1,) * 9]) == [0, 8]
        assert wrapped.reuse_logits(range(12), 8, name="x").num_run == 4
