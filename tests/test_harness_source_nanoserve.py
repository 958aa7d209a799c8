"""The engine as a subject: windows on the smallest shape, schedules to the last digit, what a build lacks."""

import gc
import random
import sys
import weakref
from collections import deque

import pytest
from recorders import BrokenRecorder, TapeRecorder, paged_decode_in_tensors

from benchmarks.harness.clock import DeviceClock
from benchmarks.harness.errors import MissingFeatureError, UndeclaredMetricError
from benchmarks.harness.invariants import check_run, check_window
from benchmarks.harness.loop import Plan
from benchmarks.harness.serving import Ask, SkippingClock, measure_window
from benchmarks.harness.slowed import Slowed
from benchmarks.harness.sources.nanoserve import NanoserveSubject
from benchmarks.harness.stepwise import Stepwise, StoppableClock
from benchmarks.harness.work import CountWork
from nanoserve import attention
from nanoserve import engine as engines
from nanoserve.errors import ConfigError, RequestError

PAGED = {"cache": "paged", "num_blocks": 64, "block_size": 4}
ARMS = {
    "paged": PAGED,
    "tight": PAGED | {"num_blocks": 12},
    "chunked": PAGED | {"max_step_tokens": 8, "max_running": 4},
    "static": PAGED | {"is_static": True, "max_running": 3},
    "contiguous": {"cache": "contiguous"},
    "none": {"cache": "none", "max_running": 2},
}


@pytest.fixture
def subject(varied):
    return NanoserveSubject(varied, "tiny")


def asks(*sizes, due_s=0.0, seed=0):
    rng = random.Random(seed)
    return [
        Ask(f"sample-{place}", place * due_s, tuple(rng.randrange(512) for _ in range(num_prompt)), num_new)
        for place, (num_prompt, num_new) in enumerate(sizes)
    ]


SIZES = ((5, 9), (17, 3), (1, 12), (8, 1), (30, 6))


def window(subject, asks, **arm):
    clock = SkippingClock(DeviceClock())
    return measure_window(lambda inbox: subject.serve(inbox, **arm), asks, clock, clock.nap)


def assert_all_free(engine, num_blocks=64):
    assert not engine.has_work
    assert (engine.num_kv_blocks, engine._scheduler.pool.num_free) == (0, num_blocks)


# Windows.


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("due_s", [0.0, 0.004])
def test_each_request_of_a_window_gets_the_tokens_that_it_gets_alone(subject, arm, due_s):
    wanted = asks(*SIZES, due_s=due_s)
    runs = window(subject, wanted, **ARMS[arm])
    for run, ask in zip(runs, wanted, strict=True):
        alone = [each.token_ids[0] for each in subject.stream(ask.prompt_ids, ask.new_tokens, cache="contiguous")]
        assert (list(run.token_ids), run.finish_reason) == (alone, "length")
        check_run(run)
    check_window(runs)
    assert len({token for run in runs for token in run.token_ids}) > 20
    assert due_s or subject._engine(**ARMS[arm]).counts.num_preemptions == (arm == "tight")


def test_ids_come_again_in_a_later_window_and_every_block_is_back_in_between(subject):
    for seed in range(3):
        wanted = asks(*SIZES, seed=seed)
        runs = window(subject, wanted, **PAGED)
        assert [run.request_id for run in runs] == [ask.request_id for ask in wanted]
        assert_all_free(subject._engine(**PAGED))


def test_leaving_early_ends_what_runs_and_what_waits_and_frees_every_block(subject):
    engine = subject._engine(**PAGED, max_running=2)
    steps = subject.serve(inbox := deque(asks(*SIZES)), **PAGED, max_running=2)
    for _ in range(4):
        told = next(steps)
    assert told
    assert not inbox
    assert engine.num_kv_blocks > 0
    steps.close()
    assert_all_free(engine)
    window(subject, asks(*SIZES), **PAGED, max_running=2)
    assert_all_free(engine)


@pytest.mark.parametrize("wrap", ["stepwise", "slowed"])
@pytest.mark.parametrize("way", ["stream", "serve"])
def test_what_is_left_behind_a_wrapper_ends_as_well(subject, wrap, way):
    clock = StoppableClock(DeviceClock())
    wrapped = Stepwise(subject, clock, int, int) if wrap == "stepwise" else Slowed(subject, 0.0, clock)
    steps = wrapped.stream([1] * 9, 8, **PAGED) if way == "stream" else wrapped.serve(deque(asks(*SIZES)), **PAGED)
    next(steps)
    assert subject._engine(**PAGED).has_work
    steps.close()
    assert_all_free(subject._engine(**PAGED))


