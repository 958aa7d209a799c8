"""A step's numbers on their way to the device, and what came of it on its way back: one copy each.

Knows pinned memory, and that a copy out of it is waited for by nobody: the host goes on while the device still works.
Memory that is on its way is kept by torch until it has arrived. Refuses to know what the numbers mean.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch


class Ints:
    """Integers that a step needs on its device: put down one after another, and sent together."""

    def __init__(self) -> None:
        self._ints: list[int] = []

    def put(self, ints: Iterable[int]) -> slice:
        """Where these will be among those that `send` returns."""
        start = len(self._ints)
        self._ints += ints
        return slice(start, len(self._ints))

    def send(self, device: torch.device) -> torch.Tensor:
        """All of them on the device, int64."""
        return to_device(self._ints, torch.int64, device)


def to_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor, in one copy that the host does not wait for."""
    return on_host(numbers, dtype, device).to(device, non_blocking=True)


def on_host(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor in memory that the device can fetch by itself."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")


def to_host(results: torch.Tensor) -> list[Any]:
    """Wait for the device, once, and bring what came of a step. Nothing else in a step waits."""
    return results.tolist()
