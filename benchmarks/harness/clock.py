"""The real clocks: monotonic nanoseconds read when the device has nothing left to do, and the device's own events.

A kernel launch returns before the kernel has run, so a clock that does not wait measures the launch. Refuses to know
how a device is waited for (`gpu/`).
"""

import itertools
import time
from collections.abc import Callable

from benchmarks.harness.gpu.driver import driver
from benchmarks.harness.timing import Clock, measure_call

_MAX_READS = 100_000


class DeviceClock:
    """`time.perf_counter_ns` behind a barrier for one device (`cpu`, `cuda`, `cuda:N`)."""

    def __init__(self, device: str = "cpu") -> None:
        self._wait = driver().gpu(device).wait

    def now_ns(self) -> int:
        self._wait()
        return time.perf_counter_ns()


class EventTimer:
    """Seconds that a call keeps one device busy (`cpu`, `cuda`, `cuda:N`).

    On CUDA between two events on the current stream: what was queued earlier is not counted, nor work that the call
    puts on other streams. Host work counts wherever the device has nothing else to do meanwhile.
    On a CPU between two stamps of DeviceClock.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._seconds = driver().gpu(device).busy_s if _is_cuda(device) else _host_seconds(device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Run the call once, to its end on the device."""
        return self._seconds(call)


def timer_resolution_ns(clock: Clock, max_reads: int = _MAX_READS) -> int | None:
    """The smallest step between two consecutive reads that differ: no shorter time can be told from none.

    Includes the cost of a read, whichever is larger. None for a clock that does not move within `max_reads` reads.
    """
    reads = [clock.now_ns() for _ in range(max_reads)]
    steps = [after - before for before, after in itertools.pairwise(reads) if after > before]
    return min(steps, default=None)


def _is_cuda(device: str) -> bool:
    return device.startswith("cuda")


def _host_seconds(device: str) -> Callable[[Callable[[], object]], float]:
    clock = DeviceClock(device)
    return lambda call: measure_call(call, clock)
