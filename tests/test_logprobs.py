"""Log probabilities against a plain forward over all positions, and against transformers, however requests run."""

import itertools

import pytest
import torch
from many_requests import (
    PROMPTS,
    TIGHT,
    WAYS,
    assert_everything_is_back,
    model_of_transformers,
    spoil_logits,
    varied_model,
)
from recorders import TapeRecorder, paged_decode_in_tensors

from nanoserve import Engine, SamplingParams, attention, engine, logprobs
from nanoserve.cache.kv import NoCache
from nanoserve.errors import ModelError, RequestError

ASKS = {"num_logprobs": 4, "prompt_logprobs": True}
DRAWN = {"temperature": 1.5, "seed": 3, "top_k": 40, "repetition_penalty": 1.3}
WISHES = [
    ASKS,
    {"prompt_logprobs": True} | DRAWN,
    {},
    {"num_logprobs": 20, "prompt_logprobs": True} | DRAWN,
    {"num_logprobs": 0} | DRAWN,
]


@pytest.fixture(scope="module")
def loaded():
    return varied_model()


def events_of(of, prompts, wishes, num_tokens=12):
    """By request, in the order of the prompts."""
    told = {str(place): [] for place in range(len(prompts))}
    for place, (ids, wish) in enumerate(zip(prompts, wishes, strict=True)):
        of.add_request(ids, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, **wish), request_id=str(place))
    while of.has_work:
        for event in of.step():
            told[event.request_id].append(event)
    assert_everything_is_back(of)
    assert not of._prompt_logprobs
    return list(told.values())


@torch.inference_mode()
def plain(loaded, ids):
    """Log softmax of each position's logits, all positions in one forward."""
    forward = loaded.model(torch.tensor(ids), torch.arange(len(ids)), NoCache())
    return loaded.model.compute_logits(forward).log_softmax(-1)


def assert_told(told, token, row, num_top):
    """`row` says how likely each token was where this one came."""
    assert told.token_id == token
    assert told.logprob == pytest.approx(float(row[token]), abs=2e-3)
    assert [at for _, at in told.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=2e-3)
    assert [float(row[other]) for other, _ in told.top] == pytest.approx([at for _, at in told.top], abs=2e-3)


def assert_as_wished(prompt, wish, events, rows):
    """All that was told of one request, and nothing that was not asked for. `rows` are of prompt and answer."""
    num_top, tokens = wish.get("num_logprobs"), [event.token_id for event in events]
    for place, event in enumerate(events):
        assert (event.logprobs is None, event.index) == (num_top is None, place)
        if num_top is not None:
            assert_told(event.logprobs, tokens[place], rows[len(prompt) - 1 + place], num_top)
    first, later = events[0].prompt_logprobs, [event.prompt_logprobs for event in events[1:]]
    assert (first is not None, {*later}) == (wish.get("prompt_logprobs", False), {None})
    if first is not None:
        assert (first[0], len(first)) == (None, len(prompt))
        for told, token, row in zip(first[1:], prompt[1:], rows, strict=False):
            assert_told(told, token, row, num_top or 0)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_they_are_those_of_a_plain_forward_however_requests_run(loaded, options, monkeypatch):
    monkeypatch.setattr(logprobs, "_MAX_ROWS", 5)
    of = Engine(loaded, **options)
    for prompt, wish, events in zip(PROMPTS, WISHES, events_of(of, PROMPTS, WISHES), strict=True):
        rows = plain(loaded, [*prompt, *(event.token_id for event in events)])
        assert_as_wished(prompt, wish, events, rows)


def test_they_are_those_of_transformers(loaded):
    theirs = model_of_transformers(loaded)
    for prompt, events in zip(PROMPTS, events_of(Engine(loaded), PROMPTS, [ASKS] * 5), strict=True):
        with torch.inference_mode():
            rows = theirs(torch.tensor([[*prompt, *(event.token_id for event in events)]])).logits[0].log_softmax(-1)
        assert_as_wished(prompt, ASKS, events, rows)


def test_who_asks_changes_nobodys_tokens(loaded):
    quiet = [{name: wish[name] for name in wish if "logprobs" not in name} for wish in WISHES]
    with_them, without = (events_of(Engine(loaded), PROMPTS, wishes) for wishes in (WISHES, quiet))
    for asked, silent in zip(with_them, without, strict=True):
        assert [event.token_id for event in asked] == [event.token_id for event in silent]


