"""The sampling loop behind the `measure` fixture: warm up, interleave the arms, check every run, sum up.

Knows the order in which things run and what a test has declared. Refuses to know pytest, nanoserve and devices: it
is given a subject that streams, a clock, a turn to take for each run, and somewhere to say how far it has come.
"""

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from benchmarks.harness.errors import InstrumentError, UndeclaredMetricError
from benchmarks.harness.garbage import without_collections
from benchmarks.harness.invariants import check_run
from benchmarks.harness.metrics import Metric, metric
from benchmarks.harness.results import Flag, Measurement, summarise_pairs, summarise_runs, summarise_sweeps
from benchmarks.harness.series import is_settled, what_is_odd
from benchmarks.harness.slopes import ttft_degree
from benchmarks.harness.timing import Clock, Emission, RunTiming, measure_stream
from benchmarks.harness.verify import check_length, check_same_tokens
from benchmarks.harness.workload import Workload

Runs = dict[str, list[RunTiming]]
Sample = dict[str, tuple[RunTiming, ...]]
"""What each arm ran in one sample: one run for each workload of the test."""

Say = Callable[[str, int, int], None]
"""Takes the phase, which run of it begins, from 1, and how many there are at most."""

Turn = Callable[[str, int | None], contextlib.AbstractContextManager[object]]
"""A block around each run: what has to come before it, and perhaps a wait. Takes the arm's name and the number of the
sample, from 0; None for a warm-up. May raise Enough."""


class Enough(Exception):  # noqa: N818 - nothing went wrong
    """No more samples are wanted of this case: what was sampled before is all there is."""


