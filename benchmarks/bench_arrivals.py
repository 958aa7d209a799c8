"""Requests that come when they like: even, in bursts, or as a trace says. Each is sent when it is due, whatever became
of those before it, and its latencies count from then.

The rate that was asked stands beside the rate that was served; where the second is lower, the engine is overloaded, and
its latencies say how long the window was rather than how fast it is. Goodput counts requests that kept both limits.

Cannot see: the network, clients that give up, rates that a window of seconds is too short for. Sixteen windows of a
comparison would take too long: nothing here is followed over commits.
"""

from pathlib import Path

import pytest

from benchmarks.harness.arrivals import bursts, from_trace, poisson
from benchmarks.harness.traffic import Limits

pytestmark = pytest.mark.desk

TRACE = Path(__file__).parent / "traces" / "bursty.csv"
LATENCIES = ("ttft_s", "itl_p50_s", "itl_p99_s", "e2e_s")
RATES = ("asked_requests_per_s", "requests_per_s", "goodput_requests_per_s", "mean_tokens_per_s")
LIMITS = Limits(ttft_s=1.0, tpot_s=0.25)
SIZES = {"prompt_tokens": [16, 64, 32, 8] * 3, "new_tokens": [8, 4, 16, 8] * 3}

paged = pytest.mark.arms(paged={"cache": "paged", "kv_memory": "1GiB"})
measured = pytest.mark.quantities(*LATENCIES, *RATES)


@paged
@measured
@pytest.mark.parametrize("rate_per_s", [4.0, *(pytest.param(rate, marks=pytest.mark.full) for rate in (1.0, 2.0, 8.0))])
def test_poisson(measure, rate_per_s):
    """Independent clients."""
    measure.serve(poisson(rate_per_s, 12, seed=1, **SIZES), limits=LIMITS)


@pytest.mark.full
@paged
@measured
@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_bursts(measure, burstiness):
    """The same mean rate, more and less evenly spread."""
    measure.serve(bursts(4.0, 12, burstiness=burstiness, seed=1, **SIZES), limits=LIMITS)


@pytest.mark.full
@paged
@measured
def test_trace(measure):
    """A schedule from a file."""
    measure.serve(from_trace(TRACE), limits=LIMITS)
