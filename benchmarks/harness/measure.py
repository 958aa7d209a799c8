"""Behind the `measure` fixture: what a benchmark test calls, and what its declared metrics make of the runs.

Knows which metrics come about in which way. Refuses to know in which order things run (`loop.py`), pytest, nanoserve
and devices.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness import scenes
from benchmarks.harness.arrivals import together
from benchmarks.harness.errors import InstrumentError, UndeclaredMetricError
from benchmarks.harness.kept import check_kept
from benchmarks.harness.loop import Loop, Nap, Plan, Say, Subject, Turn, Window
from benchmarks.harness.metrics import Metric, metric
from benchmarks.harness.one_time import Account
from benchmarks.harness.results import (
    Flag,
    Measurement,
    summarise_batches,
    summarise_pairs,
    summarise_runs,
    summarise_sweeps,
    summarise_windows,
)
from benchmarks.harness.scenes import Act, Load, Prompt, Prompts, Reusable
from benchmarks.harness.slopes import ttft_degree
from benchmarks.harness.states import proofs, refuse, states_of, tell
from benchmarks.harness.timing import Clock, RunTiming
from benchmarks.harness.traffic import Limits

Runs = dict[str, list[RunTiming]]

Tell = Callable[[Mapping[str, Sequence[Window]]], tuple[list[Flag], dict[str, Any]]]
"""Takes the windows of each arm; what the subject saw of them by itself, as flags and details."""

WAYS_OF_STATES = ("reuse", "sharing")
"""The methods of `measure` whose arms are in states of the prefix cache."""


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
        tell: Tell = lambda windows: ([], {}),
    ) -> None:
        self._plan, self._account, self._tell = plan, Account(), tell
        self._loop = Loop(plan, subject, clock, say=say, turn=turn, around=self._account.around, nap=nap)
        self._prompts, self._subject = Prompts(test=plan.name, vocab_size=subject.vocab_size), subject
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
        self._run([together(1, prompt_tokens=prompt_tokens, new_tokens=new_tokens)])
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
        self._run([together(1, prompt_tokens=each, new_tokens=new_tokens) for each in prompt_tokens])
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
        self._run([arrivals], serves=True, same_tokens=same_tokens)
        self.details["num_requests"] = len(arrivals)
        self._summarise_windows(declared, limits)

    def batches(self, sizes: Sequence[int], *, prompt_tokens: int, new_tokens: int) -> None:
        """Run a window of so many equal requests at once for each size, per arm and sample, and measure the curve.

        Raises InstrumentError for fewer than three sizes.
        """
        if len(set(sizes)) < 3:
            raise InstrumentError(f"a curve needs three sizes at least, not {list(sizes)}")
        declared = list(self._declared("batches"))
        loads = [together(size, prompt_tokens=prompt_tokens, new_tokens=new_tokens) for size in sizes]
        self._run(loads, serves=True)
        for each in declared:
            self.measurements += [summarise_batches(each, arm, self._windows_of(arm)) for arm in self._plan.arms]

    def reuse(self, prefix_tokens: int | Sequence[int], suffix_tokens: int, new_tokens: int = 1) -> None:
        """Run one request per arm and sample, in the state of the prefix cache that the arm's option "state" names.

        As `stream`; `scenes.py` has the states. Of several lengths of the prefix each sample runs one request per
        length, in random order. Before anything is timed, what is found in the cache of a primed arm is proven to give
        the logits of a prefill without one. Before each run everything is forgotten and what the state asks for is
        served, untimed; the run has to find exactly that. Raises WrongOutputError otherwise, and InstrumentError for a
        metric of one length where there are several, or of states that no arm is in, or two.
        """
        lengths = [prefix_tokens] if isinstance(prefix_tokens, int) else list(prefix_tokens)
        states = states_of(self._plan)
        acts = scenes.reusing(
            self._prompts, states, self._reusable, prefix_tokens=lengths, suffix_tokens=suffix_tokens,
            new_tokens=new_tokens,
        )  # fmt: skip
        self._run_states("reuse", states, acts, [(length, suffix_tokens) for length in lengths])

    def sharing(self, sizes: Sequence[int], prefix_tokens: int, suffix_tokens: int) -> None:
        """Run a window of so many requests at once that share a prefix, for each size, per arm and sample.

        Every request has a suffix of its own, and answers with one token. As `reuse` in everything else.
        """
        states = states_of(self._plan)
        acts = scenes.sharing(
            self._prompts, states, self._reusable, sizes=sizes, prefix_tokens=prefix_tokens,
            suffix_tokens=suffix_tokens,
        )  # fmt: skip
        self._run_states("sharing", states, acts, [(prefix_tokens, suffix_tokens)])

    def converse(self, num_turns: int, turn_tokens: int, answer_tokens: int) -> None:
        """Run a conversation per arm and sample, turn after turn, and measure its turns like a window's requests.

        Each turn's prompt is all ids so far, answers included, and `turn_tokens` new ones. Everything is forgotten
        before the first turn, which has to find nothing; each later one has to find all that the one before has stored,
        in an arm that stores. Raises WrongOutputError otherwise.
        """
        declared = list(self._declared("converse"))
        self._loop.run(scenes.conversing(self._prompts, self._reusable, num_turns, turn_tokens, answer_tokens))
        self._summarise_windows(declared)

    def revisit(self, order: Sequence[int], prefix_tokens: int, suffix_tokens: int) -> None:
        """Run requests one after another per arm and sample, and measure them like a window's.

        Request i has prefix number `order[i]` and a suffix of its own, and answers with one token. Everything is
        forgotten before the first; what each finds has to be what the subject predicts. Raises WrongOutputError
        otherwise.
        """
        declared = list(self._declared("revisit"))
        self._loop.run(scenes.revisiting(self._prompts, self._predict, order, prefix_tokens, suffix_tokens))
        self._summarise_windows(declared)

    def compare(self, *, slow: str, fast: str) -> None:
        """Measure what the test declares of how much better one arm is than another, pair by pair."""
        self._pair(slow, fast, f"{fast} over {slow}", "higher")

    def price(self, *, of: str, against: str) -> None:
        """Measure what the test declares of how much dearer one arm is than another, pair by pair."""
        self._pair(of, against, f"{of} against {against}", "lower")

    def _pair(self, slow: str, fast: str, label: str, better: str) -> None:
        declared = [each for each in map(metric, self._plan.quantities) if each.compares_two and each.better == better]
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

    def _run(self, loads: Sequence[Load], *, serves: bool = False, same_tokens: bool = True) -> None:
        self._loop.run(scenes.arriving(self._prompts, loads, serves=serves), same_tokens=same_tokens)

    def _run_states(self, way: str, states: Mapping[str, str], acts: list[Act], sizes: list[tuple[int, int]]) -> None:
        """Metrics of single arms are of one length: a case of reuse has only that."""
        declared = list(self._declared(way))
        refuse(declared, states, len(acts))
        self._loop.run(acts, proofs=proofs(states, self._plan, self._prompts, sizes))
        self._summarise_windows([each for each in declared if not each.is_of_states])
        told = tell(declared, states, self._loop.samples)
        self.measurements += told.measurements
        self.flags += told.flags
        if told.why:
            self.details["why"] = told.why

    def _summarise_windows(self, declared: Sequence[Metric], limits: Limits | None = None) -> None:
        for each in declared:
            for arm in self.arms:
                self.measurements.append(summarise_windows(each, arm, self._first_windows(arm), limits))

    def _reusable(self, arm: str) -> Reusable:
        return functools.partial(self._subject.num_reusable, **self.arms[arm])

    def _predict(self, arm: str, prompts: Sequence[Prompt]) -> Sequence[int]:
        return self._subject.predict_hits(prompts, **self.arms[arm])

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
        """Whether requests ran beside others, or used what others stored: no run alone tells what its steps cost."""
        windows = [window for arm in self.arms for window in self._flat(arm)] if self._loop.samples else []
        return any(len(window) > 1 or any(run.num_cached for run in window) for window in windows)

    def close(self) -> None:
        """Tell what was paid once apart from the rest.

        Raises UndeclaredMetricError when the test measured less than it declared: a missing number is not good.
        """
        if self._loop.samples:
            flags, details = self._tell({arm: self._flat(arm) for arm in self.arms})
            self.flags += flags
            self.details.update(details)
        check_kept(self._plan.quantities, self.measurements, self.flags)
        self._tell_one_time()

    def _tell_one_time(self) -> None:
        first_s, paid = self._loop.first_run_s, self._account.in_warm_up()
        if first_s:
            excess = {arm: first_s[arm] - statistics.median(self._loop.durations_s(arm)) for arm in first_s}
            self.details.setdefault("warm_up", {})["first_run_excess_s"] = excess
        if paid:
            self.details.setdefault("warm_up", {}).update(paid.as_dict())
        for arm, inside in self._account.in_samples.items():
            self.details.setdefault("one_time_in_samples", {})[arm] = inside.as_dict()
            self.flags.append(Flag(kind="one-time", arm=arm, what=f"{inside} inside timed samples"))

    @property
    def running(self) -> str:
        """The arm whose run began last, "" before the first."""
        return self._loop.running

    def primary_durations_s(self) -> list[float]:
        """The duration of each sample of the first arm: what pytest-benchmark's own table shows."""
        return self._loop.durations_s(next(iter(self._plan.arms)))

    def _declared(self, way: str) -> Iterator[Metric]:
        """The declared metrics that `measure.<way>` gives. Raises InstrumentError for one that it does not give."""
        if self._plan.states and way not in WAYS_OF_STATES:
            arms, ways = ", ".join(self._plan.states), " and ".join(f"`measure.{each}`" for each in WAYS_OF_STATES)
            raise InstrumentError(f"the option 'state' of {arms} means nothing to `measure.{way}`, only to {ways}")
        for each in map(metric, self._plan.quantities):
            if way in each.ways:
                yield each
            elif not each.compares_two:
                raise InstrumentError(f"{each.name} does not come about by `measure.{way}`: {each.formula}")

    def _flat(self, arm: str) -> list[Window]:
        return [window for windows in self._windows_of(arm) for window in windows]

    def _first_windows(self, arm: str) -> list[Window]:
        """For each sample the window of an arm, where there is one load."""
        return [windows[0] for windows in self._windows_of(arm)]

    def _windows_of(self, arm: str) -> list[tuple[Window, ...]]:
        """For each sample the windows of an arm, one for each load."""
        if arm not in self._plan.arms or not self._loop.samples:
            known = ", ".join(self._plan.arms) if self._loop.samples else "nothing yet"
            raise InstrumentError(f"no arm {arm!r} was streamed, only: {known}")
        return [sample[arm] for sample in self._loop.samples]
