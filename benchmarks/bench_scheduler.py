"""What a scheduler decides, counted on a clock of steps: no model, no time, no noise. Any change is a change.

The sizes are those of a published study of batching and preemption, whose counts come out to the last digit: prompts of
5 tokens, blocks of 4. A static batch issues 256 tokens where 60 are wanted (waste 0.766); four requests of 24 tokens
take 24, 28 or 44 steps in pools of 32, 24 or 12 blocks; six of them run 168, 224 or 268 positions in 48, 24 or 12.

Cannot see: what a step costs (`bench_batching.py`).
"""

import pytest

COUNTS = (
    "num_steps",
    "num_positions",
    "num_preemptions",
    "num_tokens_recomputed",
    "num_padding",
    "num_steps_to_first_answer",
)


@pytest.mark.arms(continuous={"max_running": 8}, static={"max_running": 8, "is_static": True})
@pytest.mark.quantities(*COUNTS)
def test_one_long_answer(count_work):
    """Eight requests, one of 32 tokens and seven of 4: who waits for whom."""
    count_work.schedule(prompt_tokens=5, new_tokens=[32, *[4] * 7])


def _pools(max_running, *sizes):
    """An arm for each size of the pool."""
    pool = {"max_running": max_running, "block_size": 4}
    return pytest.mark.arms(**{f"blocks_{size}": pool | {"num_blocks": size} for size in sizes})


@_pools(4, 12, 24, 32)
@pytest.mark.quantities(*COUNTS)
def test_four_requests_in_a_pool(count_work):
    """Room for all, for most, and for a third: steps and positions that preemption costs."""
    count_work.schedule(prompt_tokens=5, new_tokens=[24] * 4)


@_pools(6, 12, 24, 48)
@pytest.mark.quantities(*COUNTS)
def test_six_requests_in_a_pool(count_work):
    """The same with six."""
    count_work.schedule(prompt_tokens=5, new_tokens=[24] * 6)


_CHUNKS = {"max_running": 8, "num_blocks": 64, "block_size": 4}


@pytest.mark.arms(
    chunked=_CHUNKS | {"max_step_tokens": 16},
    whole=_CHUNKS | {"max_step_tokens": 16, "chunks_prefill": False},
    reserve=_CHUNKS | {"watermark_blocks": 8},
)
@pytest.mark.quantities(*COUNTS)
def test_long_prompts(count_work):
    """Prompts longer than a step may run: in chunks, as a whole, and with a reserve of blocks."""
    count_work.schedule(prompt_tokens=40, new_tokens=[12] * 4)
