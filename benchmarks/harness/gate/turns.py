"""How two worker processes take turns: what a worker says to the one that leads them, and what it waits for.

Knows a two-way connection and a few messages. Refuses to know what happens inside a turn. Messages are JSON objects
with a `kind`: a worker says `turn` (it wants to run), `done` (it has run), `end` (its session is over); the leader
says `go`, or `enough` (no more samples of this case). A run takes many turns: one that opens it, one for each step. A
connection that ends ends the worker: nobody is left to measure for.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.loop import Enough


class WorkerError(InstrumentError):
    """A worker process that died, hung, or spoke out of turn; the message has the end of what it printed."""


class Place(NamedTuple):
    """Where in its session a worker is: the test's position in the order of collection, and the turn within it."""

    item: int
    turn: int


class Connection(Protocol):
    """One end of a `multiprocessing.Pipe`."""

    def send_bytes(self, buf: bytes, /) -> None: ...
    def recv_bytes(self) -> bytes: ...


def send(connection: Connection, kind: str, **fields: Any) -> None:
    """Raises OSError when nobody is at the other end."""
    connection.send_bytes(json.dumps({"kind": kind, **fields}, allow_nan=False).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """The next message. Raises EOFError when nobody is at the other end, WorkerError for what is no message."""
    content = connection.recv_bytes()
    try:
        message = json.loads(content)
        message["kind"]
    except (ValueError, TypeError, KeyError) as error:
        raise WorkerError(f"no message of a worker: {content[:100]!r}") from error
    return dict(message)


class Turns:
    """The worker's side: a block that runs only while it is this worker's turn."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._item, self._name, self._turn = -1, "", 0
        self._arm = ""
        self._sample: int | None = None

    def begin_item(self, item: int, name: str) -> None:
        """The test at this position begins."""
        self._item, self._name, self._turn = item, name, 0

    @contextlib.contextmanager
    def take(self, arm: str, sample: int | None) -> Iterator[None]:
        """Wait for the turn that opens a run, run the block, give the turn back. Raises Enough if told so."""
        self._arm, self._sample = arm, sample
        self._wait(may_stop=sample is not None)
        try:
            yield
        finally:
            self.end_step()

    def begin_step(self) -> None:
        """Wait for the turn of one step of the run."""
        self._wait(may_stop=False)

    def end_step(self) -> None:
        """Give the turn back."""
        send(self._connection, "done")

    def _wait(self, *, may_stop: bool) -> None:
        place = {"item": self._item, "turn": self._turn, "name": self._name}
        send(self._connection, "turn", **place, arm=self._arm, sample=self._sample, may_stop=may_stop)
        self._turn += 1
        message = receive(self._connection)
        if message["kind"] == "enough":
            raise Enough
        if message["kind"] != "go":
            raise WorkerError(f"expected to go, was told {message['kind']!r}")

    def end(self, told: Mapping[str, Any]) -> None:
        """The session is over, and this is what it leaves."""
        send(self._connection, "end", **told)
