"""Many requests in one window of time: each is sent when it is due, whatever has become of those before it.

Knows a schedule, an injected clock, a way to wait, and a subject that is pulled step by step. Refuses to know engines,
devices and statistics. Latencies count from the time that was scheduled, not from when there was time to send: an
engine that keeps its clients waiting does not look faster for it (coordinated omission; Gil Tene, "How NOT to Measure
Latency", 2015).
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from benchmarks.harness.errors import WrongOutputError
from benchmarks.harness.timing import NS_PER_S, Clock, Emission, RunTiming, read_log

Told = Sequence[tuple[str, Emission]]
"""What came of one step: emissions, each with the id of its request."""

_NAP_S = 0.001
"""The longest sleep while nothing is due: sleeping in one go would send late."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """A request to be sent, `due_s` after its window begins."""

    request_id: str
    due_s: float
    prompt_ids: tuple[int, ...]
    new_tokens: int


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


def measure_window(
    serve: Callable[[deque[Ask]], Iterator[Told]],
    asks: Sequence[Ask],
    clock: Clock,
    nap: Callable[[float], None] = time.sleep,
) -> tuple[RunTiming, ...]:
    """Send every request when it is due and pull until all have ended; their logs, in the order of `asks`.

    The clock is read once before the first step and once after each: what a step yields arrives together, and what fell
    due meanwhile is sent then. Raises WrongOutputError where the subject ends early.
    """
    waiting = deque(sorted(asks, key=lambda ask: ask.due_s))
    sent: dict[str, _Sent] = {}
    inbox: deque[Ask] = deque()
    steps = serve(inbox)
    start_ns = now_ns = clock.now_ns()
    num_open = 0
    try:
        while waiting or num_open:
            for ask in _due(waiting, now_ns - start_ns):
                sent[ask.request_id] = _Sent(ask, start_ns + _ns(ask.due_s), now_ns)
                inbox.append(ask)
                num_open += 1
            if num_open:
                told = _pull(steps)
                now_ns = clock.now_ns()
                num_open -= _note(sent, told, now_ns)
            else:
                nap(min(_NAP_S, (start_ns + _ns(waiting[0].due_s) - now_ns) / NS_PER_S))
                now_ns = clock.now_ns()
    finally:
        close_steps(steps)
    return tuple(sent[ask.request_id].as_run() for ask in asks)


def close_steps(steps: Iterator[object]) -> None:
    """End what a subject still runs, if it can be told to."""
    getattr(steps, "close", lambda: None)()


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def _due(waiting: deque[Ask], since_start_ns: int) -> Iterator[Ask]:
    while waiting and _ns(waiting[0].due_s) <= since_start_ns:
        yield waiting.popleft()


def _pull(steps: Iterator[Told]) -> Told:
    told = next(steps, None)
    if told is None:
        raise WrongOutputError("the subject stopped serving while requests were open")
    return told


def _note(sent: dict[str, _Sent], told: Told, at_ns: int) -> int:
    """Add a step's emissions to their logs; how many requests ended with it."""
    for request_id, emission in told:
        sent[request_id].log.append((at_ns if emission.num_tokens or emission.is_admission else None, emission))
    return sum(emission.finish_reason is not None for _, emission in told)
