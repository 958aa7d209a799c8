"""What goes back: choices, logprobs and usage, in OpenAI's shapes, whole or chunk by chunk.

Knows both shapes and the engine's events. Refuses to know sockets and queues. A whole answer is the sum of its parts,
so that a stream and an answer in one piece cannot differ.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nanoserve.request import TokenEvent, TokenLogprobs
from nanoserve.server.calls import Call
from nanoserve.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have; the number is vLLM's."""

Entry = tuple[int, float | None, tuple[tuple[int, float], ...]]
"""A token, its logprob (None for the first of a prompt), and the likeliest in its place."""


@dataclasses.dataclass(slots=True)
class Part:
    """Some of an answer; parts that follow each other add up."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    entries: list[Entry] = dataclasses.field(default_factory=list)
    is_first: bool = False
    finish_reason: str | None = None

    def add(self, other: "Part") -> None:
        self.text += other.text
        self.token_ids += other.token_ids
        self.entries += other.entries
        self.is_first = self.is_first or other.is_first
        self.finish_reason = other.finish_reason or self.finish_reason


class Usage:
    """Tokens of a call, as the engine counted them. What one answer of a prompt stored for the next is not cached."""

    def __init__(self, call: Call) -> None:
        self._num_prompt, self._num_answers, self._is_silent = call.num_prompt_tokens, call.num_answers, call.is_silent
        self._num_new = self._num_cached = 0

    def note(self, place: int, event: TokenEvent) -> None:
        self._num_new += not self._is_silent
        if event.index == 0 and place % self._num_answers == 0:
            self._num_cached += event.num_cached

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_new,
            "total_tokens": self._num_prompt + self._num_new,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }


class Answers:
    """The answers of one call: takes what a step told, gives the JSON of it."""

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        self._call, self._tokenizer = call, tokenizer
        self._offsets = [0] * len(call.requests)
        self.usage = Usage(call)
        kind = "chat.completion" if call.is_chat else "text_completion"
        self._head = {"id": call.name, "object": kind, "created": call.created_s, "model": call.model}
        self._chunk_head = {**self._head, "object": f"{kind}.chunk"} if call.is_chat else self._head

    def part(self, place: int, event: TokenEvent) -> Part:
        """What a token adds to the answer at a place."""
        self.usage.note(place, event)
        call, reason = self._call, None if event.finish_reason is None else str(event.finish_reason)
        part = Part(is_first=event.index == 0, finish_reason=reason)
        if part.is_first and call.echo:
            ids = call.requests[place][0]
            part.text = call.echo[place // call.num_answers]
            part.token_ids = list(ids)
            part.entries = _entries_of_prompt(ids, event.prompt_logprobs)
        if not call.is_silent:
            part.text += event.text
            part.token_ids.append(event.token_id)
            part.entries += [] if event.logprobs is None else [_entry(event.logprobs)]
        return part

    def chunks(self, pieces: Iterable[tuple[int, TokenEvent]]) -> list[dict[str, Any]]:
        """One for each token that says anything: whoever counts or times tokens sees each of them."""
        parts = ((place, self.part(place, event)) for place, event in pieces)
        return [self._chunk(place, part) for place, part in parts if self._is_told(part)]

    def _is_told(self, part: Part) -> bool:
        """A token may bring no text yet. It is told where tokens are counted."""
        call = self._call
        counts = call.tells_token_ids or call.num_top is not None or call.tells_running_usage
        return bool(counts or part.text or part.finish_reason)

    def _chunk(self, place: int, part: Part) -> dict[str, Any]:
        chunk = {**self._chunk_head, "choices": [self._choice(place, part, is_chunk=True)]}
        if self._call.tells_running_usage:
            chunk["usage"] = self.usage.as_json()
        elif self._call.tells_usage:
            chunk["usage"] = None
        return chunk

    def last_chunk(self) -> dict[str, Any] | None:
        """The usage of a stream that asked for it, without a choice."""
        return {**self._chunk_head, "choices": [], "usage": self.usage.as_json()} if self._call.tells_usage else None

    def whole(self, parts: Mapping[int, Part]) -> dict[str, Any]:
        choices = [self._choice(place, part, is_chunk=False) for place, part in sorted(parts.items())]
        return {**self._head, "choices": choices, "usage": self.usage.as_json()}

    def _choice(self, place: int, part: Part, *, is_chunk: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": place}
        if not self._call.is_chat:
            choice["text"] = part.text
        elif is_chunk:
            choice["delta"] = {"role": "assistant", "content": part.text} if part.is_first else {"content": part.text}
        else:
            choice["message"] = {"role": "assistant", "content": part.text, "refusal": None}
        choice["logprobs"] = None if self._call.num_top is None else self._logprobs(place, part.entries)
        choice["finish_reason"] = part.finish_reason
        if self._call.tells_token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    def _logprobs(self, place: int, entries: Sequence[Entry]) -> dict[str, Any]:
        if self._call.is_chat:
            return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}
        return {
            "tokens": [self._word(token_id) for token_id, _, _ in entries],
            "token_logprobs": [None if logprob is None else _finite(logprob) for _, logprob, _ in entries],
            "top_logprobs": [self._likeliest(entry) for entry in entries] if self._call.num_top else None,
            "text_offset": [self._offset(place, token_id) for token_id, _, _ in entries],
        }

    def _offset(self, place: int, token_id: int) -> int:
        """Where the next token stands in the text; one that goes on with a character stands where that begins."""
        at, data = self._offsets[place], self._tokenizer.token_bytes(token_id)
        if self._tokenizer.is_silent(token_id) and not self._is_echoed(place, data.decode(), at):
            return at
        self._offsets[place] += sum(map(_begins, data))
        return at - (at > 0 and bool(data) and not _begins(data[0]))

    def _is_echoed(self, place: int, word: str, at: int) -> bool:
        """Special tokens are left out of a text, but not of a prompt in which a client wrote them."""
        return any(echo.startswith(word, at) for echo in self._call.echo[place // self._call.num_answers :][:1])

    def _likeliest(self, entry: Entry) -> dict[str, float] | None:
        """The likeliest by their words, the token itself in any case."""
        token_id, logprob, top = entry
        if logprob is None:
            return None
        return {self._word(each): _finite(value) for each, value in (*top, (token_id, logprob))}

    def _chat_entry(self, entry: Entry) -> dict[str, Any]:
        token_id, logprob, top = entry
        assert logprob is not None, "a chat does not tell its prompt again"
        return {
            **self._chat_word(token_id, logprob),
            "top_logprobs": [self._chat_word(each, value) for each, value in top],
        }

    def _chat_word(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}

    def _word(self, token_id: int) -> str:
        """A token as text; where it is half a character, its bytes, written as OpenAI writes them."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _begins(byte: int) -> bool:
    """Whether a character of UTF-8 begins with it."""
    return byte & 0xC0 != 0x80


def _entry(logprobs: TokenLogprobs) -> Entry:
    return logprobs.token_id, logprobs.logprob, logprobs.top


def _entries_of_prompt(ids: Sequence[int], told: Sequence[TokenLogprobs | None] | None) -> list[Entry]:
    return [
        (token_id, None, ()) if each is None else _entry(each) for token_id, each in zip(ids, told or (), strict=False)
    ]


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
