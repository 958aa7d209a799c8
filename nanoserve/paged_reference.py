"""Attention of one new position per request over KV blocks: the slow, obvious one that a fast kernel has to agree with.

Knows block tables and the formula. Refuses to know speed, and where it is used.
"""

import math

import torch


def paged_decode_reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    contexts: torch.Tensor,
    *,
    block_size: int,
) -> torch.Tensor:
    """Let each request's one query attend over the positions that its block table leads to.

    queries [requests, heads, head_dim]; keys and values, one layer of a pool, [kv_heads, slots, head_dim]; tables
    [requests, max_blocks], block numbers, anything beyond a request's own; contexts [requests], the number of positions
    that each request sees, at least 1. Returns [requests, heads, head_dim] in the queries' dtype.

    Position p lies at slot table[p // block_size] * block_size + p % block_size. KV head h serves the query heads
    [h * group, (h + 1) * group). Scores, softmax and sum are float32; the scale is 1 / sqrt(head_dim).
    """
    outs = []
    for query, table, context in zip(queries, tables.tolist(), contexts.tolist(), strict=True):
        slots = [table[position // block_size] * block_size + position % block_size for position in range(context)]
        outs.append(_attend_one(query.float(), keys[:, slots].float(), values[:, slots].float()))
    return torch.stack(outs).to(queries.dtype)


def _attend_one(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Query [heads, head_dim], keys and values [kv_heads, context, head_dim] -> [heads, head_dim]."""
    group = query.shape[0] // keys.shape[0]
    keys, values = (stored.repeat_interleave(group, dim=0) for stored in (keys, values))
    scores = (query[:, None] * keys).sum(-1) / math.sqrt(query.shape[-1])
    return (scores.softmax(-1)[..., None] * values).sum(1)
