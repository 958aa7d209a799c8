"""The sampling loop: warm up, interleave the arms, check every run.

Knows the order in which things run and what makes a run wrong. Refuses to know metrics, pytest, nanoserve and devices:
it is given a subject, a clock, a turn to take for each run, and somewhere to say how far it has come.
"""

import contextlib
import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from benchmarks.harness.arrivals import Arrival
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.garbage import without_collections
from benchmarks.harness.invariants import check_run, check_window
from benchmarks.harness.metrics import metric
from benchmarks.harness.results import Flag
from benchmarks.harness.series import is_settled, what_is_odd
from benchmarks.harness.serving import Ask, Told, measure_window
from benchmarks.harness.timing import Clock, Emission, RunTiming, measure_stream
from benchmarks.harness.traffic import duration_s
from benchmarks.harness.verify import check_length, check_same_tokens
from benchmarks.harness.workload import Workload

Window = tuple[RunTiming, ...]
"""The requests that ran together: one, where one is streamed."""

Sample = dict[str, tuple[Window, ...]]
"""What each arm ran in one sample: one window for each load of the test."""

Load = Sequence[Arrival]
"""The requests of a window, and when they are due."""

Say = Callable[[str, int, int], None]
"""Takes the phase, which run of it begins, from 1, and how many there are at most."""

Turn = Callable[[str, int | None], contextlib.AbstractContextManager[object]]
"""A block around each run: what has to come before it, and perhaps a wait. Takes the arm's name and the number of the
sample, from 0; None for a warm-up. May raise Enough."""


Nap = Callable[[float], None]
"""Waits for so many seconds."""


class Enough(Exception):  # noqa: N818 - nothing went wrong
    """No more samples are wanted of this case: what was sampled before is all there is."""


