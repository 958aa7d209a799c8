"""Many requests in one pool: each answer is exact, and the one that its prompt has alone, whatever happens around it.

transformers with the same weights is the reference, for each prompt by itself.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from many_requests import (
    CONFIG,
    CPU,
    LONG,
    PROMPTS,
    WAYS,
    answers_of_transformers,
    drain,
    gather,
    logits_seen,
    run,
    tokens,
    varied_model,
)

from nanoserve import Engine, SamplingParams
from nanoserve.attention import attend
from nanoserve.cache.blocks import BlockAllocator, BlockTable
from nanoserve.cache.kv import NoCache
from nanoserve.cache.paged import PagedPart, PagedPool, PagedStep
from nanoserve.config import CACHES
from nanoserve.sampling import Sampler
from tests.conftest import config_like_tiny


@pytest.fixture(scope="module")
def loaded():
    return varied_model()


@pytest.fixture(scope="module")
def expected(loaded):
    return answers_of_transformers(loaded)


# Against transformers.


@pytest.mark.parametrize("way", WAYS)
def test_requests_together_have_transformers_tokens_and_logits(loaded, expected, way):
    engine = Engine(loaded, **WAYS[way])
    seen = logits_seen(engine)
    assert tokens(run(engine, PROMPTS)) == [ids for ids, _ in expected]
    for place, (_, logits) in enumerate(expected):
        assert (torch.stack(seen[str(place)]) - logits).abs().max() < 1e-4
    assert (engine.counts.num_preemptions > 0) == ("preempted" in way)


@pytest.mark.parametrize("way", [*CACHES, "read in place", "none, chunked", "paged, chunked"])
def test_a_request_alone_has_transformers_tokens(loaded, expected, way):
    engine = Engine(loaded, **WAYS[way])
    for prompt, (ids, _) in zip(PROMPTS, expected, strict=True):
        assert tokens(run(engine, [prompt])) == [ids]


def test_the_kernel_over_block_tables_has_transformers_tokens(loaded, expected):
    """Triton's interpreter is slow: two requests, a few tokens."""
    pytest.importorskip("triton")
    some = SamplingParams(max_new_tokens=6, ignore_eos=True)
    if torch.cuda.is_available():
        pytest.skip("the kernel is compiled for the GPU, and this model is on the CPU")
    answers = tokens(run(Engine(loaded, attention="triton", block_size=8), PROMPTS[1:4], some))
    assert answers == [ids[:6] for ids, _ in expected[1:4]]


ONE = SamplingParams(max_new_tokens=1)


def test_a_row_of_a_static_batch_that_has_finished_is_not_sent_back_to_the_queue(loaded, expected):
    """Its block is all that the other one lacks in the end."""
    engine = Engine(loaded, is_static=True, num_blocks=64, block_size=1)
    assert tokens(run(engine, PROMPTS[:1] * 2, [LONG, ONE])) == [expected[0][0], expected[0][0][:1]]
    assert engine.counts.num_preemptions == 1


def test_padding_is_part_of_what_a_step_may_run(loaded, expected):
    """The first row has finished while the second prompt still runs in chunks."""
    engine = Engine(loaded, is_static=True, max_running=2, max_step_tokens=4)
    num_run, forward = [], engine._forward
    engine._forward = lambda scheduled: num_run.append(sum(each.num_new for each in scheduled)) or forward(scheduled)
    assert tokens(run(engine, [PROMPTS[0], PROMPTS[4]], [ONE, LONG])) == [expected[0][0][:1], expected[4][0]]
    assert num_run[:2] == [4, 4]
    assert max(num_run) == 4


# An answer depends on its prompt and its parameters, on nothing else.


HOW = {
    "greedy": {},
    "penalised": {"repetition_penalty": 1.3},
    "sampled": {"temperature": 1.0, "seed": 1},
    "filtered": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "seed": 2},
    "sampled, penalised": {"temperature": 1.0, "repetition_penalty": 1.2, "seed": 3},
    "stopped": {"stop": ("\u27e82", "\ufffd\ufffd\ufffd")},
    "sampled, stopped": {"temperature": 1.0, "stop": ("\u27e82",), "seed": 4},
}


@torch.inference_mode()
def answer_plainly(loaded, prompt, params):
    """Tokens and text without an engine: everything runs again for every token."""
    sampler, ids, text, is_hit = Sampler(params, CPU), list(prompt), "", False
    while not is_hit and len(ids) < len(prompt) + params.max_new_tokens:
        hidden = loaded.model(torch.tensor(ids), torch.arange(len(ids)), NoCache())
        ids.append(sampler.sample(loaded.model.compute_logits(hidden)[-1], ids))
        text = loaded.tokenizer.decode(ids[len(prompt) :])
        hits = [text.index(stop) for stop in params.stop if stop in text]
        text = text[: min(hits, default=None)]
        is_hit = bool(hits) or (ids[-1] in CONFIG.eos_token_ids and not params.ignore_eos)
    return ids[len(prompt) :], text


