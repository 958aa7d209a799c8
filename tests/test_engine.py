"""Requests through the engine: what comes out, in which order, what it costs, and what is refused."""

import pytest
import torch

from nanoserve import Engine, SamplingParams
from nanoserve.config import CACHES
from nanoserve.errors import ConfigError, ModelError, RequestError
from nanoserve.request import FinishReason

EOS = 256
PROMPT = (1, 2, 3)


def params(**changes):
    return SamplingParams(**({"max_new_tokens": 4} | changes))


def test_generates_the_scripted_tokens_and_text(scripted):
    (done,) = Engine(scripted(list(b"abcd"))).generate(PROMPT, params())
    assert (done.token_ids, done.text, done.finish_reason) == (tuple(b"abcd"), "abcd", FinishReason.LENGTH)
    assert done.num_prompt_tokens == 3


def test_streamed_equals_collected(scripted):
    events = list(Engine(scripted(list(b"abcd"))).stream(PROMPT, params()))
    assert [event.index for event in events] == [0, 1, 2, 3]
    assert "".join(event.text for event in events) == "abcd"
    assert [event.finish_reason for event in events] == [None, None, None, FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("cache", "positions"),
    [
        ("paged", [0, 1, 2, 3, 4]),
        ("contiguous", [0, 1, 2, 3, 4]),
        ("growing", [0, 1, 2, 3, 4]),
        ("none", [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]),
    ],
)
def test_a_cache_saves_positions(scripted, cache, positions):
    loaded = scripted(list(b"abc"))
    events = list(Engine(loaded, cache=cache).stream(PROMPT, params(max_new_tokens=3)))
    assert loaded.model.positions_run == positions
    assert sum(event.num_prefilled for event in events) == len(positions)
    assert all(event.num_prefilled + event.num_cached == 3 + event.index for event in events)


def test_eos_ends_the_request_and_stays_in_its_ids_but_not_in_its_text(scripted):
    (done,) = Engine(scripted([97, EOS, 98, 99])).generate(PROMPT, params())
    assert (done.token_ids, done.finish_reason) == ((97, EOS), FinishReason.STOP)


def test_eos_on_the_last_budgeted_token_is_stop(scripted):
    (done,) = Engine(scripted([97, EOS])).generate(PROMPT, params(max_new_tokens=2))
    assert done.finish_reason is FinishReason.STOP


def test_ignore_eos_goes_on(scripted):
    (done,) = Engine(scripted([97, EOS, 98, 99])).generate(PROMPT, params(ignore_eos=True))
    assert (done.token_ids, done.finish_reason) == ((97, EOS, 98, 99), FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [(("c",), "ab", 3), (("bc", "zz"), "a", 3), (("abcd",), "", 4), (("x",), "abcd", 4), (("de",), "abcd", 4)],
)
def test_stop_strings_cut_the_text(scripted, stop, text, num_tokens):
    (done,) = Engine(scripted(list(b"abcd"))).generate(PROMPT, params(stop=stop))
    assert (done.text, len(done.token_ids)) == (text, num_tokens)
    assert done.finish_reason is (FinishReason.STOP if text != "abcd" else FinishReason.LENGTH)


def test_half_a_character_is_held_back(scripted):
    events = list(Engine(scripted(list("aé€".encode()))).stream(PROMPT, params(max_new_tokens=6)))
    assert [event.text for event in events] == ["a", "", "é", "", "", "€"]


def test_a_list_of_prompts_comes_back_in_order(scripted):
    done = Engine(scripted(list(b"ab"))).generate([PROMPT, (4, 5, 6), "xyz"], params(max_new_tokens=2))
    assert [completion.text for completion in done] == ["ab", "ab", "ab"]
    assert len({completion.request_id for completion in done}) == 3


def test_an_empty_list_of_prompts_gives_an_empty_list(scripted):
    assert Engine(scripted([97])).generate([], params()) == []


