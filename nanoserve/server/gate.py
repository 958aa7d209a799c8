"""What every call passes before anything reads it: the key, and how large a body may be.

Knows ASGI. Refuses to know paths' meanings beyond those that need no key, and what bodies hold.
"""

import secrets
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoserve.errors import ApiError
from nanoserve.server.refusals import body_of, headers_of
from nanoserve.server.settings import ServerConfig

_KEYED = "/v1/"


class Gate:
    """Wraps an app. What it refuses is answered here; the rest of a body that is too large is never read."""

    def __init__(self, app: ASGIApp, settings: ServerConfig) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, _limited(receive, self._settings.max_body_bytes), note)
        except ApiError as error:
            if has_begun:
                raise
            await refuse(error, send)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        key = self._settings.api_key
        if key is not None and scope["path"].startswith(_KEYED) and not _has_key(headers.get(b"authorization"), key):
            raise ApiError(401, "this server wants its API key, as: Authorization: Bearer KEY", code="invalid_api_key")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            raise _too_large(self._settings.max_body_bytes)


def _has_key(given: bytes | None, key: str) -> bool:
    """As long for a wrong key as for the right one."""
    scheme, _, word = (given or b"").partition(b" ")
    return scheme.lower() == b"bearer" and secrets.compare_digest(word.strip(), key.encode())


def _limited(receive: Receive, most_bytes: int) -> Receive:
    num_bytes = 0

    async def receive_limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > most_bytes:
            raise _too_large(most_bytes)
        return message

    return receive_limited


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than the {most_bytes} bytes that this server takes", code="body_too_large"
    )


async def refuse(error: ApiError, send: Send) -> None:
    """Send an error as the whole answer. The connection ends with it: what the client still sends is not read."""
    headers: Iterable[tuple[str, str]] = {**headers_of(error), "connection": "close"}.items()
    raw = [(name.encode(), value.encode()) for name, value in headers]
    body = body_of(error)
    raw += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
