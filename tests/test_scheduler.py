"""The policy, on a unit clock: grow, preempt the youngest, admit in order. Nothing is skipped, lost or starved."""

import itertools
import random

import pytest

from nanoserve.config import SamplingParams, SchedulerConfig
from nanoserve.errors import ConfigError, RequestError
from nanoserve.request import FinishReason, Request
from nanoserve.scheduler import Scheduler


def request(name, budget=1, *, prompt=1, **how):
    return Request(name, [1] * prompt, SamplingParams(max_new_tokens=budget, ignore_eos=True), **how)


def names(scheduled):
    return [each.request.request_id for each in scheduled]


def step(scheduler):
    """One step of an engine whose model is a constant; returns what was scheduled."""
    scheduled = list(scheduler.schedule())
    for each in scheduled:
        if each.samples:
            each.request.append(7, ())
    scheduler.commit()
    scheduler.check()
    return scheduled


def drain(scheduler):
    steps = []
    while scheduler.has_work:
        steps.append(step(scheduler))
        assert steps[-1], "work is left, and nothing runs"
    return steps


def scheduler_of(requests, **config):
    scheduler = Scheduler(SchedulerConfig(**config))
    for each in requests:
        scheduler.add(each)
    return scheduler


# In order.


def test_runs_in_order_and_at_most_so_many():
    steps = drain(scheduler_of([request("a"), request("b", 2), request("c")], max_running=2))
    assert [names(each) for each in steps] == [["a", "b"], ["b", "c"]]


def test_a_blocked_head_is_not_skipped():
    """b needs two blocks and one is free: c, which needs one, waits behind it."""
    requests = [request("a", prompt=8), request("b", prompt=8), request("c", prompt=4)]
    steps = drain(scheduler_of(requests, num_blocks=3, block_size=4))
    assert [names(each) for each in steps] == [["a"], ["b", "c"]]


def test_priorities_go_first_and_keep_their_order():
    requests = [request("a"), request("b"), request("urgent", priority=-1), request("also", priority=-1)]
    steps = drain(scheduler_of(requests, max_running=1))
    assert [names(each) for each in steps] == [["urgent"], ["also"], ["a"], ["b"]]


# Chunks.


def test_a_long_prompt_runs_in_chunks_beside_those_that_decode():
    steps = drain(
        scheduler_of([request("a", 4, prompt=2), request("b", 2, prompt=9)], max_running=2, max_step_tokens=5)
    )
    told = [[(each.request.request_id, each.num_computed, each.num_new, each.samples) for each in one] for one in steps]
    assert told == [
        [("a", 0, 2, True), ("b", 0, 3, False)],
        [("a", 2, 1, True), ("b", 3, 4, False)],
        [("a", 3, 1, True), ("b", 7, 2, True)],
        [("a", 4, 1, True), ("b", 9, 1, True)],
    ]


def test_without_chunks_a_prompt_runs_as_a_whole_or_waits():
    config = {"max_running": 2, "max_step_tokens": 5, "chunks_prefill": False}
    steps = drain(scheduler_of([request("a", 3, prompt=2), request("b", prompt=9), request("c", prompt=2)], **config))
    assert [names(each) for each in steps] == [["a"], ["a", "b"], ["a", "c"]]
    assert [each.num_new for each in steps[1]] == [1, 9]


# Room.


def test_the_youngest_makes_room_for_the_oldest_and_comes_back_before_those_who_wait():
    requests = [request("a", 6, prompt=4), request("b", 6, prompt=4), request("c", prompt=4)]
    scheduler = scheduler_of(requests, num_blocks=3, block_size=4, max_running=2)
    steps = [names(each) for each in drain(scheduler)]
    assert steps[0] == ["a", "b"]
    assert steps[1] == ["a"], "a's third block is b's only one but one"
    first_of = {name: next(at for at, ran in enumerate(steps[1:], 1) if name in ran) for name in "bc"}
    assert first_of["b"] <= first_of["c"]
    assert scheduler.counts.num_preemptions == 1


