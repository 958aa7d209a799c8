"""GPT-2: learned positions, LayerNorm with biases, one fused matrix for queries, keys and values.

Knows the layers and their order, and that checkpoints hold matrices as [inputs, outputs]: they are turned round when
they are loaded (`adopt`), so that a product is the same as in every other family. Refuses to know what `llama.py`
refuses to know.

Reference: "Language Models are Unsupervised Multitask Learners" (2019), transformers' modeling_gpt2 for the numerics.
"""

import torch
from torch import nn

from nanoserve.attention import attend
from nanoserve.cache.kv import KVStep
from nanoserve.config import ModelConfig
from nanoserve.models.causal import empty_embedding
from nanoserve.ops import TORCH, Ops

_TURNED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_MASKS = (".attn.bias", ".attn.masked_bias")  # what old checkpoints keep of the causal mask


class GPT2(nn.Module):
    """A decoder as `llama.Llama` is one."""

    def __init__(self, config: ModelConfig, ops: Ops = TORCH) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.transformer = Transformer(config, ops)
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVStep) -> torch.Tensor:
        """Token ids [new] at positions [new] -> hidden states [new, hidden]; the cache is extended, not advanced."""
        hidden: torch.Tensor = self.transformer(token_ids, positions, cache)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] -> logits [rows, vocab]. A prefill asks for its last row only."""
        return self.ops.logits(hidden, self.transformer.wte if self.lm_head is None else self.lm_head)

    @staticmethod
    def adopt(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `Llama.adopt`. OpenAI's own checkpoints leave the prefix `transformer.` out."""
        if name.endswith(_MASKS):
            return {}
        own_name = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        return {own_name: tensor.T if tensor.ndim == 2 and name.endswith(_TURNED) else tensor}


class Transformer(nn.Module):
    """Embeddings of tokens and positions, layers and the final norm."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.wte = empty_embedding(config.vocab_size, config.hidden_size)
        self.wpe = empty_embedding(config.max_context_tokens, config.hidden_size)
        self.h = nn.ModuleList(Block(config, layer, ops) for layer in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVStep) -> torch.Tensor:
        hidden = self.ops.add(self.ops.embed(token_ids, self.wte), self.ops.embed(positions, self.wpe))
        for block in self.h:
            hidden = block(hidden, cache)
        return self.ops.layer_norm(hidden, self.ln_f)


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to its input."""

    def __init__(self, config: ModelConfig, layer: int, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Attention(config, layer, ops)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config, ops)

    def forward(self, hidden: torch.Tensor, cache: KVStep) -> torch.Tensor:
        hidden = self.attn(hidden, self.ops.layer_norm(hidden, self.ln_1), cache)
        return self.mlp(hidden, self.ops.layer_norm(hidden, self.ln_2))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """One matrix for all heads' queries, keys and values, in this order, around `attend`."""

    def __init__(self, config: ModelConfig, layer: int, ops: Ops) -> None:
        super().__init__()
        self.layer = layer
        self.ops = ops
        self.head_dim = config.head_dim
        self.c_attn = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.c_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, residual: torch.Tensor, normed: torch.Tensor, cache: KVStep) -> torch.Tensor:
        num_new = normed.shape[0]
        (fused,) = self.ops.project(normed, (self.c_attn,))
        queries, keys, values = (each.view(num_new, -1, self.head_dim) for each in fused.chunk(3, dim=-1))
        out = attend(queries, keys, values, layer=self.layer, cache=cache, kernel=self.ops.attend, stack=self.ops.stack)
        return self.ops.add_projection(residual, out.reshape(num_new, -1), self.c_proj)


class MLP(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.c_fc = nn.Linear(config.hidden_size, config.intermediate_size)
        self.c_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, residual: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        (wide,) = self.ops.project(normed, (self.c_fc,))
        return self.ops.add_projection(residual, self.ops.gelu(wide), self.c_proj)