class Subject(Protocol):
    """Whatever streams tokens: an engine in this process, another library, an HTTP endpoint."""

    vocab_size: int
    relative_tolerance: float

    def stream(self, prompt_ids: Sequence[int], num_new_tokens: int, **arm: Any) -> Iterator[Emission]:
        """Generate greedily, ignoring EOS. `arm` holds what distinguishes the arms of a comparison."""
        ...

    def serve(self, inbox: deque[Ask], **arm: Any) -> Iterator[Told]:
        """See `serving.ServingSubject`."""
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
    """What a test declares and how often it is sampled. `arms` maps a name to the options of the subject.

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


class Loop:
    """Runs the loads of one test, once: every arm warmed up at the very shape, then sampled."""

    def __init__(self, plan: Plan, subject: Subject, clock: Clock, *, say: Say, turn: Turn, nap: Nap) -> None:
        self._plan, self._subject, self._clock, self._nap = plan, subject, clock, nap
        self._say, self._turn = say, turn
        self._serves = False
        self._same_tokens = True
        self.samples: list[Sample] = []
        self.flags: list[Flag] = []
        self.details: dict[str, Any] = {}

    def run(self, loads: Sequence[Load], *, serves: bool = False, same_tokens: bool = True) -> None:
        """Run every load once per arm and sample; loads and arms in random order inside each sample.

        A load of one request is streamed, or, with `serves`, sent like any other window. All arms of a sample get the
        same prompts and have to produce the same tokens, as many as was asked, unless `same_tokens` is off. Raises
        WrongOutputError otherwise.
        """
        if self.samples:
            raise InstrumentError("this test has run already; make the second shape a parameter of the test")
        self._serves, self._same_tokens = serves, same_tokens
        with without_collections():
            self._warm_up(loads)
            self._take_samples(loads)
        for arm in self._plan.arms:
            for place, load in enumerate(loads):
                series = [_seconds(sample[arm][place : place + 1]) for sample in self.samples]
                where = f", with {_told(load)}" if len(loads) > 1 else ""
                self.flags += [Flag(kind=kind, arm=arm, what=what + where) for kind, what in what_is_odd(series)]

    def durations_s(self, arm: str) -> list[float]:
        """How long each sample of an arm took, all its loads together."""
        return [_seconds(sample[arm]) for sample in self.samples]

    def _warm_up(self, loads: Sequence[Load]) -> None:
        limit, spent_s = self._plan.warm_up, 0.0
        turns: list[Sample] = []
        while len(turns) < limit.max_runs and spent_s < limit.max_s:
            turns.append(self._take_sample(loads, "warm-up", len(turns), limit.max_runs))
            durations = {arm: [_seconds(turn[arm]) for turn in turns] for arm in self._plan.arms}
            restless = [arm for arm, series in durations.items() if not is_settled(series)]
            spent_s = sum(itertools.chain.from_iterable(durations.values()))
            self.details["warm_up"] = {"num_runs": len(turns), "is_settled": not restless if len(turns) > 1 else None}
            if not restless:
                return
        if len(turns) > 1:
            what = f"was still changing after {len(turns)} warm-up runs, {spent_s:.2g} s"
            self.flags += [Flag(kind="warm-up", arm=arm, what=what) for arm in restless]

    def _take_samples(self, loads: Sequence[Load]) -> None:
        num = self._plan.num_samples
        with contextlib.suppress(Enough):
            while len(self.samples) < num:
                self.samples.append(self._take_sample(loads, "sample", len(self.samples), num))

    def _take_sample(self, loads: Sequence[Load], phase: str, number: int, total: int) -> Sample:
        """Every load once, in an order drawn as that of the arms is."""
        self._say(phase, number + 1, total)
        windows = {place: self._run_arms(loads, place, phase, number) for place in _order(len(loads), phase, number)}
        return {arm: tuple(windows[place][arm] for place in range(len(loads))) for arm in self._plan.arms}

    def _run_arms(self, loads: Sequence[Load], which: int, phase: str, number: int) -> dict[str, Window]:
        """One window of every arm on the same prompts, checked off the clock."""
        asks = self._asks(loads[which], which, phase, number)
        sample, arms = number if phase == "sample" else None, list(self._plan.arms)
        windows = {arms[at]: self._run(arms[at], asks, sample) for at in _order(len(arms), phase, number)}
        if self._same_tokens:
            for place, ask in enumerate(asks):
                self._compare(ask, {_whose(arm, place, asks): windows[arm][place].token_ids for arm in arms})
        return windows

    def _asks(self, load: Load, which: int, phase: str, number: int) -> list[Ask]:
        """What to send; no two requests of a test have one prompt, which a cache would find again."""
        asks = []
        for place, each in enumerate(load):
            words = (self._plan.name, phase, number, *([which, place] if self._serves else []))
            prompt = _workload(each).prompt(self._subject.vocab_size, *words)
            asks.append(Ask(f"{phase}-{number}-{place}", each.due_s, prompt, each.new_tokens))
        return asks

    def _compare(self, ask: Ask, outputs: dict[str, tuple[int, ...]]) -> None:
        tolerance = self._subject.relative_tolerance
        ties = check_same_tokens(ask.prompt_ids, outputs, self._subject.next_logits, tolerance)
        self.flags += [Flag(kind="near-tie", arm="", what=tie) for tie in ties]

    def _run(self, arm: str, asks: Sequence[Ask], number: int | None) -> Window:
        window = self._window(arm, asks, number)
        for place, (run, ask) in enumerate(zip(window, asks, strict=True)):
            workload = Workload(prompt_tokens=len(ask.prompt_ids), new_tokens=ask.new_tokens)
            check_length(run, workload, _whose(arm, place, asks))
            check_run(run)
        check_window(window)
        return window

    def _window(self, arm: str, asks: Sequence[Ask], number: int | None) -> Window:
        subject, options = self._subject, self._plan.arms[arm]
        if self._serves:
            with self._turn(arm, number):
                return measure_window(lambda inbox: subject.serve(inbox, **options), asks, self._clock, self._nap)
        (ask,) = asks
        stream = subject.stream(ask.prompt_ids, ask.new_tokens, **options)
        with self._turn(arm, number):
            return (measure_stream(stream, self._clock, num_prompt_tokens=len(ask.prompt_ids)),)


def _workload(arrival: Arrival) -> Workload:
    return Workload(prompt_tokens=arrival.prompt_tokens, new_tokens=arrival.new_tokens)


def _whose(arm: str, place: int, asks: Sequence[Ask]) -> str:
    """What tells an answer from the others of its sample."""
    return arm if len(asks) == 1 else f"{arm}'s request {place}"


def _seconds(windows: Sequence[Window]) -> float:
    return sum(duration_s(window) or 0.0 for window in windows)


def _told(load: Load) -> str:
    """What tells a load from the others of its test."""
    return f"a prompt of {load[0].prompt_tokens}" if len(load) == 1 else f"{len(load)} requests"


def _order(num: int, phase: str, number: int) -> list[int]:
    """A random order of so many; every second one is the last one reversed, so that none is early more often."""
    order = list(range(num))
    random.Random(f"{phase} {number // 2}").shuffle(order)
    return order[::-1] if number % 2 else order
