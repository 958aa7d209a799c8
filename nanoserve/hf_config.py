"""Translates between a Hugging Face `config.json` and `ModelConfig`, both ways.

Knows the keys of each family, in transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`), and which of
their values this engine computes. Refuses to know files, weights and torch; and refuses every value it would have to
ignore.
"""

import sys
from collections.abc import Mapping
from typing import Any

from nanoserve.config import FAMILIES, ModelConfig, RopeScaling
from nanoserve.errors import ConfigError, unknown

ROPE_TYPES = ("default", "llama3")
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}

# What an absent key means to transformers, where that is not what it means for a Llama.
_ABSENT: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "gpt2": {"tie_word_embeddings": True},
}

# The only values that are computed, which are also those of absent keys.
_COMPUTED_GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
_COMPUTED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
}

_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def parse_hf_config(data: Mapping[str, Any]) -> ModelConfig:
    """Read a parsed config.json; keys that may be absent take the defaults of transformers' class for the family.

    A sliding window ends the context: up to there it is full attention. Raises ConfigError, naming the value and the
    choices, for whatever this engine does not compute.
    """
    family = data.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(unknown("model_type", family, FAMILIES))
    data = {**_ABSENT.get(family, {}), **data}
    _refuse_foreign(data)
    return _parse_gpt2(data) if family == "gpt2" else _parse_rotary(family, data)


def _parse_gpt2(data: Mapping[str, Any]) -> ModelConfig:
    num_heads, hidden_size = _count(data, "n_head"), _count(data, "n_embd")
    return ModelConfig(
        family="gpt2",
        vocab_size=_count(data, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(data, "n_inner", 4 * hidden_size),
        num_layers=_count(data, "n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_context_tokens=_count(data, "n_positions"),
        norm_eps=_number(data, "layer_norm_epsilon", 1e-5),
        tie_embeddings=_flag(data, "tie_word_embeddings"),
        eos_token_ids=parse_eos(data.get("eos_token_id")),
    )


def _parse_rotary(family: str, data: Mapping[str, Any]) -> ModelConfig:
    num_heads = _count(data, "num_attention_heads")
    hidden_size = _count(data, "hidden_size")
    theta, scaling = _rope(data)
    context = _count(data, "max_position_embeddings")
    return ModelConfig(
        family=family,
        vocab_size=_count(data, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(data, "intermediate_size"),
        num_layers=_count(data, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_count(data, "num_key_value_heads", num_heads),
        head_dim=_count(data, "head_dim", hidden_size // num_heads),
        max_context_tokens=min(context, _count(data, "sliding_window", context)) if family == "mistral" else context,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(data, "rms_norm_eps", 1e-6),
        tie_embeddings=_flag(data, "tie_word_embeddings"),
        eos_token_ids=parse_eos(data.get("eos_token_id")),
    )


def parse_eos(value: object) -> tuple[int, ...]:
    """`eos_token_id` of a config.json or generation_config.json: a number, a list of them, or null for none."""
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise ConfigError(f"eos_token_id must be a number, a list of numbers or null, not {value!r}")
    return ids


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """A config.json that transformers 4 and 5 both load, with the keys of transformers 4."""
    eos = list(config.eos_token_ids)
    return {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        **(_write_gpt2(config) if config.family == "gpt2" else _write_rotary(config)),
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": config.hidden_size,
        "n_inner": config.intermediate_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_positions": config.max_context_tokens,
        "layer_norm_epsilon": config.norm_eps,
        **_COMPUTED_GPT2,
    }


def _write_rotary(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context_tokens,
        "rope_theta": config.rope_theta,
        "rope_scaling": _write_scaling(config.rope_scaling),
        "rms_norm_eps": config.norm_eps,
        "sliding_window": None,
        **_COMPUTED,
    }


def _refuse_foreign(data: Mapping[str, Any]) -> None:
    for name, wanted in (_COMPUTED_GPT2 if data["model_type"] == "gpt2" else _COMPUTED).items():
        if (data.get(name, wanted) or False) != wanted:
            raise ConfigError(_not_computed(name, data[name], wanted))
    kinds = data.get("layer_types") or []
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind != "full_attention":
            raise ConfigError(unknown("layer type", kind, ("full_attention",)))
    if data.get("quantization_config"):
        raise ConfigError("quantization_config is not supported; choose a float checkpoint or a GGUF file")


def _not_computed(name: str, value: object, wanted: object) -> str:
    if isinstance(wanted, str):
        return unknown(name, value, (wanted,))
    return f"{name} {value!r} is not supported; choose a checkpoint where it is {str(wanted).lower()}"


def _rope(data: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    values: Mapping[str, Any] = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"rope parameters must be a table, not {values!r}")
    theta = _number(values, "rope_theta", _number(data, "rope_theta", 10_000.0))
    partial = values.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise ConfigError(f"partial_rotary_factor {partial!r} is not supported; choose a checkpoint where it is 1")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(unknown("rope_type", kind, ROPE_TYPES))
    return theta, _read_scaling(values) if kind == "llama3" else None


def _read_scaling(values: Mapping[str, Any]) -> RopeScaling:
    factor, low, high = (_number(values, name) for name in _LLAMA3_KEYS[:3])
    if low >= high:
        raise ConfigError(f"llama3 rope scaling needs low < high, not {low}, {high}")
    original = _count(values, _LLAMA3_KEYS[3])
    return RopeScaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_context_tokens=original)


def _write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    numbers = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context_tokens)
    return {"rope_type": "llama3", **dict(zip(_LLAMA3_KEYS, numbers, strict=True))}


def _count(data: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = data.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{name} is missing from the model's configuration")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
    return value


def _number(data: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = data.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{name} is missing from the model's configuration")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{name} must be a number above 0, not {value!r}")
    return float(value)


def _flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name) or False
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r}")
    return value
