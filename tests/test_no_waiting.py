"""A step waits for its device once, at its end: seen on a device that has no values (`valueless.py`)."""

import pytest
import torch
from recorders import TapeRecorder
from valueless import DEVICE, watching

from nanoserve import Engine, SamplingParams, attention, engine, sampling
from nanoserve.models.llama import Llama
from nanoserve.tokenizer import ByteTokenizer
from nanoserve.weights import LoadedModel
from tests.conftest import config_like_tiny

CONFIG = config_like_tiny(vocab_size=300, num_layers=2, num_heads=4, num_kv_heads=2)
GREEDY = {"max_new_tokens": 6, "ignore_eos": True}
DRAWN = GREEDY | {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "seed": 1}
ENGINES = {
    "gathered": {"num_blocks": 32, "attention": "sdpa"},
    "in place": {"num_blocks": 32, "attention": "reference"},
    "chunked, few blocks": {"num_blocks": 4, "attention": "sdpa", "max_step_tokens": 6, "max_running": 6},
    **{cache: {"cache": cache} for cache in ("contiguous", "growing", "none")},
}


def tokens(shape):
    """Token 7 for each row, with a logit that is a number; all ones where more comes back."""
    if len(shape) == 1:
        return [1.0] * shape[0]
    return [[7.0] * shape[1], [1.0] * shape[1]]


def steps(monkeypatch, wishes, **options):
    """Run requests of three lengths to their end; what came, and for each step what was seen of it."""
    monkeypatch.setattr(attention, "_kernel", lambda name: lambda queries, *_, **__: torch.empty_like(queries))
    told, seen = [], []
    with watching(monkeypatch, tokens) as watch:
        loaded = LoadedModel(Llama(CONFIG).to(DEVICE).eval(), ByteTokenizer(300), CONFIG, "none", DEVICE, torch.float32)
        of = Engine(loaded, **options)
        for place, wish in enumerate(wishes):
            of.add_request(range(1, 12 + 5 * place), SamplingParams(**wish), request_id=str(place))
        while of.has_work:
            watch.waits.clear()
            watch.num_sent = watch.num_fetched = 0
            told += of.step()
            seen.append((list(watch.waits), watch.num_sent, watch.num_fetched))
    return told, seen


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_a_greedy_step_is_one_copy_there_and_one_back(monkeypatch, options):
    told, seen = steps(monkeypatch, [GREEDY, GREEDY, GREEDY], **options)
    assert len(told) == 18
    assert {(*waits, sent) for waits, sent, _ in seen} == {(1,)}
    assert {fetched for *_, fetched in seen} <= {0, 1}, "a step of which no token comes fetches none"
    assert sum(fetched for *_, fetched in seen) >= 6


def test_a_step_that_draws_sends_its_filters_as_well_and_waits_as_little(monkeypatch):
    told, seen = steps(monkeypatch, [GREEDY, DRAWN, DRAWN | {"seed": 2}], **ENGINES["in place"])
    assert len(told) == 18
    assert set(map(str, seen)) == {str(([], 2, 1))}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_log_probabilities_come_back_with_the_tokens(monkeypatch, options):
    asks = GREEDY | {"num_logprobs": 3, "prompt_logprobs": True}
    told, seen = steps(monkeypatch, [asks, GREEDY, DRAWN | {"num_logprobs": 20}], **options)
    assert [len(event.prompt_logprobs) for event in told if event.prompt_logprobs] == [11]
    assert [len(event.logprobs.top) for event in told if event.request_id == "2"] == [20] * 6
    assert {str(waits) for waits, *_ in seen} == {"[]"}
    assert {fetched for *_, fetched in seen} <= {0, 1}
    assert max(sent for _, sent, _ in seen) == 2


def test_a_replayed_step_is_one_copy_there_and_one_back_as_well(monkeypatch):
    recorder = TapeRecorder()
    monkeypatch.setattr(engine, "choose_recorder", lambda *_: recorder)
    told, seen = steps(monkeypatch, [GREEDY, GREEDY, DRAWN], **ENGINES["in place"])
    assert (len(told), recorder.num_replays) == (18, 5)
    assert {(*waits, fetched) for waits, _, fetched in seen} == {(1,)}
    assert [sent for _, sent, _ in seen] == [2] * 6


def look(logits, right=sampling.likeliest):
    assert float(logits[0, 0]) >= 0
    return right(logits)


def draw(probabilities, samplers):
    return torch.multinomial(probabilities, 1)[:, 0]


def pageable(ints, dtype, device):
    return torch.tensor(ints, dtype=dtype, device=device)


def masked(logits, right=sampling.likeliest):
    logits[logits.isnan()] = 0
    return right(logits)


def picked(logits, right=sampling.likeliest):
    return right(logits[[*range(len(logits))]])


@pytest.mark.parametrize(
    ("where", "name", "plant"),
    [
        (sampling, "race", draw),
        (sampling, "to_device", pageable),
        (sampling, "likeliest", masked),
        (sampling, "likeliest", picked),
    ],
)
def test_a_planted_look_from_the_host_is_seen(monkeypatch, where, name, plant):
    monkeypatch.setattr(where, name, plant)
    _, seen = steps(monkeypatch, [GREEDY, DRAWN], **ENGINES["in place"])
    assert all(waits for waits, *_ in seen), "each of its steps"


def test_a_planted_look_at_a_number_fails(monkeypatch):
    monkeypatch.setattr(sampling, "likeliest", look)
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
        steps(monkeypatch, [GREEDY], **ENGINES["in place"])
