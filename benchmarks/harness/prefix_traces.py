"""Recorded requests by what their prompts share: each block of a prompt has an id that stands for all before it, too.

Knows the JSON lines of Mooncake's public traces (arXiv:2407.00079), and how to make up some. Refuses to know caches. A
line that is no request is left out and told: what is found again does not hang on any one of thousands of lines, and a
line that was cut off does.
"""

import dataclasses
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.popularity import zipf_order

BLOCK_TOKENS = 512
"""Tokens that an id of Mooncake's traces stands for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRequest:
    """One request. Two prompts whose first n ids are the same have the same first n blocks of tokens."""

    timestamp_ms: float
    prompt_tokens: int
    new_tokens: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, *, block_tokens: int = BLOCK_TOKENS) -> tuple[tuple[PrefixRequest, ...], tuple[str, ...]]:
    """The requests of a trace in the order of the file, and a fault, with file and line, for each line that is none.

    A line is an object with `timestamp` in milliseconds, `input_length`, `output_length` and `hash_ids`, one id for
    each `block_tokens` of the input, give or take one; it may hold more. One that is earlier than the line before it
    is a fault as well. Blank lines say nothing. Raises InstrumentError for a file that cannot be read, or without any
    request.
    """
    if block_tokens < 1:
        raise InstrumentError(f"a block holds at least one token, not {block_tokens}")
    requests, faults, before_ms = [], [], -math.inf
    for number, line in _lines(path):
        try:
            request = _request(line, block_tokens)
            before_ms, earlier_ms = request.timestamp_ms, before_ms
            if before_ms < earlier_ms:
                raise InstrumentError(f"timestamp is {before_ms} and that of the line before it {earlier_ms}")
            requests.append(request)
        except InstrumentError as error:
            faults.append(f"{path}, line {number}: {error}")
    if not requests:
        raise InstrumentError(faults[0] if faults else f"{path} is empty: a trace has at least one request")
    return tuple(requests), tuple(faults)


def as_json_lines(requests: Iterable[PrefixRequest]) -> str:
    """A trace that `read_trace` reads back."""
    rows = ((each.timestamp_ms, each.prompt_tokens, each.new_tokens, each.hash_ids) for each in requests)
    return "".join(json.dumps(dict(zip(_KEYS, row, strict=True))) + "\n" for row in rows)


_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Their numbers from 1, and what is in them."""
    try:
        everything = path.read_bytes()
    except OSError as error:
        raise InstrumentError(f"{path} cannot be read: {error.strerror}") from error
    yield from ((number, line) for number, line in enumerate(everything.split(b"\n"), 1) if line.strip())


