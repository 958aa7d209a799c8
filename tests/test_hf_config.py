"""config.json in, ModelConfig out, and back; what is not computed is refused by name."""

import subprocess
import sys

import pytest

from nanoserve.catalog import SHAPES
from nanoserve.config import RopeScaling
from nanoserve.errors import ConfigError
from nanoserve.hf_config import parse_eos, parse_hf_config, to_hf_config

PLAIN = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALING = RopeScaling(factor=32, low_freq_factor=1, high_freq_factor=4, original_context_tokens=8192)


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_survives_the_way_there_and_back(name):
    assert parse_hf_config(to_hf_config(SHAPES[name])) == SHAPES[name]


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_reads_what_is_written(name):
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(**to_hf_config(SHAPES[name]))
    assert parse_hf_config(theirs.to_dict()) == SHAPES[name]


def test_rope_of_transformers_4_and_5_read_alike():
    old = parse_hf_config({**PLAIN, "rope_theta": 500000.0, "rope_scaling": LLAMA3})
    new = parse_hf_config({**PLAIN, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}})
    assert old == new
    assert (old.rope_theta, old.rope_scaling) == (500000.0, SCALING)


def test_absent_keys_take_the_defaults_of_transformers():
    absent = ("num_key_value_heads", "rms_norm_eps")
    config = parse_hf_config({key: value for key, value in PLAIN.items() if key not in absent})
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (4, 16, 1e-6)
    assert (config.rope_theta, config.rope_scaling, config.tie_embeddings, config.eos_token_ids) == (
        1e4,
        None,
        False,
        (),
    )


def test_head_dim_may_differ_from_the_quotient():
    assert parse_hf_config({**PLAIN, "head_dim": 32}).head_dim == 32
    assert parse_hf_config({**PLAIN, "head_dim": None}).head_dim == 16


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (0, (0,)), ([3, 1], (3, 1)), ([], ())])
def test_eos_is_a_number_a_list_or_null(value, ids):
    assert parse_eos(value) == ids
    assert parse_hf_config({**PLAIN, "eos_token_id": value}).eos_token_ids == ids


@pytest.mark.parametrize("value", ["</s>", [1, "2"], True, 1.5])
def test_any_other_eos_is_refused(value):
    with pytest.raises(ConfigError, match="eos_token_id"):
        parse_eos(value)


@pytest.mark.parametrize(
    ("window", "context"), [({}, 4096), ({"sliding_window": 100}, 100), ({"sliding_window": None}, 32768)]
)
def test_the_context_of_mistral_ends_with_its_window(window, context):
    """An absent window is one of 4096 to transformers."""
    long = {**PLAIN, "model_type": "mistral", "max_position_embeddings": 32768}
    assert parse_hf_config({**long, **window}).max_context_tokens == context
    assert parse_hf_config({**long, **window, "max_position_embeddings": 50}).max_context_tokens == 50


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_window_that_is_not_used_limits_nothing(family):
    """Qwen's checkpoints carry one, and say beside it that nobody looks at it."""
    config = {**PLAIN, "model_type": family, "sliding_window": 100, "use_sliding_window": False}
    assert parse_hf_config(config).max_context_tokens == 256


@pytest.mark.parametrize(
    ("family", "num_kv_heads", "head_dim"), [("mistral", 8, 4), ("qwen2", 32, 4), ("qwen3", 32, 128)]
)
def test_absent_keys_mean_something_else_in_each_family(family, num_kv_heads, head_dim):
    data = {**PLAIN, "model_type": family, "hidden_size": 128, "num_attention_heads": 32}
    config = parse_hf_config({key: value for key, value in data.items() if key != "num_key_value_heads"})
    assert (config.num_kv_heads, config.head_dim, config.family) == (num_kv_heads, head_dim, family)


def test_gpt2_has_keys_of_its_own():
    config = parse_hf_config(GPT2)
    assert (config.hidden_size, config.intermediate_size, config.num_layers, config.head_dim) == (64, 256, 2, 16)
    assert (config.num_heads, config.num_kv_heads, config.max_context_tokens) == (4, 4, 32)
    assert (config.norm_eps, config.tie_embeddings, config.family) == (1e-5, True, "gpt2")
    other = parse_hf_config({**GPT2, "n_inner": 96, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-6})
    assert (other.intermediate_size, other.tie_embeddings, other.norm_eps) == (96, False, 1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation_function": "gelu"}, "unknown activation_function 'gelu'; choose one of: gelu_new"),
        (
            {"scale_attn_weights": False},
            "scale_attn_weights False is not supported; choose a checkpoint where it is true",
        ),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn True"),
        ({"add_cross_attention": True}, "add_cross_attention True"),
        ({"n_embd": 62}, "num_heads x head_dim is its hidden_size: not 4 heads of 15"),
    ],
)
def test_what_is_not_computed_of_gpt2_is_refused_in_one_line(change, words):
    with pytest.raises(ConfigError) as caught:
        parse_hf_config({**GPT2, **change})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma"}, "unknown model_type 'gemma'; choose one of: llama, mistral, qwen2, qwen3, gpt2"),
        ({"model_type": None}, "unknown model_type None"),
        ({"hidden_act": "gelu"}, "unknown hidden_act 'gelu'; choose one of: silu"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window True"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "unknown layer type 'sliding_attention'; choose"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "unknown rope_type 'linear'; choose one of: default, llama3",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "unknown rope_type 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is missing"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1}}, "low < high"),
        ({"rope_scaling": "linear"}, "must be a table"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number of at least 1, not '64'"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0, not nan"),
        ({"rope_theta": 0}, "rope_theta must be a number above 0, not 0"),
        ({"rope_theta": 10**400}, "rope_theta must be a number above 0"),
        ({"rope_scaling": {**LLAMA3, "factor": float("inf")}}, "factor must be a number above 0, not inf"),
        ({"layer_types": 2}, "unknown layer type 2; choose one of: full_attention"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, not 'false'"),
        ({"num_key_value_heads": 3}, "no multiple"),
    ],
)
def test_what_is_not_computed_is_refused_in_one_line(change, words):
    with pytest.raises(ConfigError) as caught:
        parse_hf_config({**PLAIN, **change})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"])
def test_a_missing_key_is_named(key):
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        parse_hf_config({name: value for name, value in PLAIN.items() if name != key})


def test_the_light_modules_do_not_import_torch():
    code = "import sys, nanoserve.catalog, nanoserve.hf_config, nanoserve.tokenizer; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
