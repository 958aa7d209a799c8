"""What sharing steps buys, and what it costs: throughput by batch, static against continuous, preemption, chunks.

A decode step reads every weight once, for one request or for many. Requests come all at once, so that what happens in
which step is the same in every arm and on every machine; only its time is measured. Latencies count from when a request
was due, queueing included.

Cannot see: requests that come when they like (`bench_arrivals.py`), the schedule itself (`bench_scheduler.py`).
"""

import pytest

from benchmarks.harness.arrivals import together
from benchmarks.harness.traffic import Limits

DESK, FULL = pytest.mark.desk, pytest.mark.full

PAGED = {"cache": "paged", "kv_memory": "1GiB"}


@pytest.mark.arms(paged=PAGED)
@pytest.mark.quantities("itl_p50_s", "steady_tokens_per_s")
@pytest.mark.parametrize("num_requests", [4])
def test_decode_together(measure, num_requests):
    """The step that a server takes most of the time, small enough to be followed over commits."""
    measure.serve(together(num_requests, prompt_tokens=8, new_tokens=6))


@pytest.mark.arms(paged=PAGED)
@pytest.mark.quantities("batch_scaling", "batch_knee_requests", "step_overhead_s", "step_per_request_s")
@pytest.mark.parametrize("largest", [pytest.param(8, marks=DESK), pytest.param(32, marks=(DESK, FULL))])
def test_decode_throughput(measure, largest):
    """Throughput from one request to many, and the batch from which on more requests mainly take longer."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size <= largest]
    measure.batches(sizes, prompt_tokens=16, new_tokens=12)


@DESK
@pytest.mark.arms(continuous=PAGED | {"max_running": 8}, static=PAGED | {"max_running": 8, "is_static": True})
@pytest.mark.quantities("ttft_s", "e2e_s", "mean_tokens_per_s", "goodput_requests_per_s", "speedup", "window_speedup")
def test_static_against_continuous(measure):
    """One long answer among short ones, then more of them: a static batch makes all wait for its longest row."""
    measure.serve(together(16, prompt_tokens=5, new_tokens=[24, *[4] * 7, *[4] * 8]), limits=Limits(ttft_s=1.0))
    measure.compare(slow="static", fast="continuous")


_POOL = {"cache": "paged", "block_size": 4, "max_running": 4}


@DESK
@FULL
@pytest.mark.arms(roomy=_POOL | {"num_blocks": 32}, tight=_POOL | {"num_blocks": 24}, tiny=_POOL | {"num_blocks": 12})
@pytest.mark.quantities("e2e_s", "itl_p99_s", "mean_tokens_per_s", "window_speedup")
def test_preemption_bill(measure):
    """Four requests of 5 + 24 tokens, in pools that hold all of them, most, and a third: what recomputing costs."""
    measure.serve(together(4, prompt_tokens=5, new_tokens=24))
    measure.compare(slow="tiny", fast="roomy")


_SMALL = {"cache": "paged", "block_size": 4, "num_blocks": 24, "max_running": 6}


@DESK
@FULL
@pytest.mark.arms(reserve=_SMALL | {"watermark_blocks": 6}, none=_SMALL)
@pytest.mark.quantities("ttft_s", "e2e_s", "mean_tokens_per_s", "window_speedup")
def test_watermark(measure):
    """A reserve of free blocks: later first tokens against fewer preemptions."""
    measure.serve(together(6, prompt_tokens=5, new_tokens=24))
    measure.compare(slow="none", fast="reserve")


_RUNNING = {"cache": "paged", "kv_memory": "1GiB", "max_running": 5}


@DESK
@pytest.mark.arms(
    chunked=_RUNNING | {"max_step_tokens": 64}, whole=_RUNNING | {"max_step_tokens": 64, "chunks_prefill": False}
)
@pytest.mark.quantities("itl_p50_s", "itl_p99_s", "e2e_s")
@pytest.mark.parametrize("prompt_tokens", [384, pytest.param(1024, marks=FULL)])
def test_chunked_prefill(measure, prompt_tokens):
    """A long prompt beside four requests that decode: one long gap for each of them, or several short ones."""
    measure.serve(together(5, prompt_tokens=[8, 8, 8, 8, prompt_tokens], new_tokens=[16, 16, 16, 16, 2]))


@DESK
@pytest.mark.arms(bookkeeping=PAGED | {"model": "none"}, whole=PAGED)
@pytest.mark.quantities("itl_p50_s", "itl_price")
@pytest.mark.parametrize("num_requests", [32, pytest.param(1, marks=FULL)])
def test_bookkeeping(measure, num_requests):
    """A step without its model: the scheduler, the batch and the text, as a share of the whole step."""
    measure.serve(together(num_requests, prompt_tokens=16, new_tokens=12), same_tokens=False)
    measure.price(of="bookkeeping", against="whole")
