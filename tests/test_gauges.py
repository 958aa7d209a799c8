"""What an engine tells of itself between steps."""

import pytest
from many_requests import LONG, PROMPTS, TIGHT, spoil_logits, varied_model

from nanoserve import Engine, SamplingParams
from nanoserve.errors import ModelError, RequestError


@pytest.fixture(scope="module")
def loaded():
    return varied_model()


def test_requests_are_counted_where_they_are_and_admitted_once(loaded):
    engine, seen, admitted = Engine(loaded, **TIGHT, max_running=3), [], []
    for place, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, LONG, request_id=str(place))
    assert (engine.num_running, engine.num_waiting, engine.admitted) == (0, 5, ())
    while engine.has_work:
        engine.step()
        seen.append((engine.num_running, engine.num_waiting))
        admitted.append(engine.admitted)
    assert (seen[0], seen[-1]) == ((3, 2), (0, 0))
    assert engine.counts.num_preemptions > 0
    assert (admitted[:2], sum(admitted, ())) == ([("0", "1", "2"), ()], ("0", "1", "2", "3", "4"))
    engine.step()
    assert engine.admitted == ()


@pytest.mark.parametrize(
    ("options", "most", "blocks"),
    [(TIGHT, 13 * 8 + 1, 13), ({"num_blocks": 64}, 128, 64), ({"cache": "contiguous"}, 128, None)],
)
def test_the_longest_request_fits_and_one_token_more_is_refused(loaded, options, most, blocks):
    engine = Engine(loaded, **options)
    assert (engine.max_request_tokens, engine.num_kv_blocks_total) == (most, blocks)
    engine.add_request(PROMPTS[1], SamplingParams(max_new_tokens=most - 7))
    with pytest.raises(RequestError):
        engine.add_request(PROMPTS[1], SamplingParams(max_new_tokens=most - 6))


def test_what_is_taken_of_failures_is_not_raised_and_what_is_left_is(loaded):
    engine = Engine(loaded)
    for name in ("taken", "raised"):
        engine.add_request(PROMPTS[0], LONG, request_id=name)
    spoil_logits(engine, "taken", after=0)
    assert [event.request_id for event in engine.step()] == ["raised"]
    ((name, error),) = engine.take_failures()
    assert (name, type(error), engine.take_failures()) == ("taken", ModelError, [])
    spoil_logits(engine, "raised", after=2)
    assert [len(engine.step()) for _ in range(2)] == [1, 0]
    engine.add_request(PROMPTS[0], LONG, request_id="new")
    with pytest.raises(ModelError, match="the largest logit is nan"):
        engine.step()
    assert (engine.admitted, engine.take_failures()) == ((), [])
    assert engine.step()
    assert engine.admitted == ("new",)
