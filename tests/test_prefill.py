"""What a prompt attends to, by the way that is for GPUs as well: torch's own choice of kernels is not seen here."""

import math

import pytest
import torch
from many_requests import CHUNKED, PROMPTS, run, varied_model

from nanoserve import Engine, SamplingParams, attention
from nanoserve.cache.kv import ALL_ROWS, Stored

WAYS = {"mask": attention._prefill_with_mask, "no scores": attention._prefill_without_scores}


def attended(queries, keys, values):
    """The formula, one query and head after another: [new, heads, head_dim] over [kv_heads, context, head_dim]."""
    num_new, num_heads, head_dim = queries.shape
    out, group, before = torch.empty_like(queries), num_heads // keys.shape[0], keys.shape[1] - num_new
    for row in range(num_new):
        for head in range(num_heads):
            seen, mixed = (each[head // group, : before + row + 1] for each in (keys, values))
            out[row, head] = (seen @ queries[row, head] / math.sqrt(head_dim)).softmax(0) @ mixed
    return out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("positions", [(5, 5), (2, 9), (7, 8)])
def test_new_positions_see_what_is_stored_and_each_other_up_to_themselves(monkeypatch, way, heads, positions):
    monkeypatch.setitem(attention._PREFILLS, "cpu", WAYS[way])
    (num_heads, num_kv_heads), (num_new, context) = heads, positions
    queries = torch.randn(num_new, num_heads, 8)
    keys, values = torch.randn(2, num_kv_heads, context, 8)
    out = attention.attend_some(queries, Stored(ALL_ROWS, keys[None], values[None]))
    torch.testing.assert_close(out, attended(queries, keys, values))


def test_a_prompt_in_chunks_has_the_same_answer_by_the_way_for_gpus(monkeypatch):
    loaded, some = varied_model(), SamplingParams(max_new_tokens=12, ignore_eos=True)
    expected = run(Engine(loaded, **CHUNKED), PROMPTS, some)
    monkeypatch.setitem(attention._PREFILLS, "cpu", attention._prefill_without_scores)
    assert run(Engine(loaded, **CHUNKED), PROMPTS, some) == expected
    assert run(Engine(loaded, cache="contiguous"), PROMPTS, some) == expected


@pytest.mark.parametrize("takes", [True, False])
def test_heads_are_repeated_only_where_no_kernel_groups_them(monkeypatch, takes):
    asked = []

    def attend(queries, keys, values, *, attn_mask, enable_gqa):
        asked.append((keys.shape[1], attn_mask.seq_len_q, attn_mask.seq_len_kv, enable_gqa))
        return queries

    monkeypatch.setattr(attention, "_flash_takes", lambda *_: takes)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", attend)
    for num_heads in (6, 2):
        attention._prefill_without_scores(torch.ones(1, num_heads, 3, 8), *torch.ones(2, 1, 2, 5, 8))
    assert asked == [(2 if takes else 6, 3, 5, takes), (2, 3, 5, False)]
