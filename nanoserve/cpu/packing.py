"""Matrices as the compiled kernels read them, and the memory in which they lie.

Knows the form that `tile.h` states. Refuses to know who packs them, and when.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import nn

PANEL = 32
"""Outputs that stand together."""


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """Matrices that read the same input, as one: `panels` as `kernels.cpp` reads them, `sizes` of their outputs.

    With `scales` [outputs] in float32, numbers are int8 and each stands for so much.
    """

    panels: torch.Tensor
    sizes: tuple[int, ...]
    num_inputs: int
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    matrices: tuple[nn.Module, ...] = ()

    def weights(self) -> Sequence[torch.Tensor]:
        """Each matrix [outputs, inputs] as it was, in bfloat16."""
        whole = self.panels.transpose(1, 2).reshape(-1, self.num_inputs)[: sum(self.sizes)]
        if self.scales is not None:
            whole = (whole * self.scales[:, None]).bfloat16()
        return torch.split(whole, list(self.sizes))


class Arena:
    """Memory in large pieces, handed out in order: matrices that are used one after the other lie so, too.

    Only what is written to becomes real memory.
    """

    _PIECE_BYTES = 1 << 28

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised, at the beginning of a cache line."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._left.numel() < num_bytes + 64:
            self._left = torch.empty(max(self._PIECE_BYTES, num_bytes + 64), dtype=torch.uint8)
        taken = self._left[-self._left.data_ptr() % 64 :]
        self._left = taken[num_bytes:]
        return taken[:num_bytes].view(dtype).view(shape)


def side_by_side(matrices: Sequence[nn.Linear | nn.Embedding]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Matrices that read the same input as one [outputs, inputs], and their biases."""
    weights: list[torch.Tensor] = [each.weight for each in matrices]
    biases: list[torch.Tensor] = [bias for each in matrices if (bias := getattr(each, "bias", None)) is not None]
    assert len(biases) in (0, len(matrices)), "some have a bias, others have none"
    whole = (torch.cat(weights) if len(weights) > 1 else weights[0]).detach().contiguous()
    return whole, torch.cat(biases) if biases else None