def test_a_step_that_fails_says_why_and_leaves_an_engine_that_goes_on(subject, monkeypatch):
    """One request fails again when it runs alone; whoever was in the step with it or still waits is ended as well."""
    engine = subject._engine(**PAGED, max_running=2)
    right = engine._forward

    def forward(scheduled):
        if engine.counts.num_steps in (3, 4):
            raise RuntimeError("device lost")
        return right(scheduled)

    monkeypatch.setattr(engine, "_forward", forward)
    with pytest.raises(RuntimeError, match="device lost"):
        window(subject, asks(*SIZES), **PAGED, max_running=2)
    assert_all_free(engine)
    assert window(subject, asks((3, 2)), **PAGED, max_running=2)[0].num_tokens == 2


def test_a_request_that_is_refused_ends_the_others(subject):
    with pytest.raises(RequestError, match="the whole pool has 64"):
        window(subject, asks((5, 9), (200, 100)), **PAGED)
    assert_all_free(subject._engine(**PAGED))


@pytest.fixture
def recorder(monkeypatch):
    """What an engine whose attention reads in place records with."""
    tape = TapeRecorder()
    monkeypatch.setattr(attention, "_kernel", lambda _: paged_decode_in_tensors)
    monkeypatch.setattr(engines, "choose_recorder", lambda graphs, *_: None if graphs == "off" else tape)
    return tape


IN_PLACE = PAGED | {"attention": "reference", "max_running": 4}


def test_an_engine_records_its_steps_when_it_is_made_and_not_when_it_is_measured(subject, recorder):
    subject._engine(**IN_PLACE)
    assert recorder.num_records == 3
    expected = [run.token_ids for run in window(subject, asks(*SIZES), **PAGED, graphs="off")]
    assert [run.token_ids for run in window(subject, asks(*SIZES), **IN_PLACE)] == expected
    assert (recorder.num_records, recorder.num_replays > 3, subject.notes()) == (3, True, [])


def test_an_engine_that_cannot_record_says_so(subject, monkeypatch):
    monkeypatch.setattr(engines, "choose_recorder", lambda *_: BrokenRecorder())
    subject._engine(**IN_PLACE)
    assert subject.notes() == [
        "a step of 4 requests cannot be recorded, steps run eagerly: operation not permitted when stream is capturing"
    ]


def test_the_proof_of_reuse_watches_a_model_that_no_replay_runs_past(subject, recorder):
    proof = subject.reuse_logits(list(range(1, 34)), 32, **IN_PLACE)
    assert (proof.num_run, recorder.num_records) == (1, 0)


@pytest.mark.parametrize("arm", [PAGED, {"cache": "contiguous"}])
def test_what_was_made_for_an_arm_is_given_back_and_made_anew(subject, arm):
    before = window(subject, asks((5, 3)), **arm)
    engine = weakref.ref(subject._engine(**arm))
    subject.release()
    gc.collect()
    assert engine() is None
    assert [run.token_ids for run in window(subject, asks((5, 3)), **arm)] == [run.token_ids for run in before]


def test_without_a_model_the_same_requests_run_and_answer_nothing(subject):
    runs = window(subject, asks(*SIZES), model="none", **PAGED)
    assert [run.token_ids for run in runs] == [(0,) * num_new for _, num_new in SIZES]
    assert [run.num_prefilled for run in runs] == [num_prompt for num_prompt, _ in SIZES]


@pytest.mark.parametrize("arm", [{"reads": "paged"}, {"cache": "paged", "model": "none"}])
def test_what_runs_no_model_has_no_share_of_what_a_model_needs(subject, arm):
    assert subject.cost(**arm) is None
    assert subject.cost(cache="paged").keeps_kv


# Schedules: the counts of the study, prompts of 5 tokens, blocks of 4.

COUNTS = (
    "num_steps", "num_positions", "num_padding", "num_preemptions", "num_tokens_recomputed",
    "num_steps_to_first_answer",
)  # fmt: skip
MIXED = [32, *[4] * 7]


