"""What a KV cache buys: one request, with the keys and values of past positions kept or computed again.

The naive arm runs every position at every step, so its cost per token grows with the context; the cached arm runs
one position per step. Arms take turns in random order, on one prompt and the same weights, and must produce the same
tokens.

Two curves, not one. The speedup of totals widens with length even where no step becomes any slower, because one
prefill is shared among more tokens; `speedup_if_constant` is that part alone. What a cache saves per token is
r(L) = naive ITL / cached ITL at context L, and how it grows (`itl_ratio_growth`).

Cannot see: several requests at once, memory, what a trained answer would have been (EOS is ignored).
"""

import pytest

DESK = ("desk",)
"""Marks a point of a curve that sixteen passes of a comparison do without."""

FULL = ("desk", "full")
"""Marks a point that the default profile does without as well."""


def point(value, *marks):
    """A parameter that some profiles leave out; `study` marks those of the published study."""
    return pytest.param(value, marks=[getattr(pytest.mark, mark) for mark in marks])


LATENCIES = ("ttft_s", "itl_p50_s", "itl_p90_s", "tpot_s", "e2e_s", "decode_tokens_per_s")
TOTALS = ("speedup", "speedup_if_constant")
CURVES = ("itl_growth", "itl_slope_s", "itl_ratio", "itl_ratio_growth", "itl_ratio_slope")

TTFT_CURVE = ("ttft_overhead_s", "ttft_per_token_s", "ttft_per_token2_s", "ttft_crossover_tokens")


@pytest.mark.arms(cached={"cache": "contiguous"}, naive={"cache": "none"})
@pytest.mark.quantities(*LATENCIES, *TOTALS)
@pytest.mark.parametrize(
    "new_tokens",
    [
        point(8, *DESK, "study"),
        point(16, *FULL, "study"),
        point(32, *FULL, "study"),
        point(64, *FULL),
        point(128, *FULL),
    ],
)
def test_generation_length(measure, new_tokens):
    """The answer grows, the prompt stays at 16 tokens."""
    measure.stream(prompt_tokens=16, new_tokens=new_tokens)
    measure.compare(slow="naive", fast="cached")


@pytest.mark.arms(cached={"cache": "contiguous"})
@pytest.mark.quantities(*LATENCIES)
@pytest.mark.parametrize("new_tokens", [point(64, *FULL, "study"), point(256, *FULL)])
def test_long_answer(measure, new_tokens):
    """The cached path alone, for answers that the naive one would take minutes for."""
    measure.stream(prompt_tokens=16, new_tokens=new_tokens)


@pytest.mark.arms(cached={"cache": "contiguous"}, naive={"cache": "none"})
@pytest.mark.quantities("itl_p50_s", "itl_p99_s", *TOTALS, *CURVES)
@pytest.mark.parametrize("new_tokens", [16, point(40, *DESK), point(128, *FULL)])
def test_cost_against_context(measure, new_tokens):
    """The same answers, step by step: r(L), ITL against context, and their slopes."""
    measure.stream(prompt_tokens=16, new_tokens=new_tokens)
    measure.compare(slow="naive", fast="cached")


@pytest.mark.arms(cached={"cache": "contiguous"})
@pytest.mark.quantities(*LATENCIES)
@pytest.mark.parametrize(
    "prompt_tokens",
    [
        point(16, "study"), point(32, *FULL), point(64, *FULL, "study"), point(128, *FULL, "study"),
        point(256, *FULL, "study"), 512, point(1024, *FULL),
    ],
)  # fmt: skip
def test_prompt_length(measure, prompt_tokens):
    """The prompt grows, the answer stays at 16 tokens: TTFT pays for prefill, ITL hardly notices."""
    measure.stream(prompt_tokens=prompt_tokens, new_tokens=16)


@pytest.mark.arms(cached={"cache": "contiguous"}, naive={"cache": "none"})
@pytest.mark.quantities("ttft_s", "itl_p50_s", "speedup", "itl_ratio")
@pytest.mark.parametrize("prompt_tokens", [point(length, *FULL) for length in (16, 64, 256, 1024)])
def test_ratio_against_prompt(measure, prompt_tokens):
    """r(L) where it is large: a naive step runs the whole prompt again."""
    measure.stream(prompt_tokens=prompt_tokens, new_tokens=8)
    measure.compare(slow="naive", fast="cached")


@pytest.mark.arms(cached={"cache": "contiguous"})
@pytest.mark.quantities("ttft_growth", *TTFT_CURVE)
@pytest.mark.parametrize("longest", [256, point(1024, *FULL)])
def test_ttft_curve(measure, longest):
    """TTFT = a + b P + c P^2 over prompt lengths P, and where what grows costs as much as what does not."""
    lengths = [length for length in (16, 32, 64, 128, 256, 512, 1024) if length <= longest]
    measure.sweep(prompt_tokens=lengths, new_tokens=1)


@pytest.mark.arms(preallocated={"cache": "contiguous"}, growing={"cache": "growing"})
@pytest.mark.quantities("itl_p50_s", "itl_growth", "speedup", "itl_ratio")
@pytest.mark.parametrize("prompt_tokens", [point(512, *FULL), point(1024, *FULL)])
def test_growing_a_cache(measure, prompt_tokens):
    """A cache that `torch.cat` makes longer at every step copies what it holds: flat against not flat."""
    measure.stream(prompt_tokens=prompt_tokens, new_tokens=16)
    measure.compare(slow="growing", fast="preallocated")


@pytest.mark.arms(nanoserve={"cache": "contiguous"}, transformers={"engine": "transformers"})
@pytest.mark.quantities(*LATENCIES, "speedup")
@pytest.mark.parametrize("prompt_tokens", [point(16, *DESK), point(256, *FULL)])
def test_against_transformers(measure, prompt_tokens):
    """Hugging Face's `generate` on the same weights in the same memory: what a known engine does here."""
    measure.stream(prompt_tokens=prompt_tokens, new_tokens=16)
    measure.compare(slow="transformers", fast="nanoserve")
