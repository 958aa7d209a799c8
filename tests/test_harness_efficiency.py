"""Shares of ceilings: what a run had to read and compute, over what it took, over what the machine gave at its best."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness.ceilings import Ceilings
from benchmarks.harness.counters import count_work
from benchmarks.harness.efficiency import mbu, mfu, shares_of
from benchmarks.harness.sources.nanoserve import NanoserveSubject
from benchmarks.harness.timing import RunTiming, Stamp
from nanoserve.cache.contiguous import ContiguousCache
from nanoserve.config import FAMILIES
from nanoserve.models.families import build_model
from nanoserve.tokenizer import ByteTokenizer
from nanoserve.weights import LoadedModel

CEILINGS = SimpleNamespace(read_bytes_per_s=1000.0, flops_per_s=100.0)


class Cost:
    def read_bytes(self, context):
        return 50.0 + context

    def prefill_flops(self, num_tokens):
        return 2.0 * num_tokens


def run(ttft_s=1.0, itl_s=0.2, *, tokens=3, prompt=10):
    times = [round((ttft_s + itl_s * place) * 1e9) for place in range(tokens)]
    return RunTiming(sent_ns=0, stamps=tuple(Stamp(at, 1) for at in times), num_prompt_tokens=prompt)


def test_mbu_counts_what_each_step_read():
    assert mbu(run(), Cost(), 1000.0) == pytest.approx((50 + 11 + 50 + 12) / 0.4 / 1000)


def test_mfu_is_of_the_prefill_alone():
    assert mfu(run(), Cost(), 100.0) == pytest.approx(20 / 1.0 / 100)


def test_without_gaps_a_prompt_or_a_ceiling_there_is_no_share():
    assert mbu(run(tokens=1), Cost(), 1000.0) is mbu(run(), Cost(), None) is None
    assert mfu(run(prompt=None), Cost(), 100.0) is mfu(run(), Cost(), None) is None


def test_each_arm_has_a_sample_per_run_and_an_unknown_cost_has_none():
    found = shares_of({"a": [run(), run(itl_s=0.4)], "b": [run()]}, {"a": Cost(), "b": None}, CEILINGS)
    assert [(m.metric.name, m.arm, len(m.samples)) for m in found.measurements] == [("mbu", "a", 2), ("mfu", "a", 2)]
    assert found.flags == []


def test_a_share_above_one_is_told_and_not_shown():
    found = shares_of({"a": [run(itl_s=0.01)]}, {"a": Cost()}, CEILINGS)
    assert [m.metric.name for m in found.measurements] == ["mfu"]
    (flag,) = found.flags
    assert (flag.kind, flag.arm) == ("ceiling", "a")
    assert "MBU came out at 6.15" in flag.what


# What a model has to do, against what the counters see it do.


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request, tiny_config):
    config = dataclasses.replace(tiny_config, family=request.param, num_kv_heads=4 if request.param == "gpt2" else 2)
    model = build_model(config).requires_grad_(False)
    loaded = LoadedModel(model, ByteTokenizer(512), config, "whatever was there", torch.device("cpu"), torch.float32)
    return NanoserveSubject(loaded, request.param)


def test_the_flops_of_a_prefill_are_those_that_are_counted_less_what_the_mask_hides(subject):
    loaded, config, tokens = subject._loaded, subject._loaded.config, 24
    cache = ContiguousCache(config, tokens, loaded.dtype, loaded.device)

    def prefill():
        hidden = loaded.model(torch.arange(tokens), torch.arange(tokens), cache)
        loaded.model.compute_logits(hidden[-1:])

    with torch.inference_mode():
        _, counted = count_work(prefill, prepare=lambda: setattr(cache, "num_cached", 0))
    hidden_pairs = tokens * tokens - tokens * (tokens + 1) / 2
    masked = 4 * config.num_layers * config.num_heads * config.head_dim * hidden_pairs
    assert subject.cost().prefill_flops(tokens) == counted.flops - masked


def test_a_decode_step_reads_every_weight_of_a_product_once_and_the_context(subject):
    cost, config, model = subject.cost(), subject._loaded.config, subject._loaded.model
    matrices = [each.weight for each in model.modules() if isinstance(each, torch.nn.Linear)]
    head = config.vocab_size * config.hidden_size if config.tie_embeddings else 0
    weights = 4 * (sum(matrix.numel() for matrix in matrices) + head)
    assert cost.read_bytes(0) == weights
    assert cost.read_bytes(100) == weights + 100 * config.kv_bytes_per_token(4)
    assert subject.cost(cache="none").read_bytes(100) == weights


# The ceilings themselves.


class FakeTimer:
    """Tells scripted seconds and runs nothing."""

    def __init__(self, *seconds):
        self._seconds = itertools.cycle(seconds)

    def seconds(self, call):
        return next(self._seconds)


def test_the_best_of_all_looks_is_the_ceiling():
    ceilings = Ceilings("cpu", torch.float32, FakeTimer(2.0))
    ceilings.look()
    assert ceilings.read_bytes_per_s == (512 << 20) / 2.0
    assert ceilings.flops_per_s == 2 * 1024**3 / 2.0
    ceilings._seconds = FakeTimer(4.0, 1.0).seconds
    ceilings.look()
    assert ceilings.as_dict() == {"read_bytes_per_s": float(512 << 20), "flops_per_s": 2.0 * 1024**3}
    ceilings._seconds = FakeTimer(8.0).seconds
    ceilings.look()
    assert ceilings.read_bytes_per_s == 512 << 20


def test_a_real_look_finds_finite_rates():
    ceilings = Ceilings("cpu", torch.float32)
    ceilings.look()
    assert 1e6 < ceilings.read_bytes_per_s < 1e14
    assert 1e6 < ceilings.flops_per_s < 1e15
