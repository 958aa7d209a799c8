"""What one step makes the machine do, counted: operators, FLOPs, bytes. No clock, no noise: any change is a change.

A count moves before a time does: one more operator per layer is invisible in a latency and plain here. Read beside
the latencies of `bench_kv_cache.py`, which say what the work costs.

Cannot see: how fast the work is done, scratch memory inside a kernel, what a compiler would fuse.
"""

import pytest

WORK = ("flops", "num_operators", "allocated_bytes", "peak_bytes", "kv_bytes", "num_forwards")
TOKENS = ("num_tokens_prefilled", "num_tokens_recomputed", "num_tokens_decoded")

each_cache = pytest.mark.arms(cached={"cache": "contiguous"}, naive={"cache": "none"})


@each_cache
@pytest.mark.quantities(*WORK, *TOKENS)
@pytest.mark.parametrize("prompt_tokens", [16, 128])
def test_prefill(count_work, prompt_tokens):
    """The step that runs the prompt."""
    count_work.prefill(prompt_tokens=prompt_tokens)


@each_cache
@pytest.mark.quantities(*WORK, *TOKENS)
@pytest.mark.parametrize("context_tokens", [16, 128])
def test_decode_step(count_work, context_tokens):
    """The step after it: one position with a cache, all of them without."""
    count_work.decode_step(context_tokens=context_tokens)


@pytest.mark.gpu
@pytest.mark.arms(
    graphs={"cache": "paged"},
    eager={"cache": "paged", "graphs": "off"},
    cached={"cache": "contiguous"},
    naive={"cache": "none"},
)
@pytest.mark.quantities("num_kernel_launches")
def test_launches_of_a_decode_step(count_work):
    """On a GPU a small model's step is as long as its launches. A recorded step is one, and its inputs' copies."""
    count_work.decode_step(context_tokens=128)
