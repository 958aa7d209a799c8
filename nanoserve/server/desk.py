"""Between the event loop and the engine's thread: who may come in, and who gets what a step told.

Knows calls that are open and how many requests each has. Refuses to know HTTP and the shape of an answer. Everything
here runs in the event loop, but `post`, which the engine's thread calls.
"""

import asyncio
import collections
import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence

from nanoserve.config import SamplingParams
from nanoserve.errors import ApiError
from nanoserve.request import TokenEvent
from nanoserve.server.metrics import Numbers
from nanoserve.server.thread import Ask, EngineThread, Told

Piece = tuple[int, TokenEvent]
"""The place of an answer among those of its call, and one token of it."""

_LONGEST_WAIT_S = 60
_NUM_REMEMBERED = 32


def shutting_down() -> ApiError:
    """For who comes too late, or has been answered for too long."""
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=1)


class Exchange:
    """The requests of one call, and what has been told of them that nobody has taken yet."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self._places = {request_id: place for place, request_id in enumerate(request_ids)}
        self._pieces: list[Piece] = []
        self._end: Exception | None = None
        self.has_failed = False
        self._news = asyncio.Event()

    @property
    def open_ids(self) -> list[str]:
        """Requests that have not ended, as far as has been told."""
        return list(self._places)

    def put(self, request_id: str, what: TokenEvent | Exception) -> None:
        if (place := self._places.get(request_id)) is None:
            return
        if isinstance(what, Exception):
            del self._places[request_id]
            self.has_failed = True
            self.break_off(what)
            return
        self._pieces.append((place, what))
        if what.finish_reason is not None:
            del self._places[request_id]
        self._news.set()

    def break_off(self, why: Exception) -> None:
        """Whoever takes is told so, after what has come before. The first reason stays."""
        self._end = self._end or why
        self._news.set()

    async def take(self) -> list[Piece]:
        """All that has come since, at least one piece; none once every request has ended. Raises what broke it off."""
        while not self._pieces and self._end is None and self._places:
            self._news.clear()
            await self._news.wait()
        pieces, self._pieces = self._pieces, []
        if self._end is not None and not pieces:
            raise self._end
        return pieces


class Desk:
    """Lets calls in, as far as there is room, and sees to it that none leaves anything behind."""

    def __init__(self, numbers: Numbers, max_open: int) -> None:
        self._numbers, self._max_open = numbers, max_open
        self._thread: EngineThread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: dict[str, Exchange] = {}
        self._recent_s: collections.deque[float] = collections.deque(maxlen=_NUM_REMEMBERED)
        self.is_draining = False

    def open_up(self, thread: EngineThread) -> None:
        """Take calls for a thread from now on, in the event loop that runs now."""
        self._thread, self._loop = thread, asyncio.get_running_loop()
        thread.start()

    @property
    def is_working(self) -> bool:
        return self._thread is not None and self._thread.is_alive

    @property
    def num_open(self) -> int:
        return len(self._calls)

    def check_room(self, num: int) -> None:
        """Raise ApiError where so many more requests cannot be taken now, or ever."""
        if self.is_draining or not self.is_working:
            self._numbers.refused(num)
            raise shutting_down()
        if num > self._max_open:
            raise ApiError(400, f"{num} answers at once are more than the {self._max_open} that this server takes")
        if self.num_open + num > self._max_open:
            self._numbers.refused(num)
            raise ApiError(
                429,
                f"{self.num_open} of {self._max_open} places are taken, this call needs {num}; try again later",
                code="queue_full",
                retry_after_s=self._retry_after_s(),
            )

    def _retry_after_s(self) -> int:
        """About when a place gets free: a fraction of what calls took lately."""
        if not self._recent_s:
            return 1
        return min(max(1, math.ceil(statistics.median(self._recent_s) / 2)), _LONGEST_WAIT_S)

    @contextlib.contextmanager
    def call(
        self, name: str, prompts: Sequence[tuple[Sequence[int], SamplingParams]], arrived_s: float
    ) -> Iterator[Exchange]:
        """Hand in a call's requests; whatever of them has not ended when it is left, is ended then.

        Raises ApiError, as `check_room` does, before any of them is handed in.
        """
        self.check_room(len(prompts))
        assert self._thread is not None, "the desk is closed"
        asks = [Ask(f"{name}-{place}", *each, arrived_s) for place, each in enumerate(prompts)]
        exchange = Exchange([ask.request_id for ask in asks])
        self._calls.update({ask.request_id: exchange for ask in asks})
        for ask in asks:
            self._thread.submit(ask)
        why = "abort"
        try:
            yield exchange
        except TimeoutError:
            why = "timeout"
            raise
        finally:
            self._leave(exchange, [ask.request_id for ask in asks], "error" if exchange.has_failed else why)
            self._recent_s.append(self._numbers.now_s() - arrived_s)

    def _leave(self, exchange: Exchange, request_ids: Sequence[str], why: str) -> None:
        assert self._thread is not None, "the desk is closed"
        for request_id in exchange.open_ids:
            self._thread.leave(request_id, why)
        for request_id in request_ids:
            del self._calls[request_id]

    def post(self, told: Sequence[Told]) -> None:
        """From the engine's thread: one wake-up of the event loop for all that a step told."""
        assert self._loop is not None, "the desk is closed"
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens any more
            self._loop.call_soon_threadsafe(self._deliver, told)

    def _deliver(self, told: Sequence[Told]) -> None:
        for request_id, what in told:
            if (exchange := self._calls.get(request_id)) is not None:
                exchange.put(request_id, what)

    def break_off(self, why: Exception) -> None:
        """End every call that is open, and take no more."""
        self.is_draining = True
        for exchange in set(self._calls.values()):
            exchange.break_off(why)
