"""Filters against transformers' own, and draws against the distribution that they should follow."""

import pytest
import torch
from transformers.generation import logits_process as reference

from nanoserve.config import SamplingParams
from nanoserve.errors import ConfigError, RequestError
from nanoserve.sampling import (
    Sampler,
    filter_logits,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repetition,
)

SEEN = [3, 5, 5, 199]


def rows():
    generator = torch.Generator().manual_seed(0)
    for scale in (0.1, 1.0, 10.0):
        yield torch.randn(200, generator=generator) * scale
    yield torch.zeros(200)
    yield torch.randint(-2, 3, (200,), generator=generator).float()  # many ties


def theirs(processor, logits):
    return processor(torch.tensor([SEEN]), logits[None])[0]


@pytest.mark.parametrize("k", [1, 2, 50, 199, 200, 1000])
def test_top_k_equals_transformers(k):
    for logits in rows():
        assert torch.equal(keep_top_k(logits, k), theirs(reference.TopKLogitsWarper(k), logits))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.8, 0.95, 0.9999])
def test_top_p_equals_transformers(p):
    for logits in rows():
        assert torch.equal(keep_top_p(logits, p), theirs(reference.TopPLogitsWarper(p), logits))


@pytest.mark.parametrize("p", [0.001, 0.05, 0.5, 1.0])
def test_min_p_equals_transformers(p):
    for logits in rows():
        assert torch.equal(keep_min_p(logits, p), theirs(reference.MinPLogitsWarper(p), logits))


@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
def test_repetition_penalty_equals_transformers(penalty):
    for logits in rows():
        expected = theirs(reference.RepetitionPenaltyLogitsProcessor(penalty), logits.clone())
        assert torch.equal(penalise_repetition(logits, SEEN, penalty), expected)


def test_all_filters_together_equal_transformers():
    params = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.2)
    chain = [
        reference.RepetitionPenaltyLogitsProcessor(1.2),
        reference.TemperatureLogitsWarper(0.7),
        reference.TopKLogitsWarper(50),
        reference.TopPLogitsWarper(0.9),
        reference.MinPLogitsWarper(0.02),
    ]
    for logits in rows():
        expected = logits.clone()
        for processor in chain:
            expected = theirs(processor, expected)
        assert torch.equal(filter_logits(logits, SEEN, params), expected)


def test_top_p_keeps_the_tokens_that_reach_it():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert keep_top_p(logits, 0.8).isfinite().tolist() == [True, True, False, False]


def test_filters_leave_their_input_alone():
    logits = torch.randn(50)
    before = logits.clone()
    Sampler(
        SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=2.0, seed=0), logits.device
    ).sample(logits, [1, 2])
    assert torch.equal(logits, before)


def test_greedy_takes_the_largest_logit_after_the_penalty():
    logits = torch.tensor([1.0, 3.0, 2.9])
    cpu = logits.device
    assert Sampler(SamplingParams(), cpu).sample(logits, [1]) == 1
    assert Sampler(SamplingParams(repetition_penalty=1.5), cpu).sample(logits, [1]) == 2


def test_draws_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    sampler = Sampler(SamplingParams(temperature=1.0, seed=0), logits.device)
    counts = torch.bincount(torch.tensor([sampler.sample(logits, []) for _ in range(4000)]), minlength=4)
    expected = 4000 * logits.softmax(0)
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 16.3  # 99.9 % point for three degrees of freedom


def test_without_a_seed_two_requests_differ():
    logits = torch.zeros(1000)
    draws = [Sampler(SamplingParams(temperature=1.0), logits.device).sample(logits, []) for _ in range(8)]
    assert len(set(draws)) > 1


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("max_new_tokens", 0, "at least 1"),
        ("temperature", -0.1, "0 \\(greedy\\) or at least 0.0001"),
        ("temperature", float("nan"), "0 \\(greedy\\)"),
        ("temperature", float("inf"), "0 \\(greedy\\)"),
        ("temperature", 1e-30, "0 \\(greedy\\)"),
        ("top_k", -1, "0 \\(off\\) or more"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.1, "above 0 and at most 1"),
        ("min_p", 1.5, "between 0 and 1"),
        ("repetition_penalty", 0.0, "between 0.01 and 100"),
        ("repetition_penalty", 1e-300, "between 0.01 and 100"),
        ("seed", -1, "from 0 to"),
        ("seed", 2**64, "from 0 to"),
        ("stop", ("",), "non-empty strings"),
        ("stop", "abc", "a tuple of strings, not 'abc'"),
    ],
)
def test_impossible_settings_are_refused_by_name(name, value, wanted):
    with pytest.raises(RequestError, match=f"{name} must be.*{wanted}"):
        SamplingParams(**{name: value})


def test_unknown_settings_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="unknown SamplingParams option 'topk'; choose one of: max_new_tokens"):
        SamplingParams.from_options({"topk": 3})
