"""The answer to one call on its connection: whole, or as server-sent events while it comes about.

Knows ASGI's messages, hang-ups and the time limit. Refuses to know what an answer looks like (`answers.py`) and how the
engine is reached (`desk.py`). A client that hangs up ends its requests before the engine's next step.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanoserve.errors import ApiError
from nanoserve.server.answers import Answers, Part
from nanoserve.server.calls import Call
from nanoserve.server.connection import connection_of
from nanoserve.server.desk import Desk, Exchange
from nanoserve.server.refusals import as_api_error, body_of
from nanoserve.tokenizer import Tokenizer

_LAST_WORDS_S = 1.0
_LINE_ENDS = {char: f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""Clients that read events with Python's `splitlines` would break them there; JSON escapes the other ends itself."""

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would wait for a buffer to fill
]


class _Gone(Exception):  # noqa: N818 - a client may go whenever it likes
    """The client has hung up."""


class Reply(Response):
    """Runs a call when it is awaited as a response. Raises ApiError where nothing has been sent yet."""

    def __init__(self, call: Call, desk: Desk, tokenizer: Tokenizer, *, arrived_s: float, ends_at_s: float) -> None:
        """`arrived_s` is on the clock of the server's numbers, `ends_at_s` on that of the event loop."""
        super().__init__()
        self._call, self._desk = call, desk
        self._arrived_s, self._ends_at_s = arrived_s, ends_at_s
        self._answers = Answers(call, tokenizer)
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._desk.call(self._call.name, self._call.requests, self._arrived_s) as told:
                await self._run(told, scope, receive, send)
        except _Gone:
            return
        except TimeoutError:
            await self._tell_timeout(send)
        await self._wait_for_reader(scope)

    async def _run(self, told: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(_watch(receive, told))
        try:
            async with asyncio.timeout_at(self._ends_at_s):
                await (self._stream(told, send) if self._call.streams else self._whole(told, scope, receive, send))
        finally:
            watcher.cancel()

    async def _tell_timeout(self, send: Send) -> None:
        """Where the answer has begun, its reader may be what it waited for, and is not waited for again."""
        error = ApiError(504, "the answer took longer than this server allows", code="timeout")
        if not self._has_begun:
            raise error
        if self._call.streams:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await _send(send, _error_event(error), is_last=True)

    async def _wait_for_reader(self, scope: Scope) -> None:
        """All has been said, but not read; whoever does not read in time has a connection no longer."""
        if (connection := connection_of(scope)) is None:
            return
        try:
            async with asyncio.timeout_at(self._ends_at_s):
                await connection.flushed()
        except TimeoutError:
            await connection.drop()

    async def _whole(self, told: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        whole: dict[int, Part] = {}
        try:
            while pieces := await told.take():
                for place, event in pieces:
                    whole.setdefault(place, Part()).add(self._answers.part(place, event))
        except (_Gone, ApiError):
            raise
        except Exception as error:
            raise as_api_error(error) from error
        self._has_begun = True
        body = _json(self._answers.whole(whole))
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _stream(self, told: Exchange, send: Send) -> None:
        self._has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        await _send(send, b"")  # the head goes out now, not with the first token
        try:
            while pieces := await told.take():
                await _send(send, _events(self._answers.chunks(pieces)))
            last = self._answers.last_chunk()
            await _send(send, _events([last] if last else []) + b"data: [DONE]\n\n", is_last=True)
        except _Gone:
            raise
        except Exception as error:
            await _send(send, _error_event(as_api_error(error)), is_last=True)


async def _watch(receive: Receive, told: Exchange) -> None:
    """The body has been read: what still comes is that the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    told.break_off(_Gone())


async def _send(send: Send, body: bytes, *, is_last: bool = False) -> None:
    """Waits while the client reads too slowly."""
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _events(chunks: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + _json(each) + b"\n\n" for each in chunks)


def _json(what: dict[str, Any]) -> bytes:
    text = json.dumps(what, ensure_ascii=False, separators=(",", ":"))
    for char, escape in _LINE_ENDS.items():
        text = text.replace(char, escape)
    return text.encode()


def _error_event(error: ApiError) -> bytes:
    return b"data: " + body_of(error) + b"\n\n"
