"""The sampling loop: prove what is reused, warm up, interleave the arms, check every run.

Knows the order in which things run and what makes a run wrong. Refuses to know metrics, pytest, nanoserve and devices:
it is given scenes, a subject, a clock, a turn to take for each run, and somewhere to say how far it has come.
"""

import contextlib
import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.garbage import without_collections
from benchmarks.harness.invariants import check_run, check_window
from benchmarks.harness.metrics import metric
from benchmarks.harness.proof import Reuse, check_hits
from benchmarks.harness.results import Flag
from benchmarks.harness.scenes import Act, Prompt, Scene
from benchmarks.harness.series import is_settled, what_is_odd
from benchmarks.harness.serving import Ask, Told, measure_window
from benchmarks.harness.timing import Clock, Emission, RunTiming, measure_stream
from benchmarks.harness.traffic import duration_s
from benchmarks.harness.verify import check_length, check_same_tokens
from benchmarks.harness.workload import Workload

T = TypeVar("T")

Window = tuple[RunTiming, ...]
"""The requests of one scene, in their order: one, where one is streamed."""

Sample = dict[str, tuple[Window, ...]]
"""What each arm ran in one sample: one window for each load of the test."""

Say = Callable[[str, int, int], None]
"""Takes the phase, which run of it begins, from 1, and how many there are at most."""

Turn = Callable[[str, int | None], contextlib.AbstractContextManager[object]]
"""A block around each run: what has to come before it, and perhaps a wait. Takes the arm's name and the number of the
sample, from 0; None for a warm-up. May raise Enough."""

Nap = Callable[[float], None]


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

    def forget(self, **arm: Any) -> None:
        """Drop whatever the arm would find again of the prompts that it has served."""
        ...

    def num_reusable(self, num_stored: int, num_prompt_tokens: int, **arm: Any) -> int | None:
        """How much of a prompt is found again that begins with so many stored positions; None where nobody knows."""
        ...

    def reuse_logits(self, prompt_ids: Sequence[int], prefix_tokens: int, **arm: Any) -> Reuse:
        """Logits behind a prompt without any cache, and with its first `prefix_tokens` served before."""
        ...

    def predict_hits(self, prompts: Sequence[Sequence[int]], **arm: Any) -> Sequence[int]:
        """Tokens of each prompt that are found again when they are served one after another, for one token each."""
        ...


Proof = Callable[[Subject], None]
"""Raises WrongOutputError where a subject is not worth timing."""


