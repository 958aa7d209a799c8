"""What tests of many requests share: a small model with varied answers, what transformers says, and runs to the end."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nanoserve import SamplingParams
from nanoserve.config import CACHES
from nanoserve.models.llama import Llama
from nanoserve.tokenizer import ByteTokenizer
from nanoserve.weights import LoadedModel
from tests.conftest import config_like_tiny

CPU = torch.device("cpu")
CONFIG = config_like_tiny(
    hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, max_context_tokens=128
)
PROMPTS = [[17], [3, 1, 4, 1, 5, 9, 2], list(range(16)), list(range(40, 73)), [5] * 20]
LONG = SamplingParams(max_new_tokens=64, ignore_eos=True)

CHUNKED = {"max_step_tokens": 7, "max_running": 5}
TIGHT = {"num_blocks": 13, "block_size": 8}
WAYS = {
    **{cache: {"cache": cache} for cache in CACHES},
    **{f"{cache}, chunked": {"cache": cache} | CHUNKED for cache in CACHES},
    "read in place": {"attention": "reference"},
    "read in place, chunked": {"attention": "reference"} | CHUNKED,
    "preempted": TIGHT,
    "preempted, chunked": TIGHT | CHUNKED,
    "preempted, read in place": {"attention": "reference"} | TIGHT,
    "preempted, blocks of one": {"num_blocks": 100, "block_size": 1},
    "one large block each": {"block_size": 256},
    "static": {"is_static": True, "max_running": 3},
}


def varied_model():
    """A model whose answers are varied: its weights are ten times as large as those of a fresh one."""
    torch.manual_seed(0)
    model = Llama(CONFIG).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(0, 0.2)
    return LoadedModel(model, ByteTokenizer(CONFIG.vocab_size), CONFIG, "random", CPU, torch.float32)


def model_of_transformers(loaded):
    """The same weights."""
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=CONFIG.vocab_size, hidden_size=CONFIG.hidden_size, intermediate_size=CONFIG.intermediate_size,
            num_hidden_layers=CONFIG.num_layers, num_attention_heads=CONFIG.num_heads, head_dim=CONFIG.head_dim,
            num_key_value_heads=CONFIG.num_kv_heads, max_position_embeddings=CONFIG.max_context_tokens,
            rms_norm_eps=CONFIG.norm_eps, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        )
    ).eval()  # fmt: skip
    theirs.load_state_dict(loaded.model.state_dict())
    return theirs


def answers_of_transformers(loaded):
    """What transformers says of each prompt alone: 64 greedy tokens, and the logits that each of them comes of."""
    theirs = model_of_transformers(loaded)
    return [greedy(theirs, ids) for ids in PROMPTS]


@torch.inference_mode()
def greedy(theirs, ids):
    prompt = torch.tensor([ids])
    done = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=64, pad_token_id=0
    )
    return done[0, len(ids) :].tolist(), theirs(done).logits[0, len(ids) - 1 : -1]


def run(engine, prompts, params=LONG, *, after_step=lambda engine: None):
    """Tokens and text of each prompt, all added at once."""
    every = params if isinstance(params, list) else [params] * len(prompts)
    for place, (ids, each) in enumerate(zip(prompts, every, strict=True)):
        engine.add_request(ids, each, request_id=str(place))
    told = drain(engine, {}, after_step)
    return [told[str(place)] for place in range(len(prompts))]


def drain(engine, told, after_step=lambda engine: None):
    """Add what comes until no work is left; blocks are counted after every step, and all are back in the end."""
    for _ in range(2000):  # more than all this takes, should there be no end to it
        if engine.has_work:
            gather(told, engine.step())
            engine._scheduler.check()
            after_step(engine)
    assert_everything_is_back(engine)
    return told


def gather(told, events):
    """Tokens and text by request."""
    for event in events:
        ids, text = told.get(event.request_id, ([], ""))
        told[event.request_id] = ([*ids, event.token_id], text + event.text)


def assert_everything_is_back(engine):
    assert not engine.has_work
    assert not engine._answers
    assert not engine._inboxes
    pool = engine._scheduler.pool
    if pool is None:
        assert engine.kv_bytes == 0
    else:
        engine._scheduler.check()
        assert (pool.num_free, engine.num_kv_blocks) == (pool.num_blocks, 0)


def tokens(answers):
    return [ids for ids, _ in answers]


def logits_seen(engine):
    """Fills up with the row of logits that each token came of, by request."""
    seen, forward = {}, engine._forward

    def look(scheduled):
        scores = forward(scheduled)
        for each, row in zip((each for each in scheduled if each.samples), scores.logits, strict=True):
            seen.setdefault(each.request.request_id, []).append(row)
        return scores

    engine._forward = look
    return seen


def spoil_logits(engine, request_id, *, after=2):
    """What comes of a request's logits after some tokens is no number."""
    forward = engine._forward

    def spoil(scheduled):
        scores = forward(scheduled)
        for row, each in enumerate(each for each in scheduled if each.samples):
            if each.request.request_id == request_id and each.request.num_output_tokens == after:
                scores.logits[row] = torch.nan
        return scores

    engine._forward = spoil
