"""What this machine can do at most: bytes read and floating-point operations per second, measured beside the runs.

Knows two kernels that come near those limits: a product of a matrix with a vector, which reads every number once, and
one of two square matrices. Keeps the best of all looks: a shared host changes its speed, and a ceiling is what it gave
at its best. Refuses to know models.
"""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness.clock import EventTimer

_READ_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
"""Several times the last cache of the largest processors."""

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
        self._kernels: tuple[Sequence[Kernel], Sequence[Kernel]] | None = None
        self.read_bytes_per_s: float | None = None
        self.flops_per_s: float | None = None

    def look(self) -> None:
        """Run each kernel a few times. Takes a few tenths of a second, and memory from the first look on."""
        reads, products = self._kernels = self._kernels or (_reads(self), _products(self))
        self.read_bytes_per_s = self._best(self.read_bytes_per_s, reads)
        self.flops_per_s = self._best(self.flops_per_s, products)

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
    num = _READ_BYTES[of._kind] // (width * torch.finfo(of._dtype).bits // 8)
    matrix = torch.zeros(num, width, dtype=of._dtype, device=of._device)
    row = torch.zeros(1, width, dtype=of._dtype, device=of._device)
    return [(matrix.nbytes, lambda: F.linear(row, matrix)), (matrix.nbytes, matrix.sum)]


def _products(of: Ceilings) -> list[Kernel]:
    import torch

    size = _SQUARE[of._kind]
    left = torch.zeros(size, size, dtype=of._dtype, device=of._device)
    return [(2.0 * size**3, lambda: left @ left)]
