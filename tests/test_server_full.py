"""As many calls as there is room for, and more: each is answered or refused, and who waits costs little."""

import asyncio
import resource

import pytest
from server_process import Call, server_process

pytestmark = pytest.mark.slow

ASKED = {"prompt": "Hello", "max_tokens": 4, "seed": 1, "return_token_ids": True}
LONG = {"prompt": "Wait", "max_tokens": 1900, "ignore_eos": True, "stream": True}
MOST_GROWN_BYTES = 500e6


@pytest.fixture(autouse=True)
def _many_files():
    """As many as there may be: a shell's usual limit is 1024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def _open(server, num, **body):
    return [await Call.open(server.url, **body) for _ in range(num)]


def _hang_up(calls):
    for call in calls:
        call.hang_up()


def test_a_thousand_that_wait_at_once_are_all_answered(tmp_path):
    async def all_of_them():
        calls = await _open(server, 1000, **ASKED)
        answers = await asyncio.gather(*(call.whole() for call in calls))
        _hang_up(calls)
        return answers

    with server_process(tmp_path, "--max-running", 16, "--max-queued", 1000) as server:
        wanted = server.complete(**ASKED)
        answers = asyncio.run(all_of_them())
        assert [status for status, _, _ in answers] == [200] * 1000
        assert len({answer["id"] for _, _, answer in answers}) == 1000
        assert all(answer["choices"] == wanted for _, _, answer in answers)
        assert server.number("generated_tokens_total") == 4004
        server.wait_until_empty()


def test_who_finds_no_place_is_told_when_to_come_back(tmp_path):
    async def one_too_many():
        holders = [*await _open(server, 7, n=128, **LONG), *await _open(server, 1, n=108, **LONG)]
        assert [await call.status() for call in holders] == [200] * 8
        await asyncio.to_thread(server.wait_until, "requests_waiting", lambda num: num > 900)
        refused = [await call.whole() for call in await _open(server, 20, **ASKED)]
        _hang_up(holders)
        return refused

    with server_process(tmp_path, "--max-running", 4, "--max-queued", 1000) as server:
        for status, headers, answer in asyncio.run(one_too_many()):
            assert (status, answer["error"]["code"]) == (429, "queue_full")
            assert int(headers["retry-after"]) >= 1
        server.wait_until_empty()
        assert server.number('requests_total{outcome="refused"}') == 20
        assert server.post(**ASKED).status_code == 200


def test_two_thousand_that_wait_cost_little_and_leave_nothing(tmp_path, record_testsuite_property):
    async def all_of_them():
        holder = await Call.open(server.url, n=128, **LONG)
        assert await holder.status() == 200
        idle = await _open(server, 2000, **LONG)
        assert [await call.status() for call in idle] == [200] * 2000
        await asyncio.to_thread(server.wait_until, "requests_waiting", lambda num: num > 2000)
        num_bytes = server.num_bytes
        _hang_up(idle)
        await asyncio.to_thread(server.wait_until, "requests_waiting", lambda num: num <= 127)
        await asyncio.to_thread(server.wait_until_connections, 2)  # the holder, and who asks for numbers
        holder.hang_up()
        return num_bytes

    with server_process(tmp_path, "--max-running", 1, "--max-queued", 2200) as server:
        server.complete(**ASKED)
        before = server.num_bytes
        grown = asyncio.run(all_of_them()) - before
        record_testsuite_property("2000 connections that wait, MB", grown / 1e6)
        assert grown < MOST_GROWN_BYTES
        server.wait_until_empty()
        assert server.number('requests_total{outcome="abort"}') > 2000
        assert server.post(**ASKED).status_code == 200
        assert "Traceback" not in server.log.read_text()
