"""What the files that know pytest leave for each other on a test. Knows keys, and refuses to know who uses them."""

from typing import NamedTuple

import pytest

from benchmarks.harness.results import BenchmarkResult


class Published(NamedTuple):
    """A finished case, and the durations that pytest-benchmark's own table shows of it."""

    result: BenchmarkResult
    durations_s: tuple[float, ...]


PUBLISHED = pytest.StashKey[Published]()
"""On an item that was measured."""

RESUMED = pytest.StashKey[Published]()
"""On an item that an earlier session has measured, so that its body does nothing in this one."""
