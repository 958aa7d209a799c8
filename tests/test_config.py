"""Settings are frozen, checked once when they are made, and refuse by name what cannot work."""

import dataclasses
import math

import pytest

from nanoserve.catalog import SHAPES
from nanoserve.config import CACHES, DTYPES, EngineConfig, ModelConfig, RopeScaling, SamplingParams
from nanoserve.errors import ConfigError, RequestError

TINY = dataclasses.asdict(SHAPES["tiny"])
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=8192)
COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")


@pytest.mark.parametrize(
    "config", [EngineConfig(), SamplingParams(), SHAPES["tiny"], SCALING], ids=lambda c: type(c).__name__
)
def test_settings_are_frozen_equal_by_value_and_made_by_name_only(config):
    name = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, getattr(config, name))
    assert dataclasses.replace(config) == config
    assert hash(dataclasses.replace(config)) == hash(config)
    with pytest.raises(TypeError):
        type(config)(getattr(config, name))


@pytest.mark.parametrize(("kind", "known"), [(EngineConfig, {}), (SamplingParams, {}), (ModelConfig, TINY)])
def test_an_unknown_option_is_refused_with_the_known_ones(kind, known):
    names = ", ".join(field.name for field in dataclasses.fields(kind))
    with pytest.raises(ConfigError) as caught:
        kind.from_options({**known, "temprature": 1})
    assert str(caught.value) == f"unknown {kind.__name__} option 'temprature'; choose one of: {names}"


def test_options_become_fields():
    assert EngineConfig.from_options({}) == EngineConfig()
    assert EngineConfig.from_options({"model": "tiny", "cache": "none"}) == EngineConfig(model="tiny", cache="none")


def test_a_changed_setting_is_checked_again():
    with pytest.raises(ConfigError, match="unknown dtype 'int3'"):
        dataclasses.replace(EngineConfig(), dtype="int3")
    with pytest.raises(RequestError, match="max_new_tokens"):
        dataclasses.replace(SamplingParams(), max_new_tokens=0)


@pytest.mark.parametrize(("name", "choices"), [("dtype", DTYPES), ("cache", CACHES)])
def test_engine_choices(name, choices):
    for choice in choices:
        assert getattr(EngineConfig(**{name: choice}), name) == choice
    for bad in ("float8", "", None, choices[0].upper()):
        with pytest.raises(ConfigError) as caught:
            EngineConfig(**{name: bad})
        assert str(caught.value) == f"unknown {name} {bad!r}; choose one of: {', '.join(choices)}"


@pytest.mark.parametrize("name", COUNTS)
def test_a_model_without_any_of_something_is_refused_by_name(name):
    for bad in (0, -1):
        with pytest.raises(ConfigError, match=f"^{name} must be at least 1, not {bad}$"):
            ModelConfig(**{**TINY, name: bad})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 9, "num_kv_heads": 2}, "num_heads 9 is no multiple of num_kv_heads 2"),
        ({"num_heads": 2, "num_kv_heads": 4}, "num_heads 2 is no multiple of num_kv_heads 4"),
        ({"head_dim": 15}, "head_dim 15 is odd: RoPE turns pairs of numbers"),
    ],
)
def test_shapes_that_do_not_fit_together_are_refused_by_name(changes, message):
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**{**TINY, **changes})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("model", "bytes_per_number", "expected"),
    [
        ("llama-3.2-1b", 2, 32_768),  # 2 x 16 layers x 8 KV heads x 64 x 2 bytes
        ("llama-3.2-1b", 4, 65_536),
        ("llama-3.1-8b", 2, 131_072),
        ("smollm2-135m-random", 2, 23_040),
        ("tiny", 4, 512),
    ],
)
def test_kv_bytes_per_token_of_known_shapes(model, bytes_per_number, expected):
    assert SHAPES[model].kv_bytes_per_token(bytes_per_number) == expected


def test_kv_bytes_do_not_count_query_heads():
    grouped = ModelConfig(**{**TINY, "num_heads": 4, "num_kv_heads": 1})
    full = ModelConfig(**{**TINY, "num_heads": 4, "num_kv_heads": 4})
    assert full.kv_bytes_per_token(2) == 4 * grouped.kv_bytes_per_token(2)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("max_new_tokens", (1, 10**9), (0, -1)),
        ("temperature", (0, 1e-4, 100.0), (-1, 1e-5, math.inf, math.nan)),
        ("top_k", (0, 1, 10**9), (-1,)),
        ("top_p", (1e-9, 1), (0, -0.5, 1.01, math.nan)),
        ("min_p", (0, 1), (-0.1, 1.1, math.nan)),
        ("repetition_penalty", (0.5, 1, 2), (0, -1, math.inf, math.nan)),
        ("seed", (None, 0, 1), ()),
        ("stop", ((), ("a", "b")), (("",), ("a", ""), "text")),
    ],
)
def test_sampling_limits(name, good, bad):
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(RequestError, match=rf"^{name} must be .*, not ") as caught:
            SamplingParams(**{name: value})
        assert repr(value) in str(caught.value)
