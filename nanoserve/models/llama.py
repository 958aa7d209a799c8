"""The Llama family: Llama 3.x, SmolLM2, TinyLlama. Mistral and Qwen are this with one thing changed.

Knows the layers and their order; parameters carry the names of Hugging Face's checkpoints. Refuses to know where
keys and values are stored, which rows the caller wants logits for, how weights got here, and what computes an
operation (`ops.py`).

Reference: "LLaMA" (arXiv:2302.13971), "RoFormer" (arXiv:2104.09864), transformers' modeling_llama for the numerics.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import nn

from nanoserve.attention import attend
from nanoserve.cache.kv import KVStep
from nanoserve.config import ModelConfig, RopeScaling
from nanoserve.models.causal import empty_embedding
from nanoserve.ops import TORCH, Ops, Rope

MakeAttention = Callable[[ModelConfig, int, Ops], "SelfAttention"]


class Llama(nn.Module):
    """A decoder over a flat list of token ids, of one request or of many; nothing here has a batch dimension."""

    def __init__(self, config: ModelConfig, ops: Ops = TORCH) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.model = Decoder(config, ops, self.attention)
        self.lm_head = None if config.tie_embeddings else _linear(config.hidden_size, config.vocab_size)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVStep) -> torch.Tensor:
        """Token ids [new] at positions [new] -> hidden states [new, hidden]; the cache is extended, not advanced."""
        hidden: torch.Tensor = self.model(token_ids, positions, cache)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] -> logits [rows, vocab]. A prefill asks for its last row only."""
        return self.ops.logits(hidden, self.model.embed_tokens if self.lm_head is None else self.lm_head)

    @staticmethod
    def adopt(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters that a Hugging Face checkpoint's tensor becomes; none for what is computed here.

        Called before there is a model. Values may be views of the tensor.
        """
        return {} if name.endswith("rotary_emb.inv_freq") else {name: tensor}

    @staticmethod
    def attention(config: ModelConfig, layer: int, ops: Ops) -> "SelfAttention":
        """The self-attention of one layer: what the families that follow Llama change."""
        return SelfAttention(config, layer, ops)


class Decoder(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, config: ModelConfig, ops: Ops, attention: MakeAttention) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.embed_tokens = empty_embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, attention(config, layer, ops), ops) for layer in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVStep) -> torch.Tensor:
        hidden = self.ops.embed(token_ids, self.embed_tokens)
        rope = self.ops.rope(rope_frequencies(self.config, positions.device), positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rope, cache)
        return self.ops.norm(hidden, self.norm)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to its input."""

    def __init__(self, config: ModelConfig, attention: "SelfAttention", ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config, ops)

    def forward(self, hidden: torch.Tensor, rope: Rope, cache: KVStep) -> torch.Tensor:
        hidden = self.self_attn(hidden, self.ops.norm(hidden, self.input_layernorm), rope, cache)
        return self.mlp(hidden, self.ops.norm(hidden, self.post_attention_layernorm))  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """Projections and rotary embedding around `attend`; with `bias`, of queries, keys and values."""

    def __init__(self, config: ModelConfig, layer: int, ops: Ops = TORCH, *, bias: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.ops = ops
        self.head_dim = config.head_dim
        self.q_proj = _linear(config.hidden_size, config.num_heads * config.head_dim, bias)
        self.k_proj = _linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias)
        self.v_proj = _linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias)
        self.o_proj = _linear(config.num_heads * config.head_dim, config.hidden_size)

    def forward(self, residual: torch.Tensor, normed: torch.Tensor, rope: Rope, cache: KVStep) -> torch.Tensor:
        num_new = normed.shape[0]
        projected = self.ops.project(normed, (self.q_proj, self.k_proj, self.v_proj))
        queries, keys, values = (each.view(num_new, -1, self.head_dim) for each in projected)
        queries, keys = self.place(queries, keys, rope)
        out = attend(queries, keys, values, layer=self.layer, cache=cache, kernel=self.ops.attend, stack=self.ops.stack)
        return self.ops.add_projection(residual, out.reshape(num_new, -1), self.o_proj)

    def place(self, queries: torch.Tensor, keys: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Heads [new, heads, head_dim] with their positions in them."""
        return self.ops.rotate(queries, rope), self.ops.rotate(keys, rope)


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, ops: Ops = TORCH) -> None:
        super().__init__()
        self.ops = ops
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, residual: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        gated = self.ops.gate(*self.ops.project(normed, (self.gate_proj, self.up_proj)))
        return self.ops.add_projection(residual, gated, self.down_proj)


def _linear(num_inputs: int, num_outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(num_inputs, num_outputs, bias=bias)


@functools.cache
def rope_frequencies(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """Radians per position [head_dim / 2] of each rotated pair, fastest first, scaled if the model says so."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = config.rope_theta ** (-pairs / config.head_dim)
    return frequencies if config.rope_scaling is None else _scale(frequencies, config.rope_scaling)


def _scale(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Keep fast frequencies, divide slow ones by `factor`, blend in between, by turns per original context."""
    turns = scaling.original_context_tokens * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = blend.clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)
