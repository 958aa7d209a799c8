"""What a pool of KV blocks costs, and what it reads: paged beside contiguous, by context and by requests at once.

A contiguous cache reserves the longest context of every request; a pool does not, and pays for it with an indirection.
Both arms get the same prompts in turns and have to produce the same tokens. Where several requests decode together,
paged ones are gathered and read in one go, contiguous ones one after another: the price can be below 1.

Cannot see: a pool that many requests have torn to pieces, for one request alone (`test_read_scaling` reads one), and
what the saved memory is worth (`bench_batching.py`).
"""

import pytest

from benchmarks.harness.arrivals import together

FULL = pytest.mark.full
DESK = pytest.mark.desk

PAGED, CONTIGUOUS = {"cache": "paged", "kv_memory": "1GiB"}, {"cache": "contiguous"}


@pytest.mark.arms(paged=PAGED, contiguous=CONTIGUOUS)
@pytest.mark.quantities("ttft_s", "itl_p50_s", "itl_price")
@pytest.mark.parametrize(
    "context_tokens", [pytest.param(64, marks=DESK), *(pytest.param(n, marks=(DESK, FULL)) for n in (256, 1024, 2000))]
)
def test_price_by_context(measure, context_tokens):
    """One request: the price of an indirection, where blocks follow each other."""
    measure.serve(together(1, prompt_tokens=context_tokens, new_tokens=24))
    measure.price(of="paged", against="contiguous")


@pytest.mark.arms(paged=PAGED, contiguous=CONTIGUOUS)
@pytest.mark.quantities("itl_p50_s", "steady_tokens_per_s", "itl_price")
@pytest.mark.parametrize(
    "num_requests", [pytest.param(8, marks=DESK), *(pytest.param(n, marks=(DESK, FULL)) for n in (2, 4, 16, 32))]
)
def test_price_by_batch(measure, num_requests):
    """Many requests of ragged length: one read of all against a read of each."""
    prompts = [16 + 8 * (place % 7) for place in range(num_requests)]
    measure.serve(together(num_requests, prompt_tokens=prompts, new_tokens=12))
    measure.price(of="paged", against="contiguous")


@pytest.mark.arms(paged={"reads": "paged"}, contiguous={"reads": "contiguous"})
@pytest.mark.quantities("read_exponent", "ttft_growth")
def test_read_scaling(measure):
    """Attention alone, all layers, one request: how its time grows from 256 to 8192 positions in scattered blocks."""
    measure.sweep(prompt_tokens=[256, 512, 1024, 2048, 4096, 8192], new_tokens=1)


@pytest.mark.full
@pytest.mark.arms(paged={"reads": "paged", "requests": 8}, contiguous={"reads": "contiguous", "requests": 8})
@pytest.mark.quantities("e2e_s", "speedup")
@pytest.mark.parametrize("context_tokens", [128, 512, 2048])
def test_read_of_a_batch(measure, context_tokens):
    """Attention alone, all layers, eight requests."""
    measure.stream(prompt_tokens=context_tokens, new_tokens=1)
    measure.compare(slow="contiguous", fast="paged")
