"""The points of the two sweeps of the cache study among some results. Knows the names of three tests."""

from collections.abc import Sequence
from typing import Literal

from benchmarks.harness.results import BenchmarkResult

Sweep = Literal["generation", "prompt"]
GENERATION: Sweep = "generation"
PROMPT: Sweep = "prompt"

_TESTS = {
    GENERATION: (("::test_generation_length", "::test_long_answer"), "new_tokens"),
    PROMPT: (("::test_prompt_length",), "prompt_tokens"),
}


def points_of(results: Sequence[BenchmarkResult], sweep: Sweep) -> list[tuple[int, BenchmarkResult]]:
    """Tokens and result of each case of a sweep that was measured, shortest first; one result for each length."""
    tests, axis = _TESTS[sweep]
    found = [(each.params[axis], each) for each in results if each.benchmark.endswith(tests) and not each.is_gap]
    return sorted(dict(reversed(found)).items())


def of_study(results: Sequence[BenchmarkResult]) -> list[BenchmarkResult]:
    """Whatever is of this study, and has values."""
    measured = [each for each in results if not each.is_gap]
    return [each for tests, _ in _TESTS.values() for each in measured if each.benchmark.endswith(tests)]
