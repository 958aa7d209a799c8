"""Causal attention of new positions over everything stored so far: written once, for every cache and model.

Knows heads, masks and which kernel is fast for which shape. Refuses to know where keys and values are kept.
"""

import torch
import torch.nn.functional as F

from nanoserve.cache.kv import KVCache

BACKEND = "scaled_dot_product_attention"
"""What computes attention, in the words that a result is filed under."""


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, layer: int, cache: KVCache
) -> torch.Tensor:
    """Store the new keys and values in the cache and attend over all of them.

    queries [new, heads, head_dim], keys and values [new, kv_heads, head_dim] -> [new, heads, head_dim].
    New position i sees every stored position and the new ones up to itself. KV head h serves the query heads
    [h * group, (h + 1) * group), as in Llama (grouped-query attention, arXiv:2305.13245).
    """
    all_keys, all_values = cache.extend(layer, keys, values)
    if queries.shape[0] == 1:
        return _attend_decode(queries, all_keys, all_values)
    return _attend_prefill(queries, all_keys, all_values)


def _attend_decode(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One query sees everything, so the heads of a group can stand where queries do: no mask, no repeated keys."""
    num_kv_heads, _, head_dim = keys.shape
    grouped = queries.view(1, num_kv_heads, -1, head_dim)
    return F.scaled_dot_product_attention(grouped, keys[None], values[None]).view(1, -1, head_dim)


def _attend_prefill(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    num_new, context = queries.shape[0], keys.shape[1]
    mask = None
    if context > num_new:
        mask = torch.ones(num_new, context, dtype=torch.bool, device=queries.device).tril(context - num_new)
    out = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
