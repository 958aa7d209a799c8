"""A planted slowdown: the same subject, each of whose steps is followed by so many percent more work.

Knows a subject, an injected clock, and how to keep a core busy. Refuses to know what is measured. The extra work is
real (a core computes, nothing sleeps), ends the step that it lengthens, and lengthens all of them as a slower kernel
would.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.loop import Subject, untimed
from benchmarks.harness.serving import Ask, Told, close_steps, runs_by_itself
from benchmarks.harness.timing import Clock, Emission
from benchmarks.harness.wrapped import Wrapped

T = TypeVar("T")


class Slowed(Wrapped):
    """Streams what `subject` streams, each step (1 + share) times as long. Everything else is the subject's own.

    A share of 0 reads the clock and works for no time: what is left of it is the instrument's own cost. What comes
    before a timed run, untimed, is as fast as ever.
    """

    def __init__(self, subject: Subject, share: float, clock: Clock) -> None:
        if not 0 <= share < math.inf:
            raise InstrumentError(f"a planted slowdown is a share of 0 or more, not {share}")
        super().__init__(subject)
        self._share, self._clock = share, clock
        self._work = _busy()

    def stream(self, prompt_ids: Sequence[int], num_new_tokens: int, **arm: Any) -> Iterator[Emission]:
        """Slower steps; the tokens are the subject's own. Raises InstrumentError for an arm that has no steps here."""
        _refuse_http(arm)
        return self._lengthened(self._subject.stream(prompt_ids, num_new_tokens, **arm))

    def serve(self, inbox: deque[Ask], **arm: Any) -> Iterator[Told]:
        """The same, for steps of many requests."""
        _refuse_http(arm)
        return self._lengthened(self._subject.serve(inbox, **arm))

    def untimed(self, act: Callable[[Subject], T]) -> T:
        """See `loop.untimed`."""
        return untimed(self._subject, act)

    def _lengthened(self, steps: Iterator[T]) -> Iterator[T]:
        try:
            start_ns = self._clock.now_ns()
            for step in steps:
                self._lengthen(start_ns)
                yield step
                start_ns = self._clock.now_ns()
        finally:
            close_steps(steps)

    def _lengthen(self, start_ns: int) -> None:
        end_ns = self._clock.now_ns()
        until_ns = end_ns + (end_ns - start_ns) * self._share
        while self._clock.now_ns() < until_ns:
            self._work()


def _refuse_http(arm: Mapping[str, Any]) -> None:
    if runs_by_itself(arm):
        raise InstrumentError("a planted slowdown lengthens steps of this process; an arm through HTTP has none here")


def _busy() -> Callable[[], object]:
    """A few microseconds of arithmetic inside the first cache, so that nothing of the subject's is pushed out."""
    import numpy as np

    numbers = np.linspace(0.5, 1.5, 1024)
    return lambda: float(numbers @ numbers)
