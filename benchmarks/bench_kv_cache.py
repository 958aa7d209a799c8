"""What a KV cache buys: one request, with the keys and values of past positions kept or computed again.

The naive arm runs every position at every step, so its cost per token grows with the context; the cached arm runs
one position per step. Both are the same engine, produce the same tokens and take turns in random order.

Cannot see: several requests at once, memory, caches that copy. The speedup here is of totals: at short lengths it
grows mostly because prefill is shared among more tokens, not because the cost per token parts ways.
"""

import functools

import pytest

desk = functools.partial(pytest.param, marks=pytest.mark.desk)
"""A point of a curve that sixteen passes of a comparison do without."""

LATENCIES = ("ttft_s", "itl_p50_s", "itl_p90_s", "tpot_s", "e2e_s", "decode_tokens_per_s")


@pytest.mark.arms(cached={"cache": "contiguous"}, naive={"cache": "none"})
@pytest.mark.quantities(*LATENCIES, "speedup")
@pytest.mark.parametrize("new_tokens", [8, 16, desk(32), desk(64)])
def test_generation_length(measure, new_tokens):
    """The answer grows, the prompt stays at 16 tokens."""
    measure.stream(prompt_tokens=16, new_tokens=new_tokens)
    measure.speedup(slow="naive", fast="cached")


@pytest.mark.arms(cached={"cache": "contiguous"})
@pytest.mark.quantities(*LATENCIES)
@pytest.mark.parametrize("prompt_tokens", [16, desk(32), desk(64), 128, desk(256), 512])
def test_prompt_length(measure, prompt_tokens):
    """The prompt grows, the answer stays at 16 tokens: TTFT pays for prefill, ITL hardly notices."""
    measure.stream(prompt_tokens=prompt_tokens, new_tokens=16)
