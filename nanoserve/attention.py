"""Causal attention of new positions over everything stored so far: written once, for every cache and model.

Knows heads, masks and which kernel is fast for which shape. Refuses to know where keys and values are kept, but for
those that a cache leaves in their blocks: they go to a kernel that follows block tables.
"""

import importlib
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F

from nanoserve.cache.kv import InBlocks, KVStep, Stored
from nanoserve.errors import ConfigError

BACKEND = "scaled_dot_product_attention"
"""What computes attention unless a kernel follows block tables, in the words that a result is filed under."""


def choose_backend(name: str, device: torch.device, *, is_paged: bool, has_native: bool = False) -> str:
    """`auto` as what will be used: a kernel over block tables on a GPU, SDPA elsewhere. Raises ConfigError.

    `reference` and `triton` read blocks in place; without a paged cache there are none. `native` is for models whose
    operations are (`has_native`), and reads any cache.
    """
    if has_native and name in ("auto", "native"):
        return "native"
    if has_native and name == "sdpa":
        raise ConfigError("attention 'sdpa' is part of kernels 'torch': choose these, or attention 'native'")
    if name == "native":
        raise ConfigError("attention 'native' is part of kernels 'native', which this model does not run on")
    if device.type == "cuda":
        importlib.import_module("torch.nn.attention.bias")  # takes seconds, which belong into no step
    if name == "auto":
        return "triton" if is_paged and device.type == "cuda" and _triton_is_here() else "sdpa"
    if name != "sdpa" and not is_paged:
        raise ConfigError(f"attention {name!r} follows block tables: choose cache 'paged', or attention 'sdpa'")
    if name == "triton":
        _check_triton(device)
    return name


def _check_triton(device: torch.device) -> None:
    if not _triton_is_here():
        raise ConfigError("attention 'triton' needs the package triton; choose one of: auto, sdpa, reference")
    from nanoserve.paged_kernel import check_device

    check_device(device)


def _triton_is_here() -> bool:
    return importlib.util.find_spec("triton") is not None


def attend_some(queries: torch.Tensor, stored: Stored | InBlocks) -> torch.Tensor:
    """One part of what `attend` does: rows [rows, heads, head_dim] over what they read, each up to itself."""
    if isinstance(stored, InBlocks):
        return _attend_in_blocks(queries, stored)
    if queries.shape[0] == stored.keys.shape[0]:
        return _attend_decode(queries, stored)
    return _attend_prefill(queries, stored.keys, stored.values)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    layer: int,
    cache: KVStep,
    kernel: Callable[[torch.Tensor, Stored | InBlocks], torch.Tensor] = attend_some,
    stack: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat,
) -> torch.Tensor:
    """Store the new keys and values of all requests, and let each request's new positions attend over its own.

    queries [new, heads, head_dim], keys and values [new, kv_heads, head_dim] -> [new, heads, head_dim].
    New position i of a request sees what is stored of it and its new ones up to itself. KV head h serves the query
    heads [h * group, (h + 1) * group), as in Llama (grouped-query attention, arXiv:2305.13245).
    """
    outs = [kernel(queries[each.rows], each) for each in cache.extend(layer, keys, values)]
    return outs[0] if len(outs) == 1 else stack(outs)


def _attend_decode(queries: torch.Tensor, stored: Stored) -> torch.Tensor:
    """A query of each request sees everything, so the heads of a group can stand where queries do: no repeated keys."""
    num_requests, num_kv_heads, _, head_dim = stored.keys.shape
    grouped = queries.view(num_requests, num_kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(grouped, stored.keys, stored.values, attn_mask=stored.mask)
    return out.reshape(num_requests, -1, head_dim)


def _attend_prefill(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    prefill = _PREFILLS.get(queries.device.type, _prefill_with_mask)
    return prefill(queries.transpose(0, 1)[None], keys, values)[0].transpose(0, 1)


def _prefill_with_mask(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Queries [1, heads, new, head_dim] over keys and values [1, kv_heads, context, head_dim]."""
    num_new, context = queries.shape[2], keys.shape[2]
    mask = None
    if context > num_new:
        mask = torch.ones(num_new, context, dtype=torch.bool, device=queries.device).tril(context - num_new)
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )


def _prefill_without_scores(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The same where a mask, or grouped heads, would send torch to a kernel that keeps all scores in memory.

    Its flash kernel takes both in its stride; where that does not run (float32), heads are repeated for the next best.
    """
    from torch.nn.attention.bias import causal_lower_right

    is_grouped = queries.shape[1] > keys.shape[1]
    if is_grouped and not _flash_takes(queries, keys, values):
        keys, values = (each.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1) for each in (keys, values))
        is_grouped = False
    mask = causal_lower_right(queries.shape[2], keys.shape[2])
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=is_grouped)


def _flash_takes(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    from torch.backends.cuda import SDPAParams, can_use_flash_attention

    return can_use_flash_attention(SDPAParams(queries, keys, values, None, 0.0, False, True))


_PREFILLS = {"cuda": _prefill_without_scores}
"""By the kind of device; on any other one torch's usual way is as good."""


def _attend_in_blocks(queries: torch.Tensor, stored: InBlocks) -> torch.Tensor:
    kernel = _kernel(stored.backend)
    return kernel(queries, stored.keys, stored.values, stored.tables, stored.contexts, block_size=stored.block_size)


def _kernel(backend: str) -> Callable[..., torch.Tensor]:
    """The reference is slow and obvious: it is what the kernel is held against."""
    if backend == "triton":
        from nanoserve.paged_kernel import paged_decode

        return paged_decode
    from nanoserve.paged_reference import paged_decode_reference

    return paged_decode_reference
