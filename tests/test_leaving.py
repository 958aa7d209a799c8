"""Requests that end early, cannot go on, or are refused: the others notice nothing, and nothing is kept."""

import pytest
from many_requests import (
    CHUNKED,
    CONFIG,
    LONG,
    PROMPTS,
    TIGHT,
    WAYS,
    answers_of_transformers,
    assert_everything_is_back,
    drain,
    gather,
    run,
    spoil_logits,
    tokens,
    varied_model,
)

from nanoserve import Engine, SamplingParams
from nanoserve.config import CACHES
from nanoserve.errors import ConfigError, ModelError, RequestError


@pytest.fixture(scope="module")
def loaded():
    return varied_model()


@pytest.fixture(scope="module")
def expected(loaded):
    return answers_of_transformers(loaded)


def test_a_request_that_cannot_go_on_costs_the_others_nothing(loaded, expected):
    engine, told, errors = Engine(loaded, **TIGHT), {}, []
    for place, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, LONG, request_id=str(place))
    spoil_logits(engine, "2")
    while engine.has_work:
        try:
            gather(told, engine.step())
        except ModelError as error:
            errors.append(error)
        engine._scheduler.check()
    assert_everything_is_back(engine)
    assert len(errors) == 1
    wanted = {str(place): ids[: 2 if place == 2 else 64] for place, (ids, _) in enumerate(expected)}
    assert {name: ids for name, (ids, _) in told.items()} == wanted


def test_an_error_is_raised_where_its_stream_is_read_and_nowhere_else(loaded, expected):
    engine = Engine(loaded)
    good, bad = engine.stream(PROMPTS[0], LONG), engine.stream(PROMPTS[1], LONG)
    next(bad)
    spoil_logits(engine, next(iter(engine._inboxes)))
    assert [event.token_id for event in good] == expected[0][0]
    assert next(bad).token_id == expected[1][0][1]
    with pytest.raises(ModelError, match="the largest logit is nan"):
        next(bad)
    assert_everything_is_back(engine)


def test_a_forward_that_fails_is_told_to_all_that_were_in_it(loaded, expected):
    engine = Engine(loaded)
    streams = [engine.stream(prompt, LONG) for prompt in PROMPTS[:2]]
    for stream in streams:
        next(stream)
    forward, engine._forward = engine._forward, lambda _: (_ for _ in ()).throw(RuntimeError("out of memory"))
    for stream in streams:
        with pytest.raises(RuntimeError, match="out of memory"):
            list(stream)
    engine._forward = forward
    assert_everything_is_back(engine)
    assert tokens(run(engine, PROMPTS)) == [ids for ids, _ in expected]


def test_a_last_token_without_a_text_is_an_error_of_its_request_alone(loaded, expected, monkeypatch):
    engine = Engine(loaded)
    engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=1), request_id="odd")
    engine.add_request(PROMPTS[1], LONG, request_id="even")
    decode = loaded.tokenizer.decode
    odd = expected[0][0][0]
    monkeypatch.setattr(loaded.tokenizer, "decode", lambda ids, *how: decode(ids, *how) if odd not in ids else 1 / 0)
    told = {}
    gather(told, engine.step())
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError):
        gather(told, engine.step())
    assert drain(engine, told)["even"][0] == expected[1][0]


@pytest.mark.parametrize("way", ["paged", "contiguous", "paged, chunked", "preempted", "static"])
def test_a_hang_up_costs_nothing_from_then_on(loaded, expected, way):
    """A request runs its prompt and all its tokens but the last; one that leaves after three, two of them."""
    engine, told = Engine(loaded, **WAYS[way] | {"num_blocks": 0}), {}
    for place in range(2):
        engine.add_request(PROMPTS[place], LONG, request_id=str(place))
    for _ in range(3):
        gather(told, engine.step())
    engine.abort("1")
    assert drain(engine, told)["0"][0] == expected[0][0]
    num_told = len(told["1"][0])
    assert (num_told, engine.counts.num_positions) == (2 if "chunked" in way else 3, (1 + 63) + (7 + num_told - 1))


def test_whoever_leaves_gives_everything_back_wherever_it_is(loaded, expected):
    """One decodes, one is in the middle of its prompt, one waits."""
    engine, told = Engine(loaded, max_running=3, max_step_tokens=12, num_blocks=40, block_size=4), {}
    for place in (0, 4, 3, 2):
        engine.add_request(PROMPTS[place], LONG, request_id=str(place))
    for _ in range(3):
        gather(told, engine.step())
    assert [len(table.blocks) for table in engine._scheduler.tables] == [1, 6, 3], "1 + 2, 20 + 1 and 10 positions"
    assert [engine.num_kv_blocks, *(engine.abort(name) or engine.num_kv_blocks for name in "243")] == [10, 10, 4, 1]
    assert drain(engine, told)["0"][0] == expected[0][0]


