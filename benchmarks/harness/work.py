"""Behind the `count_work` fixture: one step of each arm, taken apart into what it made the machine do.

Knows how to come to a step of a stream and which counter gives which metric. Refuses to know how anything is counted
(`counters.py`, `token_counts.py`), pytest and nanoserve. A count of one run is the whole truth; the one time that is
taken is for pytest-benchmark's table only.
"""

import contextlib
import functools
import statistics
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.harness.counters import Work, count_work
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.kept import check_kept
from benchmarks.harness.loop import Plan, Subject
from benchmarks.harness.metrics import WORK_METRICS, metric
from benchmarks.harness.popularity import zipf_order
from benchmarks.harness.prefix_traces import read_trace
from benchmarks.harness.replacement import OPTIMUM, Key, farthest_next_use, numbered
from benchmarks.harness.results import Flag, Measurement, exact_count
from benchmarks.harness.scenes import Prompts
from benchmarks.harness.serving import Ask, close_steps
from benchmarks.harness.timing import Clock, Emission, RunTiming, measure_call
from benchmarks.harness.token_counts import Step, count_tokens
from benchmarks.harness.verify import check_same_tokens
from benchmarks.harness.workload import Workload

T = TypeVar("T")


class CountedSubject(Subject, Protocol):
    """A subject that also tells what its requests hold, and what its scheduler and its prefix cache decide."""

    def held(self, **arm: Any) -> Mapping[str, int | None]:
        """What running requests hold now, by metric; None where the subject cannot tell, or has no such thing."""
        ...

    def count_schedule(self, prompt_tokens: int, new_tokens: Sequence[int], **scheduling: Any) -> Mapping[str, int]:
        """What comes about, by metric, when requests with these budgets come at once and the model takes no time."""
        ...

    def count_hits(
        self, requests: Sequence[Sequence[Hashable]], *, policy: str | Key, capacity: int | None
    ) -> Sequence[int]:
        """How many blocks of each request, given by their keys, a prefix cache of so many blocks finds again."""
        ...


