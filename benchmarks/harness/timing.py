"""The event log of one streamed request, and the arithmetic on it.

Knows an injected clock and tokens that arrive. Refuses to know models, devices, statistics and pytest: with a
scripted clock every number here can be checked to the last digit. Many requests at once: `traffic.py`.

Definitions and their sources: METHODOLOGY.md.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from benchmarks.harness.errors import InstrumentError

NS_PER_S = 1_000_000_000


class Clock(Protocol):
    """A monotonic clock in nanoseconds. Reading it waits until the device has finished what was sent to it."""

    def now_ns(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """What a streamed source yields: tokens that became known together, and what else the source says with them.

    `num_without_id` counts tokens whose ids the source does not tell. A role or usage message has no tokens and is no
    arrival. `num_cached` and `num_prefilled` are the positions found in a cache, and run, in this step; the first ones
    of a run are its prompt's. `is_admission` marks the moment in which the request left the queue, `is_sending` that in
    which it was on its way. `at_ns` is when this arrived, by the session's clock, where the source saw that better than
    whoever pulls it can.
    """

    token_ids: tuple[int, ...] = ()
    num_without_id: int = 0
    finish_reason: str | None = None
    num_cached: int | None = None
    num_prefilled: int | None = None
    is_admission: bool = False
    is_sending: bool = False
    at_ns: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_without_id

    @property
    def is_arrival(self) -> bool:
        """Whether something came or happened, so that it has a time."""
        return bool(self.num_tokens) or self.is_admission


@dataclasses.dataclass(frozen=True, slots=True)
class Stamp:
    """`num_tokens` tokens arrived together at `at_ns`."""

    at_ns: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunTiming:
    """The event log of one request: when it was due, sent and admitted, when its tokens came, and what they were.

    `scheduled_ns` is when a load generator meant to send it; latencies count from there, so that a generator that was
    held up does not hide the wait. `error` says why the request did not end, `broke_off_ns` when; such a run has no E2E
    and no rate. Every derived quantity is None where it is undefined: never 0, NaN or infinity.
    """

    request_id: str = ""
    scheduled_ns: int | None = None
    sent_ns: int
    admitted_ns: int | None = None
    stamps: tuple[Stamp, ...]
    token_ids: tuple[int, ...] = ()
    num_prompt_tokens: int | None = None
    num_cached: int | None = None
    num_prefilled: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    broke_off_ns: int | None = None

    def __post_init__(self) -> None:
        early = [self.scheduled_ns, self.sent_ns, self.admitted_ns]
        times = [*(at_ns for at_ns in early if at_ns is not None), *(stamp.at_ns for stamp in self.stamps)]
        if times != sorted(times):
            raise InstrumentError(f"the clock went backwards within one run: {times}")
        if any(stamp.num_tokens < 1 for stamp in self.stamps):
            raise InstrumentError("a stamp without tokens is no arrival")

    @property
    def num_tokens(self) -> int:
        return sum(stamp.num_tokens for stamp in self.stamps)

    @property
    def is_finished(self) -> bool:
        """Whether the request came to its end with at least one token."""
        return bool(self.stamps) and self.error is None

    @property
    def arrival_ns(self) -> int:
        """When the request was due: what every latency counts from."""
        return self.sent_ns if self.scheduled_ns is None else self.scheduled_ns

    @property
    def schedule_delay_s(self) -> float | None:
        """Sent minus due: by how much the load generator was late. None where nothing was planned."""
        return None if self.scheduled_ns is None else (self.sent_ns - self.scheduled_ns) / NS_PER_S

    @property
    def queue_wait_s(self) -> float | None:
        """Admitted minus arrival; None where the source does not tell when it admitted the request."""
        return None if self.admitted_ns is None else (self.admitted_ns - self.arrival_ns) / NS_PER_S

    @property
    def ttft_s(self) -> float | None:
        """First token minus arrival, queueing and prefill included."""
        return (self.stamps[0].at_ns - self.arrival_ns) / NS_PER_S if self.stamps else None

    @property
    def e2e_s(self) -> float | None:
        """Last token minus arrival; messages after the last token do not count."""
        return (self.stamps[-1].at_ns - self.arrival_ns) / NS_PER_S if self.is_finished else None

    @property
    def step_gaps_s(self) -> tuple[float, ...]:
        """The gaps between consecutive arrivals, whatever number of tokens each brought."""
        times = [stamp.at_ns for stamp in self.stamps]
        return tuple((after - before) / NS_PER_S for before, after in itertools.pairwise(times))

    @property
    def itls_s(self) -> tuple[float, ...] | None:
        """The gap before each token after the first; None when tokens came in chunks, whose gaps are another thing."""
        return self.step_gaps_s if all(stamp.num_tokens == 1 for stamp in self.stamps) else None

    @property
    def decode_s(self) -> float | None:
        """Last token minus first; None when everything arrived at once."""
        if not self.is_finished:
            return None
        return (self.stamps[-1].at_ns - self.stamps[0].at_ns) / NS_PER_S or None

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1): the first token is prefill's."""
        return None if self.decode_s is None else self.decode_s / (self.num_tokens - 1)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt positions computed per second from admission, or from sending where that is all one knows."""
        if not self.stamps or not self.num_prefilled:
            return None
        start_ns = self.sent_ns if self.admitted_ns is None else self.admitted_ns
        return _per_s(self.num_prefilled, (self.stamps[0].at_ns - start_ns) / NS_PER_S)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first per second after the first."""
        return _per_s(self.num_tokens - 1, self.decode_s)

    @property
    def e2e_tokens_per_s(self) -> float | None:
        """All tokens per second since arrival."""
        return _per_s(self.num_tokens, self.e2e_s)