@pytest.mark.parametrize("cache", CACHES)
def test_leaving_a_stream_after_three_tokens_gives_everything_back(loaded, cache):
    engine = Engine(loaded, cache=cache)
    stream = engine.stream(PROMPTS[1], LONG)
    assert [next(stream).index for _ in range(3)] == [0, 1, 2]
    assert bool(engine.kv_bytes) == (cache != "none")
    stream.close()
    assert_everything_is_back(engine)
    assert engine.counts.num_positions == 7 + 2


def test_a_call_that_raises_gives_everything_back(loaded, expected):
    engine = Engine(loaded, **TIGHT)
    forward, engine._forward = engine._forward, lambda each: forward(each) if engine.counts.num_steps < 9 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS, LONG)
    assert_everything_is_back(engine)
    engine._forward = forward
    assert [list(each.token_ids) for each in engine.generate(PROMPTS, LONG)] == [ids for ids, _ in expected]
    assert_everything_is_back(engine)


def test_what_the_pool_can_never_hold_is_refused_when_it_is_added(loaded, expected):
    """105 positions are one block more than there are: all tokens but the last, which is never stored."""
    engine = Engine(loaded, **TIGHT)
    engine.add_request(PROMPTS[0], LONG, request_id="0")
    for ask in (engine.add_request, engine.stream, engine.generate):
        with pytest.raises(RequestError, match="max_new_tokens 73 need 14 KV blocks, the whole pool has 13; ask for"):
            ask(PROMPTS[3], SamplingParams(max_new_tokens=73))
    with pytest.raises(RequestError, match="need 14 KV blocks"):
        engine.generate([PROMPTS[1], PROMPTS[3]], SamplingParams(max_new_tokens=73))
    assert engine.counts.num_positions == 0
    assert drain(engine, {})["0"][0] == expected[0][0]
    assert engine.counts.num_positions == 1 + 63


def test_the_largest_request_that_fits_has_the_pool_to_itself(loaded):
    engine = Engine(loaded, **TIGHT)
    (answer,) = run(engine, [PROMPTS[3]], SamplingParams(max_new_tokens=72, ignore_eos=True))
    assert len(answer[0]) == 72


# What is held, and what is not.


def test_a_prompt_that_fills_its_block_buys_the_next_one_with_its_first_decode(loaded):
    engine = Engine(loaded, block_size=16, num_blocks=8)
    engine.add_request(PROMPTS[2], LONG)
    held = [engine.step() and engine.num_kv_blocks for _ in range(18)]
    assert held == [1] + [2] * 16 + [3]


@pytest.mark.parametrize("how", [TIGHT, TIGHT | CHUNKED, {"num_blocks": 64}, {"num_blocks": 64, "is_static": True}])
def test_every_byte_of_the_pool_holds_a_position_or_is_counted_as_free_or_wasted(loaded, how):
    engine = Engine(loaded, **how)
    per_token = CONFIG.kv_bytes_per_token(4)
    assert per_token == 2 * 2 * 2 * 8 * 4
    size = engine._scheduler.config.block_size
    assert engine.kv_bytes == engine._memory.pool._buffer.nbytes == how["num_blocks"] * size * per_token
    assert (engine.kv_unused_bytes, engine.kv_waste_bytes) == (engine.kv_bytes, 0)
    held = []

    def account(engine):
        num_stored = sum(table.num_tokens for table in engine._scheduler.tables)
        assert engine.kv_waste_bytes + engine.kv_unused_bytes + num_stored * per_token == engine.kv_bytes
        assert engine.kv_unused_bytes == (how["num_blocks"] - engine.num_kv_blocks) * size * per_token
        held.append(engine.kv_waste_bytes)

    run(engine, PROMPTS, after_step=account)
    assert 0 < max(held) <= len(PROMPTS) * (size - 1) * per_token


