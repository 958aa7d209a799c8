"""How a server ends: killed, told to, told to twice, out of time. Its clients see how, and never wait for nothing."""

import asyncio
import signal

import pytest
from server_process import Call, Told, server_process, stream, until_cut, within

pytestmark = pytest.mark.slow

LONG = {"prompt": "Hello", "max_tokens": 800, "ignore_eos": True, "seed": 1}
ENDLESS = {**LONG, "n": 128, "stream": True, "return_token_ids": True}
"""With one running at a time: minutes."""


async def _begun(server, **body):
    """A stream that has told something."""
    call, told = await Call.open(server.url, **{**LONG, "stream": True, "return_token_ids": True, **body}), Told()
    assert await call.status() == 200
    chunks = call.chunks()
    told.add(await anext(chunks))
    return chunks, told


def test_killed_in_the_middle_it_starts_again_at_the_same_port(tmp_path):
    prompts = [f"Hello {number}" for number in range(3)]

    async def kill():
        streams = [await _begun(server, prompt=prompt) for prompt in prompts]
        server.popen.kill()
        for chunks, told in streams:
            for chunk in await until_cut(chunks):
                told.add(chunk)
        return [told for _, told in streams]

    with server_process(tmp_path) as server:
        port, parts = server.port, asyncio.run(kill())
    assert all(0 < len(told.ids) < LONG["max_tokens"] for told in parts)
    with server_process(tmp_path, port=port) as server:
        assert server.port == port
        wholes = [asyncio.run(stream(server.url, **{**LONG, "prompt": prompt})) for prompt in prompts]
    for part, whole in zip(parts, wholes, strict=True):
        assert len(whole.ids) == LONG["max_tokens"]
        assert part.ids == whole.ids[: len(part.ids)]
        assert whole.text.startswith(part.text)


async def _refused(server):
    """Until nobody listens any more."""

    async def is_refused():
        try:
            (await Call.open(server.url, **LONG)).hang_up()
        except ConnectionRefusedError:
            return True
        return False

    while not await within(is_refused()):
        await asyncio.sleep(0.01)


def test_told_to_end_it_answers_what_it_has_taken_and_nothing_more(tmp_path):
    async def end():
        chunks, told = await _begun(server)
        server.popen.send_signal(signal.SIGTERM)
        await _refused(server)
        async for chunk in chunks:
            told.add(chunk)
        return told

    with server_process(tmp_path) as server:
        wanted = asyncio.run(stream(server.url, **LONG))
        assert asyncio.run(end()) == wanted
        assert server.wait() == 0
        assert "Traceback" not in server.log.read_text()


def test_when_the_time_to_drain_is_up_the_rest_is_told_so(tmp_path):
    async def end():
        chunks, _ = await _begun(server, **ENDLESS)
        whole = await Call.open(server.url, **ENDLESS | {"stream": False})
        await asyncio.to_thread(server.wait_until, "requests_waiting", lambda num: num > 128)
        server.popen.send_signal(signal.SIGTERM)
        return await until_cut(chunks), await whole.whole()  # an error ends a stream without a [DONE]

    with server_process(tmp_path, "--max-running", 1, "--drain-timeout-s", 0.5) as server:
        told, (status, headers, answer) = asyncio.run(end())
        assert told[-1]["error"]["code"] == answer["error"]["code"] == "shutting_down"
        assert (status, headers["retry-after"]) == (503, "1")
        assert server.wait() == 0
        assert "Traceback" not in server.log.read_text()


def test_told_to_end_twice_it_waits_for_nobody(tmp_path):
    async def end():
        chunks, _ = await _begun(server, **ENDLESS)
        server.popen.send_signal(signal.SIGTERM)
        await _refused(server)
        server.popen.send_signal(signal.SIGTERM)
        return await until_cut(chunks)

    with server_process(tmp_path, "--max-running", 1, "--drain-timeout-s", 3600) as server:
        told = asyncio.run(end())
        assert server.wait() == 0
        assert "Traceback" not in server.log.read_text()
    assert len(told) < ENDLESS["max_tokens"] * ENDLESS["n"] / 10
