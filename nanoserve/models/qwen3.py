"""Qwen3: Llama with a norm on each head of queries and keys, and heads as wide as its config.json says.

Reference: "Qwen3 Technical Report" (arXiv:2505.09388), transformers' modeling_qwen3 for the numerics.
"""

import torch
from torch import nn

from nanoserve.config import ModelConfig
from nanoserve.models.llama import Llama, SelfAttention
from nanoserve.ops import TORCH, Ops, Rope


class Qwen3(Llama):
    """See `Llama`."""

    @staticmethod
    def attention(config: ModelConfig, layer: int, ops: Ops) -> SelfAttention:
        return NormedAttention(config, layer, ops)


class NormedAttention(SelfAttention):
    """A head is normed before it is rotated; all heads of a layer share the norm's weight."""

    def __init__(self, config: ModelConfig, layer: int, ops: Ops = TORCH) -> None:
        super().__init__(config, layer, ops)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def place(self, queries: torch.Tensor, keys: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        return super().place(self.ops.norm(queries, self.q_norm), self.ops.norm(keys, self.k_norm), rope)
