"""The smallest things that a test of the engine can run on."""

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # triton decides when it is first imported, which transformers does as well
    os.environ.setdefault("TRITON_INTERPRET", "1")


from nanoserve.cache.kv import KVCache
from nanoserve.catalog import SHAPES
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.tokenizer import ByteTokenizer
from nanoserve.weights import LoadedModel, load_model

settings.register_profile("no clock", deadline=None)  # a busy machine is no fault of what is tested
settings.load_profile("no clock")


class ScriptedModel:
    """A fake model: after any context the next token is `script[position of the last token - prompt]`, cyclically.

    It counts the positions it was asked to run, so that a test can see what a cache saves.
    """

    def __init__(self, script: list[int], num_prompt_tokens: int, vocab_size: int = 300) -> None:
        self.script, self.num_prompt_tokens, self.vocab_size = script, num_prompt_tokens, vocab_size
        self.positions_run: list[int] = []

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVCache) -> torch.Tensor:
        self.positions_run += positions.tolist()
        return positions[:, None].float()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        steps = hidden[:, 0].long() - (self.num_prompt_tokens - 1)
        wanted = torch.tensor(self.script)[steps % len(self.script)]
        return torch.nn.functional.one_hot(wanted, self.vocab_size).float()


def config_like_tiny(**changes) -> ModelConfig:
    shape = {
        "vocab_size": 300,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "max_context_tokens": 64,
        "eos_token_ids": (256,),
    }
    return ModelConfig(**(shape | changes))


@pytest.fixture
def scripted():
    """Make a LoadedModel whose output is a script of token ids."""

    def make(script, num_prompt_tokens=3, **changes) -> LoadedModel:
        config = config_like_tiny(**changes)
        model = ScriptedModel(script, num_prompt_tokens, config.vocab_size)
        return LoadedModel(
            model, ByteTokenizer(config.vocab_size), config, "scripted", torch.device("cpu"), torch.float32
        )

    return make


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    """The tiny random shape in float32."""
    return load_model(EngineConfig(model="tiny", device="cpu", dtype="float32"))


@pytest.fixture(scope="module")
def varied() -> LoadedModel:
    """The smallest shape with larger weights than usual: a fresh one repeats its last token."""
    loaded = load_model(EngineConfig(model="tiny", device="cpu", dtype="float32"))
    torch.manual_seed(0)
    for weight in loaded.model.parameters():
        if weight.ndim > 1:
            weight.requires_grad_(False).normal_(0, 0.2)
    return loaded


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    return SHAPES["tiny"]
