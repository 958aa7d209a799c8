"""One streamed run as a log of stamps, and the arithmetic on it.

Knows an injected clock and tokens that arrive. Refuses to know models, devices, statistics and pytest: with a
scripted clock every number here can be checked to the last digit.

Definitions and their sources: METHODOLOGY.md.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Protocol

from benchmarks.harness.errors import InstrumentError

_NS_PER_S = 1_000_000_000


class Clock(Protocol):
    """A monotonic clock in nanoseconds. Reading it waits until the device has finished what was sent to it."""

    def now_ns(self) -> int: ...


class Emission(Protocol):
    """What a streamed source yields: the tokens that became known together (none for a role or usage message)."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def finish_reason(self) -> str | None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Stamp:
    """`num_tokens` tokens arrived together at `at_ns`."""

    at_ns: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunTiming:
    """The event log of one request: when it was sent, when its tokens came, and what they were.

    Every derived quantity is None where it is undefined: never 0, NaN or infinity.
    """

    sent_ns: int
    stamps: tuple[Stamp, ...]
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        times = [self.sent_ns, *(stamp.at_ns for stamp in self.stamps)]
        if times != sorted(times):
            raise InstrumentError(f"the clock went backwards within one run: {times}")
        if any(stamp.num_tokens < 1 for stamp in self.stamps):
            raise InstrumentError("a stamp without tokens is no arrival")

    @property
    def num_tokens(self) -> int:
        return sum(stamp.num_tokens for stamp in self.stamps)

    @property
    def ttft_s(self) -> float | None:
        """First token minus sent, queueing and prefill included."""
        return self._since_sent_s(0)

    @property
    def e2e_s(self) -> float | None:
        """Last token minus sent."""
        return self._since_sent_s(-1)

    @property
    def itls_s(self) -> tuple[float, ...] | None:
        """The gap before each token after the first; None when tokens came in chunks, whose gaps are another thing."""
        if any(stamp.num_tokens != 1 for stamp in self.stamps):
            return None
        times = [stamp.at_ns for stamp in self.stamps]
        return tuple((after - before) / _NS_PER_S for before, after in itertools.pairwise(times))

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1): the first token is prefill's; None when everything arrived at once."""
        if len(self.stamps) < 2:
            return None
        return (self.stamps[-1].at_ns - self.stamps[0].at_ns) / (self.num_tokens - 1) / _NS_PER_S

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first per second after the first."""
        return None if not self.tpot_s else 1 / self.tpot_s

    @property
    def e2e_tokens_per_s(self) -> float | None:
        """All tokens per second since sent."""
        return None if not self.e2e_s else self.num_tokens / self.e2e_s

    def _since_sent_s(self, index: int) -> float | None:
        return (self.stamps[index].at_ns - self.sent_ns) / _NS_PER_S if self.stamps else None


def measure_stream(stream: Iterable[Emission], clock: Clock) -> RunTiming:
    """Pull a stream to its end: one clock read before the first pull, one per emission that carries tokens."""
    stamps: list[Stamp] = []
    token_ids: list[int] = []
    finish_reason = None
    sent_ns = clock.now_ns()
    for emission in stream:
        if emission.token_ids:
            stamps.append(Stamp(clock.now_ns(), len(emission.token_ids)))
            token_ids += emission.token_ids
        finish_reason = emission.finish_reason or finish_reason
    return RunTiming(sent_ns=sent_ns, stamps=tuple(stamps), token_ids=tuple(token_ids), finish_reason=finish_reason)


def measure_call(call: Callable[[], object], clock: Clock) -> float:
    """Seconds that a call takes, device work included. Reads the clock exactly twice."""
    start_ns = clock.now_ns()
    call()
    end_ns = clock.now_ns()
    if end_ns < start_ns:
        raise InstrumentError(f"the clock went backwards during one call: {start_ns}, {end_ns}")
    return (end_ns - start_ns) / _NS_PER_S


def speedup(slow_s: float | None, fast_s: float | None) -> float | None:
    """How many times faster: slow / fast; None when either is undefined or not positive."""
    return slow_s / fast_s if slow_s and fast_s and slow_s > 0 and fast_s > 0 else None
