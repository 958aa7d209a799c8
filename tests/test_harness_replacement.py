"""Hits of nanoserve's prefix cache against published figures, a plain simulation, stack distances and the optimum."""

import itertools
import math
import re
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.errors import InstrumentError, MissingFeatureError
from benchmarks.harness.popularity import zipf_order
from benchmarks.harness.replacement import (
    OPTIMUM,
    farthest_next_use,
    hit_rates,
    lru_hits,
    numbered,
    powers_of_two,
)
from benchmarks.harness.sources.nanoserve_prefix import policies_among, predict_hits, replay

POLICIES = ("lru", "lfu", "fifo", "size")
ALPHAS = (0.5, 1.0, 2.0)


def single(prompts):
    """Each prompt is one block."""
    return [(prompt,) for prompt in prompts]


def hits_of_zipf(policy, slots, seed):
    return [sum(replay(policy, slots, single(zipf_order(200, 32, alpha, seed)))) for alpha in ALPHAS]


def optimum_hits(capacity, requests):
    paths = numbered(requests)
    return replay(farthest_next_use(paths), capacity, paths)


# What is known to be right.


@pytest.mark.parametrize(
    ("policy", "slots", "hits"),
    [
        ("lru", 4, [25, 62, 156]),
        ("lfu", 4, [53, 83, 165]),
        ("size", 4, [53, 83, 165]),
        ("fifo", 4, [27, 58, 145]),
        *((policy, None, [168, 169, 183]) for policy in POLICIES),
    ],
)
def test_published_hits_of_seed_42(policy, slots, hits):
    assert hits_of_zipf(policy, slots, 42) == hits


@pytest.mark.parametrize(
    ("trace", "hits"),
    [("AABCA", {"lfu": 2, "lru": 1, "fifo": 1}), ("AAABCBCBCBC", {"lfu": 2, "lru": 8})],
)
def test_published_micro_traces(trace, hits):
    assert {policy: sum(replay(policy, 2, single(trace))) for policy in hits} == hits


@pytest.mark.parametrize("num_seeds", [30, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.simulated])])
@pytest.mark.parametrize(
    ("policy", "slots", "published"),
    [
        ("lfu", 4, [(19.2, 4.1), (42.7, 5.0), (83.8, 2.9)]),
        ("lru", 4, [(15.9, 2.7), (32.4, 4.0), (80.2, 3.4)]),
        ("lfu", 16, [(57.2, 3.9), (74.3, 3.1), (92.2, 1.1)]),
    ],
)
def test_published_means_and_deviations_of_a_thousand_seeds(policy, slots, published, num_seeds):
    """Theirs are other seeds: apart by no more than four standard errors, and by the rounding."""
    percent = zip(*[[hits / 2 for hits in hits_of_zipf(policy, slots, seed)] for seed in range(num_seeds)], strict=True)
    for rates, (mean, sd) in zip(percent, published, strict=True):
        error = sd * math.sqrt(1 / num_seeds + 1 / 1000)
        assert statistics.fmean(rates) == pytest.approx(mean, abs=4 * error + 0.05)
        assert statistics.stdev(rates) == pytest.approx(sd, abs=4 * error / math.sqrt(2) + 0.05)


@pytest.mark.parametrize("seed", [0, 7])
def test_without_a_limit_exactly_the_first_uses_miss(seed):
    order = zipf_order(200, 32, 1.0, seed)
    assert sum(replay("lru", None, single(order))) == 200 - len(set(order))


def test_a_prefix_is_never_found_behind_a_block_that_left():
    """Blocks 1, 2, 3 of one prompt in a cache of 3: the last leaves first, and what is left is found from the start."""
    assert replay("lru", 3, [(1, 2, 3), (1, 2, 3)]) == [0, 3]
    assert replay("lru", 3, [(1, 2, 3), (9,), (1, 2, 3)]) == [0, 0, 2]
    assert replay("lru", 3, [(1, 2, 3), (8, 9), (1, 2, 3)]) == [0, 0, 1]
    assert replay("lru", 3, [(1, 2, 3), (7, 8, 9), (1, 2, 3)]) == [0, 0, 0]


def test_the_same_ids_behind_other_ids_are_another_block():
    assert replay("lru", None, [(1, 2, 3), (2, 3), (1, 3), (1, 2)]) == [0, 0, 1, 2]


# A plain simulation of prompts in slots.


