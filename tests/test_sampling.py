"""Filters against transformers' own, and draws against the distribution that they should follow."""

import pytest
import torch
from transformers.generation import logits_process as reference

from nanoserve.config import SamplingParams
from nanoserve.errors import ConfigError, ModelError, RequestError
from nanoserve.sampling import Filters, Sampler, Scores, sample_rows

CPU = torch.device("cpu")
SEEN, NUM_PROMPT = [3, 5, 5, 199], 1


def rows():
    generator = torch.Generator().manual_seed(0)
    for scale in (0.1, 1.0, 10.0):
        yield torch.randn(200, generator=generator) * scale
    yield torch.zeros(200)
    yield torch.randint(-2, 3, (200,), generator=generator).float()  # many ties


def ours(logits, **wanted):
    params = SamplingParams(**{"temperature": 1.0} | wanted)
    return Filters([(Sampler(params, CPU, NUM_PROMPT), SEEN)], len(logits), CPU).apply(logits[None])[0]


def theirs(processor, logits):
    return processor(torch.tensor([SEEN]), logits[None])[0]


@pytest.mark.parametrize("k", [1, 2, 50, 199, 200, 1000])
def test_top_k_equals_transformers(k):
    for logits in rows():
        assert torch.equal(ours(logits, top_k=k), theirs(reference.TopKLogitsWarper(k), logits))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.8, 0.95, 0.9999])
def test_top_p_equals_transformers(p):
    for logits in rows():
        assert torch.equal(ours(logits, top_p=p), theirs(reference.TopPLogitsWarper(p), logits))


@pytest.mark.parametrize("p", [0.001, 0.05, 0.5, 1.0])
def test_min_p_equals_transformers(p):
    for logits in rows():
        assert torch.equal(ours(logits, min_p=p), theirs(reference.MinPLogitsWarper(p), logits))


@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
def test_repetition_penalty_equals_transformers(penalty):
    for logits in rows():
        expected = theirs(reference.RepetitionPenaltyLogitsProcessor(penalty), logits.clone())
        assert torch.equal(ours(logits, repetition_penalty=penalty), expected)


@pytest.mark.parametrize("presence", [0, 0.5, -2])
@pytest.mark.parametrize("frequency", [0, 0.3, -1.7])
@pytest.mark.parametrize("bias", [{}, {0: 100, 5: -3.25, 3: 1.5}])
def test_what_is_added_equals_a_loop_over_the_tokens(presence, frequency, bias):
    """Behind the penalty that multiplies and before the temperature; the prompt, 3, is not penalised."""
    more = {"repetition_penalty": 1.3, "temperature": 0.7}
    for logits in rows():
        expected = theirs(reference.RepetitionPenaltyLogitsProcessor(1.3), logits.clone())
        for token, times in {5: 2, 199: 1}.items():
            expected[token] += -presence - frequency * times + bias.get(token, 0)
        for token in {0, 3} & {*bias}:
            expected[token] += bias[token]
        found = ours(logits, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias, **more)
        assert torch.allclose(found, expected / 0.7, atol=1e-5)


def test_a_greedy_row_is_penalised_for_its_own_tokens_and_for_nobody_elses():
    logits = torch.tensor([[0.0, 1.0, 0.9, 0.0]] * 3)
    wishes = [{}, {"presence_penalty": 0.2}, {"logit_bias": ((0, 5),)}]
    samplers = [Sampler(SamplingParams(**wish), CPU, 1) for wish in wishes]
    assert [sampler.wants_likeliest for sampler in samplers] == [True, False, False]
    assert sample_rows(Scores(logits), [(sampler, [2, 1]) for sampler in samplers]) == [1, 2, 0]
    assert sample_rows(Scores(logits), [(sampler, [1, 2]) for sampler in samplers]) == [1, 1, 0]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty must be between -2 and 2, not 2.1"),
        ({"frequency_penalty": -3}, "frequency_penalty must be between -2 and 2, not -3"),
        ({"frequency_penalty": torch.nan}, "frequency_penalty must be"),
        ({"logit_bias": {1: 101}}, "logit_bias must be between -100 and 100 each"),
        ({"logit_bias": {"x": 1}}, "logit_bias must be a mapping of token ids to numbers, not {'x': 1}"),
        ({"logit_bias": 3}, "logit_bias must be a mapping"),
        ({"logit_bias": [(1, 2, 3)]}, "logit_bias must be a mapping"),
    ],
)
def test_what_cannot_be_added_is_refused(wish, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**wish)


