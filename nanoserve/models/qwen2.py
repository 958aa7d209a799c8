"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values.

Reference: "Qwen2 Technical Report" (arXiv:2407.10671), transformers' modeling_qwen2 for the numerics.
"""

from nanoserve.config import ModelConfig
from nanoserve.models.llama import Llama, SelfAttention
from nanoserve.ops import Ops


class Qwen2(Llama):
    """See `Llama`."""

    @staticmethod
    def attention(config: ModelConfig, layer: int, ops: Ops) -> SelfAttention:
        return SelfAttention(config, layer, ops, bias=True)
