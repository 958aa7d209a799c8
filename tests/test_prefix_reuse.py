"""Reuse in an engine: what is found was computed once, is not run again, and changes nothing of what is said.

transformers with the same weights is the reference.
"""

import pytest
import torch
from many_requests import LONG, PROMPTS, answers_of_transformers, logits_seen, run, tokens, varied_model

from nanoserve import Engine, SamplingParams
from nanoserve.cache.blocks import BlockTable
from nanoserve.cache.paged import PagedPart, PagedStep
from nanoserve.cache.prefix import PrefixTree
from nanoserve.errors import ConfigError

POOL = {"num_blocks": 64, "block_size": 4}
TWO = SamplingParams(max_new_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded():
    return varied_model()


@pytest.fixture(scope="module")
def expected(loaded):
    return answers_of_transformers(loaded)


def rows_that_run(engine):
    """Fills up with the number of positions of each forward."""
    seen, model = [], engine._model

    class Watched:
        compute_logits = model.compute_logits

        def __call__(self, token_ids, positions, cache):
            seen.append(len(token_ids))
            return model(token_ids, positions, cache)

    engine._model = Watched()
    return seen


def found(engine, ids):
    """Nodes of what the engine remembers of these ids."""
    return engine._scheduler.prefixes.find(list(ids), engine._scheduler._space)


WAYS = {
    "lru": {},
    "lfu": {"prefix_cache": "lfu"},
    "size, chunked": {"prefix_cache": "size", "max_step_tokens": 7, "max_running": 5},
    "fifo, read in place": {"prefix_cache": "fifo", "attention": "reference"},
    "blocks of one": {"num_blocks": 256, "block_size": 1},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_found_gives_the_logits_of_transformers(loaded, expected, way):
    """Everything is asked twice, and its answer once more as a prompt; hits are what is stored, to the token."""
    engine = Engine(loaded, **POOL | WAYS[way])
    run(engine, PROMPTS, TWO)
    before = engine.prefix_counts.num_hit_tokens
    seen = logits_seen(engine)
    assert tokens(run(engine, PROMPTS)) == [ids for ids, _ in expected]
    for place, (_, logits) in enumerate(expected):
        assert (torch.stack(seen[str(place)]) - logits).abs().max() < 1e-4
    size = engine._scheduler.config.block_size
    assert engine.prefix_counts.num_hit_tokens - before == sum((len(ids) - 1) // size * size for ids in PROMPTS)


def test_what_is_found_is_not_run(loaded):
    engine = Engine(loaded, **POOL)
    ran = rows_that_run(engine)
    prompt = list(range(30))
    cold, again = ([*engine.stream(prompt, TWO)] for _ in range(2))
    assert ran == [30, 1, 2, 1]
    assert [(each.num_prefilled, each.num_cached) for each in (*cold, *again)] == [(30, 0), (1, 30), (2, 28), (1, 30)]
    assert [each.token_id for each in cold] == [each.token_id for each in again]


def test_a_store_that_returns_nothing_saves_nothing(loaded, monkeypatch):
    monkeypatch.setattr(PrefixTree, "find", lambda *_: [])
    engine = Engine(loaded, **POOL)
    ran = rows_that_run(engine)
    for _ in range(2):
        engine.generate(list(range(30)), TWO)
    assert ran == [30, 1, 30, 1]
    assert engine.prefix_counts.num_hit_tokens == 0


def test_a_prefix_used_three_times_is_what_it_was(loaded):
    """Neither what follows it nor another request writes into it."""
    engine = Engine(loaded, **POOL)
    prefix = list(range(20))
    engine.generate(prefix, TWO)
    path = found(engine, prefix)
    assert len(path) == 5
    slots = [node.block * 4 + offset for node in path for offset in range(4)]
    stored = engine._memory.pool._buffer[:, :, :, slots].clone()
    for last in (100, 101, 102):
        engine.generate([*prefix, last, last], LONG)
    assert engine._memory.pool._buffer[:, :, :, slots].equal(stored)
    assert found(engine, prefix) == path


def test_requests_with_one_prefix_hold_it_once(loaded):
    """(N - 1) x P positions are saved, once the prefix has run."""
    engine, prefix = Engine(loaded, **POOL), list(range(16))
    engine.generate(prefix, TWO)
    for last in range(5):
        engine.add_request([*prefix, 100 + last], TWO)
    engine.step()
    assert engine.num_kv_blocks == 4 + 5


def test_turns_of_a_conversation_carry_their_ids(loaded):
    """Each turn finds all that the turns before it have run, in whole blocks; the first finds nothing."""
    engine, plain, ids = Engine(loaded, **POOL), Engine(loaded, prefix_cache="off"), []
    for turn in range(4):
        asked = [*ids, *range(10 * turn, 10 * turn + 9)]
        events = [*engine.stream(asked, SamplingParams(max_new_tokens=6, ignore_eos=True))]
        assert events[0].num_cached == max(0, len(ids) - 1) // 4 * 4
        ids = [*asked, *(event.token_id for event in events)]
        assert plain.generate(asked, SamplingParams(max_new_tokens=6, ignore_eos=True))[0].token_ids == tuple(ids[-6:])


def test_forgetting_leaves_what_a_request_holds(loaded):
    engine = Engine(loaded, **POOL)
    stream = engine.stream(list(range(20)), LONG)
    next(stream)
    engine.generate(list(range(50, 70)), TWO)
    assert len(found(engine, range(50, 70))) == 5
    engine.reset_prefix_cache()
    assert len(found(engine, range(20))) == 5
    assert found(engine, range(50, 70)) == []
    stream.close()


def test_a_forward_that_fails_leaves_nothing_to_be_found(loaded, monkeypatch):
    engine = Engine(loaded, **POOL)
    with monkeypatch.context() as patch:
        patch.setattr(type(engine._memory), "batch", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate(list(range(20)), TWO)
    assert len(engine._scheduler.prefixes) == 0
    engine._scheduler.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache": "mru"}, "unknown prefix_cache 'mru'; choose one of: auto, lru, lfu, fifo, size, off"),
        ({"prefix_cache": "lru", "cache": "contiguous"}, "'lru' keeps blocks of cache 'paged', not 'contiguous'"),
        ({"prefix_cache": "lru", "is_static": True}, "does not work with is_static: choose 'off'"),
        ({"block_size": 12}, "block_size must be a power of two"),
    ],
)
def test_options_that_cannot_work_are_refused(loaded, options, message):
    with pytest.raises(ConfigError, match=message):
        Engine(loaded, **options)


def test_without_a_prefix_cache_there_is_nothing_to_count_and_resetting_is_no_error(loaded):
    for options in ({"prefix_cache": "off"}, {"cache": "contiguous"}, {"is_static": True}):
        engine = Engine(loaded, **options)
        engine.reset_prefix_cache()
        assert engine.prefix_counts is None


@torch.inference_mode()
@pytest.mark.parametrize("fault", ["positions from 0", "a mask over the suffix only"])
def test_the_tolerance_sees_what_a_wrong_suffix_does(loaded, fault):
    """The two classical faults of reuse move logits by more than what reuse may."""
    engine, ids = Engine(loaded, **POOL), list(range(16))
    seen = logits_seen(engine)
    engine.generate(ids, TWO)
    (right, _) = seen.popitem()[1]
    held = BlockTable(engine._scheduler.pool, 4)
    if fault == "positions from 0":
        held.adopt([node.block for node in found(engine, ids)[:3]])
    num_stored = held.num_tokens
    held.grow(num_stored + 4)
    step = PagedStep(engine._memory.pool, [PagedPart(held, num_stored, 4)])
    hidden = loaded.model(torch.tensor(ids[12:]), torch.arange(4) + (12 - num_stored), step)
    assert (loaded.model.compute_logits(hidden[-1:])[0] - right).abs().max() > 1e-4