ALL = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2}


def chain(params):
    """What transformers does about a request, in its order."""
    if params.repetition_penalty != 1:
        yield reference.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    if params.temperature:
        yield reference.TemperatureLogitsWarper(params.temperature)
        if params.top_k:
            yield reference.TopKLogitsWarper(params.top_k)
        if params.top_p < 1:
            yield reference.TopPLogitsWarper(params.top_p)
        if params.min_p:
            yield reference.MinPLogitsWarper(params.min_p)


def test_all_filters_together_equal_transformers():
    for logits in rows():
        expected = logits.clone()
        for processor in chain(SamplingParams(**ALL)):
            expected = theirs(processor, expected)
        assert torch.equal(ours(logits, **ALL), expected)


WISHES = [
    {},
    {"repetition_penalty": 1.5},
    {"temperature": 0.3},
    {"temperature": 3.0, "top_k": 4},
    {"temperature": 0.9, "top_k": 1000, "top_p": 0.7},
    {"temperature": 1.1, "min_p": 0.3, "repetition_penalty": 0.8},
    {"top_k": 7, "top_p": 0.2, "min_p": 0.9},
    ALL,
]


class Alone:
    """One request's tokens, the slow and obvious way: transformers' filters, and torch's own draw."""

    def __init__(self, params):
        self.params = params
        self.generator = torch.Generator().manual_seed(params.seed)

    def next(self, logits, ids):
        for processor in chain(self.params):
            logits = processor(torch.tensor([ids]), logits[None])[0]
        if not self.params.temperature:
            return int(logits.argmax())
        return int(torch.multinomial(logits.softmax(-1), 1, generator=self.generator))


def test_rows_together_have_the_tokens_that_each_has_alone():
    """Whoever shares the batch, and in whichever order: the draws of a seed are those of torch's multinomial."""
    order = torch.Generator().manual_seed(1)
    every = [SamplingParams(seed=place, **wish) for place, wish in enumerate(WISHES)]
    together, alone = [Sampler(params, CPU) for params in every], [Alone(params) for params in every]
    for number in range(40):
        some = torch.randperm(len(every), generator=order)[: 1 + number % len(every)].tolist()
        logits = torch.randn(len(some), 200, generator=order) * 3
        before, ids = logits.clone(), [torch.randint(200, (1 + number,), generator=order).tolist() for _ in some]
        found = sample_rows(Scores(logits), [(together[each], seen) for each, seen in zip(some, ids, strict=True)])
        expected = [alone[each].next(*row) for each, row in zip(some, zip(logits, ids, strict=True), strict=True)]
        assert found == expected, [WISHES[each] for each in some]
        assert logits.equal(before)


def test_what_has_been_found_of_the_likeliest_is_not_looked_for_again():
    found = torch.tensor([[7.0, 8.0], [1.5, -2.0]], dtype=torch.float64)
    greedy = Sampler(SamplingParams(), CPU)
    assert sample_rows(Scores(torch.zeros(2, 10), found), [(greedy, [1]), (greedy, [2])]) == [7, 8]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("wish", WISHES)
def test_a_row_without_a_largest_number_is_an_error_beside_the_others_tokens(value, wish):
    logits = torch.randn(3, 200)
    logits[1] = value
    samplers = [Sampler(SamplingParams(seed=1, **each), CPU) for each in ({}, wish, ALL)]
    tokens = sample_rows(Scores(logits), [(sampler, SEEN) for sampler in samplers])
    assert [type(token) for token in tokens] == [int, ModelError, int]
    assert f"the largest logit is {value}" in str(tokens[1])


def test_top_p_keeps_the_tokens_that_reach_it():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert ours(logits, top_p=0.8).isfinite().tolist() == [True, True, False, False]


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