def test_a_prompt_that_is_remembered_is_computed_and_is_found_by_others_afterwards(loaded):
    of, prompt = Engine(loaded, block_size=8), PROMPTS[3]
    alike = [events_of(of, [prompt], [wish]) for wish in ({}, ASKS, {}, ASKS)]
    assert [events[0].num_cached for (events,) in alike] == [0, 0, 32, 0]
    for (events,) in alike[1::2]:
        assert_as_wished(prompt, ASKS, events, plain(loaded, [*prompt, *(event.token_id for event in events)]))


def test_a_prompt_that_made_room_is_told_once_and_whole(loaded):
    """The youngest is sent back in the middle of its prompt."""
    of = Engine(loaded, num_blocks=12, block_size=4, max_step_tokens=6, max_running=3)
    prompts = [PROMPTS[1], PROMPTS[0], list(range(50, 76))]
    for prompt, events in zip(prompts, events_of(of, prompts, [ASKS] * 3, num_tokens=16), strict=True):
        assert_as_wished(prompt, ASKS, events, plain(loaded, [*prompt, *(event.token_id for event in events)]))
    assert (of.counts.num_preemptions, of.counts.num_recomputed) == (1, 24), "of a prompt of 26"


def test_a_prompt_that_was_told_is_not_asked_for_again(loaded):
    of, seen = Engine(loaded, **TIGHT), []
    forward = of._forward
    of._forward = lambda scheduled: seen.extend(scheduled) or forward(scheduled)
    events_of(of, PROMPTS, [ASKS] * 5, num_tokens=24)
    asked = [(each.request.request_id, each.prompt_targets) for each in seen if each.prompt_targets]
    assert asked == [(str(place), range(1, len(ids))) for place, ids in enumerate(PROMPTS) if len(ids) > 1]
    assert of.counts.num_preemptions > 0


def test_recorded_steps_tell_them_as_well_and_prompts_that_are_asked_for_run_eagerly(loaded, monkeypatch):
    recorder = TapeRecorder()
    monkeypatch.setattr(attention, "_kernel", lambda _: paged_decode_in_tensors)
    monkeypatch.setattr(engine, "choose_recorder", lambda *_: recorder)
    of = Engine(loaded, attention="reference", max_step_tokens=5, max_running=5)
    for prompt, wish, events in zip(PROMPTS, WISHES, events_of(of, PROMPTS, WISHES), strict=True):
        assert_as_wished(prompt, wish, events, plain(loaded, [*prompt, *(event.token_id for event in events)]))
    assert recorder.num_replays >= 6
    one_by_one = Engine(loaded, attention="reference", max_step_tokens=1, max_running=1)
    recorder.num_replays = 0
    (events,) = events_of(one_by_one, [PROMPTS[1]], [ASKS], num_tokens=3)
    assert_as_wished(PROMPTS[1], ASKS, events, plain(loaded, [*PROMPTS[1], *(event.token_id for event in events)]))
    assert recorder.num_replays == 1 + 2, "the prompt's last position tells of no token of the prompt"


def test_a_request_that_leaves_in_the_middle_of_its_prompt_leaves_nothing(loaded):
    of = Engine(loaded, max_step_tokens=8, max_running=2)
    of.add_request(PROMPTS[3], SamplingParams(**ASKS), request_id="a")
    of.step()
    assert of._prompt_logprobs
    of.abort("a")
    assert not of._prompt_logprobs


def test_more_alternatives_than_there_are_tokens_are_all_there_are():
    (line,) = logprobs.lines_of(torch.zeros(1, 3), torch.tensor([2.0]), 20).tolist()
    assert (line[0], sorted(line[2:5])) == (2, [0, 1, 2])
    assert line[1] == pytest.approx(-1.0986, abs=1e-4)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"num_logprobs": 21}, "num_logprobs must be None .off. or an integer from 0 to 20, not 21"),
        ({"num_logprobs": -1}, "not -1"),
        ({"num_logprobs": 1.5}, "not 1.5"),
        ({"prompt_logprobs": 3}, "prompt_logprobs must be True or False, not 3"),
    ],
)
def test_what_makes_no_sense_is_refused(wish, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**wish)


def test_a_row_without_a_token_tells_nothing_and_disturbs_nobody(loaded):
    of = Engine(loaded, **TIGHT)
    for name in ("good", "bad"):
        of.add_request(PROMPTS[1], SamplingParams(max_new_tokens=4, ignore_eos=True, **ASKS), request_id=name)
    spoil_logits(of, "bad", after=0)
    events = of.step()
    assert [(name, type(error)) for name, error in of.take_failures()] == [("bad", ModelError)]
    events += itertools.chain.from_iterable(of.step() for _ in range(3))
    assert_as_wished(PROMPTS[1], ASKS, events, plain(loaded, [*PROMPTS[1], *(event.token_id for event in events)]))
