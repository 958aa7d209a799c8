"""What the event stream of one answer says, for `/v1/completions` and `/v1/chat/completions`: emissions, and its end.

Knows what the chunks of these two say, and how to tell how many tokens each brought. Refuses to know clocks, sockets
and HTTP: bytes are pulled (`read_emissions`) or pushed (`AnswerReader`). A stream that is not understood is an error,
never a guess.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from benchmarks.harness.errors import SourceError
from benchmarks.harness.sources.sse import Event, EventReader
from benchmarks.harness.timing import Emission

CountTokens = Callable[[str], int]

_REASONS_WITH_EOS = ("stop", "tool_calls")
_QUOTE_CHARS = 300


def quote(text: str) -> str:
    """The beginning of what somebody said, as an error quotes it."""
    return text if len(text) <= _QUOTE_CHARS else f"{text[:_QUOTE_CHARS]}..."


def read_emissions(chunks: Iterable[bytes], *, count_tokens: CountTokens | None = None) -> Iterator[Emission]:
    """One emission per chunk of the answer, read from the bytes of its event stream up to [DONE].

    The number of tokens in a chunk is the best that is known of it: its token ids; its running usage; its logprobs;
    `count_tokens` of its text (it runs on the clock); 1 where there is text at all (content, reasoning, refusal, tool
    calls). At the end the count is held against the server's: SourceError when they differ, and no check when it does
    not say. One token more on the server's side is allowed where the answer ended by itself: an EOS that is never
    shown. It is not counted, for it has no arrival. The last emission tells the prompt's cached and computed tokens
    where the server does.

    Raises SourceError when the stream breaks off, reports an error, or is anything else than one choice's chunks.
    """
    reader = AnswerReader(count_tokens)
    try:
        for chunk in chunks:
            yield from reader.feed(chunk)
            if reader.is_done:
                break
        else:
            reader.cut_off()
    except SourceError as error:
        raise SourceError(f"broke off after {reader.num_tokens} tokens: {error}") from error
    yield reader.close()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """What one chunk says. None where it does not say; `num_so_far`, `num_prompt`, `num_cached` are its usage."""

    is_choice: bool = False
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    num_logprobs: int | None = None
    finish_reason: str | None = None
    num_so_far: int | None = None
    num_prompt: int | None = None
    num_cached: int | None = None


class AnswerReader:
    """Takes the bytes of one answer as they come, as `read_emissions` does: it counts their tokens, and remembers what
    the end has to be checked against.
    """

    def __init__(self, count_tokens: CountTokens | None = None) -> None:
        self._count_tokens = count_tokens or (lambda text: 1)
        self._events = EventReader()
        self._is_running_total = False
        self.finish_reason: str | None = None
        self._usage = _Chunk()
        self.num_tokens, self.is_done = 0, False

    def feed(self, chunk: bytes) -> Iterator[Emission]:
        """An emission for each part of the answer that ends in these bytes; nothing after [DONE]."""
        for event in self._events.feed(chunk):
            if event.data.strip() == "[DONE]":
                self._finish()
                return
            if event.data.strip():
                yield self._take(_parse(event))

    def _finish(self) -> None:
        if self.finish_reason is None:
            raise SourceError("[DONE] came without a finish_reason")
        self.is_done = True

    def cut_off(self) -> NoReturn:
        """The bytes have ended before [DONE]."""
        raise SourceError("the stream ended without [DONE]")

    def close(self) -> Emission:
        """Compare the count with the server's; the answer's last emission."""
        usage = self._usage
        num_hidden = 0 if usage.num_so_far is None else usage.num_so_far - self.num_tokens
        if num_hidden not in ((0, 1) if self.finish_reason in _REASONS_WITH_EOS else (0,)):
            raise SourceError(
                f"the server counts {usage.num_so_far} tokens where {self.num_tokens} were seen to arrive: pass "
                "count_tokens=, or ask the server for return_token_ids=True, stream_options=CONTINUOUS_USAGE, logprobs"
            )
        if usage.num_prompt is None or usage.num_cached is None:
            return Emission()
        if not 0 <= usage.num_cached <= usage.num_prompt:
            raise SourceError(f"the server found {usage.num_cached} of {usage.num_prompt} prompt tokens in its cache")
        return Emission(num_cached=usage.num_cached, num_prefilled=usage.num_prompt - usage.num_cached)

    def _take(self, chunk: _Chunk) -> Emission:
        num_new = self._num_new(chunk) if chunk.is_choice else 0
        if num_new < 0:
            raise SourceError(f"usage.completion_tokens fell from {self.num_tokens} to {chunk.num_so_far}")
        self.num_tokens += num_new
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self._usage = self._usage if chunk.num_so_far is None else chunk
        token_ids = chunk.token_ids or ()
        return Emission(token_ids=token_ids, num_without_id=num_new - len(token_ids), finish_reason=chunk.finish_reason)

    def _num_new(self, chunk: _Chunk) -> int:
        if chunk.token_ids is not None:
            return len(chunk.token_ids)
        if chunk.num_so_far and self._is_running(chunk):
            return chunk.num_so_far - self.num_tokens
        if chunk.num_logprobs:
            return chunk.num_logprobs
        return self._count_tokens(chunk.text) if chunk.text else 0

    def _is_running(self, chunk: _Chunk) -> bool:
        """Whether this usage is one of many: servers that send it once send it with the finish reason, too late."""
        if chunk.finish_reason is None:
            self._is_running_total = True
        return self._is_running_total or (self.num_tokens == 0 and bool(chunk.text))


def _parse(event: Event) -> _Chunk:
    try:
        chunk = json.loads(event.data)
    except ValueError as error:
        raise SourceError(f"not JSON: {quote(event.data)}") from error
    except RecursionError as error:
        raise SourceError(f"nested too deeply: {quote(event.data)}") from error
    try:
        _refuse_error(event, chunk)
        return _read_chunk(chunk)
    except (AttributeError, KeyError, TypeError) as error:
        raise SourceError(f"not a chunk of a completion: {quote(event.data)}") from error


def _refuse_error(event: Event, chunk: dict[str, Any]) -> None:
    error = chunk.get("error")
    if error or event.name == "error" or chunk.get("object") == "error":
        said = error.get("message", error) if isinstance(error, dict) else error or chunk.get("message") or event.data
        raise SourceError(f"the server says: {quote(str(said))}")


def _read_chunk(chunk: dict[str, Any]) -> _Chunk:
    usage = chunk.get("usage") or {}
    choices = (chunk.get("choices") or []) if usage else chunk["choices"]
    if len(choices) > 1 or any(choice.get("index") for choice in choices):
        raise SourceError("it streams more than one choice")
    said: dict[str, Any] = _read_choice(choices[0]) if choices else {}
    return _Chunk(
        num_so_far=_read_count(usage, "completion_tokens"),
        num_prompt=_read_count(usage, "prompt_tokens"),
        num_cached=_read_count(usage.get("prompt_tokens_details") or {}, "cached_tokens"),
        **said,
    )


def _read_count(usage: dict[str, Any], name: str) -> int | None:
    if not isinstance(count := usage.get(name), int | None):
        raise TypeError(f"{name} is {count!r}")
    return count


def _read_choice(choice: dict[str, Any]) -> dict[str, Any]:
    token_ids, logprobs = choice.get("token_ids"), choice.get("logprobs") or {}
    entries = logprobs.get("content") or logprobs.get("tokens")
    text = choice["text"] or "" if "text" in choice else _read_delta(choice["delta"] or {})
    _demand(text, str, "text")
    _demand(token_ids, list | None, "token_ids")
    _demand(entries, list | None, "logprobs")
    _demand(choice.get("finish_reason"), str | None, "finish_reason")
    for token_id in token_ids or ():
        _demand(token_id, int, "a token id")
    return {
        "is_choice": True,
        "text": text,
        "token_ids": None if token_ids is None else tuple(token_ids),
        "num_logprobs": None if entries is None else len(entries),
        "finish_reason": choice.get("finish_reason"),
    }


def _demand(value: object, kind: Any, name: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}")


def _read_delta(delta: dict[str, Any]) -> str:
    """Everything in a piece of a chat message that the model wrote, tool calls included."""
    texts = [delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content"), delta.get("refusal")]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        texts += [function.get("name"), function.get("arguments")]
    return "".join(text for text in texts if text)
