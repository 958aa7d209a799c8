"""Matrices that share their input, multiplied as one: where a launch is dear, one wide product is cheaper than three.

Knows which matrices of a layer belong together, by the names of Hugging Face's checkpoints, and lays the weights of
each group side by side, once; the matrices themselves become views, so that no weight is there twice. Knows that a
product can begin with what it is added to. Refuses to know devices: whoever loads a model says where this pays.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanoserve.ops import TorchOps

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Matrices of one module that get the same input."""


class _Whole(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None
    sizes: list[int]


class FusedOps(TorchOps):
    """See `Ops`. What `join` has laid side by side is one product; the results are views of it."""

    def __init__(self) -> None:
        self._wholes: dict[tuple[nn.Linear, ...], _Whole] = {}

    def join(self, matrices: Sequence[nn.Linear]) -> None:
        """Give these matrices one storage, in this order; their values stay. Either all have a bias, or none has."""
        sizes = [matrix.out_features for matrix in matrices]
        weight = torch.cat([matrix.weight for matrix in matrices])
        bias = None if matrices[0].bias is None else torch.cat([matrix.bias for matrix in matrices])
        self._wholes[tuple(matrices)] = _Whole(weight, bias, sizes)
        for name, whole in (("weight", weight), ("bias", bias)):
            for matrix, part in zip(matrices, () if whole is None else torch.split(whole, sizes), strict=False):
                setattr(matrix, name, nn.Parameter(part, requires_grad=False))

    def project(self, inputs: torch.Tensor, matrices: Sequence[nn.Linear]) -> Sequence[torch.Tensor]:
        whole = self._wholes.get(tuple(matrices))
        if whole is None:
            return super().project(inputs, matrices)
        return torch.split(F.linear(inputs, whole.weight, whole.bias), whole.sizes, dim=-1)

    def add_projection(self, residual: torch.Tensor, inputs: torch.Tensor, matrix: nn.Linear) -> torch.Tensor:
        """The product is added where the residual lies: its sums begin with it."""
        if matrix.bias is not None:
            return super().add_projection(residual, inputs, matrix)
        return residual.addmm_(inputs, matrix.weight.t())


def fuse(model: nn.Module) -> FusedOps:
    """Join every group of a loaded model, and let its modules use the result. Needs room for one group meanwhile."""
    ops = FusedOps()
    for module in model.modules():
        for names in GROUPS:
            group = [getattr(module, name, None) for name in names]
            if _can_join(matrices := [each for each in group if isinstance(each, nn.Linear)], len(names)):
                ops.join(matrices)
        if hasattr(module, "ops"):
            module.ops = ops  # type: ignore[assignment]  # a plain attribute, which nn.Module does not declare
    return ops


def _can_join(matrices: Sequence[nn.Linear], num_wanted: int) -> bool:
    return len(matrices) == num_wanted and len({matrix.bias is None for matrix in matrices}) == 1