def test_two_streams_pulled_in_turn_lose_nothing(scripted):
    engine = Engine(scripted(list(b"abcd")))
    first, second = engine.stream(PROMPT, params()), engine.stream(PROMPT, params())
    texts = [(next(first).text, next(second).text) for _ in range(4)]
    assert texts == [(letter, letter) for letter in "abcd"]
    assert list(first) == list(second) == []
    assert not engine.has_work


def test_leaving_a_stream_frees_its_request(scripted):
    engine = Engine(scripted(list(b"abcd")))
    for _ in engine.stream(PROMPT, params()):
        break
    assert not engine.has_work
    assert not engine._answers
    assert not engine._inboxes


def test_a_stream_that_is_never_pulled_queues_nothing(scripted):
    engine = Engine(scripted(list(b"abcd")))
    engine.stream(PROMPT, params())
    assert not engine.has_work


def test_a_step_that_raises_leaves_the_engine_usable(scripted):
    loaded = scripted(list(b"ab"))
    engine = Engine(loaded)
    engine._model = lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate(PROMPT, params())
    engine._model = loaded.model
    assert engine.generate(PROMPT, params(max_new_tokens=2))[0].text == "ab"


def test_requests_can_be_added_stepped_and_aborted_by_hand(scripted):
    engine = Engine(scripted(list(b"abcd")))
    first = engine.add_request(PROMPT, params(max_new_tokens=1), request_id="first")
    engine.add_request(PROMPT, params(), request_id="second")
    told = [(event.request_id, event.finish_reason) for event in engine.step()]
    assert told == [(first, FinishReason.LENGTH), ("second", None)]
    engine.abort("second")
    assert not engine.has_work
    assert engine.step() == []


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ("", {}, "the prompt is empty"),
        ((1, 300), {}, "token id 300 is outside the vocabulary: choose from 0 to 299"),
        ((1, 2), {"logit_bias": {300: 1}}, "token id 300 is outside the vocabulary: choose from 0 to 299"),
        ((-1,), {}, "token id -1 is outside"),
        ((1,) * 61, {}, "a prompt of 61 tokens and max_new_tokens 4 exceed the model's context of 64 tokens"),
        ((1,), {"max_new_tokens": 64}, "shorten either by 1$"),
    ],
)
def test_bad_prompts_are_refused_before_any_work(scripted, prompt, changes, message):
    loaded = scripted(list(b"ab"))
    engine = Engine(loaded)
    for call in (engine.generate, engine.stream, engine.add_request):
        with pytest.raises(RequestError, match=message):
            call(prompt, params(**changes))
    with pytest.raises(RequestError, match=message):
        engine.generate([prompt, PROMPT], params(**changes))
    assert not engine.has_work
    assert loaded.model.positions_run == []


def test_an_empty_prompt_of_ids_is_refused(scripted):
    engine = Engine(scripted([97]))
    for call in (engine.stream, engine.add_request):
        with pytest.raises(RequestError, match="the prompt is empty"):
            call((), params())


def test_a_request_that_just_fits_the_context_runs(scripted):
    (done,) = Engine(scripted([97], num_prompt_tokens=60)).generate((1,) * 60, params())
    assert len(done.token_ids) == 4


def test_ids_in_use_and_unknown_ids_are_refused(scripted):
    engine = Engine(scripted([97]))
    engine.add_request(PROMPT, params(), request_id="a")
    with pytest.raises(RequestError, match="'a' is already in use"):
        engine.add_request(PROMPT, params(), request_id="a")
    with pytest.raises(RequestError, match="no request 'b'"):
        engine.abort("b")


def test_unknown_options_and_caches_are_refused(scripted):
    with pytest.raises(ConfigError, match=r"unknown EngineConfig option 'chache'; choose one of: model, device"):
        Engine.load("tiny", chache="none")
    with pytest.raises(ConfigError, match="unknown cache 'ring'; choose one of: paged, contiguous, growing, none"):
        Engine(scripted([97]), cache="ring")


def test_caches_agree_on_a_real_model(tiny):
    outputs = {
        cache: Engine(tiny, cache=cache).generate([(1, 2, 3), (9,) * 40], SamplingParams(max_new_tokens=32))
        for cache in CACHES
    }
    tokens = {cache: [completion.token_ids for completion in of_cache] for cache, of_cache in outputs.items()}
    assert tokens["none"] == tokens["contiguous"] == tokens["growing"] == tokens["paged"]