def _request(line: bytes, block_tokens: int) -> PrefixRequest:
    record = _record(line)
    request = PrefixRequest(
        timestamp_ms=_time(record["timestamp"]),
        prompt_tokens=_length("input_length", record["input_length"], 1),
        new_tokens=_length("output_length", record["output_length"], 0),
        hash_ids=_ids(record["hash_ids"]),
    )
    num_blocks = -(-request.prompt_tokens // block_tokens)
    if abs(len(request.hash_ids) - num_blocks) > 1:
        told = f"{len(request.hash_ids)} hash_ids for {num_blocks} blocks of {block_tokens} tokens"
        raise InstrumentError(f"input_length is {request.prompt_tokens}: {told}")
    return request


def _record(line: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InstrumentError(f"no complete JSON object, perhaps cut off: {error}") from error
    if not isinstance(record, dict):
        raise InstrumentError(f"no JSON object: {_shown(record)}")
    missing = [key for key in _KEYS if key not in record]
    if missing:
        raise InstrumentError(f"lacks {', '.join(missing)}")
    return record


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise InstrumentError(f"timestamp is {_shown(value)}, which is no number of milliseconds")
    return float(value) if type(value) is float else int(value)


def _length(key: str, value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise InstrumentError(f"{key} is {_shown(value)}, which is no whole number of at least {least}")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or any(type(each) is not int for each in value):
        raise InstrumentError(f"hash_ids is {_shown(value)}, which is no list of at least one whole number")
    return tuple(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


_BEGINS, _AGAIN, _ENDS = 0.35, 0.2, 0.15
"""How likely a conversation begins before a turn, a turn asks for another answer, and a conversation ends after one."""


def generate_trace(
    num_requests: int, seed: int, *, num_systems: int = 8, alpha: float = 1.0, block_tokens: int = BLOCK_TOKENS
) -> list[PrefixRequest]:
    """Made up: conversations that take turns, each behind one of a few system prompts of Zipf's popularity.

    A turn sends all that was said before, the answers too, and a question, or the prompt of the turn before again for
    another answer. Prompts have one block to some twenty. The same arguments give the same requests on every version of
    Python. (Were no prompt sent twice, each would end in a block of its own, and `fifo` would evict what `lru` does.)
    Raises InstrumentError for a block below 1 token.
    """
    if block_tokens < 1:
        raise InstrumentError(f"a block has at least 1 token, not {block_tokens}")
    chats = _Chats(_Draws(seed), zipf_order(num_requests, num_systems, alpha, seed), num_systems, block_tokens)
    return [chats.next_request(number) for number in range(num_requests)]


class _Draws:
    """Python promises the bits of `random` for a seed, and of nothing else that it draws."""

    def __init__(self, seed: int) -> None:
        self.share = random.Random(seed).random

    def whole(self, low: int, high: int) -> int:
        return low + int(self.share() * (high - low + 1))


@dataclasses.dataclass(slots=True, eq=False)
class _Chat:
    """One conversation: which it is, what it begins with, how long its last prompt was, and with the answer."""

    number: int
    system: int
    system_tokens: int
    prompt_tokens: int
    num_tokens: int

    def blocks(self, block_tokens: int) -> Iterator[tuple[int, ...]]:
        """What tells each block of the prompt from every other: where it ends, and who shares it."""
        for start in range(0, self.prompt_tokens, block_tokens):
            end = min(start + block_tokens, self.prompt_tokens)
            yield (end, self.system) if end <= self.system_tokens else (end, self.system, self.number)


class _Chats:
    """Conversations that go on side by side."""

    def __init__(self, draw: _Draws, order: Iterable[int], num_systems: int, block_tokens: int) -> None:
        self._draw, self._order, self._block_tokens = draw, iter(order), block_tokens
        self._system_tokens = [draw.whole(max(1, block_tokens // 4), 4 * block_tokens) for _ in range(num_systems)]
        self._ids: dict[tuple[int, ...], int] = {}
        self._running: list[_Chat] = []
        self._now_ms = 0

    def next_request(self, number: int) -> PrefixRequest:
        """The next turn of one that runs, or of a new one."""
        draw, size = self._draw, self._block_tokens
        if not self._running or draw.share() < _BEGINS:
            self._begin(number)
        chat = self._running[draw.whole(0, len(self._running) - 1)]
        if chat.num_tokens == chat.system_tokens or draw.share() >= _AGAIN:
            chat.prompt_tokens = chat.num_tokens + draw.whole(size // 16, size)
        request = self._request(chat, new_tokens=draw.whole(size // 32, size))
        chat.num_tokens = request.prompt_tokens + request.new_tokens
        if draw.share() < _ENDS:
            self._running.remove(chat)
        return request

    def _request(self, chat: _Chat, new_tokens: int) -> PrefixRequest:
        self._now_ms += self._draw.whole(0, 4_000)
        return PrefixRequest(
            timestamp_ms=self._now_ms,
            prompt_tokens=chat.prompt_tokens,
            new_tokens=new_tokens,
            hash_ids=tuple(self._ids.setdefault(block, len(self._ids)) for block in chat.blocks(self._block_tokens)),
        )

    def _begin(self, number: int) -> None:
        system = next(self._order)
        num_tokens = self._system_tokens[system]
        self._running.append(_Chat(number, system, num_tokens, num_tokens, num_tokens))
