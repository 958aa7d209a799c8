"""Writes a Hugging Face folder of the Llama family as a GGUF file, as llama.cpp's own converter does: BF16 matrices.

Knows both names of a tensor, the order of rows that llama.cpp's rotary embedding wants, and its way to store scaled
frequencies. There is no vocabulary in the file: whoever reads it is given token ids.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import PeerError

_FAMILIES = ("llama", "mistral")
_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, path: Path) -> None:
    """Write `path` as a whole or not at all. Raises PeerError for a model that is no Llama."""
    import gguf

    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config["model_type"] not in _FAMILIES:
        raise PeerError(f"no GGUF file is written of a {config['model_type']}; only of: {', '.join(_FAMILIES)}")
    spare = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(spare, "llama")
    _add_shape(writer, config)
    _add_tensors(writer, config, folder / "model.safetensors")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    spare.replace(path)


def _add_shape(writer: Any, config: Mapping[str, Any]) -> None:
    import gguf

    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _add_tensors(writer: Any, config: Mapping[str, Any], file: Path) -> None:
    import gguf
    import numpy as np
    import torch
    from safetensors import safe_open

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    if config.get("rope_scaling"):
        writer.add_tensor("rope_freqs.weight", np.array(frequency_divisors(config), dtype=np.float32))
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118, the library's handle is no mapping
            tensor = tensors.get_tensor(name)
            num_heads = next((heads[part] for part in name.split(".") if part in heads), 0)
            rows = rotary_rows(tensor, num_heads) if num_heads else tensor
            if tensor.ndim == 1:  # norms, which llama.cpp keeps in float32
                writer.add_tensor(gguf_name(name), rows.float().numpy())
            else:
                raw = rows.contiguous().view(torch.uint8).numpy()
                writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    if layer is None:
        raise KeyError(f"{name} is no tensor of a Llama")
    return f"blk.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{kind}"


def rotary_rows(weight: Any, num_heads: int) -> Any:
    """Rows of a projection to heads, paired (2i, 2i + 1) as llama.cpp rotates them, not (i, i + half)."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def frequency_divisors(config: Mapping[str, Any]) -> list[float]:
    """By how much llama3's scaling divides each rotary frequency: 1 for fast ones, `factor` for slow ones."""
    scaling, dim = config["rope_scaling"], config["head_dim"]
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    found = []
    for pair in range(0, dim, 2):
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi * config["rope_theta"] ** (pair / dim))
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1 / (keep + (1 - keep) / factor))
    return found