class Subject(Protocol):
    """Whatever streams tokens: an engine in this process, another library, an HTTP endpoint."""

    vocab_size: int
    relative_tolerance: float

    def stream(self, prompt_ids: Sequence[int], num_new_tokens: int, **arm: Any) -> Iterator[Emission]:
        """Generate greedily, ignoring EOS. `arm` holds what distinguishes the arms of a comparison."""
        ...

    def next_logits(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Logits of the token after `token_ids`; asked only to judge a difference between arms."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """When warming up ends: once every arm has settled, or at a limit of runs or of seconds, whichever is first."""

    max_runs: int = 0
    max_s: float = 0.0

    def __post_init__(self) -> None:
        if self.max_runs < 0 or not self.max_s >= 0:
            raise InstrumentError(f"cannot warm up for {self.max_runs} runs, {self.max_s} s")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a test declares and how often it is sampled. `arms` maps a name to the options of `Subject.stream`.

    `name` tells a test from every other: no two tests run the same prompts, so none warms a cache for another.
    """

    name: str
    quantities: tuple[str, ...]
    arms: Mapping[str, Mapping[str, Any]]
    num_samples: int = 1
    warm_up: WarmUp = WarmUp()

    def __post_init__(self) -> None:
        for name in self.quantities:
            metric(name)
        if not self.quantities or not self.arms:
            raise InstrumentError("a benchmark declares at least one quantity and one arm")
        if self.num_samples < 1:
            raise InstrumentError(f"cannot take {self.num_samples} samples")


class Measure:
    """What a benchmark test calls. One instance serves one test; `close` checks that it kept its declaration."""

    def __init__(
        self,
        plan: Plan,
        subject: Subject,
        clock: Clock,
        say: Say = lambda phase, number, total: None,
        turn: Turn = lambda arm, number: contextlib.nullcontext(),
    ) -> None:
        self._plan = plan
        self._subject = subject
        self._clock = clock
        self._say = say
        self._turn = turn
        self._samples: list[Sample] = []
        self.measurements: list[Measurement] = []
        self.flags: list[Flag] = []
        self.details: dict[str, Any] = {}

    def stream(self, *, prompt_tokens: int, new_tokens: int) -> None:
        """Run one request per arm and sample, arms in random order inside each sample, and measure what streams out.

        Every arm is warmed up at this very shape, with prompts that no sample uses. All arms of a sample get the
        same prompt and have to produce the same tokens, `new_tokens` of them. Raises WrongOutputError otherwise.
        A test streams once: two shapes are two cases.
        """
        declared = list(self._declared(is_sweep=False))
        self._run_all([Workload(prompt_tokens=prompt_tokens, new_tokens=new_tokens)])
        for each in declared:
            self.measurements += [summarise_runs(each, arm, runs) for arm, runs in self.runs.items()]

    def sweep(self, *, prompt_tokens: Sequence[int], new_tokens: int) -> None:
        """Run one request of each prompt length per arm and sample, and measure the curve through them.

        As `stream`, with the lengths in random order inside each sample. Each sample gives one curve, so that what is
        told of the curve has the interval of its samples. Raises InstrumentError for fewer than three lengths.
        """
        if len(set(prompt_tokens)) < 3:
            raise InstrumentError(f"a curve needs three lengths at least, not {list(prompt_tokens)}")
        declared = list(self._declared(is_sweep=True))
        self._run_all([Workload(prompt_tokens=each, new_tokens=new_tokens) for each in prompt_tokens])
        degrees = {arm: ttft_degree(runs) for arm, runs in self.runs.items()}
        self.details["degree"] = degrees
        for each in declared:
            for arm, degree in degrees.items():
                self.measurements.append(summarise_sweeps(each, arm, [one[arm] for one in self._samples], degree))

    def compare(self, *, slow: str, fast: str) -> None:
        """Measure what the test declares of two arms just streamed, pair by pair. A test compares once."""
        declared = [each for each in map(metric, self._plan.quantities) if each.compares_arms]
        if not declared:
            raise UndeclaredMetricError(
                f"this test declares nothing that compares arms, such as 'speedup'; it declares "
                f"{', '.join(self._plan.quantities)}"
            )
        if any(m.metric.compares_arms for m in self.measurements):
            raise InstrumentError("this test has compared already; make the other pair a test of its own")
        pairs = list(zip(self._runs_of(slow), self._runs_of(fast), strict=True))
        self.measurements += [summarise_pairs(each, f"{fast} over {slow}", pairs) for each in declared]

    @property
    def arms(self) -> Mapping[str, Mapping[str, Any]]:
        return self._plan.arms

    @property
    def runs(self) -> Runs:
        """Every measured run of each arm, in order."""
        if not self._samples:
            return {}
        return {arm: [run for sample in self._samples for run in sample[arm]] for arm in self._plan.arms}

    def close(self) -> None:
        """Raise UndeclaredMetricError when the test measured less than it declared: a missing number is not good."""
        check_kept(self._plan.quantities, self.measurements)

    def primary_durations_s(self) -> list[float]:
        """E2E of each sample of the first arm: what pytest-benchmark's own table shows."""
        first = next(iter(self._plan.arms))
        return [_duration_s(sample[first]) for sample in self._samples]

    def _run_all(self, workloads: Sequence[Workload]) -> None:
        if self._samples:
            raise InstrumentError("this test has streamed already; make the second shape a parameter of the test")
        with without_collections():
            self._warm_up(workloads)
            self._take_samples(workloads)
        for arm in self._plan.arms:
            for place, workload in enumerate(workloads):
                series = [_duration_s(sample[arm][place : place + 1]) for sample in self._samples]
                where = f", with a prompt of {workload.prompt_tokens}" if len(workloads) > 1 else ""
                self.flags += [Flag(kind=kind, arm=arm, what=what + where) for kind, what in what_is_odd(series)]

    def _warm_up(self, workloads: Sequence[Workload]) -> None:
        limit, spent_s = self._plan.warm_up, 0.0
        turns: list[Sample] = []
        while len(turns) < limit.max_runs and spent_s < limit.max_s:
            turns.append(self._take_sample(workloads, "warm-up", len(turns), limit.max_runs))
            durations = {arm: [_duration_s(turn[arm]) for turn in turns] for arm in self._plan.arms}
            restless = [arm for arm, series in durations.items() if not is_settled(series)]
            spent_s = sum(itertools.chain.from_iterable(durations.values()))
            self.details["warm_up"] = {"num_runs": len(turns), "is_settled": not restless if len(turns) > 1 else None}
            if not restless:
                return
        if len(turns) > 1:
            self._flag_all("warm-up", restless, f"was still changing after {len(turns)} warm-up runs, {spent_s:.2g} s")

    def _take_samples(self, workloads: Sequence[Workload]) -> None:
        num = self._plan.num_samples
        with contextlib.suppress(Enough):
            while len(self._samples) < num:
                self._samples.append(self._take_sample(workloads, "sample", len(self._samples), num))

    def _take_sample(self, workloads: Sequence[Workload], phase: str, number: int, total: int) -> Sample:
        """Every workload once, in an order drawn as that of the arms is."""
        self._say(phase, number + 1, total)
        runs = {
            place: self._run_arms(workloads[place], phase, number) for place in _order(len(workloads), phase, number)
        }
        return {arm: tuple(runs[place][arm] for place in range(len(workloads))) for arm in self._plan.arms}

    def _run_arms(self, workload: Workload, phase: str, number: int) -> dict[str, RunTiming]:
        """One run of every arm on one prompt, checked off the clock."""
        prompt = workload.prompt(self._subject.vocab_size, self._plan.name, phase, number)
        sample, arms = number if phase == "sample" else None, list(self._plan.arms)
        runs = {arms[at]: self._run(arms[at], prompt, workload, sample) for at in _order(len(arms), phase, number)}
        outputs = {arm: runs[arm].token_ids for arm in self._plan.arms}
        tolerance = self._subject.relative_tolerance
        ties = check_same_tokens(prompt, outputs, self._subject.next_logits, tolerance)
        self.flags += [Flag(kind="near-tie", arm="", what=tie) for tie in ties]
        return runs

    def _run(self, arm: str, prompt: Sequence[int], workload: Workload, number: int | None) -> RunTiming:
        stream = self._subject.stream(prompt, workload.new_tokens, **self._plan.arms[arm])
        with self._turn(arm, number):
            run = measure_stream(stream, self._clock, num_prompt_tokens=len(prompt))
        check_length(run, workload, arm)
        check_run(run)
        return run

    def _declared(self, *, is_sweep: bool) -> Iterator[Metric]:
        """The declared metrics of single arms. Raises InstrumentError for one that does not come about in this way."""
        for each in map(metric, self._plan.quantities):
            if each.along is not None if is_sweep else each.is_of_runs:
                yield each
            elif not each.compares_arms:
                way = "sweep" if is_sweep else "stream"
                raise InstrumentError(f"{each.name} does not come about by `measure.{way}`: {each.formula}")

    def _flag_all(self, kind: str, arms: Sequence[str], what: str) -> None:
        self.flags += [Flag(kind=kind, arm=arm, what=what) for arm in arms]

    def _runs_of(self, arm: str) -> list[RunTiming]:
        if arm not in self.runs:
            raise InstrumentError(f"no arm {arm!r} was streamed, only: {', '.join(self.runs) or 'nothing yet'}")
        return self.runs[arm]


def _duration_s(runs: Sequence[RunTiming]) -> float:
    return sum(run.e2e_s or 0.0 for run in runs)


def _order(num: int, phase: str, number: int) -> list[int]:
    """A random order of so many; every second one is the last one reversed, so that none is early more often."""
    order = list(range(num))
    random.Random(f"{phase} {number // 2}").shuffle(order)
    return order[::-1] if number % 2 else order


def check_kept(quantities: Sequence[str], measurements: Sequence[Measurement]) -> None:
    """Raise UndeclaredMetricError unless every declared quantity was measured, and is defined for every arm."""
    undefined = {m.metric.name for m in measurements if m.value is None and not m.metric.coefficient}
    missing = set(quantities) - {m.metric.name for m in measurements} | undefined
    if missing:
        raise UndeclaredMetricError(f"declared but not measured: {', '.join(sorted(missing))}")
