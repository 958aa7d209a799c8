"""The server as its clients see it: requests through HTTP, from another process, to the same engine and options.

Closed loops say what so many clients get who wait for their answers; open arrivals what clients get who do not. The
price of HTTP is held against the engine in this process, in the same minutes. How late the client itself was is
measured as well, and the server's own means stand beside the client's. With `--endpoint URL` the same is asked of any
server that speaks OpenAI's protocol; what needs the engine at hand is left out.

Cannot see: a network, clients that give up, more load than one client process on the same cores can make.
"""

from pathlib import Path

import pytest

from benchmarks.harness.arrivals import bursts, from_trace, poisson
from benchmarks.harness.clients import closed_loop
from benchmarks.harness.traffic import Limits

DESK, FULL = pytest.mark.desk, pytest.mark.full

TRACE = Path(__file__).parent / "traces" / "bursty.csv"
LIMITS = Limits(ttft_s=1.0, tpot_s=0.25)
SIZES = {"prompt_tokens": [16, 64, 32, 8] * 3, "new_tokens": [8, 4, 16, 8] * 3}
LATENCIES = ("ttft_s", "itl_p50_s", "itl_p99_s", "tpot_s", "e2e_s")
RATES = ("asked_requests_per_s", "requests_per_s", "goodput_requests_per_s", "mean_tokens_per_s")
DELAYS = ("schedule_delay_p50_s", "schedule_delay_p99_s", "schedule_delay_max_s")

ENGINE = {"cache": "paged", "kv_memory": "1GiB"}
HTTP = ENGINE | {"via": "http"}

through_http = pytest.mark.arms(http=HTTP)


def full(*values):
    """Parameters that the default profile does without."""
    return [pytest.param(value, marks=FULL) for value in values]


@pytest.mark.arms(http=HTTP, engine=ENGINE)
@pytest.mark.quantities("ttft_s", "itl_p50_s", "tpot_s", "ttft_price", "itl_price", "tpot_price")
@pytest.mark.parametrize("num_clients", [8, *full(1)])
def test_price_of_http(measure, num_clients):
    """HTTP, event streams and another process, over the engine at hand; small enough to be followed over commits."""
    measure.serve(closed_loop(num_clients, 1, prompt_tokens=16, new_tokens=32))
    measure.price(of="http", against="engine")


@DESK
@through_http
@pytest.mark.quantities(*LATENCIES, "mean_tokens_per_s", "requests_per_s", "goodput_requests_per_s")
@pytest.mark.parametrize("num_clients", [1, 8, *full(2, 4, 16, 32)])
def test_concurrency(measure, num_clients):
    """Clients that wait for their answers: throughput against what each of them gets."""
    measure.serve(closed_loop(num_clients, 2, prompt_tokens=32, new_tokens=16), limits=LIMITS)


@DESK
@through_http
@pytest.mark.quantities(*LATENCIES, *RATES, *DELAYS)
@pytest.mark.parametrize("rate_per_s", [4.0, *full(1.0, 2.0, 8.0)])
def test_poisson(measure, rate_per_s):
    """Independent clients, who send when they like."""
    measure.serve(poisson(rate_per_s, 12, seed=1, **SIZES), limits=LIMITS)


@DESK
@FULL
@through_http
@pytest.mark.quantities(*LATENCIES, *RATES, *DELAYS)
@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_bursts(measure, burstiness):
    """The same mean rate, more and less evenly spread."""
    measure.serve(bursts(4.0, 12, burstiness=burstiness, seed=1, **SIZES), limits=LIMITS)


@DESK
@FULL
@through_http
@pytest.mark.quantities(*LATENCIES, *RATES, *DELAYS)
def test_trace(measure):
    """A schedule from a file."""
    measure.serve(from_trace(TRACE), limits=LIMITS)


@DESK
@pytest.mark.arms(primed=HTTP | {"state": "primed"}, unseen=HTTP | {"state": "unseen"})
@pytest.mark.quantities("ttft_s", "reuse_speedup", "ttft_saved_s")
@pytest.mark.parametrize("prefix_tokens", [256])
def test_shared_prefix(measure, prefix_tokens):
    """A prompt whose beginning somebody has asked before."""
    measure.reuse(prefix_tokens=prefix_tokens, suffix_tokens=16)


@DESK
@FULL
@through_http
@pytest.mark.quantities("ttft_s", "mean_ttft_s")
def test_conversation(measure):
    """Turn after turn, each of which begins with all that was said."""
    measure.converse(num_turns=6, turn_tokens=32, answer_tokens=8)
