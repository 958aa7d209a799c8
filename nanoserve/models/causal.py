"""What the engine asks of a model. `llama.py` states the shapes."""

from typing import Protocol

import torch

from nanoserve.cache.kv import KVStep


class CausalModel(Protocol):
    """Hidden states of all positions of a step, and logits of those that are asked for."""

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVStep) -> torch.Tensor: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
