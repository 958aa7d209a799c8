"""What every call passes before anything reads it: the key, where there is one, and how large it says to be.

Knows ASGI. Refuses to know what is asked. A body that is larger than it says, or does not say, is FastAPI's to count.
"""

import secrets
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nanoserve.errors import ApiError
from nanoserve.server.refusals import body_of, headers_of
from nanoserve.server.settings import ServerConfig

_KEYED = "/v1/"


class Gate:
    """Wraps an app. Paths outside the API need no key: whoever watches a server has none."""

    def __init__(self, app: ASGIApp, settings: ServerConfig) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope["path"], dict(scope["headers"])) if scope["type"] == "http" else None
        await (self._app if error is None else _response(error))(scope, receive, send)

    def _error(self, path: str, headers: Mapping[bytes, bytes]) -> ApiError | None:
        key, most_bytes = self._settings.api_key, self._settings.max_body_bytes
        if key is not None and path.startswith(_KEYED) and not _is_key(headers.get(b"authorization", b""), key):
            said = "this server wants its API key, as: Authorization: Bearer KEY"
            return ApiError(401, said, code="invalid_api_key")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > most_bytes:
            said = f"the body has {int(length)} bytes, this server takes {most_bytes} at most"
            return ApiError(413, said, code="body_too_large")
        return None


def _is_key(given: bytes, key: str) -> bool:
    """As long for a wrong key as for the right one."""
    scheme, _, word = given.partition(b" ")
    return scheme.lower() == b"bearer" and secrets.compare_digest(word.strip(), key.encode())


def _response(error: ApiError) -> Response:
    return Response(body_of(error), error.status, media_type="application/json", headers=dict(headers_of(error)))
