"""The pool of KV blocks: what is asked for, what it comes to, and arithmetic that can be checked by hand."""

import dataclasses
import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.counters import count_work
from nanoserve.cache.kv import NoCache
from nanoserve.cache.sizing import AUTO_SHARES, PoolPlan, in_words, parse_kv_memory, plan_pool, step_bytes
from nanoserve.catalog import SHAPES
from nanoserve.config import ModelConfig
from nanoserve.errors import ConfigError
from nanoserve.models.llama import Llama

KiB, MiB, GiB = 1024, 1024**2, 1024**3
GPT2 = ModelConfig(
    vocab_size=50257, hidden_size=768, intermediate_size=3072, num_layers=12, num_heads=12, num_kv_heads=12,
    head_dim=64, max_context_tokens=1024, tie_embeddings=True,
)  # fmt: skip
GIVEN = {"bytes_per_number": 2, "block_size": 16, "max_running": 32, "free_bytes": 16 * GiB, "device_kind": "cpu"}


def plan(model="llama-3.2-1b", kv_memory="auto", **changes) -> PoolPlan:
    config = SHAPES[model] if isinstance(model, str) else model
    return plan_pool(config, kv_memory=kv_memory, **(GIVEN | changes))


# what is asked for


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", None),
        ("800000000", 800_000_000),
        ("1", 1),
        ("16B", 16),
        ("512MiB", 512 * MiB),
        ("2GiB", 2 * GiB),
        ("2 gib", 2 * GiB),
        ("1TiB", 1024 * GiB),
        ("1KiB", KiB),
        ("3kB", 3_000),
        ("20MB", 20_000_000),
        ("1.5GB", 1_500_000_000),
        ("0.1GiB", 107_374_182),  # and 0.4 of a byte
        ("1TB", 10**12),
        ("40%", Fraction(2, 5)),
        ("0.5 %", Fraction(1, 200)),
        ("100%", Fraction(1)),
    ],
)
def test_sizes_and_shares_are_read_exactly(text, expected):
    found = parse_kv_memory(text)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "0", "0GiB", "0.4B", "0%", "100.1%", "200%", "-1GiB", "-40%", "+1GiB", "nan", "inf", "nan%", "1e9"),
        *("2G", "2GiBs", "2 Gi B", "GiB", "%", "40%%", "40 percent", "1,5GB", "1_000", ".5GiB", "2GiB\n", "\u0664GiB"),
        *("AUTO", "none", "9" * 5000, "1." + "0" * 5000, None, 0.5, -1),
    ],
)
def test_anything_else_is_refused_with_the_forms_there_are(text):
    with pytest.raises(ConfigError) as caught:
        parse_kv_memory(text)
    assert str(caught.value) == (
        "kv_memory must be auto, bytes (800000000), a size (512MiB, 2GiB, 1.5GB) or a share of the free memory up to "
        f"100% (40%), not {text!r}"
    )
    with pytest.raises(ConfigError, match=r"^kv_memory must be auto"):
        plan(kv_memory=text)


# what it comes to


@pytest.mark.parametrize(
    ("model", "bytes_per_number", "per_token"),
    [("llama-3.2-1b", 2, 32_768), (GPT2, 2, 36_864), ("smollm2-135m-random", 4, 46_080)],
)
def test_a_block_holds_the_keys_and_values_of_its_tokens_in_all_layers(model, bytes_per_number, per_token):
    for block_size in (1, 16, 256):
        found = plan(model, bytes_per_number=bytes_per_number, block_size=block_size)
        assert found.bytes_per_block == block_size * per_token


@pytest.mark.parametrize(("device_kind", "percent"), [("cpu", 40), ("cuda", 90)])
def test_auto_takes_a_share_of_what_is_left_beside_the_weights(device_kind, percent):
    found = plan(device_kind=device_kind, free_bytes=12 * GiB, weights_bytes=2 * GiB)
    assert found.budget_bytes == 10 * GiB * percent // 100
    assert found.num_blocks == found.budget_bytes // (512 * KiB)


