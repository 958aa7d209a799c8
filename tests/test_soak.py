"""Thousands of requests through a pool that is too small: no block is lost, nobody starves, no answer changes.

They arrive, hang up and overtake at random. How long a request may take is counted in steps, and follows from those
before it.
"""

import dataclasses
import random

import pytest
import torch

from nanoserve import Engine, SamplingParams
from nanoserve.cache.blocks import BlockTable
from nanoserve.errors import BlockError
from nanoserve.models.llama import Llama
from nanoserve.tokenizer import ByteTokenizer
from nanoserve.weights import LoadedModel
from tests.conftest import config_like_tiny

CONFIG = config_like_tiny()
PROMPTS = [[(3 * place + 7 * number) % 256 for number in range(length)] for place, length in enumerate(range(1, 31, 3))]
PARAMS = [
    SamplingParams(max_new_tokens=budget, temperature=temperature, seed=budget)
    for budget in (1, 4, 9, 16)
    for temperature in (0.0, 1.0)
]
SMALL = {"num_blocks": 16, "block_size": 4, "max_running": 8, "max_step_tokens": 24}
"""The longest request, of 28 + 16 tokens, needs 11 blocks."""


@pytest.fixture(scope="module")
def loaded():
    torch.manual_seed(0)
    model = Llama(CONFIG).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(0, 1)
    return LoadedModel(model, ByteTokenizer(CONFIG.vocab_size), CONFIG, "random", torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def alone(loaded):
    """Answers by prompt and parameters, each of which had a cache of its own."""
    engine = Engine(loaded, cache="contiguous")
    return {
        (place, params): engine.generate(prompt, params)[0] for place, prompt in enumerate(PROMPTS) for params in PARAMS
    }


@dataclasses.dataclass
class Live:
    """A request that has not ended. `allowed` steps after its arrival it has."""

    asked: tuple[int, SamplingParams]
    priority: int
    work: int
    allowed: int
    ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    age: int = 0


class Soak:
    """An engine, the requests in it, and how long each may take.

    The oldest request always runs, and each step brings it a token or a share of its prompt: this is its `work`. So
    a request has ended after the work of all before it and its own. Who overtakes may find the pool full and have to
    wait for those that run, at most `max_running`; nobody is admitted meanwhile.
    """

    def __init__(self, loaded, alone, seed, **options):
        self.rng, self.alone = random.Random(seed), alone
        self.engine = Engine(loaded, **SMALL | options)
        self.config = self.engine._scheduler.config
        self.live: dict[str, Live] = {}
        self.num_added = self.num_ended = 0

    def run(self, num_requests, *, overtaking=0.0):
        while self.num_added < num_requests or self.live:
            if self.num_added < num_requests and len(self.live) < 30 and self.rng.random() < 0.4:
                for _ in range(self.rng.randint(1, 4)):
                    self.arrive(-1 if self.rng.random() < overtaking else 0)
            if self.live and self.rng.random() < 0.02:
                self.hang_up(self.rng.choice(list(self.live)))
            self.step()
        assert not self.engine.has_work
        assert not self.engine._answers
        assert self.engine._scheduler.pool.num_free == self.config.num_blocks

    def arrive(self, priority):
        place, params = self.rng.randrange(len(PROMPTS)), self.rng.choice(PARAMS)
        name = self.engine.add_request(PROMPTS[place], params, request_id=str(self.num_added), priority=priority)
        work = self.work_of(len(PROMPTS[place]), params.max_new_tokens)
        before = sum(each.work for each in self.live.values() if each.priority <= priority)
        overtakes = [each for each in self.live.values() if each.priority > priority]
        wait = self.config.max_running * self.work_of(len(PROMPTS[-1]), PARAMS[-1].max_new_tokens) if overtakes else 0
        for each in overtakes:
            each.allowed += work + wait
        self.live[name] = Live((place, params), priority, work, before + work + wait)
        self.num_added += 1

    def work_of(self, num_prompt, num_new):
        """Steps that a request takes at most while it is the oldest: a chunk at least as large as this, or a token."""
        chunk = self.config.max_step_tokens - self.config.max_running + 1
        return -(-(num_prompt + num_new) // chunk) + num_new

    def hang_up(self, name):
        self.engine.abort(name)
        left = self.live.pop(name)
        answer = self.alone[left.asked]
        assert tuple(left.ids) == answer.token_ids[: len(left.ids)]
        assert answer.text.startswith(left.text)

    def step(self):
        events = self.engine.step()
        self.engine._scheduler.check()
        for each in self.live.values():
            each.age += 1
            assert each.age <= each.allowed, f"{each} starves"
        for event in events:
            each = self.live[event.request_id]
            each.ids.append(event.token_id)
            each.text += event.text
            if event.finish_reason is not None:
                self.end(event.request_id)

    def end(self, name):
        each = self.live.pop(name)
        answer = self.alone[each.asked]
        assert (tuple(each.ids), each.text) == (answer.token_ids, answer.text), name
        self.num_ended += 1


WAYS = {
    "in order": {},
    "overtaking": {"overtaking": 0.1},
    "whole prompts": {"chunks_prefill": False, "max_step_tokens": 16},
    "a reserve": {"watermark_blocks": 3, "overtaking": 0.1},
    "static": {"is_static": True},
    "read in place": {"attention": "reference", "block_size": 1, "num_blocks": 50},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_short_soak(loaded, alone, way):
    options = dict(WAYS[way])
    overtaking = options.pop("overtaking", 0.0)
    soak = Soak(loaded, alone, seed=1, **options)
    soak.run(150, overtaking=overtaking)
    assert soak.num_ended > 120
    assert soak.engine.counts.num_preemptions > 5


@pytest.mark.slow
@pytest.mark.simulated
@pytest.mark.parametrize("overtaking", [0.0, 0.1])
def test_ten_thousand_requests(loaded, alone, overtaking):
    soak = Soak(loaded, alone, seed=2)
    soak.run(10_000, overtaking=overtaking)
    assert soak.num_ended > 8_000
    assert soak.engine.counts.num_preemptions > 500


def test_a_planted_leak_is_named(loaded, alone, monkeypatch):
    release = BlockTable.release

    def forgetful(table):
        del table.blocks[3:4]
        release(table)

    monkeypatch.setattr(BlockTable, "release", forgetful)
    with pytest.raises(BlockError, match=r"has \d+ owners, and \d tables hold it"):
        Soak(loaded, alone, seed=3).run(100)


def test_planted_favour_of_the_young_is_seen_as_starving(loaded, alone, monkeypatch):
    add = Engine.add_request
    monkeypatch.setattr(
        Engine,
        "add_request",
        lambda *asked, request_id, priority: add(*asked, request_id=request_id, priority=-int(request_id)),
    )
    with pytest.raises(AssertionError, match="starves"):
        Soak(loaded, alone, seed=4).run(1000)
