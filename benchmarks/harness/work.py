"""Behind the `count_work` fixture: one step of each arm, taken apart into what it made the machine do.

Knows how to come to a step of a stream and which counter gives which metric. Refuses to know how anything is counted
(`counters.py`, `token_counts.py`), pytest and nanoserve. A count of one run is the whole truth; the one time that is
taken is for pytest-benchmark's table only.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from benchmarks.harness.counters import Work, count_work
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.loop import Plan, Subject
from benchmarks.harness.measure import check_kept
from benchmarks.harness.metrics import WORK_METRICS, metric
from benchmarks.harness.results import Flag, Measurement, exact_count
from benchmarks.harness.timing import Clock, Emission, RunTiming, measure_call
from benchmarks.harness.token_counts import Step, count_tokens
from benchmarks.harness.verify import check_same_tokens
from benchmarks.harness.workload import Workload


class CountedSubject(Subject, Protocol):
    """A subject that also tells what its requests hold."""

    def held(self, **arm: Any) -> Mapping[str, int | None]:
        """What running requests hold now, by metric; None where the subject cannot tell, or has no such thing."""
        ...

    def count_schedule(self, prompt_tokens: int, new_tokens: Sequence[int], **scheduling: Any) -> Mapping[str, int]:
        """What comes about, by metric, when requests with these budgets come at once and the model takes no time."""
        ...


class CountWork:
    """What a test of work calls, once. `close` checks that it kept its declaration."""

    def __init__(self, plan: Plan, subject: CountedSubject, clock: Clock, device: str) -> None:
        self._plan = plan
        self._subject = subject
        self._clock = clock
        self._device = device
        self._durations_s: dict[str, float] = {}
        self.runs: dict[str, list[RunTiming]] = {}
        self.measurements: list[Measurement] = []
        self.flags: list[Flag] = []
        self.details: dict[str, Any] = {"operators": {}}
        for name in plan.quantities:
            if not metric(name).is_exact:
                raise InstrumentError(f"{name} is not a count of work; counts are: {', '.join(WORK_METRICS)}")

    def prefill(self, *, prompt_tokens: int) -> None:
        """Count the step that runs the prompt and gives the first token."""
        self._count(Workload(prompt_tokens=prompt_tokens, new_tokens=2), num_steps_before=0)

    def decode_step(self, *, context_tokens: int) -> None:
        """Count the step that runs one more position after `context_tokens` of them."""
        self._count(Workload(prompt_tokens=context_tokens, new_tokens=3), num_steps_before=1)

    def schedule(self, *, prompt_tokens: int, new_tokens: Sequence[int]) -> None:
        """Count what a scheduler decides for requests with these budgets. Arms are its settings, steps the clock."""
        self._refuse_second()
        for arm, options in self._plan.arms.items():
            count = functools.partial(self._subject.count_schedule, prompt_tokens, new_tokens, **options)
            self._add(arm, count())
            self._durations_s[arm] = measure_call(count, self._clock)

    def close(self) -> None:
        """Raise UndeclaredMetricError when the test counted less than it declared."""
        check_kept(self._plan.quantities, self.measurements)

    def primary_durations_s(self) -> list[float]:
        """How long the first arm took, uncounted, once: pytest-benchmark's table wants a time."""
        return list(self._durations_s.values())[:1]

    def _count(self, workload: Workload, num_steps_before: int) -> None:
        self._refuse_second()
        prompt = workload.prompt(self._subject.vocab_size, self._plan.name, "count")
        outputs = {}
        for arm, options in self._plan.arms.items():
            at = _AtStep(self._subject, prompt, num_steps_before, workload.new_tokens, options)
            with contextlib.closing(at):
                _, work = count_work(at.run_step, device=self._device, prepare=at.prepare)
                self._keep(arm, work, at)
                self._durations_s[arm] = self._seconds_of(at)
                outputs[arm] = tuple(token for emission in at.emissions for token in emission.token_ids)
        ties = check_same_tokens(prompt, outputs, self._subject.next_logits, self._subject.relative_tolerance)
        self.flags += [Flag(kind="near-tie", arm="", what=tie) for tie in ties]

    def _refuse_second(self) -> None:
        if self._durations_s:
            raise InstrumentError("this test has counted already; make the second step a parameter of the test")

    def _seconds_of(self, at: "_AtStep") -> float:
        """The step once more, uncounted; after counting, which imports a lot at first."""
        at.prepare()
        return measure_call(at.run_step, self._clock)

    def _keep(self, arm: str, work: Work, at: "_AtStep") -> None:
        counted = work.counts() | _tokens_of_last_step(at.emissions, at.num_prompt_tokens)
        counted |= self._subject.held(**at.options)
        self.details["operators"][arm] = dict(work.operators)
        self._add(arm, counted)

    def _add(self, arm: str, counted: Mapping[str, int | None]) -> None:
        self.measurements += [exact_count(metric(name), arm, counted.get(name)) for name in self._plan.quantities]


class _AtStep:
    """A stream that can be brought to the same step again and again, and is closed in the end."""

    def __init__(
        self,
        subject: Subject,
        prompt: Sequence[int],
        num_steps_before: int,
        new_tokens: int,
        options: Any,
    ) -> None:
        self._subject = subject
        self._prompt = prompt
        self._num_steps_before = num_steps_before
        self._new_tokens = new_tokens
        self.options = options
        self.emissions: list[Emission] = []
        self._stream: Iterator[Emission] = iter(())

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt)

    def close(self) -> None:
        """End the request, if the stream can be told to."""
        close = getattr(self._stream, "close", lambda: None)
        close()

    def prepare(self) -> None:
        """Begin anew and run the steps before the one that counts; the old request is ended first."""
        self.close()
        self._stream = self._subject.stream(self._prompt, self._new_tokens, **self.options)
        self.emissions = [next(self._stream) for _ in range(self._num_steps_before)]

    def run_step(self) -> None:
        self.emissions.append(next(self._stream))


def _tokens_of_last_step(emissions: Sequence[Emission], num_prompt_tokens: int) -> dict[str, int | None]:
    """What the last step ran, by metric: the difference that it makes to the counts of all steps."""
    steps = [
        Step(num_prefilled=each.num_prefilled, num_cached=each.num_cached, num_tokens=each.num_tokens)
        for each in emissions
    ]
    before, after = (count_tokens(some, num_prompt_tokens).counts() for some in (steps[:-1], steps))
    names = {
        "num_forwards": "num_forwards",
        "num_prefilled": "num_tokens_prefilled",
        "num_recomputed": "num_tokens_recomputed",
        "num_decoded": "num_tokens_decoded",
    }
    return {ours: after[theirs] - before.get(theirs, 0) for theirs, ours in names.items() if theirs in after}