def test_the_reserve_delays_a_request_and_excludes_none():
    alone = drain(scheduler_of([request("a", prompt=8)], num_blocks=2, block_size=4, watermark_blocks=2))
    assert [names(each) for each in alone] == [["a"]]
    requests = [request("a", 3, prompt=4), request("b", prompt=4)]
    beside = drain(scheduler_of(requests, num_blocks=4, block_size=4, watermark_blocks=3))
    assert [names(each) for each in beside] == [["a"], ["a"], ["a"], ["b"]]


def test_what_the_whole_pool_cannot_hold_is_refused_when_it_is_added():
    scheduler = scheduler_of([request("fits", 5, prompt=4)], num_blocks=2, block_size=4)
    with pytest.raises(RequestError, match="max_new_tokens 6 need 3 KV blocks, the whole pool has 2"):
        scheduler.add(request("is too long", 6, prompt=4))
    assert [names(each) for each in drain(scheduler)] == [["fits"]] * 5


# Ending.


def test_abort_finds_waiting_and_running_requests_and_frees_what_they_hold():
    scheduler = scheduler_of([request("a", 3), request("b", 3)], max_running=1, num_blocks=4, block_size=4)
    step(scheduler)
    assert [each.finish_reason for each in scheduler.abort("b")] == [FinishReason.ABORT]
    assert [each.finish_reason for each in scheduler.abort("a")] == [FinishReason.ABORT]
    assert not scheduler.has_work
    assert scheduler.pool.num_free == 4
    with pytest.raises(RequestError, match="no request 'a'"):
        scheduler.abort("a")


def test_a_static_batch_that_only_waited_for_an_aborted_row_is_released_with_it():
    scheduler = scheduler_of([request("a"), request("b", 9)], max_running=2, is_static=True, num_blocks=4, block_size=4)
    step(scheduler)
    assert [each.request_id for each in scheduler.abort("b")] == ["b", "a"]
    assert (scheduler.has_work, scheduler.pool.num_free) == (False, 4)


def test_ids_are_used_once_while_they_live():
    scheduler = scheduler_of([request("a")])
    with pytest.raises(RequestError, match="'a' is already in use"):
        scheduler.add(request("a"))
    drain(scheduler)
    scheduler.add(request("a"))


def test_eos_wins_over_the_budget_unless_it_is_ignored():
    ends = Request("a", (1,), SamplingParams(max_new_tokens=1))
    ignores = request("b")
    ends.append(9, (9,))
    ignores.append(9, (9,))
    assert (ends.finish_reason, ignores.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    assert ends.output_ids == [9]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_running": 0}, "max_running must be at least 1, not 0"),
        ({"block_size": 0}, r"block_size must be a power of two \(1, 2, 4, .*not 0"),
        ({"block_size": 12}, "block_size must be a power of two"),
        ({"num_blocks": -1}, "num_blocks must be at least 0"),
        ({"max_running": 8, "max_step_tokens": 7}, "max_step_tokens 7 is less than max_running 8"),
    ],
)
def test_an_impossible_configuration_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**options)


# Counts that travel: prompts of 5 tokens, blocks of 4, a unit clock.


def counted(budgets, **config):
    requests = [request(str(number), budget, prompt=5) for number, budget in enumerate(budgets)]
    scheduler = scheduler_of(requests, max_running=len(budgets), **config)
    steps = drain(scheduler)
    issued = sum(each.samples or each.is_padding for one in steps for each in one)
    collected = sum(each.samples for one in steps for each in one)
    return scheduler.counts, len(steps), issued, collected


MIXED = [32, *[4] * 7]


def test_a_static_batch_waits_for_its_longest_row():
    _, num_steps, issued, collected = counted(MIXED, is_static=True)
    assert (num_steps, issued, collected) == (32, 256, 60)
    decoded, useful = issued - 8, collected - 8
    assert (decoded, useful, round(1 - useful / decoded, 4)) == (248, 52, 0.7903)
    assert round(1 - collected / issued, 4) == 0.7656


