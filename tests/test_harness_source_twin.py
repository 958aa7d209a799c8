"""transformers on our own tensors: the same tokens, no copy, and an arm like any other."""

import dataclasses

import pytest
import torch

from benchmarks.harness.sources.nanoserve import TWIN, NanoserveSubject
from benchmarks.harness.sources.twin import transformers_twin
from nanoserve.catalog import resolve
from nanoserve.config import EngineConfig
from nanoserve.hf_config import to_hf_config
from nanoserve.models.llama import rope_frequencies
from nanoserve.weights import load_model

PROMPT = tuple(range(40, 60))


@pytest.fixture(scope="module")
def subject():
    return NanoserveSubject(load_model(EngineConfig(model="tiny", device="cpu", dtype="float32")), "tiny")


def tokens_of(subject, **arm):
    return [token for emission in subject.stream(PROMPT, 24, **arm) for token in emission.token_ids]


def test_both_engines_say_the_same(subject):
    assert tokens_of(subject, **TWIN) == tokens_of(subject, cache="contiguous")


def test_the_weights_are_shared(subject):
    list(subject.stream(PROMPT, 1, **TWIN))
    ours = subject._loaded.model.state_dict()
    theirs = subject._twin.state_dict()
    assert {name: ours[name].data_ptr() for name in ours} == {name: theirs[name].data_ptr() for name in ours}
    assert set(theirs) - set(ours) <= {"lm_head.weight"}


def test_llama3_scaling_reaches_the_twin(subject):
    """The rotary frequencies are the only numbers that are not shared."""
    theirs = resolve("llama-3.2-1b").config
    rope = {"rope_theta": theirs.rope_theta, "rope_scaling": theirs.rope_scaling}
    config = dataclasses.replace(subject._loaded.config, **rope)
    twin = transformers_twin(subject._loaded.model.state_dict(), to_hf_config(config))
    assert torch.allclose(twin.model.rotary_emb.inv_freq, rope_frequencies(config, torch.device("cpu")))
