"""Attention of one new position per request over KV blocks, as a Triton kernel: what lies in the pool is never copied.

Knows slots, tiles and an online softmax. Refuses to know who holds which block, prefill, and when it is worth using.
Whoever has a GPU imports this file, and nobody else has to: Triton is not everywhere. `paged_reference.py` has the same
contract, and is the formula.

References: PagedAttention (arXiv:2309.06180), online softmax (arXiv:1805.02867), FlashAttention-2 (arXiv:2307.08691).
"""

import math

import torch
import triton
import triton.language as tl

from nanoserve.errors import ConfigError

_SMALLEST_DOT = 16
"""A side of what `tl.dot` multiplies; what is smaller is padded."""


def paged_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    contexts: torch.Tensor,
    *,
    block_size: int,
    tile_tokens: int = 64,
) -> torch.Tensor:
    """Let each request's one query attend over the positions that its block table leads to.

    queries [requests, heads, head_dim]; keys and values, one layer of a pool, [kv_heads, slots, head_dim]; tables
    [requests, max_blocks] int32, block numbers, anything beyond a request's own: those are not followed; contexts
    [requests] int32, the number of positions that each request sees, at least 1. Returns [requests, heads, head_dim] in
    the queries' dtype. All may be views whose last dimension is contiguous; keys and values have the queries' dtype and
    each other's strides. What no request sees may hold anything, NaN included.

    Position p lies at slot table[p // block_size] * block_size + p % block_size. KV head h serves the query heads
    [h * group, (h + 1) * group). Scores and sums are float32; the scale is 1 / sqrt(head_dim). `tile_tokens` positions
    are read at a time: a matter of speed.

    Raises ConfigError for a block size that is no power of two (a shift finds the slot), for a tile that is none or is
    below 16, and for a device that Triton cannot run on.
    """
    _check_power_of_two("block size", block_size, least=1)
    _check_power_of_two("tile_tokens", tile_tokens, least=_SMALLEST_DOT)
    check_device(queries.device)
    _check_layout(queries, keys, values, tables, contexts)
    num_requests, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    with torch.cuda.device(queries.get_device()):  # Triton launches on the current one; -1, off a GPU, changes nothing
        _attend[(num_requests, num_kv_heads)](
            out, queries, keys, values, tables, contexts, 1 / math.sqrt(head_dim),
            queries.stride(0), queries.stride(1), keys.stride(0), keys.stride(1), tables.stride(0),
            group, head_dim, _padded(group), _padded(head_dim), block_size, tile_tokens, _INTERPRETED,
        )  # fmt: skip
    return out


def _padded(length: int) -> int:
    return max(_SMALLEST_DOT, 1 << (length - 1).bit_length())


def _check_power_of_two(name: str, value: int, *, least: int) -> None:
    if value < least or value & (value - 1):
        raise ConfigError(f"{name} {value} does not suit the Triton kernel; choose a power of two from {least} on")


def check_device(device: torch.device) -> None:
    """Raise ConfigError for a device that Triton cannot run on."""
    if device.type != "cuda" and not _INTERPRETED:
        raise ConfigError(
            f"the Triton kernel does not run on device {str(device)!r}; choose cuda or cuda:N, "
            "or set TRITON_INTERPRET=1 before triton is imported"
        )


def _check_layout(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, contexts: torch.Tensor
) -> None:
    """What the kernel takes for granted: it reads addresses, and would read wrong ones."""
    assert queries.dtype == keys.dtype == values.dtype, (queries.dtype, keys.dtype, values.dtype)
    assert tables.dtype == contexts.dtype == torch.int32, (tables.dtype, contexts.dtype)
    assert (keys.shape, keys.stride()) == (values.shape, values.stride()), "keys and values lie differently"
    assert queries.shape[2] == keys.shape[2], (queries.shape, keys.shape)
    assert queries.shape[1] % keys.shape[0] == 0, (queries.shape, keys.shape)
    assert queries.shape[0] == tables.shape[0] == contexts.shape[0], (queries.shape, tables.shape, contexts.shape)
    assert all(each.stride(-1) == 1 for each in (queries, keys, tables, contexts)), "a last dimension has gaps"


# The arguments bear no types, because Triton would read them: `int` would cut a stride to 32 bits. `table_stride`
# changes as requests grow: no reason to compile again.
@triton.jit(do_not_specialize=["table_stride"])  # type: ignore[untyped-decorator]  # triton has no type hints
def _attend(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    out, queries, keys, values, tables, contexts, scale,
    query_stride, query_head_stride, head_stride, slot_stride, table_stride,
    group: tl.constexpr, head_dim: tl.constexpr, padded_group: tl.constexpr, padded_dim: tl.constexpr,
    block_size: tl.constexpr, tile_tokens: tl.constexpr, interpreted: tl.constexpr,
):  # fmt: skip
    """One request's query heads [group, head_dim] that one KV head serves, over tiles of positions.

    `best`, `total` and `mixed` are, per query head, the largest score so far, and the sums of weights and of weighted
    values relative to it. The first tile holds a position that is seen, so `best` is finite from there on.
    """
    request, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, dim, lane = tl.arange(0, padded_group), tl.arange(0, padded_dim), tl.arange(0, tile_tokens)
    in_dim = (dim < head_dim)[None, :]
    in_group = (row < group)[:, None] & in_dim
    head = kv_head * group + row[:, None]
    # Triton's interpreter multiplies bfloat16 as if its bits were integers.
    kind = tl.float32 if interpreted else queries.dtype.element_ty
    query_at = request * query_stride + head * query_head_stride + dim[None, :]
    query = tl.load(queries + query_at, mask=in_group, other=0.0).to(kind)
    context = tl.load(contexts + request)
    best = tl.full([padded_group], float("-inf"), tl.float32)
    total = tl.full([padded_group], 0.0, tl.float32)
    mixed = tl.full([padded_group, padded_dim], 0.0, tl.float32)
    for start in range(0, context, tile_tokens):
        position = start + lane
        seen = position < context
        block = tl.load(tables + request * table_stride + position // block_size, mask=seen, other=0).to(tl.int64)
        slot = block * block_size + position % block_size
        at = kv_head * head_stride + slot[:, None] * slot_stride + dim[None, :]
        loaded = seen[:, None] & in_dim
        key = tl.load(keys + at, mask=loaded, other=0.0).to(kind)
        value = tl.load(values + at, mask=loaded, other=0.0).to(kind)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - new_best[:, None])
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(kind), value, input_precision="ieee")
        best = new_best
    out_at = (request * tl.num_programs(1) * group + head) * head_dim + dim[None, :]
    tl.store(out + out_at, mixed / total[:, None], mask=in_group)


_INTERPRETED = not isinstance(_attend, triton.JITFunction)
"""Whether TRITON_INTERPRET was set when triton was imported: the kernel then runs in Python, on any device."""