def test_one_seed_gives_one_output_streamed_or_collected(tiny):
    sampled = SamplingParams(max_new_tokens=16, temperature=1.0, seed=7)
    engine = Engine(tiny)
    collected = engine.generate((1, 2, 3), sampled)[0].token_ids
    assert tuple(event.token_id for event in engine.stream((1, 2, 3), sampled)) == collected
    other = engine.generate((1, 2, 3), SamplingParams(max_new_tokens=16, temperature=1.0, seed=8))[0].token_ids
    assert other != collected


def test_prefill_computes_logits_for_the_last_position_only(tiny):
    rows = []
    engine = Engine(tiny)
    compute_logits = tiny.model.compute_logits
    try:
        tiny.model.compute_logits = lambda hidden: rows.append(hidden.shape[0]) or compute_logits(hidden)
        engine.generate((1,) * 50, SamplingParams(max_new_tokens=3))
    finally:
        del tiny.model.compute_logits
    assert rows == [1, 1, 1]


def test_unwritten_cache_positions_are_never_read(tiny, monkeypatch):
    expected = Engine(tiny).generate((1, 2, 3), SamplingParams(max_new_tokens=8))[0].token_ids
    monkeypatch.setattr(torch, "empty", lambda shape, **kw: torch.full(shape, float("nan"), **kw))
    assert Engine(tiny).generate((1, 2, 3), SamplingParams(max_new_tokens=8))[0].token_ids == expected


class ThreeIds:
    """An array of ids that is no list: its truth value is ambiguous, and its items only know how to be an index."""

    def __iter__(self):
        return (torch.tensor(i) for i in (1, 2, 3))

    def __bool__(self):
        raise ValueError("ambiguous")


@pytest.mark.parametrize(
    "prompt", [torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3]).numpy(), ThreeIds(), iter((1, 2, 3))]
)
def test_ids_may_come_in_any_sequence(scripted, prompt):
    (done,) = Engine(scripted(list(b"abcd"))).generate(prompt, params())
    assert (done.text, done.num_prompt_tokens) == ("abcd", 3)


def test_prompts_may_come_from_an_iterator(scripted):
    engine = Engine(scripted(list(b"ab")))
    assert len(engine.generate((text for text in ("abc", "xyz")), params(max_new_tokens=2))) == 2


@pytest.mark.parametrize("prompt", [[1.5, 2.0], ["a", 1], [["a"]], None, 7, {1, 2}, {"role": "user"}])
def test_what_is_no_prompt_is_refused(scripted, prompt):
    engine = Engine(scripted([97]))
    with pytest.raises(RequestError, match=r"a prompt is a text|prompts are a text"):
        engine.generate(prompt, params())
    assert not engine.has_work


def test_a_request_that_cannot_go_on_does_not_block_the_others(scripted):
    loaded = scripted(list(b"ab"))
    engine = Engine(loaded)
    engine.add_request(PROMPT, params(), request_id="bad")
    engine._model = lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory"))
    assert engine.step() == []
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    engine._model = loaded.model
    assert not engine.has_work
    assert engine.generate(PROMPT, params(max_new_tokens=2))[0].text == "ab"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error_and_no_token(scripted, value, temperature):
    engine = Engine(scripted([97]))
    engine._model.compute_logits = lambda hidden: torch.full((1, 300), value)
    with pytest.raises(ModelError, match="the largest logit is"):
        engine.generate(PROMPT, params(temperature=temperature))


def test_a_prompt_is_not_penalised_and_an_answer_is(scripted):
    engine = Engine(scripted([7]))
    wish = {"presence_penalty": 2, "logit_bias": {9: 0.5}, "max_new_tokens": 2}
    assert [each.token_ids for each in engine.generate([(7, 7, 7), (1, 2, 9)], SamplingParams(**wish))] == [(7, 9)] * 2
