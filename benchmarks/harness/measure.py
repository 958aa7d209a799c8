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
from benchmarks.harness.metrics import TRAFFIC_METRICS, metric
from benchmarks.harness.results import Flag, Measurement, summarise_pairs, summarise_runs
from benchmarks.harness.series import is_settled, what_is_odd
from benchmarks.harness.timing import Clock, Emission, RunTiming, measure_stream, speedup
from benchmarks.harness.verify import check_length, check_same_tokens
from benchmarks.harness.workload import Workload

Runs = dict[str, list[RunTiming]]
Say = Callable[[str], None]
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
        say: Say = lambda text: None,
        turn: Turn = lambda arm, number: contextlib.nullcontext(),
    ) -> None:
        self._plan = plan
        self._subject = subject
        self._clock = clock
        self._say = say
        self._turn = turn
        self.runs: Runs = {}
        self.measurements: list[Measurement] = []
        self.flags: list[Flag] = []
        self.details: dict[str, Any] = {}

    def stream(self, *, prompt_tokens: int, new_tokens: int) -> None:
        """Run one request per arm and sample, arms in random order inside each sample, and measure what streams out.

        Every arm is warmed up at this very shape, with prompts that no sample uses. All arms of a sample get the
        same prompt and have to produce the same tokens, `new_tokens` of them. Raises WrongOutputError otherwise.
        A test streams once: two shapes are two cases.
        """
        if self.runs:
            raise InstrumentError("this test has streamed already; make the second shape a parameter of the test")
        workload = Workload(prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        with without_collections():
            self._warm_up(workload)
            samples = self._take_samples(workload)
        self.runs = {arm: [sample[arm] for sample in samples] for arm in self._plan.arms}
        self._summarise()

    def speedup(self, *, slow: str, fast: str) -> None:
        """Compare two arms of the stream just measured, pair by pair. A test compares once."""
        self._check_declared("speedup")
        if any(m.metric.name == "speedup" for m in self.measurements):
            raise InstrumentError("this test has compared already; make the other pair a test of its own")
        pairs = [(a.e2e_s, b.e2e_s) for a, b in zip(self._runs_of(slow), self._runs_of(fast), strict=True)]
        defined = [(a, b) for a, b in pairs if a and b and speedup(a, b)]
        of_slow, of_fast = zip(*defined, strict=True) if defined else ((), ())
        self.measurements.append(summarise_pairs(metric("speedup"), f"{fast} over {slow}", of_slow, of_fast))

    def close(self) -> None:
        """Raise UndeclaredMetricError when the test measured less than it declared: a missing number is not good."""
        check_kept(self._plan.quantities, self.measurements)

    def primary_durations_s(self) -> list[float]:
        """E2E of each run of the first arm: what pytest-benchmark's own table shows."""
        first = next(iter(self._plan.arms))
        return [run.e2e_s for run in self.runs.get(first, ()) if run.e2e_s is not None]

    def _warm_up(self, workload: Workload) -> None:
        limit, spent_s = self._plan.warm_up, 0.0
        turns: list[dict[str, RunTiming]] = []
        while len(turns) < limit.max_runs and spent_s < limit.max_s:
            turns.append(self._take_sample(workload, "warm-up", len(turns)))
            durations = {arm: [turn[arm].e2e_s or 0.0 for turn in turns] for arm in self._plan.arms}
            restless = [arm for arm, series in durations.items() if not is_settled(series)]
            spent_s = sum(itertools.chain.from_iterable(durations.values()))
            self.details["warm_up"] = {"num_runs": len(turns), "is_settled": not restless if len(turns) > 1 else None}
            if not restless:
                return
        if len(turns) > 1:
            self._flag_all("warm-up", restless, f"was still changing after {len(turns)} warm-up runs, {spent_s:.2g} s")

    def _take_samples(self, workload: Workload) -> list[dict[str, RunTiming]]:
        samples: list[dict[str, RunTiming]] = []
        with contextlib.suppress(Enough):
            while len(samples) < self._plan.num_samples:
                samples.append(self._take_sample(workload, "sample", len(samples)))
        return samples

    def _take_sample(self, workload: Workload, phase: str, number: int) -> dict[str, RunTiming]:
        """One run of every arm on one prompt, checked off the clock."""
        self._say(f"{phase} {number + 1}")
        prompt = workload.prompt(self._subject.vocab_size, self._plan.name, phase, number)
        place = number if phase == "sample" else None
        runs = {arm: self._run(arm, prompt, workload, place) for arm in self._order(phase, number)}
        outputs = {arm: runs[arm].token_ids for arm in self._plan.arms}
        tolerance = self._subject.relative_tolerance
        ties = check_same_tokens(prompt, outputs, self._subject.next_logits, tolerance)
        self.flags += [Flag(kind="near-tie", arm="", what=tie) for tie in ties]
        return runs

    def _order(self, phase: str, number: int) -> list[str]:
        """A random order of the arms; every second one is the last one reversed, so that no arm is early more often."""
        order = list(self._plan.arms)
        random.Random(f"{phase} {number // 2}").shuffle(order)
        return order[::-1] if number % 2 else order

    def _run(self, arm: str, prompt: Sequence[int], workload: Workload, number: int | None) -> RunTiming:
        stream = self._subject.stream(prompt, workload.new_tokens, **self._plan.arms[arm])
        with self._turn(arm, number):
            run = measure_stream(stream, self._clock, num_prompt_tokens=len(prompt))
        check_length(run, workload, arm)
        check_run(run)
        return run

    def _summarise(self) -> None:
        declared = [metric(name) for name in self._plan.quantities]
        for each in declared:
            if each.name in TRAFFIC_METRICS or each.is_exact:
                raise InstrumentError(f"{each.name} does not come about by `measure.stream`: {each.formula}")
            if not each.compares_arms:
                self.measurements += [summarise_runs(each, arm, runs) for arm, runs in self.runs.items()]
        for arm in self.runs:
            series = [run.e2e_s or 0.0 for run in self.runs[arm]]
            self.flags += [Flag(kind=kind, arm=arm, what=what) for kind, what in what_is_odd(series)]

    def _flag_all(self, kind: str, arms: Sequence[str], what: str) -> None:
        self.flags += [Flag(kind=kind, arm=arm, what=what) for arm in arms]

    def _runs_of(self, arm: str) -> list[RunTiming]:
        if arm not in self.runs:
            raise InstrumentError(f"no arm {arm!r} was streamed, only: {', '.join(self.runs) or 'nothing yet'}")
        return self.runs[arm]

    def _check_declared(self, name: str) -> None:
        if name not in self._plan.quantities:
            raise UndeclaredMetricError(
                f"this test does not declare {name!r}; it declares {', '.join(self._plan.quantities)}"
            )


def check_kept(quantities: Sequence[str], measurements: Sequence[Measurement]) -> None:
    """Raise UndeclaredMetricError unless every declared quantity was measured, and is defined for every arm."""
    undefined = {m.metric.name for m in measurements if m.value is None}
    missing = set(quantities) - {m.metric.name for m in measurements} | undefined
    if missing:
        raise UndeclaredMetricError(f"declared but not measured: {', '.join(sorted(missing))}")
