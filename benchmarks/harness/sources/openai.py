"""Any OpenAI-compatible HTTP endpoint as a streamed source: `/v1/completions` and `/v1/chat/completions`.

Knows how a single answer is asked for and pulled; what its chunks say is read in `answer.py`. Refuses to know clocks,
sockets and which HTTP library is in use: a client of `httpx2` or of `httpx` does. Many at once: `streams.py`.
"""

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from benchmarks.harness.errors import InstrumentError, SourceError
from benchmarks.harness.sources.answer import quote, read_emissions
from benchmarks.harness.timing import Emission

CONTINUOUS_USAGE = {"include_usage": True, "continuous_usage_stats": True}
"""As `stream_options=`: asks vLLM and SGLang for the count so far in every chunk. Others may refuse the request."""

_FIXED = {"stream": True, "n": 1, "best_of": 1, "echo": False}
HEADERS = {"accept": "text/event-stream", "accept-encoding": "identity"}


class HttpClient(Protocol):
    """What is asked of a client; `httpx2.Client` and `httpx.Client` both do it."""

    def build_request(self, method: str, url: str, *, json: Any, headers: dict[str, str]) -> Any: ...

    def send(self, request: Any, *, stream: bool) -> Any: ...


def openai_stream(
    client: HttpClient,
    *,
    model: str,
    prompt: str | Sequence[int] | None = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
    max_tokens: int | None,
    count_tokens: Callable[[str], int] | None = None,
    **body: Any,
) -> Iterator[Emission]:
    """Stream the answer to one prompt (a text or token ids, `/completions`) or to messages (`/chat/completions`).

    The client's `base_url` is the one that OpenAI's own client takes, `http://host:8000/v1`; its timeouts apply, so
    its read timeout has to outlast the longest wait for a token. `body` is added to the request; a value of None
    leaves a field out. By default the request is greedy and asks for the final usage. Servers that know it want
    `ignore_eos=True` for outputs of a set length, and `return_token_ids=True` (vLLM) tells tokens best.

    The request is sent at the first pull. `read_emissions` says what comes. Raises SourceError, with the URL, for
    everything that the server or the connection does wrong. Closing the iterator hangs up.
    """
    if (prompt is None) == (messages is None):
        raise InstrumentError("give either prompt= or messages=")
    for name, only in _FIXED.items():
        if body.get(name, only) != only:
            raise InstrumentError(f"{name}={body[name]!r} is no single stream of new tokens: it can only be {only!r}")
    path = "chat/completions" if prompt is None else "completions"
    asked = {"model": model, "prompt": prompt, "messages": messages, "max_tokens": max_tokens, "stream": True}
    fields = {**asked, "temperature": 0, "stream_options": {"include_usage": True}, **body}
    sent = {name: value for name, value in fields.items() if value is not None}
    return _exchange(client, client.build_request("POST", path, json=sent, headers=HEADERS), count_tokens)


def _exchange(client: HttpClient, request: Any, count_tokens: Callable[[str], int] | None) -> Iterator[Emission]:
    try:
        with contextlib.closing(_send(client, request)) as response:
            chunks = _chunks_of(response)
            _check_head(response, chunks)
            yield from read_emissions(chunks, count_tokens=count_tokens)
            _drain(chunks)
    except SourceError as error:
        raise SourceError(f"{request.url}: {error}") from error


def _send(client: HttpClient, request: Any) -> Any:
    """The response with its body still to come. Whatever the client raises is the network's doing."""
    try:
        return client.send(request, stream=True)
    except Exception as error:
        raise SourceError(f"no answer: {type(error).__name__}: {error}") from error


def _chunks_of(response: Any) -> Iterator[bytes]:
    try:
        yield from response.iter_bytes()
    except Exception as error:
        raise SourceError(f"{type(error).__name__}: {error}") from error


def _check_head(response: Any, chunks: Iterator[bytes]) -> None:
    content_type = response.headers.get("content-type", "")
    if response.status_code != 200:
        raise SourceError(f"status {response.status_code}: {_beginning_of(chunks)}")
    if content_type.partition(";")[0].strip().lower() != "text/event-stream":
        raise SourceError(f"content type {content_type!r} is not text/event-stream: {_beginning_of(chunks)}")


def _beginning_of(chunks: Iterator[bytes]) -> str:
    body = b""
    with contextlib.suppress(SourceError):
        while len(body) < 1000 and (chunk := next(chunks, b"")):
            body += chunk
    return quote(body.decode(errors="replace").strip())


def _drain(chunks: Iterator[bytes]) -> None:
    """Read past [DONE], or the connection cannot be used again and the next request pays for a new one."""
    with contextlib.suppress(SourceError):
        collections.deque(chunks, maxlen=0)
