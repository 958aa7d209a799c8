"""Hands finished samples to pytest-benchmark, so that its table and JSON show our numbers and no second stopwatch runs.

pytest-benchmark lets a test bring its own timer. This one stands at 0 before each round and at the duration that our
clock measured after it, so that the difference of the two is that duration to the last bit.
"""

import itertools
from collections.abc import Sequence
from typing import Any

_elapsed_s = [0.0]


def replayed_seconds() -> float:
    """The timer that a benchmark test is marked with (`@pytest.mark.benchmark(timer=replayed_seconds)`)."""
    return _elapsed_s[0]


def replay(benchmark: Any, durations_s: Sequence[float]) -> None:
    """Let a `benchmark` fixture whose timer is `replayed_seconds` record one round per duration, in their order."""
    upcoming = itertools.cycle(durations_s)

    def rewind() -> None:
        _elapsed_s[0] = 0.0

    def advance() -> None:
        _elapsed_s[0] = next(upcoming)

    benchmark.pedantic(advance, setup=rewind, rounds=len(durations_s), iterations=1)
