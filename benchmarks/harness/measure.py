"""The sampling loop behind the `measure` fixture: warm up, interleave the arms, check every run, sum up.

Knows the order in which things run and what a test has declared. Refuses to know pytest, nanoserve and devices: it
is given a subject that streams, a clock, and somewhere to say how far it has come.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from benchmarks.harness.errors import InstrumentError, UndeclaredMetricError
from benchmarks.harness.metrics import metric
from benchmarks.harness.results import Measurement, summarise_runs, summarise_values
from benchmarks.harness.timing import Clock, Emission, RunTiming, measure_stream, speedup
from benchmarks.harness.verify import check_length, check_same_tokens
from benchmarks.harness.workload import Workload

Runs = dict[str, list[RunTiming]]
Say = Callable[[str], None]


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
class Plan:
    """What a test declares and how often it is sampled. `arms` maps a name to the options of `Subject.stream`.

    `name` tells a test from every other: no two tests run the same prompts, so none warms a cache for another.
    """

    name: str
    quantities: tuple[str, ...]
    arms: Mapping[str, Mapping[str, Any]]
    num_samples: int = 1
    num_warmups: int = 0

    def __post_init__(self) -> None:
        for name in self.quantities:
            metric(name)
        if not self.quantities or not self.arms:
            raise InstrumentError("a benchmark declares at least one quantity and one arm")
        if self.num_samples < 1 or self.num_warmups < 0:
            raise InstrumentError(f"cannot take {self.num_samples} samples after {self.num_warmups} warm-ups")


class Measure:
    """What a benchmark test calls. One instance serves one test; `close` checks that it kept its declaration."""

    def __init__(self, plan: Plan, subject: Subject, clock: Clock, say: Say = lambda text: None) -> None:
        self._plan = plan
        self._subject = subject
        self._clock = clock
        self._say = say
        self._runs: Runs = {}
        self.measurements: list[Measurement] = []
        self.notes: list[str] = []

    def stream(self, *, prompt_tokens: int, new_tokens: int) -> None:
        """Run one request per arm and sample, arms in random order inside each sample, and measure what streams out.

        Every arm is warmed up at this very shape, with prompts that no sample uses. All arms of a sample get the
        same prompt and have to produce the same tokens, `new_tokens` of them. Raises WrongOutputError otherwise.
        A test streams once: two shapes are two cases.
        """
        if self._runs:
            raise InstrumentError("this test has streamed already; make the second shape a parameter of the test")
        workload = Workload(prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        for i in range(self._plan.num_warmups):
            self._take_sample(workload, "warm-up", i)
        samples = [self._take_sample(workload, "sample", i) for i in range(self._plan.num_samples)]
        self._runs = {arm: [sample[arm] for sample in samples] for arm in self._plan.arms}
        self._summarise()

    def speedup(self, *, slow: str, fast: str) -> None:
        """Compare two arms of the stream just measured, pair by pair. A test compares once."""
        self._check_declared("speedup")
        if any(m.metric.name == "speedup" for m in self.measurements):
            raise InstrumentError("this test has compared already; make the other pair a test of its own")
        pairs = zip(self._runs_of(slow), self._runs_of(fast), strict=True)
        ratios = [speedup(a.e2e_s, b.e2e_s) for a, b in pairs]
        defined = [ratio for ratio in ratios if ratio is not None]
        self.measurements.append(summarise_values(metric("speedup"), f"{fast} over {slow}", defined))

    def close(self) -> None:
        """Raise UndeclaredMetricError when the test measured less than it declared: a missing number is not good."""
        undefined = {m.metric.name for m in self.measurements if m.value is None}
        missing = set(self._plan.quantities) - {m.metric.name for m in self.measurements} | undefined
        if missing:
            raise UndeclaredMetricError(f"declared but not measured: {', '.join(sorted(missing))}")

    def primary_durations_s(self) -> list[float]:
        """E2E of each run of the first arm: what pytest-benchmark's own table shows."""
        first = next(iter(self._plan.arms))
        return [run.e2e_s for run in self._runs.get(first, ()) if run.e2e_s is not None]

    def _take_sample(self, workload: Workload, phase: str, number: int) -> dict[str, RunTiming]:
        """One run of every arm on one prompt, checked off the clock."""
        self._say(f"{phase} {number + 1}")
        prompt = workload.prompt(self._subject.vocab_size, self._plan.name, phase, number)
        runs = {arm: self._run(arm, prompt, workload) for arm in self._order(phase, number)}
        outputs = {arm: runs[arm].token_ids for arm in self._plan.arms}
        tolerance = self._subject.relative_tolerance
        self.notes += check_same_tokens(prompt, outputs, self._subject.next_logits, tolerance)
        return runs

    def _order(self, phase: str, number: int) -> list[str]:
        """A random order of the arms; every second one is the last one reversed, so that no arm is early more often."""
        order = list(self._plan.arms)
        random.Random(f"{phase} {number // 2}").shuffle(order)
        return order[::-1] if number % 2 else order

    def _run(self, arm: str, prompt: Sequence[int], workload: Workload) -> RunTiming:
        stream = self._subject.stream(prompt, workload.new_tokens, **self._plan.arms[arm])
        run = measure_stream(stream, self._clock)
        check_length(run, workload, arm)
        return run

    def _summarise(self) -> None:
        declared = [metric(name) for name in self._plan.quantities]
        for each in declared:
            if not each.compares_arms:
                self.measurements += [summarise_runs(each, arm, runs) for arm, runs in self._runs.items()]

    def _runs_of(self, arm: str) -> list[RunTiming]:
        if arm not in self._runs:
            raise InstrumentError(f"no arm {arm!r} was streamed, only: {', '.join(self._runs) or 'nothing yet'}")
        return self._runs[arm]

    def _check_declared(self, name: str) -> None:
        if name not in self._plan.quantities:
            raise UndeclaredMetricError(
                f"this test does not declare {name!r}; it declares {', '.join(self._plan.quantities)}"
            )
