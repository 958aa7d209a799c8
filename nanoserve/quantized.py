"""Matrices in 8 bits, a scale for each output, and how plain torch multiplies with them.

Knows rounding. Refuses to know which model, and how to be fast: a matrix is widened whenever it is used (`cpu/` widens
it in registers). What is rounded is what a model multiplies with or looks up: embeddings, projections and the head.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from nanoserve.ops import TorchOps


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [outputs, inputs] as int8 and a float32 scale [outputs]: the largest of each output becomes 127."""
    scales = weight.abs().amax(dim=1).float().clamp(min=1e-12) / 127
    return (weight / scales[:, None]).round_().to(torch.int8), scales


class Int8Ops(TorchOps):
    """See `Ops`. A matrix is rounded when it is first used; its parameter holds the int8 numbers from then on."""

    def __init__(self) -> None:
        self._scales: dict[nn.Module, torch.Tensor] = {}

    def embed(self, token_ids: torch.Tensor, embedding: nn.Embedding) -> torch.Tensor:
        scales = self._scales_of(embedding)[token_ids][:, None]
        return (F.embedding(token_ids, embedding.weight) * scales).to(self._dtype)

    def project(self, inputs: torch.Tensor, matrices: Sequence[nn.Linear]) -> Sequence[torch.Tensor]:
        return [self._product(inputs, matrix, matrix.bias) for matrix in matrices]

    def add_projection(self, residual: torch.Tensor, inputs: torch.Tensor, matrix: nn.Linear) -> torch.Tensor:
        return residual + self._product(inputs, matrix, matrix.bias)

    def logits(self, hidden: torch.Tensor, head: nn.Linear | nn.Embedding) -> torch.Tensor:
        return self._product(hidden, head, None)

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        names = {module: f"{name}.weight" for name, module in model.named_modules()}
        found = model.state_dict()
        rounded = {names[each]: found[names[each]] * scales[:, None] for each, scales in self._scales.items()}
        return found | {name: weight.to(self._dtype) for name, weight in rounded.items()}

    def _product(
        self, inputs: torch.Tensor, matrix: nn.Linear | nn.Embedding, bias: torch.Tensor | None
    ) -> torch.Tensor:
        scales = self._scales_of(matrix).to(inputs.dtype)
        product = F.linear(inputs, matrix.weight.to(inputs.dtype)) * scales
        return product if bias is None else product + bias

    def _scales_of(self, matrix: nn.Linear | nn.Embedding) -> torch.Tensor:
        if matrix not in self._scales:
            self._dtype = matrix.weight.dtype
            rounded, self._scales[matrix] = quantize(matrix.weight)
            matrix.weight = nn.Parameter(rounded, requires_grad=False)
        return self._scales[matrix]