def test_auto_leaves_what_a_step_needs_where_that_is_more_than_the_rest():
    needed = step_bytes(SHAPES["llama-3.2-1b"], 2, 2048)
    assert needed == 2048 * (3 * (2048 + 8192) + 2 * 64) * 2
    found = plan(device_kind="cuda", free_bytes=GiB)
    assert found.budget_bytes == GiB - needed < GiB * 9 // 10
    assert plan(device_kind="cuda", free_bytes=GiB, max_step_tokens=64).budget_bytes == GiB * 9 // 10
    assert "budget       auto: what is free - 126,353,408 bytes (120.50 MiB) for a step's" in str(found)


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_what_a_step_needs_is_what_a_prompt_is_counted_to_take(name):
    # One layer is as wide as all: each gives back what it took before the next one runs.
    config = dataclasses.replace(SHAPES[name], num_layers=1)
    model, num_tokens = Llama(config).requires_grad_(False), 256
    ids, positions = torch.zeros(num_tokens, dtype=torch.long), torch.arange(num_tokens)
    _, work = count_work(lambda: model(ids, positions, NoCache()))
    assert work.peak_bytes == pytest.approx(step_bytes(config, 4, num_tokens), rel=0.05)


@pytest.mark.parametrize(("max_running", "block_size", "num_blocks"), [(1, 16, 128), (4, 16, 512), (3, 256, 24)])
def test_no_pool_is_larger_than_requests_could_fill(max_running, block_size, num_blocks):
    for kv_memory in ("auto", "90%", "1GiB"):
        found = plan("tiny", kv_memory, max_running=max_running, block_size=block_size)
        assert found.num_blocks == num_blocks
    odd = dataclasses.replace(SHAPES["tiny"], max_context_tokens=2049)
    assert plan(odd, max_running=max_running, block_size=block_size).num_blocks > num_blocks


def test_a_size_is_taken_as_it_is_down_to_whole_blocks():
    assert plan(kv_memory="1GiB").num_bytes == GiB
    assert plan(kv_memory="1.0004GiB").num_bytes == GiB
    assert plan(kv_memory=str(GiB - 1)).num_blocks == 2047
    assert plan(kv_memory="16GiB").num_bytes == 16 * GiB
    assert plan(kv_memory="25%", free_bytes=12 * GiB, weights_bytes=4 * GiB).num_bytes == 2 * GiB
    assert plan(kv_memory="100%").num_bytes == 16 * GiB


def test_more_than_is_free_is_refused_with_both_sizes():
    with pytest.raises(ConfigError) as caught:
        plan(kv_memory="17GiB")
    assert str(caught.value) == (
        "kv_memory '17GiB' is 18,253,611,008 bytes (17.00 GiB), more than the 17,179,869,184 bytes (16.00 GiB) that "
        "are free"
    )
    with pytest.raises(ConfigError, match=r"\(15.00 GiB\) that are free beside 1,073,741,824 bytes \(1.00 GiB\) of we"):
        plan(kv_memory="16GiB", weights_bytes=GiB)


@pytest.mark.parametrize(
    ("kv_memory", "changes", "budget"),
    [
        ("524287", {}, "524,287 bytes (512.00 KiB)"),
        ("1%", {"free_bytes": 1000 * KiB}, "10,240 bytes (10.00 KiB)"),
        ("auto", {"free_bytes": 120 * MiB}, "0 bytes"),
    ],
)
def test_less_than_one_block_is_refused_with_its_size(kv_memory, changes, budget):
    with pytest.raises(ConfigError) as caught:
        plan(kv_memory=kv_memory, **changes)
    assert str(caught.value) == (
        f"kv_memory {kv_memory!r} comes to {budget}, less than one block of 16 tokens: 524,288 bytes (512.00 KiB)"
    )


@pytest.mark.parametrize("kv_memory", ["auto", "1GiB", "40%"])
def test_weights_that_leave_nothing_are_refused_with_both_sizes(kv_memory):
    for weights_bytes in (GiB, 2 * GiB):
        with pytest.raises(
            ConfigError, match=r"^no memory is left for KV blocks: 1,073,741,824 bytes .* [12],.* bytes"
        ):
            plan(kv_memory=kv_memory, free_bytes=GiB, weights_bytes=weights_bytes)


