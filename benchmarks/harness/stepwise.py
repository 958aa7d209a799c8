"""A stream whose steps wait for their turn, and a clock that does not count the wait.

A shared machine changes its speed within a run. Two processes that take turns step by step see the same machine; two
that take turns run by run do not. Knows a subject, a clock and when a step begins and ends. Refuses to know whose turn
it is.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

from benchmarks.harness.loop import Subject, untimed
from benchmarks.harness.serving import Ask, Told, close_steps, runs_by_itself
from benchmarks.harness.timing import Clock, Emission
from benchmarks.harness.wrapped import Wrapped

T = TypeVar("T")


class StoppableClock:
    """Tells the time of another clock, less what passed while it was stopped. Never goes backwards."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._stopped_ns = clock, 0

    def now_ns(self) -> int:
        return self._clock.now_ns() - self._stopped_ns

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Time stands still inside the block, whatever ends it."""
        start_ns = self._clock.now_ns()
        try:
            yield
        finally:
            self._stopped_ns += self._clock.now_ns() - start_ns


class Stepwise(Wrapped):
    """Streams what `subject` streams. Each step, and whoever stamps it, runs between `begin` and `end`.

    `begin` may wait, and `end` may let another run: `clock` stands still in both. Everything else is the subject's own.
    What comes before a timed run, untimed, is one turn however many steps it has: nobody compares them, and meanwhile
    the other measures nothing that it would disturb.
    """

    def __init__(
        self, subject: Subject, clock: StoppableClock, begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        super().__init__(subject)
        self._clock, self._begin, self._end = clock, begin, end

    def stream(self, prompt_ids: Sequence[int], num_new_tokens: int, **arm: Any) -> Iterator[Emission]:
        """The same emissions, one step a turn."""
        stream = self._subject.stream(prompt_ids, num_new_tokens, **arm)
        with contextlib.closing(self._in_one_turn(stream) if runs_by_itself(arm) else self._in_turns(stream)) as steps:
            for emission in steps:
                yield emission
                if emission.finish_reason is not None:  # or a turn would be waited for, for nothing
                    return

    def serve(self, inbox: deque[Ask], **arm: Any) -> Iterator[Told]:
        """The same, one step of all requests a turn; of an engine that runs by itself, all of it in one turn."""
        steps = self._subject.serve(inbox, **arm)
        return self._in_one_turn(steps) if runs_by_itself(arm) else self._in_turns(steps)

    def _in_one_turn(self, steps: Iterator[T]) -> Generator[T, None, None]:
        with self._clock.stopped():
            self._begin()
        try:
            yield from steps
        finally:
            close_steps(steps)
            with self._clock.stopped():
                self._end()

    def untimed(self, act: Callable[[Subject], T]) -> T:
        """See `loop.untimed`."""
        with self._clock.stopped():
            self._begin()
        try:
            return untimed(self._subject, act)
        finally:
            with self._clock.stopped():
                self._end()

    def _in_turns(self, steps: Iterator[T]) -> Generator[T, None, None]:
        try:
            while True:
                with self._clock.stopped():
                    self._begin()
                try:
                    step = next(steps, None)
                    if step is None:
                        return
                    yield step
                finally:
                    with self._clock.stopped():
                        self._end()
        finally:
            close_steps(steps)
