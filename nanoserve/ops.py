"""The operations that a model is written in, and how plain torch computes them.

Knows one position's mathematics: products, norms, rotations, gates, reads of the cache. Refuses to know which model
asks. Whoever computes them faster (`cpu/`) keeps this contract, and is held against `TorchOps`: what it gives is the
definition, on every device and in every dtype.
"""

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from nanoserve.attention import attend_some
from nanoserve.cache.kv import InBlocks, Stored, copy_lines

Rope = tuple[torch.Tensor, torch.Tensor]


class Ops(Protocol):
    """Activations are [rows, width], a row for each position of a step; results may be overwritten by the next step."""

    def embed(self, token_ids: torch.Tensor, embedding: nn.Embedding) -> torch.Tensor:
        """Token ids, or positions where those are learned, [rows] -> hidden states [rows, hidden]."""
        ...

    def add(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Left + right. The left may be overwritten."""
        ...

    def norm(self, inputs: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
        """Root mean square norm (arXiv:1910.07467) over the last dimension."""
        ...

    def layer_norm(self, inputs: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
        """Mean and variance norm with weight and bias (arXiv:1607.06450) over the last dimension."""
        ...

    def project(self, inputs: torch.Tensor, matrices: Sequence[nn.Linear]) -> Sequence[torch.Tensor]:
        """One input through several matrices; the results may be views of one tensor."""
        ...

    def add_projection(self, residual: torch.Tensor, inputs: torch.Tensor, matrix: nn.Linear) -> torch.Tensor:
        """Residual + matrix(inputs). The residual may be overwritten."""
        ...

    def rope(self, frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Rope:
        """What `rotate` needs for these positions, from radians per position [head_dim / 2]."""
        ...

    def rotate(self, heads: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Turn the pairs (i, i + head_dim / 2) of each head [rows, heads, head_dim] by its position's angles.

        The heads may be overwritten.
        """
        ...

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """SiLU(gate) * up: SwiGLU (arXiv:2002.05202)."""
        ...

    def gelu(self, inputs: torch.Tensor) -> torch.Tensor:
        """GELU by its tanh formula (arXiv:1606.08415), which GPT-2 was trained with."""
        ...

    def store(self, lines: torch.Tensor, places: torch.Tensor, new: torch.Tensor) -> None:
        """Write new [rows, kv_heads, head_dim] to lines [lines, head_dim], at places [rows x kv_heads]."""
        ...

    def attend(self, queries: torch.Tensor, stored: Stored | InBlocks) -> torch.Tensor:
        """Queries [rows, heads, head_dim] over what is stored -> as many."""
        ...

    def stack(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """What `attend` gave for one part of the rows after the other."""
        ...

    def logits(self, hidden: torch.Tensor, head: nn.Linear | nn.Embedding) -> torch.Tensor:
        """Hidden states [rows, hidden] -> logits [rows, vocab]."""
        ...

    def together(self) -> contextlib.AbstractContextManager[None]:
        """What is asked for inside may be computed when it ends, as one: results hold nothing before.

        Only these operations, and views of what they return, may stand inside; a cache's own writes are none of them
        but in a pool.
        """
        ...

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """A model's weights as a checkpoint has them, by name; copies where they are kept in another form."""
        ...


class TorchOps:
    """See `Ops`: the formulas, in the dtype of their inputs, and angles in float32."""

    def embed(self, token_ids: torch.Tensor, embedding: nn.Embedding) -> torch.Tensor:
        return F.embedding(token_ids, embedding.weight)

    def add(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left + right

    def norm(self, inputs: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
        return F.rms_norm(inputs, norm.normalized_shape, norm.weight, norm.eps)

    def layer_norm(self, inputs: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
        return F.layer_norm(inputs, norm.normalized_shape, norm.weight, norm.bias, norm.eps)

    def project(self, inputs: torch.Tensor, matrices: Sequence[nn.Linear]) -> Sequence[torch.Tensor]:
        return [F.linear(inputs, matrix.weight, matrix.bias) for matrix in matrices]

    def add_projection(self, residual: torch.Tensor, inputs: torch.Tensor, matrix: nn.Linear) -> torch.Tensor:
        return residual + F.linear(inputs, matrix.weight, matrix.bias)

    def rope(self, frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Rope:
        angles = positions.to(torch.float32)[:, None, None] * torch.cat((frequencies, frequencies))
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(self, heads: torch.Tensor, rope: Rope) -> torch.Tensor:
        cos, sin = rope
        first, second = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((-second, first), dim=-1) * sin

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate).mul_(up)

    def gelu(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.gelu(inputs, approximate="tanh")

    def store(self, lines: torch.Tensor, places: torch.Tensor, new: torch.Tensor) -> None:
        copy_lines(lines, places, new)

    def attend(self, queries: torch.Tensor, stored: Stored | InBlocks) -> torch.Tensor:
        return attend_some(queries, stored)

    def stack(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts)

    def logits(self, hidden: torch.Tensor, head: nn.Linear | nn.Embedding) -> torch.Tensor:
        return F.linear(hidden, head.weight)

    def together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return model.state_dict()


TORCH = TorchOps()
