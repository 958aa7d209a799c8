"""Behind the `measure` fixture: what a benchmark test calls, and what its declared metrics make of the runs.

Knows which metrics come about in which way. Refuses to know in which order things run (`loop.py`), pytest, nanoserve
and devices.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.arrivals import together
from benchmarks.harness.errors import InstrumentError, UndeclaredMetricError
from benchmarks.harness.loop import Load, Loop, Nap, Plan, Say, Subject, Turn, Window
from benchmarks.harness.metrics import Metric, metric
from benchmarks.harness.results import (
    Flag,
    Measurement,
    summarise_batches,
    summarise_pairs,
    summarise_runs,
    summarise_sweeps,
    summarise_windows,
)
from benchmarks.harness.slopes import ttft_degree
from benchmarks.harness.timing import Clock, RunTiming
from benchmarks.harness.traffic import Limits

Runs = dict[str, list[RunTiming]]


class Measure:
    """What a benchmark test calls. One instance serves one test; `close` checks that it kept its declaration."""

    def __init__(
        self,
        plan: Plan,
        subject: Subject,
        clock: Clock,
        say: Say = lambda phase, number, total: None,
        turn: Turn = lambda arm, number: contextlib.nullcontext(),
        *,
        nap: Nap = time.sleep,
    ) -> None:
        self._plan = plan
        self._loop = Loop(plan, subject, clock, say=say, turn=turn, nap=nap)
        self.measurements: list[Measurement] = []
        self.details: dict[str, Any] = self._loop.details
        self.flags: list[Flag] = self._loop.flags

    def stream(self, *, prompt_tokens: int, new_tokens: int) -> None:
        """Run one request per arm and sample, arms in random order inside each sample, and measure what streams out.

        Every arm is warmed up at this very shape, with prompts that no sample uses. All arms of a sample get the
        same prompt and have to produce the same tokens, `new_tokens` of them. Raises WrongOutputError otherwise.
        A test streams once: two shapes are two cases.
        """
        declared = list(self._declared("stream"))
        self._loop.run([together(1, prompt_tokens=prompt_tokens, new_tokens=new_tokens)])
        for each in declared:
            self.measurements += [summarise_runs(each, arm, runs) for arm, runs in self.runs.items()]

    def sweep(self, *, prompt_tokens: Sequence[int], new_tokens: int) -> None:
        """Run one request of each prompt length per arm and sample, and measure the curve through them.

        As `stream`, with the lengths in random order inside each sample. Each sample gives one curve, so that what is
        told of the curve has the interval of its samples. Raises InstrumentError for fewer than three lengths.
        """
        if len(set(prompt_tokens)) < 3:
            raise InstrumentError(f"a curve needs three lengths at least, not {list(prompt_tokens)}")
        declared = list(self._declared("sweep"))
        self._loop.run([together(1, prompt_tokens=each, new_tokens=new_tokens) for each in prompt_tokens])
        degrees = {arm: ttft_degree(runs) for arm, runs in self.runs.items()}
        self.details["degree"] = degrees
        for each in declared:
            for arm, degree in degrees.items():
                samples = [[window[0] for window in windows] for windows in self._windows_of(arm)]
                self.measurements.append(summarise_sweeps(each, arm, samples, degree))

    def serve(self, arrivals: Load, *, limits: Limits | None = None, same_tokens: bool = True) -> None:
        """Run a window of requests per arm and sample, each sent when it is due, and measure all of them together.

        As `stream`; each sample gives one window, and every quantity of a window one number. `limits` are what goodput
        judges by. Without `same_tokens` the arms need not agree: for an arm that answers nothing.
        """
        declared = list(self._declared("serve"))
        for each in declared:
            each.summary((), limits)  # raises before anything runs where it lacks limits
        self._loop.run([arrivals], serves=True, same_tokens=same_tokens)
        self.details["num_requests"] = len(arrivals)
        for each in declared:
            for arm in self._plan.arms:
                windows = [windows[0] for windows in self._windows_of(arm)]
                self.measurements.append(summarise_windows(each, arm, windows, limits))

    def batches(self, sizes: Sequence[int], *, prompt_tokens: int, new_tokens: int) -> None:
        """Run a window of so many equal requests at once for each size, per arm and sample, and measure the curve.

        Raises InstrumentError for fewer than three sizes.
        """
        if len(set(sizes)) < 3:
            raise InstrumentError(f"a curve needs three sizes at least, not {list(sizes)}")
        declared = list(self._declared("batches"))
        loads = [together(size, prompt_tokens=prompt_tokens, new_tokens=new_tokens) for size in sizes]
        self._loop.run(loads, serves=True)
        for each in declared:
            self.measurements += [summarise_batches(each, arm, self._windows_of(arm)) for arm in self._plan.arms]

    def compare(self, *, slow: str, fast: str) -> None:
        """Measure what the test declares of how much better one arm is than another, pair by pair."""
        self._pair(slow, fast, f"{fast} over {slow}", "higher")

    def price(self, *, of: str, against: str) -> None:
        """Measure what the test declares of how much dearer one arm is than another, pair by pair."""
        self._pair(of, against, f"{of} against {against}", "lower")

    def _pair(self, slow: str, fast: str, label: str, better: str) -> None:
        declared = [each for each in map(metric, self._plan.quantities) if each.compares_arms and each.better == better]
        if not declared:
            example = "'speedup'" if better == "higher" else "'itl_price'"
            raise UndeclaredMetricError(
                f"this test declares nothing that compares arms in this way, such as {example}; it declares "
                f"{', '.join(self._plan.quantities)}"
            )
        if any(m.metric in declared for m in self.measurements):
            raise InstrumentError("this test has compared already; make the other pair a test of its own")
        samples = zip(self._windows_of(slow), self._windows_of(fast), strict=True)
        pairs = [pair for ours, theirs in samples for pair in zip(ours, theirs, strict=True)]
        self.measurements += [summarise_pairs(each, label, pairs) for each in declared]

    @property
    def arms(self) -> Mapping[str, Mapping[str, Any]]:
        return self._plan.arms

    @property
    def runs(self) -> Runs:
        """Every measured run of each arm, in order."""
        if not self._loop.samples:
            return {}
        return {arm: [run for window in self._flat(arm) for run in window] for arm in self.arms}

    @property
    def shares_steps(self) -> bool:
        """Whether requests ran beside others, so that no run alone tells what its steps cost."""
        return bool(self._loop.samples) and any(len(window) > 1 for arm in self.arms for window in self._flat(arm))

    def close(self) -> None:
        """Raise UndeclaredMetricError when the test measured less than it declared: a missing number is not good."""
        check_kept(self._plan.quantities, self.measurements)

    def primary_durations_s(self) -> list[float]:
        """The duration of each sample of the first arm: what pytest-benchmark's own table shows."""
        return self._loop.durations_s(next(iter(self._plan.arms)))

    def _declared(self, way: str) -> Iterator[Metric]:
        """The declared metrics of single arms. Raises InstrumentError for one that does not come about in this way."""
        for each in map(metric, self._plan.quantities):
            if way in each.ways:
                yield each
            elif not each.compares_arms:
                raise InstrumentError(f"{each.name} does not come about by `measure.{way}`: {each.formula}")

    def _flat(self, arm: str) -> list[Window]:
        return [window for windows in self._windows_of(arm) for window in windows]

    def _windows_of(self, arm: str) -> list[tuple[Window, ...]]:
        """For each sample the windows of an arm, one for each load."""
        if arm not in self._plan.arms or not self._loop.samples:
            known = ", ".join(self._plan.arms) if self._loop.samples else "nothing yet"
            raise InstrumentError(f"no arm {arm!r} was streamed, only: {known}")
        return [sample[arm] for sample in self._loop.samples]


def check_kept(quantities: Sequence[str], measurements: Sequence[Measurement]) -> None:
    """Raise UndeclaredMetricError unless every declared quantity was measured, and is defined for every arm."""
    undefined = {m.metric.name for m in measurements if m.value is None and not m.metric.coefficient}
    missing = set(quantities) - {m.metric.name for m in measurements} | undefined
    if missing:
        raise UndeclaredMetricError(f"declared but not measured: {', '.join(sorted(missing))}")
