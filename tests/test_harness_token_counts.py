"""Work counted from steps: what was run, what was run again, and what a cache has to hold."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.exact import exact_changes, is_red
from benchmarks.harness.token_counts import Step, count_tokens, kv_blocks, kv_bytes_per_token, total_tokens
from nanoserve.catalog import SHAPES


def counted(num_prompt, *steps):
    """Steps as (num_prefilled, num_cached) or (num_prefilled, num_cached, num_tokens)."""
    return count_tokens([Step(**dict(zip(FIELDS, step, strict=False))) for step in steps], num_prompt)


FIELDS = ("num_prefilled", "num_cached", "num_tokens")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(5, 0), (1, 5), (1, 6)], (3, 5, 2, 0, 7, 3)),  # a cache
        ([(5, 0), (6, 0), (7, 0)], (3, 5, 2, 11, 7, 3)),  # none: 5 + 6 positions again
        ([(1, 4), (1, 5)], (2, 1, 1, 0, 6, 2)),  # a prefix hit of 4
        ([(2, 0, 0), (2, 2, 0), (1, 4, 1), (1, 5, 1)], (4, 5, 1, 0, 6, 2)),  # chunked prefill
        ([(5, 0), (1, 5), (7, 0), (1, 7)], (4, 5, 3, 6, 8, 4)),  # preempted after 2 tokens, all run again
        ([(1, 4), (4, 2)], (2, 3, 1, 1, 6, 2)),  # preempted; half of the hit was evicted, and runs for the first time
        ([(5, 0), (4, 5, 2), (2, 7, 2)], (3, 5, 4, 2, 9, 5)),  # 4 drafts run, 2 accepted, 2 run again
        ([], (0, 0, 0, 0, 0, 0)),
    ],
)
def test_counts_of_one_request(steps, expected):
    """Forwards; positions prefilled, decoded, recomputed and stored; tokens."""
    assert dataclasses.astuple(counted(5, *steps)) == expected


@given(num_prompt=st.integers(1, 50), num_new=st.integers(1, 20), num_hits=st.integers(0, 49))
def test_with_a_cache_nothing_is_recomputed_and_without_all_of_it(num_prompt, num_new, num_hits):
    hits = min(num_hits, num_prompt - 1)
    later = range(num_prompt, num_prompt + num_new - 1)
    with_cache = counted(num_prompt, (num_prompt - hits, hits), *((1, cached) for cached in later))
    without = counted(num_prompt, (num_prompt, 0), *((cached + 1, 0) for cached in later))
    assert (with_cache.num_prefilled, with_cache.num_decoded, with_cache.num_recomputed) == (
        num_prompt - hits,
        num_new - 1,
        0,
    )
    assert without.num_recomputed == sum(later)
    assert with_cache.num_stored == without.num_stored == num_prompt + num_new - 1


@given(
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8),
    num_prompt=st.integers(0, 12),
)
def test_every_position_that_ran_is_counted_once(steps, num_prompt):
    counts = counted(num_prompt, *steps)
    assert counts.num_prefilled + counts.num_decoded + counts.num_recomputed == sum(step[0] for step in steps)
    assert min(counts.counts().values()) >= 0


def test_a_source_that_does_not_tell_is_unknown_and_not_zero():
    counts = counted(5, (5, 0), (None, None))
    assert counts.counts() == {"num_forwards": 2, "num_tokens": 2}
    assert (counts.num_prefilled, counts.num_recomputed, counts.num_stored) == (None, None, None)
    assert total_tokens([counts, counted(5, (5, 0))]).counts() == {"num_forwards": 3, "num_tokens": 3}


@pytest.mark.parametrize("step", [(-1, 0), (1, -1), (1, 0, -1)])
def test_a_negative_count_is_refused(step):
    with pytest.raises(InstrumentError, match=r"Step\(.*-1.*\) counts something below zero"):
        counted(5, step)


def test_losing_the_cache_turns_the_gate_red_in_recomputed_positions_only():
    base = counted(5, (5, 0), (1, 5), (1, 6)).counts()
    changes = exact_changes(base, counted(5, (5, 0), (6, 0), (7, 0)).counts())
    assert [(change.key, change.difference) for change in changes] == [("num_recomputed", 11)]
    assert is_red(changes)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((12, 12, 64, 2), 36_864),  # GPT-2, fp16
        ((16, 8, 64, 2), 32_768),  # Llama 3.2 1B, bf16
        ((16, 8, 64, 4), 65_536),  # and in fp32; its 32 query heads do not count
    ],
)
def test_bytes_of_one_position(shape, expected):
    assert kv_bytes_per_token(*shape) == expected


def test_bytes_of_one_position_are_the_engines_own_sum():
    for config in SHAPES.values():
        expected = config.kv_bytes_per_token(2)
        assert kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, 2) == expected


def test_blocks_are_rounded_up():
    assert [kv_blocks(num_tokens, 16) for num_tokens in (0, 1, 16, 17, 40, 64)] == [0, 1, 1, 2, 3, 4]


@pytest.mark.parametrize(("num_tokens", "block_size"), [(-1, 16), (1, 0)])
def test_sizes_that_cannot_be_are_refused(num_tokens, block_size):
    with pytest.raises(InstrumentError, match=f"{num_tokens} tokens in blocks of {block_size}"):
        kv_blocks(num_tokens, block_size)
