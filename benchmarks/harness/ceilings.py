"""What this machine can do at most: bytes read and floating-point operations per second, measured beside the runs.

Knows two kernels that come near those limits: a product of a matrix with a vector, which reads every number once, and
one of two square matrices. Keeps the best of all looks: a shared host changes its speed, and a ceiling is what it gave
at its best. Refuses to know models.
"""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness.clock import EventTimer
from benchmarks.harness.gpu.driver import driver

_READ_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}
"""More than the last cache of nearly all processors; of a GPU's memory, at most a quarter of what is free."""

_SQUARE = {"cpu": 1024, "cuda": 8192}
_REPEATS = 3

Kernel = tuple[float, Callable[[], object]]
"""What a call does, in bytes or operations, and the call."""


class Ceilings:
    """The best that any look has seen; None before the first."""

    def __init__(self, device: str, dtype: Any, timer: EventTimer | None = None) -> None:
        """`dtype` is torch's: the ceiling of a product depends on it."""
        self._kind, self._device, self._dtype = device.partition(":")[0], device, dtype
        self._seconds = (timer or EventTimer(device)).seconds
        self.read_bytes_per_s: float | None = None
        self.flops_per_s: float | None = None

    def look(self) -> None:
        """Run each kernel a few times: a few tenths of a second, and memory for as long."""
        self.read_bytes_per_s = self._best(self.read_bytes_per_s, _reads(self))
        self.flops_per_s = self._best(self.flops_per_s, _products(self))

    def _best(self, before: float | None, kernels: Sequence[Kernel]) -> float:
        rates = [amount / self._seconds(call) for amount, call in kernels for _ in range(_REPEATS)]
        return max(rates if before is None else [*rates, before])

    def as_dict(self) -> dict[str, float | None]:
        """For the provenance."""
        return {"read_bytes_per_s": self.read_bytes_per_s, "flops_per_s": self.flops_per_s}


def _reads(of: Ceilings) -> list[Kernel]:
    """Reading with the kernel that decoding uses, and with a plain sum: whichever is faster here."""
    import torch
    import torch.nn.functional as F

    width = 2048
    free_bytes, wanted_bytes = driver().gpu(of._device).free_bytes(), _READ_BYTES[of._kind]
    num = (wanted_bytes if free_bytes is None else min(wanted_bytes, free_bytes // 4)) // (width * of._dtype.itemsize)
    matrix = torch.zeros(num, width, dtype=of._dtype, device=of._device)
    row = torch.zeros(1, width, dtype=of._dtype, device=of._device)
    return [(matrix.nbytes, lambda: F.linear(row, matrix)), (matrix.nbytes, matrix.sum)]


def _products(of: Ceilings) -> list[Kernel]:
    import torch

    size = _SQUARE[of._kind]
    left = torch.zeros(size, size, dtype=of._dtype, device=of._device)
    return [(2.0 * size**3, lambda: left @ left)]
