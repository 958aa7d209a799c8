"""The one way to GPUs: everything that the instrument asks of a driver, as an interface, and which driver that is.

Knows what can be asked. Refuses to know NVML and CUDA (`nvidia.py`): whatever is decided by a GPU's answers is tested
with a scripted driver, on a machine without one.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

from benchmarks.harness.gpu.readings import DeviceWork, GpuState, PeakMemory


class Gpu(Protocol):
    """One device. `device` is what torch runs on (`cuda:1`), `label` its name with its memory, as torch tells them."""

    @property
    def device(self) -> str: ...

    @property
    def label(self) -> str | None: ...

    def state(self, also_ours: Collection[int] = ()) -> GpuState:
        """Read everything now. Processes in `also_ours` are no strangers: the other arm of a comparison, for one."""

    def make_current(self) -> None:
        """From now on this is the device of whatever names none."""

    def wait(self) -> None:
        """Return when the device has finished what was sent to it."""

    def free_bytes(self) -> int | None:
        """Device memory that nobody holds; None where that is not known."""

    def held_bytes(self) -> int | None:
        """Memory in this process's tensors. Caches that libraries keep for later are emptied first, and not counted.

        None where tensors are not counted.
        """

    def reset_memory(self) -> None:
        """Give back what no tensor holds, and forget the high-water mark."""

    def peak_bytes(self) -> int | None:
        """The high-water mark: the most in this process's tensors since the mark was forgotten, by a reset or a count.

        None where tensors are not counted.
        """

    def peak_memory(self, call: Callable[[], object]) -> PeakMemory | None:
        """Run `call` once; its peak above the level it found, never an earlier high-water mark. None: not countable."""

    def busy_s(self, call: Callable[[], object]) -> float:
        """Run `call` once, to its end on the device, and return the seconds between two events around it."""

    def count_work(self, call: Callable[[], object]) -> DeviceWork:
        """Run `call` once under the profiler."""


class Driver(Protocol):
    """All GPUs that this process may see."""

    def gpus(self) -> Sequence[Gpu]:
        """As CUDA numbers them; none on a machine without one. Asking initialises nothing on a device."""

    def gpu(self, device: str) -> Gpu:
        """The one that torch calls `device` (`cuda`, `cuda:N`); for any other device one that knows nothing."""


_installed: list[Driver] = []


def driver() -> Driver:
    """The driver in use: NVIDIA's, unless another one was put in its place."""
    if not _installed:
        from benchmarks.harness.gpu.nvidia import NvidiaDriver

        _installed.append(NvidiaDriver())
    return _installed[-1]


@contextlib.contextmanager
def use_driver(other: Any) -> Iterator[None]:
    """Put another driver in the place of NVIDIA's for as long as the block runs: for tests."""
    _installed.append(other)
    try:
        yield
    finally:
        _installed.remove(other)


class NoGpu:
    """What stands in where nothing runs on a GPU: reads nothing, waits for nothing, still runs what it is given."""

    label: str | None = None

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def state(self, also_ours: Collection[int] = ()) -> GpuState:
        return GpuState()

    def make_current(self) -> None:
        """It always is."""

    def wait(self) -> None:
        """A CPU has finished when it returns."""

    def free_bytes(self) -> int | None:
        return None

    def held_bytes(self) -> int | None:
        return None

    def reset_memory(self) -> None:
        """Nothing is kept."""

    def peak_bytes(self) -> int | None:
        return None

    def peak_memory(self, call: Callable[[], object]) -> PeakMemory | None:
        call()
        return None

    def busy_s(self, call: Callable[[], object]) -> float:
        raise AssertionError(f"{self.device} has no events: its time is the host's")

    def count_work(self, call: Callable[[], object]) -> DeviceWork:
        raise AssertionError(f"{self.device} has no allocator and no launches")
