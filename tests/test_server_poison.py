"""A request that makes the engine's step raise, among others: it alone is told so, and nobody else notices."""

import json
import threading

import pytest
import torch
from server_here import ChattyTokenizer, in_background, serving, wait_until

from conftest import ScriptedModel, config_like_tiny
from nanoserve import Engine
from nanoserve.weights import LoadedModel

POISON = 7
ASKED = {"prompt": "Hello", "max_tokens": 12, "temperature": 0}
LETTERS = "abcd"


class Poisoned(ScriptedModel):
    """It raises wherever this token goes in, and says what a bias wants. Its forwards wait for the gate."""

    def __init__(self):
        super().__init__(list(b"said"), num_prompt_tokens=5)
        self.gate = threading.Semaphore(0)
        self.sizes = []

    def __call__(self, token_ids, positions, cache):
        self.gate.acquire()
        if POISON in token_ids.tolist():
            self.sizes.append(len(token_ids))
            raise ArithmeticError("poisoned")
        return super().__call__(token_ids, positions, cache)


def _engine():
    model, config = Poisoned(), config_like_tiny(max_context_tokens=512)
    loaded = LoadedModel(model, ChattyTokenizer(300), config, "scripted", torch.device("cpu"), torch.float32)
    return Engine(loaded, num_blocks=64, block_size=8), model


def _saying(letter, **body):
    return {**ASKED, "logit_bias": {str(ord(letter)): 100}, **body}


POISONS = {
    "while its prompt is computed": {**ASKED, "prompt": [72, 101, 108, 108, POISON]},
    "while it decodes": {**ASKED, "logit_bias": {str(POISON): 100}},
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_one_request_that_cannot_go_on_ends_alone(poison, streams):
    engine, model = _engine()
    with serving(engine) as running:
        others = [in_background(running.complete, **_saying(letter)) for letter in LETTERS]
        others.append(in_background(running.stream, **_saying("s")))
        wait_until(lambda: running.server._desk.num_open == len(others))
        model.gate.release(4)
        bad, errors = in_background(_lines, client=running.client, body={**poison, "stream": streams})
        wait_until(lambda: running.server._desk.num_open == len(others) + 1)
        model.gate.release(10_000)
        for thread, _ in (*others, (bad, errors)):
            thread.join(20)
        ((status, error),) = errors
        assert status == (200 if streams else 500)
        assert error["error"]["type"] == "server_error"
        for letter, (_, answers) in zip(LETTERS, others, strict=False):
            assert answers[0]["choices"][0]["text"] == letter * 12
        assert "".join(chunk["choices"][0]["text"] for chunk in others[-1][1][0]) == "s" * 12
        _check_that_it_goes_on(running, engine)
    assert model.sizes[0] > len(others), "nobody was beside it"


def _lines(client, body):
    """Status, and the error that an answer or the end of a stream is."""
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return answer.status_code, json.loads(lines[-1])


def _check_that_it_goes_on(running, engine):
    assert running.complete(**_saying("z"))["choices"][0]["text"] == "z" * 12
    assert running.client.get("/health").status_code == 200
    assert running.number('nanoserve_requests_total{outcome="error"}') == 1
    assert running.number('nanoserve_requests_total{outcome="length"}') == len(LETTERS) + 2
    assert (engine.num_running, engine.num_kv_blocks) == (0, 0)
