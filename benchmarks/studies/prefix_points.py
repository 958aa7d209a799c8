"""What the prefix study asks of some results: the tests by name, their settings in order, their runs in turns.

Knows the names of tests, arms and parameters. Every function takes any results, and gives nothing where they hold none.
"""

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness.prefill_cost import Curve, curve_of
from benchmarks.harness.results import BenchmarkResult, Measurement
from benchmarks.harness.stats import Estimate, Interval
from benchmarks.harness.timing import RunTiming
from benchmarks.studies.claims import median_of, ratio_of

Results = Sequence[BenchmarkResult]

PREFILL_CURVE, REUSE, DERIVED = "test_prefill_curve", "test_reuse", "test_derived_against_direct"
CONVERSATION, BATCHED, SERVED, ZIPF = "test_conversation", "test_batched_sharing", "test_zipf_served", "test_zipf"

TESTS = (PREFILL_CURVE, REUSE, DERIVED, CONVERSATION, BATCHED, SERVED, ZIPF)

UNLIMITED = "unlimited"
"""The arm of a cache that holds everything."""


class Setting(NamedTuple):
    """Lengths in tokens; sorted by suffix and then by prefix."""

    suffix: int
    prefix: int

    @property
    def tokens(self) -> int:
        return self.prefix + self.suffix

    @property
    def share(self) -> float:
        """The prefix as a fraction of the prompt."""
        return self.prefix / self.tokens

    def __str__(self) -> str:
        return f"prefix {self.prefix} + suffix {self.suffix}"


class TurnFigures(NamedTuple):
    """A turn, counted from 1, over all conversations: off over carried, and what was saved up to its first token."""

    turn: int
    speedup: Estimate
    saved_so_far_s: Estimate


def of_test(results: Results, test: str) -> list[BenchmarkResult]:
    """The cases of a test that have values, each once, the first where there are several."""
    of = [result for result in results if result.benchmark.endswith(f"::{test}") and not result.is_gap]
    found = {result.case: result for result in reversed(of)}
    return [result for result in results if found.get(result.case) is result]


def of_study(results: Results) -> list[BenchmarkResult]:
    """Whatever is of this study."""
    return [result for test in TESTS for result in of_test(results, test)]


def by_setting(results: Results, test: str = REUSE) -> dict[Setting, BenchmarkResult]:
    """Cases with one prefix and one suffix, in order."""
    cases = of_test(results, test)
    found = {Setting(each.params["suffix_tokens"], each.params["prefix_tokens"]): each for each in cases}
    return dict(sorted(found.items()))


def by_parameter(results: Results, test: str, name: str) -> dict[Any, BenchmarkResult]:
    """Cases that differ in one parameter, in order."""
    return dict(sorted({each.params[name]: each for each in of_test(results, test)}.items()))


def measured(result: BenchmarkResult, name: str, arm: str | None = None) -> Measurement | None:
    """A metric of a result, of that arm, or of the only one; None where it was not measured, or is undefined."""
    found = (m for m in result.measurements if m.metric.name == name and arm in (None, m.arm))
    return next((m for m in found if m.value is not None), None)


def estimate(m: Measurement) -> Estimate:
    """What a measurement says, without its metric."""
    return Estimate(value=m.value, interval=Interval(m.low, m.high), num_samples=m.num_observations)


def lengths_of(results: Results) -> dict[int, list[float]]:
    """TTFT of every uncached prompt of the longest sweep, by its length, in the order of the samples."""
    found: dict[int, list[float]] = {}
    for result in list(by_parameter(results, PREFILL_CURVE, "longest").values())[-1:]:
        for run in result.runs.get("uncached", ()):
            if run.num_prompt_tokens and run.ttft_s:
                found.setdefault(run.num_prompt_tokens, []).append(run.ttft_s)
    return dict(sorted(found.items()))


def curve_in(results: Results) -> Curve | None:
    """The curve through that sweep; None below three lengths."""
    lengths_s = lengths_of(results)
    return curve_of(lengths_s) if len(lengths_s) > 2 else None


def windows_of(result: BenchmarkResult, arm: str) -> list[tuple[RunTiming, ...]]:
    """The conversations of an arm, each with its turns in order."""
    runs, num_turns = result.runs.get(arm, ()), result.params["num_turns"]
    return [tuple(runs[start : start + num_turns]) for start in range(0, len(runs), num_turns)]


def turns_of(result: BenchmarkResult) -> Iterator[TurnFigures]:
    """What each turn of a conversation gained."""
    off, carried = ([list(map(_ttft_s, window)) for window in windows_of(result, arm)] for arm in ("off", "carried"))
    saved = [list(itertools.accumulate(map(operator.sub, *pair))) for pair in zip(off, carried, strict=True)]
    for place in range(result.params["num_turns"] if saved else 0):
        slow, fast = [window[place] for window in off], [window[place] for window in carried]
        yield TurnFigures(place + 1, ratio_of(slow, fast), median_of([window[place] for window in saved]))


def _ttft_s(run: RunTiming) -> float:
    return run.ttft_s or 0.0


def longest_conversation(results: Results) -> BenchmarkResult | None:
    """The one with the most turns, and of these the one with the shortest answers."""
    cases = of_test(results, CONVERSATION)
    return max(cases, key=lambda case: (case.params["num_turns"], -case.params["answer_tokens"]), default=None)


def hit_rates(result: BenchmarkResult) -> Mapping[str, float]:
    """The mean hit rate of each arm of the simulation, over all seeds."""
    return {arm: told["mean"] for arm, told in result.details.get("hit_rate", {}).items()}
