"""What the stopwatch costs the run that it measures.

Knows the loop of `measure_stream` and a clock. Refuses to correct anybody's numbers: a cost that mattered would have
to be removed, not subtracted.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.clock import DeviceClock, timer_resolution_ns
from benchmarks.harness.timing import NS_PER_S, Clock, Emission, RunTiming, measure_stream

MAX_STAMP_NS = 2000.0
"""The fastest engines emit a token each millisecond: 2 us of it are 0.2 %, a tenth of what a comparison resolves."""

_MAX_SHARE = 0.01
_MIN_TICKS = 100
_NUM_EMISSIONS = 2000
_NUM_TRIES = 7


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """What the clock resolves on this machine, and what one stamp costs the run that it measures."""

    resolution_ns: int | None
    stamp_ns: float

    @classmethod
    def of(cls, clock: Clock) -> "Stopwatch":
        """Measure both, in about a tenth of a second."""
        # The clock's own steps, without a device's barrier: what that costs is part of a stamp.
        return cls(resolution_ns=timer_resolution_ns(DeviceClock("cpu")), stamp_ns=stamp_cost_ns(clock))

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return dataclasses.asdict(self)

    def cost_s(self, run: RunTiming) -> float:
        """All time that the instrument took inside one run: a stamp per arrival, and one for sending."""
        return (1 + len(run.stamps)) * self.stamp_ns / NS_PER_S

    def costs_s(self, runs: Mapping[str, Sequence[RunTiming]]) -> dict[str, float]:
        """Per arm, the most seconds that the instrument took of any run."""
        return {arm: max((self.cost_s(run) for run in of_arm), default=0.0) for arm, of_arm in runs.items()}

    def share_of(self, runs: Mapping[str, Sequence[RunTiming]]) -> dict[str, float]:
        """Per arm, the largest part of a run's E2E that was the instrument's."""
        return {
            arm: max((self.cost_s(r) / r.e2e_s for r in of_arm if r.e2e_s), default=0.0) for arm, of_arm in runs.items()
        }

    def doubts(self, runs: Mapping[str, Sequence[RunTiming]]) -> Iterator[tuple[str, str]]:
        """The arms whose times are close to what the clock can tell, or to what stamping costs, and why."""
        for arm, share in self.share_of(runs).items():
            gaps = [gap for run in runs[arm] for gap in run.step_gaps_s]
            if share > _MAX_SHARE:
                yield arm, f"the instrument itself took {share:.1%} of a run"
            if gaps and self.resolution_ns and min(gaps) * NS_PER_S < _MIN_TICKS * self.resolution_ns:
                yield (
                    arm,
                    f"the shortest gap is {min(gaps) * NS_PER_S:.0f} ns, the clock resolves {self.resolution_ns} ns",
                )


def stamp_cost_ns(clock: Clock, num_emissions: int = _NUM_EMISSIONS, num_tries: int = _NUM_TRIES) -> float:
    """What stamping one emission adds to a run, clock read and device barrier included.

    A stream that does nothing but yield is timed inside itself, from its first pull to its last: once measured, once
    only drained. Each is the best of `num_tries`, because what disturbs them only ever adds.
    """
    measured, drained = [], []
    for _ in range(num_tries):
        measured.append(_pull_ns(lambda stream: measure_stream(stream, clock), clock, num_emissions))
        drained.append(_pull_ns(_drain, clock, num_emissions))
    return max(min(measured) - min(drained), 0.0)


def read_cost_ns(clock: Clock, num_reads: int = _NUM_EMISSIONS, num_tries: int = _NUM_TRIES) -> float:
    """What one bare look at the clock costs, loop included; the best of `num_tries`."""
    costs = []
    for _ in range(num_tries):
        start_ns = clock.now_ns()
        for _ in itertools.repeat(None, num_reads):
            clock.now_ns()
        costs.append((clock.now_ns() - start_ns) / num_reads)
    return min(costs)


def is_cheap(stamp_ns: float) -> bool:
    """Whether a stamp of this cost can be left in every measured run."""
    return stamp_ns < MAX_STAMP_NS


def _pull_ns(pull: Callable[[Iterable[Emission]], object], clock: Clock, num_emissions: int) -> float:
    """Nanoseconds per emission between the first pull and the one after the last emission."""
    spans_ns: list[int] = []
    emission = Emission(token_ids=(0,))

    def stream() -> Iterator[Emission]:
        start_ns = clock.now_ns()
        for _ in itertools.repeat(None, num_emissions):
            yield emission
        spans_ns.append(clock.now_ns() - start_ns)

    pull(stream())
    return spans_ns[0] / num_emissions


def _drain(stream: Iterable[Emission]) -> None:
    for _ in stream:
        pass
