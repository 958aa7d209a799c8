"""The desk: who is let in, what each call is told, and in which order."""

import asyncio

import pytest

from nanoserve import SamplingParams, TokenEvent
from nanoserve.errors import ApiError
from nanoserve.request import FinishReason
from nanoserve.server.desk import Desk, Exchange
from nanoserve.server.metrics import Numbers

PARAMS = SamplingParams()


def event(request_id, index=0, finish_reason=None):
    return TokenEvent(
        request_id=request_id, index=index, token_id=7, text="x", num_prefilled=1, num_cached=0,
        finish_reason=finish_reason,
    )  # fmt: skip


class FakeThread:
    """Remembers what it was asked."""

    is_alive = True

    def __init__(self):
        self.asks, self.left = [], []

    def start(self):
        pass

    def submit(self, ask):
        self.asks.append(ask.request_id)

    def leave(self, request_id, why):
        self.left.append((request_id, why))


def at_the_desk(play, max_open=4):
    """Run `play(desk, thread)` in an event loop, on a clock that ticks a second at each look."""
    times = iter(range(10_000))

    async def run():
        desk, thread = Desk(Numbers(lambda: float(next(times))), max_open), FakeThread()
        desk.open_up(thread)
        await play(desk, thread)

    asyncio.run(run())


def test_pieces_come_in_their_order_until_all_have_ended():
    async def play():
        exchange = Exchange(["a", "b"])
        exchange.put("b", event("b"))
        exchange.put("a", event("a", 0, FinishReason.STOP))
        assert [place for place, _ in await exchange.take()] == [1, 0]
        later = asyncio.get_running_loop().call_later(0.01, exchange.put, "b", event("b", 1, FinishReason.LENGTH))
        assert [(place, piece.index) for place, piece in await exchange.take()] == [(1, 1)]
        assert await exchange.take() == []
        later.cancel()

    asyncio.run(play())


def test_what_came_before_an_error_is_told_before_it():
    async def play():
        exchange = Exchange(["a", "b"])
        exchange.put("a", event("a"))
        exchange.put("b", ValueError("first"))
        exchange.break_off(ValueError("second"))
        assert len(await exchange.take()) == 1
        with pytest.raises(ValueError, match="first"):
            await exchange.take()
        assert exchange.open_ids == ["a"]

    asyncio.run(play())


def test_what_is_told_after_an_end_is_nobodys():
    async def play():
        exchange = Exchange(["a"])
        exchange.put("a", event("a", 0, FinishReason.STOP))
        exchange.put("a", ValueError("late"))
        assert len(await exchange.take()) == 1
        assert await exchange.take() == []

    asyncio.run(play())


def test_what_has_not_ended_is_ended_when_its_call_is_left():
    async def play(desk, thread):
        with desk.call("c", [([1], PARAMS)] * 3, 0.0) as exchange:
            assert thread.asks == ["c-0", "c-1", "c-2"]
            assert desk.num_open == 3
            exchange.put("c-1", event("c-1", 0, FinishReason.STOP))
        assert thread.left == [("c-0", "abort"), ("c-2", "abort")]
        assert desk.num_open == 0

    at_the_desk(play)


def test_who_ends_with_one_that_failed_is_no_abort_of_its_client():
    async def play(desk, thread):
        with desk.call("c", [([1], PARAMS)] * 2, 0.0) as exchange:
            exchange.put("c-1", ValueError("bad"))
        assert thread.left == [("c-0", "error")]

    at_the_desk(play)


def test_what_is_refused_is_counted_by_request():
    async def play(desk, thread):
        with desk.call("c", [([1], PARAMS)] * 3, 0.0), pytest.raises(ApiError):
            desk.check_room(2)
        desk.is_draining = True
        with pytest.raises(ApiError):
            desk.check_room(3)
        assert b'nanoserve_requests_total{outcome="refused"} 5.0' in desk._numbers.as_text()

    at_the_desk(play)


def test_a_timeout_is_told_as_one():
    async def play(desk, thread):
        with pytest.raises(TimeoutError), desk.call("c", [([1], PARAMS)], 0.0):
            raise TimeoutError
        assert thread.left == [("c-0", "timeout")]

    at_the_desk(play)


def test_room_is_counted_by_request_and_given_back():
    async def play(desk, thread):
        with desk.call("c", [([1], PARAMS)] * 3, 0.0):
            desk.check_room(1)
            with pytest.raises(ApiError, match="3 of 4 places are taken") as caught:
                desk.check_room(2)
            assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
        desk.check_room(4)
        with pytest.raises(ApiError, match="more than the 4") as caught:
            desk.check_room(5)
        assert caught.value.status == 400
        assert len(thread.asks) == 3

    at_the_desk(play)


@pytest.mark.parametrize(("took_s", "wanted_s"), [(0, 1), (9, 5), (10_000, 60)])
def test_when_to_come_back_follows_what_calls_took(took_s, wanted_s):
    async def play(desk, thread):
        with desk.call("c", [([1], PARAMS)] * 4, -float(took_s)):
            pass
        with desk.call("d", [([1], PARAMS)] * 4, 0.0), pytest.raises(ApiError) as caught:
            desk.check_room(1)
        assert caught.value.retry_after_s == wanted_s

    at_the_desk(play)


def test_a_desk_that_closes_takes_nobody_and_tells_everybody():
    async def play(desk, thread):
        with desk.call("c", [([1], PARAMS)], 0.0) as exchange:
            desk.break_off(ApiError(503, "over"))
            with pytest.raises(ApiError, match="over"):
                await exchange.take()
            with pytest.raises(ApiError, match="shutting down") as caught:
                desk.check_room(1)
            assert caught.value.status == 503

    at_the_desk(play)
