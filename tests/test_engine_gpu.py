"""What only a GPU can show of an engine: how often a step waits for it, and that graphs are captured and play alike.

Everything that leads to it is tested without one: `test_no_waiting.py`, `test_replay.py`, `test_fused.py`.
"""

import warnings

import pytest
import torch
from many_requests import PROMPTS, run

from nanoserve import Engine, EngineConfig, SamplingParams
from nanoserve.replay import buckets
from nanoserve.weights import load_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=1)
OPTIONS = {"num_blocks": 64, "block_size": 8, "max_running": 5}


@pytest.fixture(scope="module")
def on_gpu():
    """The smallest shape with larger weights than usual: a fresh one repeats its last token."""
    loaded = load_model(EngineConfig(model="tiny", device="cuda", dtype="float32"))
    torch.manual_seed(0)
    for weight in loaded.model.parameters():
        if weight.ndim > 1:
            weight.normal_(0, 0.2)
    return loaded


def waits_of_each_step(engine, params):
    """How often torch says that the host waits, step by step."""
    for place, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, params[place % len(params)])
    found = []
    while engine.has_work:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                engine.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found.append(sum("synchroniz" in str(each.message) for each in caught))
    return found


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("attention", ["triton", "sdpa"])
@pytest.mark.parametrize("params", [[GREEDY], [GREEDY, DRAWN]], ids=["greedy", "drawn"])
def test_a_step_waits_once(on_gpu, graphs, attention, params):
    engine = Engine(on_gpu, attention=attention, graphs=graphs, **OPTIONS)
    waits_of_each_step(engine, params)  # compiles, captures
    assert set(waits_of_each_step(engine, params)) == {1}


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_captured_steps_have_the_tokens_of_eager_ones(on_gpu, params):
    eager, captured = (Engine(on_gpu, graphs=graphs, **OPTIONS) for graphs in ("off", "auto"))
    assert captured.warm_up() == len(buckets(OPTIONS["max_running"]))
    assert run(captured, PROMPTS, params) == run(eager, PROMPTS, params)
    assert captured.notes == ()


def test_a_prompt_in_chunks_has_the_tokens_of_one_in_one_piece(on_gpu):
    chunked = Engine(on_gpu, **OPTIONS | {"max_step_tokens": 7})
    assert run(chunked, PROMPTS, GREEDY) == run(Engine(on_gpu, **OPTIONS), PROMPTS, GREEDY)