def untimed(subject: Subject, act: Callable[[Subject], T]) -> T:
    """Let `act` use a subject for what nobody times: nothing is slowed down, and it is one turn where turns are taken.

    A wrapper has a method `untimed` for it, which takes `act` alone.
    """
    own: Callable[[Callable[[Subject], T]], T] | None = getattr(subject, "untimed", None)
    return act(subject) if own is None else own(act)


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

    `name` tells a test from every other: no two tests run the same prompts, so none warms a cache for another. An
    arm's option "state" is none of the subject's: it is taken out of `arms`, and goes into `states`.
    """

    name: str
    quantities: tuple[str, ...]
    arms: Mapping[str, Mapping[str, Any]]
    num_samples: int = 1
    warm_up: WarmUp = WarmUp()
    states: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        states = {arm: options["state"] for arm, options in self.arms.items() if "state" in options}
        bare = {arm: {k: v for k, v in options.items() if k != "state"} for arm, options in self.arms.items()}
        object.__setattr__(self, "states", {**self.states, **states})
        object.__setattr__(self, "arms", bare)
        for name in self.quantities:
            metric(name)
        if not self.quantities or not self.arms:
            raise InstrumentError("a benchmark declares at least one quantity and one arm")
        if self.num_samples < 1:
            raise InstrumentError(f"cannot take {self.num_samples} samples")


class Loop:
    """Runs the loads of one test, once: every arm warmed up at the very shape, then sampled."""

    def __init__(
        self, plan: Plan, subject: Subject, clock: Clock, *, say: Say, turn: Turn, around: Turn, nap: Nap
    ) -> None:
        """`around` is a block like `turn`, around what is timed of a run and nothing else."""
        self._plan, self._subject, self._clock, self._nap = plan, subject, clock, nap
        self._say, self._turn, self._around = say, turn, around
        self._same_tokens, self._may_end_early = True, getattr(subject, "may_end_early", False)
        self.running = ""
        self.first_run_s: dict[str, float] = {}
        self.samples: list[Sample] = []
        self.flags: list[Flag] = []
        self.details: dict[str, Any] = {}

    def run(self, acts: Sequence[Act], *, same_tokens: bool = True, proofs: Sequence[tuple[str, Proof]] = ()) -> None:
        """Run every load once per arm and sample; loads and arms in random order inside each sample.

        `proofs`, each of an arm, come before the first warm-up. Arms of a sample that get the same prompt have to
        produce the same tokens, as many as was asked, unless `same_tokens` is off. Raises WrongOutputError otherwise.
        """
        if self.samples:
            raise InstrumentError("this test has run already; make the second shape a parameter of the test")
        self._same_tokens = same_tokens
        with without_collections():
            self._forget()
            for arm, proof in proofs:
                with self._turn(arm, None):
                    untimed(self._subject, proof)
            self._warm_up(acts)
            self._take_samples(acts)
        for arm in self._plan.arms:
            for place, act in enumerate(acts):
                series = [_seconds(sample[arm][place : place + 1]) for sample in self.samples]
                where = f", with {act.name}" if len(acts) > 1 else ""
                self.flags += [Flag(kind=kind, arm=arm, what=what + where) for kind, what in what_is_odd(series)]

    def _forget(self) -> None:
        """What another test of the same prompts has left behind. Arms in a state forget before each run anyway."""
        for options in self._plan.arms.values() if not self._plan.states else ():
            self._subject.forget(**options)

    def durations_s(self, arm: str) -> list[float]:
        """How long each sample of an arm took, all its loads together."""
        return [_seconds(sample[arm]) for sample in self.samples]

    def _warm_up(self, acts: Sequence[Act]) -> None:
        limit, spent_s = self._plan.warm_up, 0.0
        turns: list[Sample] = []
        while len(turns) < limit.max_runs and spent_s < limit.max_s:
            turns.append(self._take_sample(acts, "warm-up", len(turns), limit.max_runs))
            durations = {arm: [_seconds(turn[arm]) for turn in turns] for arm in self._plan.arms}
            self.first_run_s = {arm: series[0] for arm, series in durations.items()}
            restless = [arm for arm, series in durations.items() if not is_settled(series)]
            spent_s = sum(itertools.chain.from_iterable(durations.values()))
            self.details["warm_up"] = {"num_runs": len(turns), "is_settled": not restless if len(turns) > 1 else None}
            if not restless:
                return
        if len(turns) > 1:
            what = f"was still changing after {len(turns)} warm-up runs, {spent_s:.2g} s"
            self.flags += [Flag(kind="warm-up", arm=arm, what=what) for arm in restless]

    def _take_samples(self, acts: Sequence[Act]) -> None:
        num = self._plan.num_samples
        with contextlib.suppress(Enough):
            while len(self.samples) < num:
                self.samples.append(self._take_sample(acts, "sample", len(self.samples), num))

    def _take_sample(self, acts: Sequence[Act], phase: str, number: int, total: int) -> Sample:
        """Every load once, in an order drawn as that of the arms is."""
        self._say(phase, number + 1, total)
        windows = {place: self._run_arms(acts[place], phase, number) for place in _order(len(acts), phase, number)}
        return {arm: tuple(windows[place][arm] for place in range(len(acts))) for arm in self._plan.arms}

    def _run_arms(self, act: Act, phase: str, number: int) -> dict[str, Window]:
        """One window of every arm, checked off the clock."""
        scenes = {arm: act.scene(arm, phase, number) for arm in self._plan.arms}
        sample, arms = number if phase == "sample" else None, list(self._plan.arms)
        ran = {arms[at]: self._run(arms[at], scenes[arms[at]], sample) for at in _order(len(arms), phase, number)}
        if self._same_tokens:
            self._compare({arm: ran[arm] for arm in arms})
        return {arm: tuple(run for _, run in told) for arm, told in ran.items()}

    def _compare(self, ran: Mapping[str, "Ran"]) -> None:
        """Hold those answers of the arms against each other whose prompts are equal."""
        for place in range(max(map(len, ran.values()))):
            outputs: dict[Prompt, dict[str, tuple[int, ...]]] = {}
            for arm, told in ran.items():
                for prompt, run in told[place : place + 1]:
                    outputs.setdefault(prompt, {})[_whose(arm, place, told)] = run.token_ids
            for prompt, answers in outputs.items():
                self._compare_answers(prompt, answers)

    def _compare_answers(self, prompt: Prompt, answers: dict[str, tuple[int, ...]]) -> None:
        tolerance = self._subject.relative_tolerance
        ties = check_same_tokens(prompt, answers, self._subject.next_logits, tolerance)
        self.flags += [Flag(kind="near-tie", arm="", what=tie) for tie in ties]

    def _run(self, arm: str, scene: Scene, number: int | None) -> "Ran":
        self.running = arm
        with self._turn(arm, number):
            ran = self._play(scene, arm, number)
        for place, (ask, (prompt, run)) in enumerate(zip(scene.asks, ran, strict=True)):
            whose = _whose(arm, place, ran)
            workload = Workload(prompt_tokens=len(prompt), new_tokens=ask.new_tokens)
            check_length(run, workload, whose, may_end_early=self._may_end_early)
            if scene.hits is None or scene.hits[place] is not None:
                check_hits(run, None if scene.hits is None else scene.hits[place], whose)
            check_run(run)
        check_window([run for _, run in ran])
        return ran

    def _play(self, scene: Scene, arm: str, number: int | None) -> "Ran":
        """What was served before, which nobody times, then the window itself."""
        options, before = self._plan.arms[arm], scene.before
        if before is not None:
            untimed(self._subject, lambda bare: _serve_before(bare, before, options))
        with self._around(arm, number):
            return self._play_window(scene, options)

    def _play_window(self, scene: Scene, options: Mapping[str, Any]) -> "Ran":
        subject = self._subject
        if scene.how == "together":
            runs = measure_window(lambda inbox: subject.serve(inbox, **options), scene.asks, self._clock, self._nap)
            return [(ask.prompt_ids, run) for ask, run in zip(scene.asks, runs, strict=True)]
        ran: Ran = []
        for ask in scene.asks:
            said = ran[-1][0] + ran[-1][1].token_ids if ran and scene.how == "carried" else ()
            prompt = said + ask.prompt_ids
            stream = subject.stream(prompt, ask.new_tokens, **options)
            name, num = ask.request_id, len(prompt)
            ran.append((prompt, measure_stream(stream, self._clock, request_id=name, num_prompt_tokens=num)))
        return ran


Ran = list[tuple[Prompt, RunTiming]]
"""The requests of a window as they were sent, and what became of them."""


def _serve_before(subject: Subject, prompts: Sequence[Prompt], options: Mapping[str, Any]) -> None:
    """Everything else is forgotten; each of these runs to its first token, after which all of it is stored."""
    subject.forget(**options)
    for prompt in prompts:
        for _ in subject.stream(prompt, 1, **options):
            pass


def _whose(arm: str, place: int, ran: Ran) -> str:
    """What tells an answer from the others of its sample."""
    return arm if len(ran) == 1 else f"{arm}'s request {place}"


def _seconds(windows: Sequence[Window]) -> float:
    return sum(duration_s(window) or 0.0 for window in windows)


def _order(num: int, phase: str, number: int) -> list[int]:
    """A random order of so many; every second one is the last one reversed, so that none is early more often."""
    order = list(range(num))
    random.Random(f"{phase} {number // 2}").shuffle(order)
    return order[::-1] if number % 2 else order
