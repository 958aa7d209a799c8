"""Many clients at once, some of whom hang up: nobody's tokens are lost, doubled or another's, and nothing is left."""

import asyncio
import dataclasses
import random

import pytest
from server_process import Call, ServerProcess, Told, server_process, stream

from nanoserve import Engine, SamplingParams

pytestmark = pytest.mark.slow

NUM_READERS = 32
NUM_CLIENTS = 64
MOST_GROWN_BYTES = 24 * 2**20
CRAMPED = ("--max-running", 16, "--kv-memory", "512KiB")
"""64 blocks for 16 requests of up to 9: some have to make room for others."""


def _body(number):
    """Greedy and sampled ones; what penalties and seeds bring about is never the same token twice."""
    prompt = [(7 * number + 3 * place) % 256 for place in range(8 + 3 * number)]
    varied = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0, "presence_penalty": 2.0}
    return {"prompt": prompt, "max_tokens": 24 + 5 * (number % 12), "ignore_eos": True, **varied}


BODIES = [_body(number) for number in range(24)]


@dataclasses.dataclass
class Load:
    """Clients one beside the other, each with call after call. `wanted` is what each body gets alone."""

    server: ServerProcess
    wanted: list[Told]
    num_ended: int = 0
    num_hung_up: int = 0

    async def run(self, num_calls, seed):
        async with asyncio.TaskGroup() as clients:
            for number in range(NUM_CLIENTS):
                clients.create_task(self._client(num_calls, random.Random(f"{seed} {number}")))
        await asyncio.to_thread(self.server.wait_until_empty)

    async def _client(self, num_calls, chance):
        for _ in range(num_calls):
            number = chance.randrange(len(BODIES))
            patience = chance.randrange(BODIES[number]["max_tokens"]) if chance.random() < 0.4 else None
            await self._call(number, patience)

    async def _call(self, number, patience):
        """With patience for so many chunks; None has it for all."""
        body = {**BODIES[number], "stream": True, "return_token_ids": True}
        call, told = await Call.open(self.server.url, **body), Told()
        if patience != 0:
            assert await call.status() == 200
            await self._read(call, told, patience)
        call.hang_up()
        self._check(told, self.wanted[number], is_whole=patience is None)

    async def _read(self, call, told, patience):
        num_chunks = 0
        async for chunk in call.chunks():
            assert "error" not in chunk, chunk
            told.add(chunk)
            num_chunks += 1
            if num_chunks == patience:
                return

    def _check(self, told, wanted, *, is_whole):
        if is_whole:
            assert told == wanted
            self.num_ended += 1
        else:
            assert told.ids == wanted.ids[: len(told.ids)]
            assert wanted.text.startswith(told.text)
            self.num_hung_up += 1


@pytest.fixture(scope="module")
def wanted():
    """From an engine that no server is in front of, one after the other."""
    engine = Engine.load("tiny", device="cpu", dtype="float32")
    answers = [engine.generate(body["prompt"], _params(**body))[0] for body in BODIES]
    assert len({tuple(answer.token_ids) for answer in answers}) == len(BODIES)
    return [Told(list(answer.token_ids), answer.text) for answer in answers]


def _params(prompt, max_tokens, **others):
    return SamplingParams(max_new_tokens=max_tokens, **others)


async def _nothing_is_left(server, wanted, num_calls):
    load = Load(server, wanted)
    for number, body in enumerate(BODIES):
        assert await stream(server.url, **body) == wanted[number]
    await load.run(3, seed=1)
    before, bytes_before = server.holds(), server.num_bytes
    await load.run(num_calls, seed=2)
    assert load.num_ended + load.num_hung_up == NUM_CLIENTS * (3 + num_calls)
    assert load.num_hung_up > load.num_ended / 3
    assert server.number("preemptions_total") > 0
    server.wait_until_connections(1)
    (num_fds, num_threads), (fds_before, threads_before) = server.holds(), before
    assert num_fds == fds_before
    assert num_threads <= threads_before + NUM_READERS  # they come as they are needed, and stay
    assert server.num_bytes - bytes_before < MOST_GROWN_BYTES
    assert server.number('requests_total{outcome="error"}') == server.number('requests_total{outcome="refused"}') == 0
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("num_calls", [6, pytest.param(180, marks=pytest.mark.simulated)])
def test_many_streams_and_clients_that_hang_up(tmp_path, wanted, num_calls):
    with server_process(tmp_path, *CRAMPED) as server:
        asyncio.run(_nothing_is_left(server, wanted, num_calls))