def counted(subject, budgets, **arms):
    work = CountWork(Plan(name="counts", quantities=COUNTS, arms=arms), subject, DeviceClock(), "cpu")
    work.schedule(prompt_tokens=5, new_tokens=budgets)
    work.close()
    return [[m.value for m in work.measurements if m.arm == arm] for arm in arms]


def test_a_static_batch_waits_for_its_longest_row_and_a_continuous_one_does_not(subject):
    rows = {"max_running": 8}
    (steps, ran, padding, *_, first), (_, continuous_ran, no_padding, *_, continuous_first) = counted(
        subject, MIXED, static=rows | {"is_static": True}, continuous=rows
    )
    prompts, collected = 8 * 5, sum(MIXED)
    decoded = ran - prompts
    assert (steps, decoded, decoded - padding) == (32, 248, 52)
    assert round(padding / decoded, 4) == 0.7903
    issued = decoded + 8
    assert (issued, collected, round(1 - collected / issued, 4)) == (256, 60, 0.7656)
    assert (continuous_ran - prompts + 8, no_padding) == (60, 0)
    assert round(issued / (continuous_ran - prompts + 8), 4) == 4.2667
    assert (continuous_first, first) == (4, 32)


def test_four_requests_in_pools_of_three_sizes(subject):
    found = counted(
        subject, [24] * 4, **{f"{num}": {"max_running": 4, "block_size": 4, "num_blocks": num} for num in (12, 24, 32)}
    )
    told = [(steps, round(4 * 24 / (4 * steps), 3), preemptions, again) for steps, _, _, preemptions, again, _ in found]
    assert told == [(44, 0.545, 3, 55), (28, 0.857, 1, 25), (24, 1.0, 0, 0)]


def test_six_requests_in_pools_of_three_sizes(subject):
    found = counted(
        subject, [24] * 6, **{f"{num}": {"max_running": 6, "block_size": 4, "num_blocks": num} for num in (48, 24, 12)}
    )
    told = [
        (round(6 * 24 / (6 * steps), 3), round(preemptions / 6, 2), again, positions)
        for steps, positions, _, preemptions, again, _ in found
    ]
    assert told == [(1.0, 0.0, 0, 168), (0.667, 0.5, 59, 224), (0.375, 1.17, 107, 268)]


def test_what_no_schedule_gives_is_not_zero(subject):
    plan = Plan(name="counts", quantities=("num_steps", "kv_bytes"), arms={"a": {"max_running": 2}})
    work = CountWork(plan, subject, DeviceClock(), "cpu")
    work.schedule(prompt_tokens=5, new_tokens=[2])
    with pytest.raises(UndeclaredMetricError, match=r"not measured: kv_bytes$"):
        work.close()


def assert_probe_fails(error):
    """Here as well: what is missing is missing in this process."""
    with pytest.raises((ImportError, TypeError, ConfigError)):
        exec(f"import nanoserve; {error.probe}", {})


@pytest.mark.parametrize(
    ("arm", "module"), [({"max_rows": 3}, None), ({"depth": 2}, None), ({"reads": "paged"}, "nanoserve.cache.paged")]
)
def test_an_arm_that_a_build_cannot_run_is_a_missing_feature(subject, monkeypatch, arm, module):
    if module:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingFeatureError, match=f"no engine with {next(iter(arm))}=") as raised:
        next(subject.stream([1] * 8, 2, **arm))
    assert_probe_fails(raised.value)
    if not module:
        with pytest.raises(MissingFeatureError):
            window(subject, asks((3, 2)), **arm)


def test_an_option_that_no_scheduler_has_is_a_missing_feature(subject):
    with pytest.raises(MissingFeatureError, match=r"no scheduler with \{'max_rows': 3\}") as raised:
        subject.count_schedule(5, [2], max_rows=3)
    assert_probe_fails(raised.value)


def test_a_build_without_a_scheduler_of_its_own_settings_lacks_a_feature(subject, monkeypatch):
    monkeypatch.delattr("nanoserve.config.SchedulerConfig")
    with pytest.raises(MissingFeatureError, match="cannot import name 'SchedulerConfig'") as raised:
        subject.count_schedule(5, [2], max_running=3)
    assert_probe_fails(raised.value)
    monkeypatch.undo()
    exec(f"import nanoserve; {raised.value.probe}", {})
