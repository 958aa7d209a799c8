"""What the engine asks of a model, and what families share. `llama.py` states the shapes."""

from typing import Protocol

import torch
from torch import nn

from nanoserve.cache.kv import KVStep


class CausalModel(Protocol):
    """Hidden states of all positions of a step, and logits of those that are asked for."""

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVStep) -> torch.Tensor: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def empty_embedding(num_rows: int, width: int) -> nn.Embedding:
    """Not nn.Embedding(...): its initial values would be thrown away, and drawing them imports a compiler."""
    return nn.Embedding.from_pretrained(torch.empty(num_rows, width))  # type: ignore[no-any-return,no-untyped-call]
