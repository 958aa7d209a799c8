"""What a client is told when something goes wrong: a body in OpenAI's format, and headers.

Knows which of nanoserve's errors is whose fault. Refuses to know who found it out: a gate, a path or a stream.
"""

import json

from starlette.responses import Response

from nanoserve.errors import ApiError, NanoserveError, RequestError, one_line

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def body_of(error: ApiError) -> bytes:
    """ASCII only: a message may quote half a surrogate pair, which no other encoding takes."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    said = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return json.dumps({"error": said}).encode()


def _headers_of(error: ApiError) -> dict[str, str]:
    """What goes along: when to come back, how to say who one is, and that a body which was not read never will be."""
    unread = {"connection": "close"} if error.status in (401, 413) else {}
    key = {"www-authenticate": "Bearer"} if error.status == 401 else {}
    later = {"retry-after": str(error.retry_after_s)} if error.retry_after_s else {}
    return {**unread, **key, **later}


def response_of(error: ApiError) -> Response:
    """The error as a whole answer."""
    return Response(body_of(error), error.status, media_type="application/json", headers=_headers_of(error))


def as_api_error(error: Exception) -> ApiError:
    """Whatever ended a request, as what its client is told: 400 for what a client can mend, 500 for the rest.

    A fault of ours is told by its kind only: its message may hold what is none of the client's business.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, one_line(error))
    if isinstance(error, NanoserveError):
        return ApiError(500, one_line(error), code="engine_error")
    return ApiError(500, f"the engine could not go on with this request: {type(error).__name__}", code="engine_error")