OPTIONS = {
    "model": st.sampled_from([*SHAPES]),
    "kv_memory": st.sampled_from(["auto", "1%", "33.3%", "100%", "700MB", "3GiB"]),
    "device_kind": st.sampled_from([*AUTO_SHARES]),
    "free_bytes": st.integers(36 * GiB, 200 * GiB),
    "weights_bytes": st.integers(0, 32 * GiB),
    "block_size": st.sampled_from([1, 16, 256]),
    "max_running": st.integers(1, 300),
}


@given(st.fixed_dictionaries(OPTIONS), st.integers(0, 8 * GiB))
def test_a_pool_fits_and_grows_with_what_is_free(options, more):
    found = plan(**options)
    assert 1 <= found.num_blocks <= found.num_usable_blocks
    assert found.num_blocks * found.bytes_per_block == found.num_bytes
    assert found.num_bytes <= found.budget_bytes <= options["free_bytes"] - options["weights_bytes"]
    is_capped = found.num_blocks == found.num_usable_blocks
    assert is_capped or found.budget_bytes - found.num_bytes < found.bytes_per_block
    larger = plan(**options | {"free_bytes": options["free_bytes"] + more})
    assert larger.num_blocks >= found.num_blocks


# what is shown


def test_the_whole_arithmetic_is_shown():
    found = plan("smollm2-135m-random", bytes_per_number=4, free_bytes=24 * GiB, weights_bytes=538_060_032)
    assert str(found).splitlines() == [
        "per token    2 (keys, values) x 30 layers x 3 KV heads x 64 numbers x 4 bytes = 46,080 bytes",
        "per block    16 tokens x 46,080 bytes = 737,280 bytes (720.00 KiB)",
        "free         25,769,803,776 bytes (24.00 GiB) on cpu",
        "weights      538,060,032 bytes (513.13 MiB) yet to be loaded; 25,231,743,744 bytes (23.50 GiB) are left",
        "budget       auto: 40 % of what is left = 10,092,697,497 bytes (9.40 GiB)",
        "at most      32 requests x 512 blocks (8,192 tokens, the longest context) = 12,079,595,520 bytes (11.25 GiB)",
        "KV pool      13,689 blocks x 737,280 bytes = 10,092,625,920 bytes (9.40 GiB)",
        "holds        219,024 tokens: 26 x the longest context, or more and shorter requests",
        "peak         10,524,052,480 bytes (9.80 GiB) with the pool full and the intermediate results of a step",
    ]
    step, layer = 2048 * (3 * (576 + 1536) + 2 * 64) * 4, found.num_bytes // 30
    assert found.peak_bytes == found.num_bytes + step + layer * 9 // 8


def test_weights_that_are_loaded_are_not_shown():
    assert "weights" not in str(plan())
    assert "budget       auto: 40 % of what is free = " in str(plan())
    assert "budget       12.5% of what is free = 2,147,483,648 bytes" in str(plan(kv_memory="12.5%"))
    assert "budget       3GB = 3,000,000,000 bytes (2.79 GiB)" in str(plan(kv_memory="3GB"))


def test_a_pool_too_small_for_the_longest_context_says_how_long_a_request_may_be():
    found = plan(kv_memory="1GiB")
    assert (found.num_tokens, found.longest_request_tokens) == (32_768, 32_769)
    assert "holds        32,768 tokens; a request may have 32,769 of the model's 131,072, prompt and answer" in str(
        found
    )
    whole = plan(kv_memory="4GiB")
    assert (whole.num_tokens, whole.longest_request_tokens) == (131_072, 131_072)
    assert "holds        131,072 tokens: 1 x the longest context" in str(whole)


def test_the_shown_numbers_are_the_plan_s():
    found = plan(device_kind="cuda", max_running=2)
    shown = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?= bytes)", str(found))]
    assert {found.bytes_per_block, found.free_bytes, found.budget_bytes, found.num_bytes} <= set(shown)


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1,024 bytes (1.00 KiB)"),
        (5 * GiB // 2, "2,684,354,560 bytes (2.50 GiB)"),
        (3 * 1024**5, "3,377,699,720,527,872 bytes (3072.00 TiB)"),
    ],
)
def test_bytes_are_shown_exactly_and_to_the_eye(num_bytes, words):
    assert in_words(num_bytes) == words
