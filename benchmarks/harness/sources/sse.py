"""Server-sent events out of a stream of bytes, each as soon as the line that ends it is here.

Knows the event stream format (HTML Living Standard, section 9.2). Refuses to know HTTP, JSON and what events mean.
The bytes may be cut anywhere: in the middle of a line ending, or of a UTF-8 character.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One event; several `data` lines are joined by newlines. A name that was not given is "message"."""

    name: str
    data: str


def read_events(chunks: Iterable[bytes]) -> Iterator[Event]:
    """The events in `chunks`, however the bytes are divided among them. Comments (keep-alives) are no events.

    As the standard asks: an event that no blank line ended is dropped, bytes that are no UTF-8 are replaced.
    """
    name, data = "", list[str]()
    for line in _read_lines(chunks):
        field, _, value = line.partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))
        elif field == "event":
            name = value.removeprefix(" ")
        elif not line:
            if data:
                yield Event(name or "message", "\n".join(data))
            name, data = "", []


def _read_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Whole lines. A CR ends its line at once, or an event would be held back until the next one comes."""
    pending, is_after_cr, is_first = b"", False, True
    for chunk in filter(None, chunks):
        pending += chunk.removeprefix(b"\n") if is_after_cr else chunk
        is_after_cr = pending.endswith(b"\r")
        *lines, pending = _LINE_END.split(pending)
        for line in lines:
            yield (line.removeprefix(_BYTE_ORDER_MARK) if is_first else line).decode(errors="replace")
            is_first = False
