"""Many requests in one window of time: each is sent when it is due, whatever has become of those before it.

Knows a schedule, an injected clock, a way to wait, and a subject that is pulled step by step. Refuses to know engines,
devices and statistics. Latencies count from the time that was scheduled, not from when there was time to send: an
engine that keeps its clients waiting does not look faster for it (coordinated omission; Gil Tene, "How NOT to Measure
Latency", 2015).
"""

import dataclasses
import heapq
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from benchmarks.harness.errors import WrongOutputError
from benchmarks.harness.timing import NS_PER_S, Clock, Emission, RunTiming, read_log

Told = Sequence[tuple[str, Emission]]
"""What came of one step: emissions, each with the id of its request."""

_NAP_S = 0.001
"""The longest sleep while nothing is due: sleeping in one go would send late."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """A request to be sent, `due_s` after its window begins, or after the request named by `after` has ended."""

    request_id: str
    due_s: float
    prompt_ids: tuple[int, ...]
    new_tokens: int
    after: str | None = None


class Inbox(deque[Ask]):
    """Requests that are due and not yet taken. `next_due_ns` is when the next one comes, None where none is planned."""

    next_due_ns: int | None = None


def runs_by_itself(arm: Mapping[str, Any]) -> bool:
    """Whether an arm's engine is behind HTTP: it goes on whether or not anybody pulls, and has no steps of ours."""
    return arm.get("via") == "http"


class SkippingClock:
    """Tells the time of another clock and what was slept, which takes no time: a schedule is kept without waiting."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._skipped_ns = clock, 0

    def now_ns(self) -> int:
        return self._clock.now_ns() + self._skipped_ns

    def nap(self, seconds: float) -> None:
        self._skipped_ns += _ns(seconds)


class ServingSubject(Protocol):
    """Whatever answers many requests at once."""

    def serve(self, inbox: deque[Ask], **arm: Any) -> Iterator[Told]:
        """Take all that lies in the inbox, then run one step: once for each pull, greedily, ignoring EOS.

        Closing it ends every request that is still running.
        """
        ...


@dataclasses.dataclass(slots=True)
class _Sent:
    """One request's log as it grows."""

    ask: Ask
    scheduled_ns: int
    sent_ns: int
    log: list[tuple[int | None, Emission]] = dataclasses.field(default_factory=list)

    def as_run(self) -> RunTiming:
        return RunTiming(
            request_id=self.ask.request_id,
            scheduled_ns=self.scheduled_ns,
            sent_ns=self.sent_ns,
            num_prompt_tokens=len(self.ask.prompt_ids),
            **read_log(self.log),
        )


class _Schedule:
    """What is still to be sent, and when: by the plan, or from when another request has ended."""

    def __init__(self, asks: Sequence[Ask], start_ns: int) -> None:
        self._places = itertools.count()
        self._planned: list[tuple[int, int, Ask]] = []
        self._held: dict[str, list[Ask]] = defaultdict(list)
        for ask in asks:
            if ask.after is None:
                self._plan(ask, start_ns)
            else:
                self._held[ask.after].append(ask)

    def _plan(self, ask: Ask, since_ns: int) -> None:
        heapq.heappush(self._planned, (since_ns + _ns(ask.due_s), next(self._places), ask))

    @property
    def next_due_ns(self) -> int | None:
        return self._planned[0][0] if self._planned else None

    def take_due(self, now_ns: int) -> Iterator[tuple[int, Ask]]:
        """What is due by now, with its time."""
        while self._planned and self._planned[0][0] <= now_ns:
            due_ns, _, ask = heapq.heappop(self._planned)
            yield due_ns, ask

    def note_end(self, request_id: str, at_ns: int) -> None:
        """Whoever waited for this request's end has a time now."""
        for ask in self._held.pop(request_id, ()):
            self._plan(ask, at_ns)


def measure_window(
    serve: Callable[[deque[Ask]], Iterator[Told]],
    asks: Sequence[Ask],
    clock: Clock,
    nap: Callable[[float], None] = time.sleep,
) -> tuple[RunTiming, ...]:
    """Send every request when it is due and pull until all have ended; their logs, in the order of `asks`.

    The clock is read once before the first step and once after each: what a step yields arrives together, unless the
    subject tells when it came, and what fell due meanwhile is sent then. Raises WrongOutputError where the subject ends
    early.
    """
    inbox = Inbox()
    steps = serve(inbox)
    start_ns = now_ns = clock.now_ns()
    window = _Window(_Schedule(asks, start_ns), inbox)
    try:
        while window.send_due(now_ns) or window.schedule.next_due_ns is not None:
            if window.num_open:
                told = _pull(steps)
                now_ns = clock.now_ns()
                window.note(told, now_ns)
            else:
                nap(min(_NAP_S, ((window.schedule.next_due_ns or now_ns) - now_ns) / NS_PER_S))
                now_ns = clock.now_ns()
    finally:
        close_steps(steps)
    return tuple(window.sent[ask.request_id].as_run() for ask in asks)


@dataclasses.dataclass(slots=True)
class _Window:
    """What was sent, and what has come of it so far."""

    schedule: _Schedule
    inbox: Inbox
    sent: dict[str, _Sent] = dataclasses.field(default_factory=dict)
    num_open: int = 0

    def send_due(self, now_ns: int) -> int:
        """Send what is due by now; how many requests are open."""
        for due_ns, ask in self.schedule.take_due(now_ns):
            self.sent[ask.request_id] = _Sent(ask, due_ns, now_ns)
            self.inbox.append(ask)
            self.num_open += 1
        self.inbox.next_due_ns = self.schedule.next_due_ns
        return self.num_open

    def note(self, told: Told, now_ns: int) -> None:
        """Add a step's emissions to their logs; each has arrived now, or when it says."""
        for request_id, emission in told:
            at_ns, one = now_ns if emission.at_ns is None else emission.at_ns, self.sent[request_id]
            if emission.is_sending:
                one.sent_ns = at_ns
            one.log.append((at_ns if emission.is_arrival else None, emission))
            if emission.finish_reason is not None:
                self.num_open -= 1
                self.schedule.note_end(request_id, at_ns)


def close_steps(steps: Iterator[object]) -> None:
    """End what a subject still runs, if it can be told to."""
    getattr(steps, "close", lambda: None)()


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def _pull(steps: Iterator[Told]) -> Told:
    told = next(steps, None)
    if told is None:
        raise WrongOutputError("the subject stopped serving while requests were open")
    return told
