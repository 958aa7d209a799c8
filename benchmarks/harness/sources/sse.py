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


class EventReader:
    """Takes the bytes as they come. Comments (keep-alives) are no events.

    As the standard asks: an event that no blank line ended is dropped, bytes that are no UTF-8 are replaced.
    """

    def __init__(self) -> None:
        self._name, self._data = "", list[str]()
        self._pending, self._is_after_cr, self._is_first = b"", False, True

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """The events that end in these bytes; what is left of them waits for the next."""
        for line in self._lines(chunk):
            field, _, value = line.partition(":")
            if field == "data":
                self._data.append(value.removeprefix(" "))
            elif field == "event":
                self._name = value.removeprefix(" ")
            elif not line:
                if self._data:
                    yield Event(self._name or "message", "\n".join(self._data))
                self._name, self._data = "", []

    def _lines(self, chunk: bytes) -> Iterator[str]:
        """Whole lines. A CR ends its line at once, or an event would be held back until the next one comes."""
        if not chunk:
            return
        self._pending += chunk.removeprefix(b"\n") if self._is_after_cr else chunk
        self._is_after_cr = self._pending.endswith(b"\r")
        *lines, self._pending = _LINE_END.split(self._pending)
        for line in lines:
            yield (line.removeprefix(_BYTE_ORDER_MARK) if self._is_first else line).decode(errors="replace")
            self._is_first = False


def read_events(chunks: Iterable[bytes]) -> Iterator[Event]:
    """The events in `chunks`, however the bytes are divided among them."""
    reader = EventReader()
    for chunk in chunks:
        yield from reader.feed(chunk)