@pytest.mark.parametrize("cache", ["contiguous", "growing", "none"])
def test_without_a_pool_there_is_nothing_to_count_in_it(loaded, cache):
    engine = Engine(loaded, cache=cache)
    engine.add_request(PROMPTS[1], LONG)
    engine.step()
    reserved = {"contiguous": 7 + 64, "growing": 7, "none": 0}[cache]
    assert engine.kv_bytes == reserved * CONFIG.kv_bytes_per_token(4)
    assert (engine.num_kv_blocks, engine.kv_waste_bytes, engine.kv_unused_bytes, engine.pool_plan) == (None,) * 4


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_step_tokens": 0}, "max_step_tokens must be at least 1, not 0"),
        ({"max_step_tokens": -5}, "max_step_tokens must be at least 1, not -5"),
        ({"max_step_tokens": 2.5}, "max_step_tokens must be at least 1, not 2.5"),
        ({"max_step_tokens": 31}, "max_step_tokens 31 is less than max_running 32"),
        ({"max_running": 0}, "max_running must be at least 1, not 0"),
        ({"max_running": -1}, "max_running must be at least 1, not -1"),
        ({"num_blocks": -1}, "num_blocks must be at least 0, not -1"),
        ({"num_blocks": "64"}, "num_blocks must be at least 0, not '64'"),
        ({"watermark_blocks": -1}, "watermark_blocks must be at least 0, not -1"),
        ({"block_size": 0}, r"block_size must be a power of two \(1, 2, 4, 8, 16, 32, 64, 128, 256\).* not 0"),
        ({"block_size": 12}, "block_size must be a power of two .* not 12"),
        ({"block_size": 16.0}, "block_size must be a power of two .* not 16.0"),
        ({"block_size": 512}, "block_size must be a power of two .* not 512"),
        (
            {"max_runing": 4},
            "unknown Engine option 'max_runing'; choose one of: cache, kv_memory, prefix_cache, attention, graphs, "
            "max_running",
        ),
        ({"cache": "contiguous", "num_blocks": 4}, "num_blocks and kv_memory size the pool of cache 'paged'; cache"),
        ({"cache": "none", "kv_memory": "1GiB"}, "cache 'none' has none"),
        ({"kv_memory": "lots"}, "kv_memory must be auto, bytes .* not 'lots'"),
        ({"kv_memory": "0"}, "kv_memory must be auto"),
        ({"kv_memory": "-1GiB"}, "kv_memory must be auto"),
        ({"kv_memory": "101%"}, "kv_memory must be auto"),
        ({"kv_memory": "100"}, "100 bytes, less than one block of 16 tokens: 4,096 bytes"),
        ({"kv_memory": "1000TiB"}, "more than the .* that are free"),
        ({"cache": "contiguous", "attention": "reference"}, "attention 'reference' follows block tables: choose cache"),
        ({"cache": "none", "attention": "triton"}, "attention 'triton' follows block tables"),
        ({"attention": "flash"}, "unknown attention 'flash'; choose one of: auto, sdpa, reference, triton"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_runs(loaded, options, message):
    with pytest.raises(ConfigError, match=message):
        Engine(loaded, **options)


def test_the_kernel_is_refused_on_a_device_that_it_cannot_run_on(loaded, monkeypatch):
    kernel = pytest.importorskip("nanoserve.paged_kernel")
    monkeypatch.setattr(kernel, "_INTERPRETED", False)
    with pytest.raises(ConfigError, match="does not run on device 'cpu'; choose cuda"):
        Engine(loaded, attention="triton")


def test_calls_that_make_no_sense_are_refused_and_change_nothing(loaded, expected):
    engine = Engine(loaded)
    engine.add_request(PROMPTS[0], LONG, request_id="0")
    for message, call in {
        "request id '0' is already in use": lambda: engine.add_request(PROMPTS[1], request_id="0"),
        "priority must be an integer, not 'high'": lambda: engine.add_request(PROMPTS[1], priority="high"),
        "no request '1' is waiting or running": lambda: engine.abort("1"),
        "2 sets of sampling parameters for 3 prompts": lambda: engine.generate(PROMPTS[:3], [LONG] * 2),
        "1 sets of sampling parameters for 0 prompts": lambda: engine.generate([], [LONG]),
    }.items():
        with pytest.raises(RequestError, match=message):
            call()
    assert drain(engine, {})["0"][0] == expected[0][0]
    with pytest.raises(RequestError, match="no request '0' is waiting or running"):
        engine.abort("0")


def test_a_step_without_work_is_no_step(loaded):
    engine = Engine(loaded)
    assert (engine.step(), engine.counts.num_steps) == ([], 0)


def test_what_is_told_of_whom_nobody_streams_waits_for_the_next_step(scripted):
    engine = Engine(scripted(list(b"ab")))
    engine.add_request((1, 2, 3), SamplingParams(max_new_tokens=2), request_id="by hand")
    assert len(list(engine.stream((1, 2, 3), SamplingParams(max_new_tokens=4)))) == 4
    assert engine.has_work
    assert [(event.request_id, event.text) for event in engine.step()] == [("by hand", "a"), ("by hand", "b")]
    assert not engine.has_work