def plain_hits(policy, slots, prompts):
    """On a hit the count goes up by one; a miss evicts the smallest, if all slots are taken, and is always admitted."""
    kept, hits = {}, 0
    key = {"lru": lambda p: kept[p][1], "lfu": lambda p: kept[p][:2], "fifo": lambda p: kept[p][2]}[policy]
    for now, prompt in enumerate(prompts):
        if prompt in kept:
            hits += 1
            kept[prompt] = (kept[prompt][0] + 1, now, kept[prompt][2])
        else:
            if len(kept) == slots:
                del kept[min(kept, key=key)]
            kept[prompt] = (1, now, now)
    return hits


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 8))
def test_single_blocks_are_prompts_in_slots(prompts, slots):
    for policy in ("lru", "lfu", "fifo"):
        assert sum(replay(policy, slots, single(prompts))) == plain_hits(policy, slots, prompts)
    assert replay("size", slots, single(prompts)) == replay("lfu", slots, single(prompts))


# Stack distances.

requests_of_blocks = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=14)


@given(requests_of_blocks)
def test_stack_distances_give_the_hits_of_lru_at_every_capacity(requests):
    by_size = lru_hits(requests)
    assert by_size == [0, *(sum(replay("lru", size, requests)) for size in range(1, len(by_size)))]
    assert by_size[-1] == sum(replay("lru", None, requests))
    assert by_size == sorted(by_size)


@settings(max_examples=40)
@given(requests_of_blocks)
def test_leaving_by_age_is_leaving_by_last_use_where_every_request_ends_in_a_block_of_its_own(requests):
    requests = [(*keys, ("end", number)) for number, keys in enumerate(requests)]
    for size in (1, 2, 3, 5, 8, 13):
        assert replay("fifo", size, requests) == replay("lru", size, requests)


def test_a_long_request_finds_its_first_blocks_only():
    assert replay("lru", 2, [(1, 2, 3, 4), (1, 2, 3, 4)]) == [0, 2]
    assert lru_hits([(1, 2, 3, 4), (1, 2, 3, 4)]) == [0, 1, 2, 3, 4]


def test_conversations_find_all_that_they_have_said_in_a_cache_that_holds_them():
    """40 conversations that grow turn by turn."""
    requests = [[("chat", chat), *range(turn)] for turn in range(0, 100, 4) for chat in range(40)]
    by_size = lru_hits(requests)
    assert len(by_size) == 40 * 97 + 1
    assert by_size[-1] == sum(map(len, requests)) - 40 * 97
    assert by_size[39:41] == [0, 1]  # all others spoke in between


# The optimum.


def most_hits(capacity, requests):
    """Over all ways to evict: a state is what is in the cache, by the path to each block."""
    best = {frozenset(): 0}
    for keys in requests:
        wanted = [tuple(keys[: end + 1]) for end in range(min(len(keys), capacity))]
        after = {}
        for kept, hits in best.items():
            found = sum(path in kept for path in wanted)
            others = [path for path in kept if path not in wanted]
            room = capacity - len(wanted)
            for stay in itertools.combinations(others, min(room, len(others))):
                state = frozenset([*wanted, *stay])
                if all(path[:-1] in state for path in state if len(path) > 1):
                    after[state] = max(after.get(state, 0), hits + found)
        best = after
    return max(best.values())


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=9), st.integers(1, 5))
def test_no_way_to_evict_finds_more_than_the_optimum(requests, capacity):
    assert sum(optimum_hits(capacity, requests)) == most_hits(capacity, requests)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=14), st.integers(1, 4))
def test_no_way_to_evict_single_blocks_finds_more_than_the_optimum(prompts, capacity):
    assert sum(optimum_hits(capacity, single(prompts))) == most_hits(capacity, single(prompts))


@settings(max_examples=40)
@given(requests_of_blocks)
def test_no_policy_finds_more_than_the_optimum(requests):
    for capacity in (1, 2, 3, 5, 8, 13):
        optimum = sum(optimum_hits(capacity, requests))
        assert all(sum(replay(policy, capacity, requests)) <= optimum for policy in POLICIES)


def test_the_optimum_keeps_what_comes_back_first():
    assert optimum_hits(2, single("ABCAB")) == [0, 0, 0, 1, 0]
    assert replay("lru", 2, single("ABCAB")) == [0] * 5


# Rates.


