"""A step that raises an error costs whoever makes it fail: the others run again, alone first, and notice nothing."""

import dataclasses

import pytest
from many_requests import LONG, PROMPTS, WAYS, assert_everything_is_back, gather, run, varied_model

from nanoserve import Engine, SamplingParams, engine

BAD, GOOD = "3", "0124"
USUAL = ("paged", "contiguous", "none, chunked", "preempted, chunked", "static")
DRAWN = SamplingParams(max_new_tokens=24, temperature=1.3, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded():
    return varied_model()


@pytest.fixture(scope="module")
def expected(loaded):
    return {str(place): ids for place, (ids, _) in enumerate(run(Engine(loaded, cache="contiguous"), PROMPTS))}


class Poisoned:
    """A model that stores all keys and values of a step, and then raises where it holds one of these tokens."""

    def __init__(self, model, *tokens):
        self._model, self._tokens, self.compute_logits = model, tokens, model.compute_logits

    def __call__(self, token_ids, positions, kv):
        hidden = self._model(token_ids, positions, kv)
        if found := {*token_ids.tolist()} & {*self._tokens}:
            raise RuntimeError(f"poisoned by {min(found)}")
        return hidden


def poisoned(loaded, *tokens, **options):
    """An engine, and how many requests were in each of its forwards."""
    of = Engine(dataclasses.replace(loaded, model=Poisoned(loaded.model, *tokens)), **options)
    sizes, forward = [], of._forward
    of._forward = lambda scheduled: sizes.append(len(scheduled)) or forward(scheduled)
    return of, sizes


def to_the_end(of, params=LONG, prompts=PROMPTS):
    """Tokens by request, and errors by request; blocks are counted after every step."""
    told, failed = {}, {}
    for place, prompt in enumerate(prompts):
        of.add_request(prompt, params, request_id=str(place))
    for _ in range(2000):
        if of.has_work:
            gather(told, of.step())
            of._scheduler.check()
            failed |= dict(of.take_failures())
    assert_everything_is_back(of)
    return {name: ids for name, (ids, _) in told.items()}, {name: str(error) for name, error in failed.items()}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_poisoned_prompt_fails_alone_and_the_others_go_on(loaded, expected, options):
    of, _ = poisoned(loaded, 41, **options)  # the third prompt's second token
    told, failed = to_the_end(of)
    assert failed == {BAD: "poisoned by 41"}
    assert told == {name: expected[name] for name in GOOD}


@pytest.mark.parametrize("options", [WAYS[name] for name in USUAL], ids=USUAL)
def test_a_token_that_poisons_in_the_middle_ends_its_request_behind_it(loaded, expected, options):
    of, _ = poisoned(loaded, token := whose_alone(expected, BAD), **options)
    told, failed = to_the_end(of)
    assert failed == {BAD: f"poisoned by {token}"}
    assert told == {name: expected[name] for name in GOOD} | {BAD: expected[BAD][: expected[BAD].index(token) + 1]}


def whose_alone(expected, name):
    """A token that comes in the middle of this answer, and in nobody else's, nor in a prompt."""
    others = {token for other, ids in expected.items() for token in ids if other != name}.union(*PROMPTS)
    return next(token for place, token in enumerate(expected[name]) if place > 5 and token not in others)


def test_suspects_run_one_after_another_each_alone_until_it_has_a_token(loaded, expected):
    of, sizes = poisoned(loaded, 41, max_step_tokens=20, max_running=5)
    told, _ = to_the_end(of)
    # 1 + 7 + 12 positions, then 1 + 1 + 4 + 14, the poison among them; then each of the four alone.
    assert sizes[:7] == [3, 4, 1, 1, 1, 1, 4]
    assert of.counts.num_failed_steps == 2
    assert told == {name: expected[name] for name in GOOD}


def test_all_that_fail_are_told_and_it_ends(loaded):
    of, sizes = poisoned(loaded, *range(300))
    told, failed = to_the_end(of)
    assert (told, {*failed}, sizes) == ({}, {*expected_names()}, [5, 1, 1, 1, 1, 1])
    of.loaded.model._tokens = ()
    assert len(to_the_end(of)[0]) == 5


def expected_names():
    return [str(place) for place in range(len(PROMPTS))]


def test_who_reads_a_stream_is_told_there(loaded, expected):
    of, _ = poisoned(loaded, 41)
    good, bad = (of.stream(PROMPTS[place], LONG) for place in (0, 3))
    assert next(good).token_id == expected["0"][0]
    with pytest.raises(RuntimeError, match="poisoned by 41"):
        next(bad)
    assert [event.token_id for event in good] == expected["0"][1:]
    assert of.take_failures() == []
    assert_everything_is_back(of)


@pytest.mark.parametrize("cache", ["paged", "growing"])
def test_what_fails_once_costs_nobody_anything(loaded, expected, cache):
    of, _ = poisoned(loaded, cache=cache)
    forward, of._forward = of._forward, lambda each: forward(each) if of.counts.num_steps not in (4, 20) else 1 / 0
    assert to_the_end(of) == (expected, {})
    assert (of.counts.num_failed_steps, of.counts.num_preemptions) == (2, 10)


@pytest.mark.parametrize("cache", ["paged", "contiguous"])
def test_draws_of_a_step_that_failed_are_drawn_again(loaded, cache, monkeypatch):
    (undisturbed, _), num_calls = to_the_end(Engine(loaded, cache=cache), DRAWN), []
    fetch = engine.sample_rows

    def fails_sometimes(*arguments):
        num_calls.append(fetch(*arguments))
        return num_calls[-1] if len(num_calls) not in (1, 9) else 1 / 0

    monkeypatch.setattr(engine, "sample_rows", fails_sometimes)
    assert to_the_end(Engine(loaded, cache=cache), DRAWN) == (undisturbed, {})


def test_prompts_that_are_asked_about_are_told_once_and_whole(loaded):
    asks = SamplingParams(max_new_tokens=3, num_logprobs=0, prompt_logprobs=True, ignore_eos=True)
    of, _ = poisoned(loaded, 41, max_step_tokens=9, max_running=5)
    for place, prompt in enumerate(PROMPTS):
        of.add_request(prompt, asks, request_id=str(place))
    told = {}
    while of.has_work:
        for event in of.step():
            told.setdefault(event.request_id, []).append(event.prompt_logprobs and len(event.prompt_logprobs))
        of.take_failures()
    assert told == {name: [len(PROMPTS[int(name)]), None, None] for name in GOOD}
    assert not of._prompt_logprobs


def test_a_suspect_may_leave_before_its_turn(loaded, expected):
    of, _ = poisoned(loaded, 41)
    for place, prompt in enumerate(PROMPTS):
        of.add_request(prompt, LONG, request_id=str(place))
    of.step()
    of.abort("1")
    of.step()
    of.abort("0")
    told = {}
    while of.has_work:
        gather(told, of.step())
        of.take_failures()
    assert_everything_is_back(of)
    assert {name: ids for name, (ids, _) in told.items()} == {name: expected[name] for name in "24"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_ends_all_and_is_raised(loaded, expected, error):
    of, _ = poisoned(loaded)
    for place, prompt in enumerate(PROMPTS):
        of.add_request(prompt, LONG, request_id=str(place))
    forward, of._forward = of._forward, lambda _: (_ for _ in ()).throw(error)
    with pytest.raises(error):
        of.step()
    assert_everything_is_back(of)
    of._forward = forward
    assert to_the_end(of) == (expected, {})


def test_that_steps_failed_is_no_secret(loaded):
    of, _ = poisoned(loaded, 41)
    assert of.notes == loaded.notes
    to_the_end(of)
    assert "steps that failed: 2" in of.notes[-1]
