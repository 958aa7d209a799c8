"""transformers' Llama on the very tensors of ours: the same numbers in the same memory, another engine around them.

Knows both libraries' names for one shape. Refuses to know how either is run (`huggingface.py`).
"""

from collections.abc import Mapping
from typing import Any


def llama_twin(model: Any, config: Mapping[str, Any]) -> Any:
    """A LlamaForCausalLM that shares the weights of nanoserve's `model`, copying none. `config` is a config.json."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    ours = model.state_dict()
    theirs = LlamaConfig(**config)
    with torch.device("meta"):
        twin = LlamaForCausalLM(theirs)
    if theirs.tie_word_embeddings:
        ours["lm_head.weight"] = ours["model.embed_tokens.weight"]
    twin.load_state_dict(ours, assign=True)
    rotary: Any = LlamaRotaryEmbedding(theirs)
    twin.model.rotary_emb = rotary.to(ours["model.embed_tokens.weight"].device)
    options: Any = GenerationConfig
    twin.generation_config = options(pad_token_id=0)
    made: Any = twin
    return made.eval().requires_grad_(False)
