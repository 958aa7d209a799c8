"""What a client costs that has hung up: a few steps, and never the rest of what it asked for.

The server is stopped while its client hangs up. So what it computes afterwards is what came of noticing too late,
however busy the machine is.
"""

import asyncio
import contextlib

import pytest
from server_process import Call, server_process

pytestmark = pytest.mark.slow

MOST_STEPS = 60
"""In each of which every request gets a token. To the end it would be some thousand."""

LONG = {"prompt": "Hello", "max_tokens": 1900, "ignore_eos": True}
NUM = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = ("--max-running", NUM, "--max-step-tokens", NUM, "--prefix-cache", "off")
    with server_process(tmp_path_factory.mktemp("server"), *options) as server:
        yield server


@contextlib.contextmanager
def stopped(server):
    """Its process does nothing meanwhile."""
    server.process.suspend()
    try:
        yield
    finally:
        server.process.resume()


@pytest.fixture
def spent(server):
    """Call it for the steps, the tokens and the requests that have been admitted since the test began."""
    names = ("steps_total", "generated_tokens_total", "queue_seconds_count")
    before = [server.number(name) for name in names]
    return lambda: [server.number(name) - past for name, past in zip(names, before, strict=True)]


@pytest.mark.parametrize("streams", [True, False])
def test_in_the_middle_of_an_answer(server, spent, streams):
    async def hang_up():
        call = await Call.open(server.url, n=NUM, stream=streams, **LONG)
        await asyncio.to_thread(server.wait_until, "requests_running", NUM)
        await asyncio.to_thread(_wait_for_tokens, spent)
        with stopped(server):
            call.hang_up()

    def _wait_for_tokens(spent):
        server.wait_until("generated_tokens_total", lambda _: spent()[1] > 10 * NUM)
        seen.extend(spent())

    seen = []
    asyncio.run(hang_up())
    server.wait_until_empty()
    assert spent()[0] - seen[0] < MOST_STEPS
    assert spent()[1] - seen[1] < MOST_STEPS * NUM


def test_before_its_turn_has_come(server, spent):
    async def hang_up():
        holder = await Call.open(server.url, n=NUM, stream=True, **LONG)
        await asyncio.to_thread(server.wait_until, "requests_running", NUM)
        waiting = [await Call.open(server.url, stream=streams, **LONG) for streams in (True, False)]
        await asyncio.to_thread(server.wait_until, "requests_waiting", 2)
        for call in waiting:
            call.hang_up()
        await asyncio.to_thread(server.wait_until, "requests_waiting", 0)
        assert server.number("requests_running") == NUM  # nobody has got a place yet
        holder.hang_up()

    asyncio.run(hang_up())
    server.wait_until_empty()
    assert spent()[2] == NUM


@pytest.mark.parametrize("streams", [True, False])
def test_while_its_prompt_is_computed_in_chunks(server, spent, streams):
    prompts = [[place] * 1900 for place in range(NUM)]

    async def hang_up():
        call = await Call.open(server.url, stream=streams, max_tokens=2, prompt=prompts)
        await asyncio.to_thread(server.wait_until, "steps_total", lambda _: spent()[0] > 10)
        seen.extend(spent())
        with stopped(server):
            call.hang_up()

    seen = []
    asyncio.run(hang_up())
    server.wait_until_empty()
    assert spent()[0] - seen[0] < MOST_STEPS
    assert spent()[1] == 0