@pytest.fixture(scope="module")
def asked(loaded):
    """Prompts, parameters, and what comes of them where nothing is shared."""
    found = []
    for place, how in enumerate(HOW.values()):
        for prompt in PROMPTS[place % 2 :: 2]:
            params = SamplingParams(max_new_tokens=24, ignore_eos=place % 3 > 0, **how)
            found.append((prompt, params, answer_plainly(loaded, prompt, params)))
    return found


def any_engine(loaded, rng):
    """Its pool holds the longest request, and not much more."""
    block_size = rng.choice([1, 2, 8, 16, 64])
    least = -(-(33 + 24 - 1) // block_size)
    return Engine(
        loaded,
        block_size=block_size,
        num_blocks=least + rng.randint(0, least // 4),
        watermark_blocks=rng.randint(0, 2),
        max_running=rng.randint(1, 8),
        max_step_tokens=rng.choice([8, 13, 50, 2048]),
        chunks_prefill=rng.random() < 0.8,
        **rng.choice([{"is_static": True}, *({"prefix_cache": policy} for policy in ("off", "lru", "lfu", "size"))]),
        attention=rng.choice(["sdpa", "reference"]),
    )


@pytest.mark.parametrize("some", range(4))
def test_an_answer_does_not_depend_on_what_runs_beside_it_nor_on_how(loaded, asked, some):
    num_preemptions = 0
    for seed in range(some, 16, 4):
        rng = random.Random(seed)
        engine, told = any_engine(loaded, rng), {}
        for place in rng.sample(range(len(asked)), len(asked)):
            prompt, params, _ = asked[place]
            engine.add_request(prompt, params, request_id=str(place), priority=rng.randint(0, 2))
            for _ in range(rng.randint(0, 2)):
                gather(told, engine.step())
        told = drain(engine, told)
        assert [told[str(place)] for place in range(len(asked))] == [answer for _, _, answer in asked], seed
        num_preemptions += engine.counts.num_preemptions
    assert num_preemptions > 5


# What is not stored is not read.


@torch.inference_mode()
def spoil_what_is_not_stored(engine):
    """Every slot of the pool without a stored or remembered position becomes NaN, inside held blocks as well."""
    pool, tables = engine._memory.pool, engine._scheduler.tables
    unused = torch.ones(pool.num_blocks * pool.block_size, dtype=torch.bool)
    for table in tables:
        unused[table.slots(0, table.num_tokens)] = False
    if engine._scheduler.prefixes is not None:
        unused.view(pool.num_blocks, -1)[[*engine._scheduler.prefixes._idle]] = False
    pool._buffer[:, :, :, unused] = torch.nan
    pool._workspace.fill_(torch.nan)


@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way].get("cache", "paged") == "paged"])
def test_nobody_reads_what_is_free_or_not_yet_written(loaded, expected, way):
    engine = Engine(loaded, **WAYS[way] | ({} if "num_blocks" in WAYS[way] else {"num_blocks": 64}))
    spoil_what_is_not_stored(engine)
    assert tokens(run(engine, PROMPTS, after_step=spoil_what_is_not_stored)) == [ids for ids, _ in expected]


@pytest.mark.parametrize("in_place", [None, "reference"])
def test_a_fork_writes_into_a_copy_and_the_original_reads_what_it_had(in_place):
    config = config_like_tiny(num_layers=2, num_heads=4, num_kv_heads=2)
    pool, allocator = PagedPool(config, 5, 4, torch.float32, CPU), BlockAllocator(5)
    pool._buffer.fill_(torch.nan)
    first = BlockTable(allocator, 4)
    first.grow(6)
    old, new = torch.randn(2, 2, 6, 2, 4), torch.randn(2, 2, 2, 2, 4)  # layers, keys and values, positions, heads
    for layer, stored in enumerate(old):
        next(PagedStep(pool, [PagedPart(first, 0, 6)]).extend(layer, *stored))
    second = first.fork()
    pool.copy_block(*second.grow(7))
    assert first.grow(7) is None
    step = PagedStep(pool, [PagedPart(first, 6, 1), PagedPart(second, 6, 1)], in_place=in_place)
    queries = torch.randn(2, 4, 4)
    for layer in range(2):
        outs = attend(queries, *new[layer], layer=layer, cache=step)
        for row, table in enumerate((first, second)):
            keys, values = (torch.cat((old[layer, each], new[layer, each, row : row + 1])) for each in range(2))
            assert pool.whole(layer)[0][:, table.slots(0, 7)].transpose(0, 1).equal(keys)
            torch.testing.assert_close(outs[row], attended(queries[row], keys, values))


def attended(query, keys, values):
    """One query [heads, head_dim] over keys and values [positions, kv_heads, head_dim]."""
    out = F.scaled_dot_product_attention(query[:, None], keys.transpose(0, 1), values.transpose(0, 1), enable_gqa=True)
    return out[:, 0]
