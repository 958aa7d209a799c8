"""nanoserve's prefix cache as it is measured: proven on whole engines, predicted by the tree alone, never left over."""

import pytest

from benchmarks.harness.arrivals import together
from benchmarks.harness.clock import DeviceClock
from benchmarks.harness.errors import InstrumentError, MissingFeatureError, WrongOutputError
from benchmarks.harness.loop import Plan, WarmUp
from benchmarks.harness.measure import Measure
from benchmarks.harness.sources.nanoserve import NanoserveSubject
from benchmarks.harness.work import CountWork
from nanoserve import EngineConfig
from nanoserve.cache.blocks import BlockTable
from nanoserve.cache.prefix import PrefixTree

POOL = {"cache": "paged", "num_blocks": 64, "block_size": 4}
STATES = ("cold", "primed", "unseen", "suffix", "prefix", "warm")


@pytest.fixture
def subject(varied):
    return NanoserveSubject(varied, "tiny")


def measuring(subject, arms, *quantities, name="a test"):
    plan = Plan(name=name, quantities=quantities, arms=arms, warm_up=WarmUp(max_runs=1, max_s=1))
    return Measure(plan, subject, DeviceClock("cpu"))


def test_every_state_finds_what_it_has_to(subject):
    measure = measuring(subject, {state: POOL | {"state": state} for state in STATES}, "ttft_s")
    measure.reuse(prefix_tokens=16, suffix_tokens=8)
    found = {state: run.num_cached for state, (run,) in measure.runs.items()}
    assert found == {"cold": 0, "primed": 16, "unseen": 0, "suffix": 0, "prefix": 0, "warm": 20}


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "size"])
def test_what_a_pool_that_is_too_small_finds_is_what_the_tree_alone_finds(subject, policy):
    arms = {"on": POOL | {"num_blocks": 16, "prefix_cache": policy}, "off": POOL | {"prefix_cache": "off"}}
    measure = measuring(subject, arms, "hit_rate")
    measure.revisit([0, 1, 0, 2, 0, 3, 4, 1, 0, 0, 2, 2], prefix_tokens=16, suffix_tokens=4)
    on, off = measure.measurements
    assert 0 < on.value < 0.7
    assert off.value == 0


def test_a_store_that_returns_nothing_is_an_error_and_no_saving(subject, monkeypatch):
    monkeypatch.setattr(PrefixTree, "find", lambda *_: [])
    measure = measuring(subject, {s: POOL | {"state": s} for s in ("unseen", "primed")}, "reuse_speedup")
    with pytest.raises(WrongOutputError, match="24 positions ran behind a prefix that was served before, not 8"):
        measure.reuse(prefix_tokens=16, suffix_tokens=8)
    assert measure.measurements == []


def test_a_block_of_other_tokens_is_seen_before_anything_is_timed(subject, monkeypatch):
    """The order alone would not be: positions are in the keys, and attention adds up in any order."""
    adopt = BlockTable.adopt
    monkeypatch.setattr(BlockTable, "adopt", lambda table, blocks: adopt(table, [*blocks[1:], *blocks[-1:]]))
    measure = measuring(subject, {s: POOL | {"state": s} for s in ("unseen", "primed")}, "reuse_speedup")
    with pytest.raises(WrongOutputError, match="the logits behind a cached prefix are"):
        measure.reuse(prefix_tokens=16, suffix_tokens=8)
    assert measure.runs == {}


def test_the_same_test_twice_in_one_process_finds_nothing(subject):
    for _ in range(2):
        measure = measuring(subject, {"paged": POOL}, "ttft_s")
        measure.serve(together(3, prompt_tokens=16, new_tokens=2))
        assert [run.num_cached for run in measure.runs["paged"]] == [0, 0, 0]


def test_what_a_test_has_left_behind_is_no_hit_but_an_error_where_it_is_not_forgotten(subject, monkeypatch):
    monkeypatch.setattr(NanoserveSubject, "forget", lambda *_, **arm: None)
    measuring(subject, {"paged": POOL}, "ttft_s").stream(prompt_tokens=16, new_tokens=2)
    with pytest.raises(WrongOutputError, match="found 12 tokens of a prompt in a cache that has not seen it"):
        measuring(subject, {"paged": POOL}, "ttft_s").stream(prompt_tokens=16, new_tokens=2)


def test_requests_of_one_prefix_hold_it_once(subject):
    shape, saved = subject._loaded.config, {}
    arms = {"shared": POOL, "apart": POOL | {"prefix_cache": "off"}}
    for num in (1, 3):
        plan = Plan(name="a test", quantities=("num_kv_blocks", "kv_unused_bytes"), arms=arms)
        count = CountWork(plan, subject, DeviceClock("cpu"), "cpu")
        count.sharing(num_requests=num, prefix_tokens=16, suffix_tokens=8)
        blocks, unused = ({m.arm: m.value for m in count.measurements if m.metric.name == n} for n in plan.quantities)
        saved[num] = (blocks["apart"] - blocks["shared"], unused["shared"] - unused["apart"])
    assert saved == {1: (0, 0), 3: (2 * 4, 2 * 16 * shape.kv_bytes_per_token(4))}


def test_a_lookup_finds_the_second_time_what_it_stored_the_first(subject):
    arm = {"prefixes": 100}
    for prompt in (range(64), range(64), range(100, 132)):
        (told,) = subject.stream(list(prompt), 1, **arm)
        assert told.token_ids == ((len(prompt) - 1) // 16,)
    assert subject.cost(**arm) is None


@pytest.mark.parametrize("prefix_tokens", [0, 8, 9])
def test_a_prefix_is_shorter_than_its_prompt(subject, prefix_tokens):
    with pytest.raises(InstrumentError, match=f"a prompt of 8 tokens is shorter, not {prefix_tokens}"):
        subject.reuse_logits(range(8), prefix_tokens, **POOL)


def test_a_build_without_a_prefix_cache_lacks_a_feature(subject, monkeypatch):
    monkeypatch.delattr(EngineConfig, "prefix_policy")
    measure = measuring(subject, {"cold": POOL | {"state": "cold"}, "primed": POOL | {"state": "primed"}}, "ttft_s")
    with pytest.raises(MissingFeatureError, match="no prefix cache"):
        measure.reuse(prefix_tokens=16, suffix_tokens=8)
