"""The real clock: monotonic nanoseconds, read only when the device has nothing left to do.

Knows how each kind of device is waited for. A kernel launch returns before the kernel has run, so a clock that
does not wait measures the launch.
"""

import time
from collections.abc import Callable


class DeviceClock:
    """`time.perf_counter_ns` behind a barrier for one device (`cpu`, `cuda`, `cuda:N`)."""

    def __init__(self, device: str = "cpu") -> None:
        self._wait = _barrier(device)

    def now_ns(self) -> int:
        self._wait()
        return time.perf_counter_ns()


def _barrier(device: str) -> Callable[[], None]:
    if not device.startswith("cuda"):
        return lambda: None
    import torch

    return lambda: torch.cuda.synchronize(device)