def test_rates_are_shares_of_the_blocks_that_are_asked_for():
    requests = [(1, 2), (1, 2, 3), (4,), (1, 2, 3)]
    rates = hit_rates(requests, [3, 1], ["lru", "fifo", OPTIMUM], replay)
    assert (rates.num_requests, rates.num_blocks, rates.num_distinct) == (4, 9, 4)
    assert rates.capacities == (1, 3)
    assert rates.by_policy == {"lru": (1 / 9, 4 / 9), "fifo": (1 / 9, 4 / 9), OPTIMUM: (1 / 9, 4 / 9)}
    assert rates.unlimited == 5 / 9


@settings(max_examples=25)
@given(requests_of_blocks)
def test_the_largest_of_the_usual_capacities_is_enough_for_everybody(requests):
    rates = hit_rates(requests, [], [*POLICIES, OPTIMUM], replay)
    assert rates.capacities[-1] // 2 < rates.num_distinct <= rates.capacities[-1]
    assert all(math.isclose(found[-1], rates.unlimited) for found in rates.by_policy.values())


def test_powers_of_two():
    assert [powers_of_two(enough)[-1] for enough in (1, 2, 3, 4, 5, 1024, 1025)] == [1, 2, 4, 4, 8, 1024, 2048]


def test_it_says_what_it_does():
    said = []
    hit_rates([(1,)], [1, 2], ["lru", "fifo"], replay, said.append)
    assert said == ["lru at every capacity", "fifo at 1 blocks", "fifo at 2 blocks"]


# What is refused.


@pytest.mark.parametrize("capacity", [0, -3])
def test_a_cache_without_a_block_is_refused(capacity):
    with pytest.raises(InstrumentError, match=f"capacity is .*at least 1.*, not {capacity}"):
        replay("lru", capacity, single("AB"))
    with pytest.raises(InstrumentError, match=f"capacity is .*at least 1, not {capacity}"):
        hit_rates(single("AB"), [capacity], ["lru"], replay)


def test_a_policy_that_nobody_knows_is_refused_with_the_choices():
    with pytest.raises(MissingFeatureError, match=re.escape("'belady'") + ".*lru, lfu, fifo, size") as caught:
        replay("belady", 1, single("AB"))
    with pytest.raises(Exception, match="belady"):
        exec(caught.value.probe, {})
    assert policies_among(()) == POLICIES
    assert policies_among(("fifo", "fifo")) == ("fifo",)


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(InstrumentError, match="0 requests without any block have no hit rate"):
        hit_rates([], [1], ["lru"], replay)


def test_a_build_without_a_prefix_cache_lacks_a_feature(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "nanoserve.cache.prefix", None)
    with pytest.raises(MissingFeatureError, match="no prefix cache") as caught:
        replay("lru", 1, single("AB"))
    assert caught.value.probe == "import nanoserve.cache.prefix"


# Prompts of token ids.


def test_a_prompt_that_is_sent_again_runs_its_last_token():
    prompt = list(range(64))
    assert predict_hits([prompt, prompt, prompt[:63], [*prompt, 7]], 100, 16) == [0, 48, 48, 64]


def test_a_prompt_that_does_not_fit_is_refused():
    with pytest.raises(InstrumentError, match="a prompt of 33 tokens does not fit into 2 blocks of 16"):
        predict_hits([[0] * 33], 2, 16)
    assert predict_hits([[0] * 32, []], 2, 16) == [0, 0]


def scheduled_hits(prompts, num_blocks, block_size, policy):
    """The same by a scheduler, a request at a time."""
    from nanoserve.cache.prefix import PrefixTree
    from nanoserve.config import SamplingParams, SchedulerConfig
    from nanoserve.request import Request
    from nanoserve.scheduler import Scheduler

    tree = PrefixTree(block_size, policy, evicts_runs=True)
    scheduler = Scheduler(SchedulerConfig(num_blocks=num_blocks, block_size=block_size), tree)
    hits = []
    for number, prompt in enumerate(prompts):
        before = tree.counts.num_hit_tokens
        scheduler.add(Request(str(number), list(prompt), SamplingParams(max_new_tokens=1, ignore_eos=True)))
        while scheduler.has_work:
            for each in scheduler.schedule():
                if each.samples:
                    each.request.append(0, ())
            scheduler.commit()
        hits.append(tree.counts.num_hit_tokens - before)
    return hits


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=16), min_size=1, max_size=12),
    st.integers(8, 12),
    st.sampled_from(POLICIES),
)
def test_predicted_hits_are_those_of_a_scheduler(prompts, num_blocks, policy):
    assert predict_hits(prompts, num_blocks, 2, policy) == scheduled_hits(prompts, num_blocks, 2, policy)
