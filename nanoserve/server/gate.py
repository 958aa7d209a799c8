"""What every call passes before anything reads it: the key, where there is one, and how large its body is.

Knows ASGI. Refuses to know what is asked. What a client sends beyond the limit is never kept.
"""

import secrets
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoserve.errors import ApiError
from nanoserve.server.refusals import response_of
from nanoserve.server.settings import ServerConfig

_KEYED = "/v1/"
_TOO_LARGE = "the body is larger than the {} bytes that this server takes"


class Gate:
    """Wraps an app. Paths outside the API need no key: whoever watches a server has none."""

    def __init__(self, app: ASGIApp, settings: ServerConfig) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope["path"], dict(scope["headers"])) if scope["type"] == "http" else None
        if error is not None:
            await response_of(error)(scope, receive, send)
            return
        await self._app(scope, _limited(receive, self._settings.max_body_bytes), send)

    def _error(self, path: str, headers: Mapping[bytes, bytes]) -> ApiError | None:
        key, most_bytes = self._settings.api_key, self._settings.max_body_bytes
        if key is not None and path.startswith(_KEYED) and not _is_key(headers.get(b"authorization", b""), key):
            said = "this server wants its API key, as: Authorization: Bearer KEY"
            return ApiError(401, said, code="invalid_api_key")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > most_bytes:
            return ApiError(413, _TOO_LARGE.format(most_bytes), code="body_too_large")
        return None


def _is_key(given: bytes, key: str) -> bool:
    """As long for a wrong key as for the right one."""
    scheme, _, word = given.partition(b" ")
    return scheme.lower() == b"bearer" and secrets.compare_digest(word.strip(), key.encode())


def _limited(receive: Receive, most_bytes: int) -> Receive:
    """Raises HTTPException in the middle of a body: of all errors it is the one that FastAPI lets through there."""
    num_bytes = 0

    async def receive_some() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > most_bytes:
            raise HTTPException(413, _TOO_LARGE.format(most_bytes))
        return message

    return receive_some