def _per_s(count: int, duration_s: float | None) -> float | None:
    return count / duration_s if duration_s else None


def measure_stream(
    stream: Iterable[Emission],
    clock: Clock,
    *,
    request_id: str = "",
    scheduled_ns: int | None = None,
    num_prompt_tokens: int | None = None,
    keep_errors: bool = False,
) -> RunTiming:
    """Pull a stream to its end: one clock read before the first pull, one per emission that carries tokens.

    An admission is stamped as well; what tells its own time has that. What the stream raises passes through; with
    `keep_errors` the run ends there instead, with what had arrived and the error's text: for load, where one failed
    request is a count.
    """
    log: list[tuple[int | None, Emission]] = []
    error = broke_off_ns = None
    sent_ns = clock.now_ns()
    try:
        for emission in stream:
            if emission.is_arrival:
                log.append((clock.now_ns() if emission.at_ns is None else emission.at_ns, emission))
            else:
                log.append((None, emission))
    except Exception as raised:
        if not keep_errors:
            raise
        error, broke_off_ns = f"{type(raised).__name__}: {raised}", clock.now_ns()
    return RunTiming(
        request_id=request_id,
        scheduled_ns=scheduled_ns,
        sent_ns=sent_ns,
        num_prompt_tokens=num_prompt_tokens,
        error=error,
        broke_off_ns=broke_off_ns,
        **read_log(log),
    )


def read_log(log: list[tuple[int | None, Emission]]) -> dict[str, Any]:
    """What the emissions of one run said, in their order, as fields of its RunTiming; quiet ones have no time."""
    emissions = [emission for _, emission in log]
    timed = [(at_ns, emission) for at_ns, emission in log if at_ns is not None]
    return {
        "admitted_ns": next((at_ns for at_ns, emission in timed if emission.is_admission), None),
        "stamps": tuple(Stamp(at_ns, emission.num_tokens) for at_ns, emission in timed if emission.num_tokens),
        "token_ids": tuple(itertools.chain.from_iterable(emission.token_ids for emission in emissions)),
        "finish_reason": _first(reversed(emissions), "finish_reason"),
        "num_cached": _first(emissions, "num_cached"),
        "num_prefilled": _prefilled(emissions),
    }


def _prefilled(emissions: list[Emission]) -> int | None:
    """Positions run up to the first token, in one step or in chunks; a source may also tell their sum at its end."""
    first = next((i for i, emission in enumerate(emissions) if emission.num_tokens), len(emissions))
    chunks = [each.num_prefilled for each in emissions[: first + 1] if each.num_prefilled is not None]
    found: int | None = sum(chunks) if chunks else _first(emissions, "num_prefilled")
    return found


def _first(emissions: Iterable[Emission], name: str) -> Any:
    return next((value for emission in emissions if (value := getattr(emission, name)) is not None), None)


def measure_call(call: Callable[[], object], clock: Clock) -> float:
    """Seconds that a call takes, device work included. Reads the clock exactly twice."""
    start_ns = clock.now_ns()
    call()
    end_ns = clock.now_ns()
    if end_ns < start_ns:
        raise InstrumentError(f"the clock went backwards during one call: {start_ns}, {end_ns}")
    return (end_ns - start_ns) / NS_PER_S


def speedup(slow_s: float | None, fast_s: float | None) -> float | None:
    """How many times faster: slow / fast; None when either is undefined or not positive, or the ratio is no number."""
    if not slow_s or not fast_s or slow_s < 0 or fast_s < 0:
        return None
    return slow_s / fast_s if math.isfinite(slow_s / fast_s) else None