class CountWork:
    """What a test of work calls, once. `close` checks that it kept its declaration."""

    def __init__(self, plan: Plan, subject: CountedSubject, clock: Clock, device: str) -> None:
        self._plan = plan
        self._subject = subject
        self._clock = clock
        self._device = device
        self._durations_s: dict[str, float] = {}
        self.running = ""
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

    def hit_rate(self, *, num_requests: int, num_prompts: int, alpha: float, seeds: int) -> None:
        """Count which requests a prefix cache misses when their prompts, of a block each, are drawn by Zipf's law.

        Arms are a `policy` and `slots`, the prompts that fit, None for all. The seeds are those below `seeds`: the
        count is their sum, and exact; `details` has mean and standard deviation of their hit rates.
        """
        self._refuse_second()
        if seeds < 1:
            raise InstrumentError(f"seeds is at least 1, not {seeds}")
        orders = [zipf_order(num_requests, num_prompts, alpha, seed) for seed in range(seeds)]
        draws = [[(prompt,) for prompt in order] for order in orders]
        for arm, options in self._plan.arms.items():
            policy, slots = _exactly(arm, options, "policy", "slots")
            count = functools.partial(self._hits, policy=policy, capacity=slots)
            hits = self._timed(arm, functools.partial(lambda count: [*map(count, draws)], count))
            self._add(arm, {"num_missed_requests": seeds * num_requests - sum(hits)})
            self._keep_rate(arm, [each / num_requests for each in hits])

    def replay(self, trace_path: Path) -> None:
        """Count which blocks of a recorded trace a prefix cache misses. Arms are a `policy` and a `capacity` in blocks.

        Raises InstrumentError for a trace with any fault: what is followed over commits is good as a whole.
        """
        self._refuse_second()
        recorded, faults = read_trace(trace_path)
        if faults:
            raise InstrumentError(faults[0])
        requests = [each.hash_ids for each in recorded]
        num_blocks = sum(map(len, requests))
        for arm, options in self._plan.arms.items():
            policy, capacity = _exactly(arm, options, "policy", "capacity")
            hits = self._timed(arm, functools.partial(self._hits, requests, policy, capacity))
            self._add(arm, {"num_missed_blocks": num_blocks - hits})
            self._keep_rate(arm, [hits / num_blocks])

    def sharing(self, *, num_requests: int, prefix_tokens: int, suffix_tokens: int) -> None:
        """Count what requests hold together that begin alike, after the first token of each; the prefix ran before."""
        self._refuse_second()
        prompts = Prompts(test=self._plan.name, vocab_size=self._subject.vocab_size)
        prefix = prompts(prefix_tokens, 1, "prefix")
        asks = [
            Ask(str(place), 0.0, prefix + prompts(suffix_tokens, 1, "suffix", place), 2)
            for place in range(num_requests)
        ]
        for arm, options in self._plan.arms.items():
            count = functools.partial(_held_together, self._subject, prefix, asks, options)
            self._add(arm, self._timed(arm, count))

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
            self.running = arm
            at = _AtStep(self._subject, prompt, num_steps_before, workload.new_tokens, options)
            with contextlib.closing(at):
                _, work = count_work(at.run_step, device=self._device, prepare=at.prepare)
                self._keep(arm, work, at)
                self._durations_s[arm] = self._seconds_of(at)
                outputs[arm] = tuple(token for emission in at.emissions for token in emission.token_ids)
        ties = check_same_tokens(prompt, outputs, self._subject.next_logits, self._subject.relative_tolerance)
        self.flags += [Flag(kind="near-tie", arm="", what=tie) for tie in ties]

    def _hits(self, requests: Sequence[Sequence[Hashable]], policy: str, capacity: int | None) -> int:
        """Blocks that are found under a policy of the subject's, or under one that knows what comes."""
        if policy == OPTIMUM:
            known = numbered(requests)
            return sum(self._subject.count_hits(known, policy=farthest_next_use(known), capacity=capacity))
        return sum(self._subject.count_hits(requests, policy=policy, capacity=capacity))

    def _refuse_second(self) -> None:
        if self._durations_s:
            raise InstrumentError("this test has counted already; make the second step a parameter of the test")

    def _seconds_of(self, at: "_AtStep") -> float:
        """The step once more, uncounted; after counting, which imports a lot at first."""
        at.prepare()
        return measure_call(at.run_step, self._clock)

    def _timed(self, arm: str, count: Callable[[], T]) -> T:
        """What is counted, and how long the counting took: once is enough for both."""
        found: list[T] = []
        self._durations_s[arm] = measure_call(lambda: found.append(count()), self._clock)
        return found[0]

    def _keep_rate(self, arm: str, rates: Sequence[float]) -> None:
        spread = {"sd": statistics.stdev(rates), "num_seeds": len(rates)} if len(rates) > 1 else {}
        self.details.setdefault("hit_rate", {})[arm] = {"mean": statistics.fmean(rates), **spread}

    def _keep(self, arm: str, work: Work, at: "_AtStep") -> None:
        counted = work.counts() | _tokens_of_last_step(at.emissions, at.num_prompt_tokens)
        counted |= self._subject.held(**at.options)
        self.details["operators"][arm] = dict(work.operators)
        if work.num_graph_launches is not None:
            self.details.setdefault("num_graph_launches", {})[arm] = work.num_graph_launches
        self._add(arm, counted)

    def _add(self, arm: str, counted: Mapping[str, int | None]) -> None:
        self.measurements += [exact_count(metric(name), arm, counted.get(name)) for name in self._plan.quantities]


def _exactly(arm: str, options: Mapping[str, Any], *names: str) -> list[Any]:
    """The values of these options, in this order. Raises InstrumentError for an arm that has others."""
    if set(options) != set(names):
        raise InstrumentError(f"arm {arm!r} has the options {dict(options)!r}; here they are: {', '.join(names)}")
    return [options[name] for name in names]


def _held_together(
    subject: CountedSubject, prefix: Sequence[int], asks: Sequence[Ask], options: Mapping[str, Any]
) -> Mapping[str, int | None]:
    """What the subject holds when each of these requests has its first token, of two."""
    subject.forget(**options)
    for _ in subject.stream(prefix, 1, **options):
        pass
    steps, begun = subject.serve(deque(asks), **options), set[str]()
    try:
        while len(begun) < len(asks):
            begun |= {request_id for request_id, _ in next(steps)}
        return subject.held(**options)
    finally:
        close_steps(steps)


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
        """Begin anew and run the steps before the one that counts; the old request is ended, and forgotten, first."""
        self.close()
        self._subject.forget(**self.options)
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