def test_continuous_batching_issues_what_is_collected_and_answers_at_once():
    counts, num_steps, issued, collected = counted(MIXED)
    assert (num_steps, issued, collected, counts.num_padding) == (32, 60, 60, 0)
    assert round(256 / 60, 4) == 4.2667
    scheduler = scheduler_of(
        [request(str(place), budget, prompt=5) for place, budget in enumerate(MIXED)], max_running=8
    )
    first = next(number for number in itertools.count(1) if any(each.request.finish_reason for each in step(scheduler)))
    assert first == 4


@pytest.mark.parametrize(
    ("num_blocks", "num_steps", "occupancy", "num_preemptions", "num_recomputed"),
    [(12, 44, 0.545, 3, 55), (24, 28, 0.857, 1, 25), (32, 24, 1.0, 0, 0)],
)
def test_four_requests_in_pools_of_three_sizes(num_blocks, num_steps, occupancy, num_preemptions, num_recomputed):
    counts, taken, issued, _ = counted([24] * 4, num_blocks=num_blocks, block_size=4)
    assert (taken, round(issued / (4 * taken), 3)) == (num_steps, occupancy)
    assert (counts.num_preemptions, counts.num_recomputed) == (num_preemptions, num_recomputed)


@pytest.mark.parametrize(
    ("num_blocks", "occupancy", "evictions", "num_recomputed", "num_positions"),
    [(48, 1.0, 0.0, 0, 168), (24, 0.667, 0.5, 59, 224), (12, 0.375, 1.17, 107, 268)],
)
def test_six_requests_in_pools_of_three_sizes(num_blocks, occupancy, evictions, num_recomputed, num_positions):
    counts, taken, issued, _ = counted([24] * 6, num_blocks=num_blocks, block_size=4)
    assert (issued, round(issued / (6 * taken), 3)) == (144, occupancy)
    assert round(counts.num_preemptions / 6, 2) == evictions
    assert (counts.num_recomputed, counts.num_positions) == (num_recomputed, num_positions)


# For a long time.


def soak(seed, num_steps):
    """Random arrivals, aborts and sizes; every invariant is checked after every step."""
    rng = random.Random(seed)
    config = SchedulerConfig(
        max_running=rng.randint(1, 12), max_step_tokens=rng.randint(12, 64), num_blocks=rng.randint(8, 64),
        block_size=rng.choice([1, 4, 16]), watermark_blocks=rng.randint(0, 4), chunks_prefill=rng.random() < 0.8,
    )  # fmt: skip
    scheduler, live, ended, waited = Scheduler(config), {}, 0, {}
    most = config.num_blocks * config.block_size
    for number in range(num_steps):
        if rng.random() < 0.3 and len(live) < 40:
            prompt = rng.randint(1, max(1, min(60, most - 1)))
            each = request(f"{seed}-{number}", rng.randint(1, max(1, min(30, most - prompt))), prompt=prompt)
            scheduler.add(each)
            live[each.request_id] = each
        if live and rng.random() < 0.02:
            scheduler.abort(rng.choice(list(live)))
        scheduled = step(scheduler) if scheduler.has_work else []
        assert bool(scheduled) == bool(live) or not scheduler.has_work
        assert len(scheduled) <= config.max_running
        assert sum(each.num_new for each in scheduled) <= max(config.max_step_tokens, 61) or not config.chunks_prefill
        assert len(set(names(scheduled))) == len(scheduled)
        ended += sum(each.finish_reason is not None for each in live.values())
        live = {name: each for name, each in live.items() if each.finish_reason is None}
        ran = set(names(scheduled))
        waited = {name: 0 if name in ran else waited.get(name, 0) + 1 for name in live}
        assert max(waited.values(), default=0) < 40 * 95, "somebody starves"
    drain(scheduler)
    assert scheduler.pool.num_free == config.num_blocks
    return ended


def test_a_short_soak():
    assert sum(soak(seed, 500) for seed in range(4)) > 100


@pytest.mark.slow
@pytest.mark.simulated
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_thousand_steps(seed):
    assert soak(seed, 10_000) > 100
