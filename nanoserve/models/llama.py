"""The Llama family: Llama 3.x, SmolLM2, TinyLlama, Mistral without a sliding window.

Knows the layers and their order; parameters carry the names of Hugging Face's checkpoints. Refuses to know where
keys and values are stored, which rows the caller wants logits for, and how weights got here.

Reference: "LLaMA" (arXiv:2302.13971), "RoFormer" (arXiv:2104.09864), transformers' modeling_llama for the numerics.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from nanoserve.attention import attend
from nanoserve.cache.kv import KVStep
from nanoserve.config import ModelConfig, RopeScaling

Rope = tuple[torch.Tensor, torch.Tensor]


class Llama(nn.Module):
    """A decoder over a flat list of token ids, of one request or of many; nothing here has a batch dimension."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = None if config.tie_embeddings else _linear(config.hidden_size, config.vocab_size)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVStep) -> torch.Tensor:
        """Token ids [new] at positions [new] -> hidden states [new, hidden]; the cache is extended, not advanced."""
        hidden: torch.Tensor = self.model(token_ids, positions, cache)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] -> logits [rows, vocab]. A prefill asks for its last row only."""
        weight = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(hidden, weight)


class Decoder(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # Not nn.Embedding(...): its initial values would be thrown away, and drawing them imports a compiler.
        self.embed_tokens = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
            torch.empty(config.vocab_size, config.hidden_size)
        )
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVStep) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(token_ids)
        rope = rope_tables(self.config, positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rope, cache)
        return self.norm(hidden)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to its input."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: torch.Tensor, rope: Rope, cache: KVStep) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rope, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """Projections and rotary embedding around `attend`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.q_proj = _linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = _linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = _linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = _linear(config.num_heads * config.head_dim, config.hidden_size)

    def forward(self, hidden: torch.Tensor, rope: Rope, cache: KVStep) -> torch.Tensor:
        num_new = hidden.shape[0]
        queries = rotate(self.q_proj(hidden).view(num_new, -1, self.head_dim), rope)
        keys = rotate(self.k_proj(hidden).view(num_new, -1, self.head_dim), rope)
        values = self.v_proj(hidden).view(num_new, -1, self.head_dim)
        out = attend(queries, keys, values, layer=self.layer, cache=cache)
        return self.o_proj(out.reshape(num_new, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))  # type: ignore[no-any-return]


def _linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    return nn.Linear(num_inputs, num_outputs, bias=False)


def rope_tables(config: ModelConfig, positions: torch.Tensor, dtype: torch.dtype) -> Rope:
    """Cosines and sines [new, 1, head_dim], computed in float32 whatever the model's dtype."""
    frequencies = rope_frequencies(config, positions.device)
    angles = positions.to(torch.float32)[:, None, None] * torch.cat((frequencies, frequencies))
    return angles.cos().to(dtype), angles.sin().to(dtype)


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


def rotate(heads: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Turn the pairs (i, i + head_dim / 2) of each head [new, heads, head_dim] by its position's angles."""
    cos, sin = rope
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
