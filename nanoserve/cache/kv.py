"""The interface that attention sees, the cache that stores nothing, and caches side by side.

Every cache answers one question per layer: given the new positions' keys and values, which keys and values does
attention read? It refuses to know queries, masks of positions to come, and how attention is computed.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

ALL_ROWS = slice(None)


def copy_lines(lines: torch.Tensor, places: torch.Tensor, new: torch.Tensor) -> None:
    """Write new [rows, kv_heads, head_dim] to lines [lines, head_dim], at places [rows x kv_heads]."""
    lines.index_copy_(0, places, new.flatten(0, 1))


class Stored(NamedTuple):
    """What some new positions attend to: which rows of the step they are, and [requests, kv_heads, context, head_dim].

    One request with all its new rows, or several with one row each. Where their contexts differ, `mask`
    [requests, 1, 1, context] is False at positions that a request does not have.
    """

    rows: slice
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None = None


class InBlocks(NamedTuple):
    """The same for requests with one new row each, or more, left where it is: a kernel follows the block tables itself.

    keys, values [kv_heads, slots, head_dim] of the whole pool; tables [requests, blocks] and contexts [requests] are
    int32. What a table holds behind a request's own blocks is arbitrary. `backend` is a name of `config.ATTENTIONS`.
    With `row_starts` [requests + 1], int32, a request has any number of new rows, its last positions, from there on.
    """

    rows: slice
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    contexts: torch.Tensor
    block_size: int
    backend: str
    row_starts: torch.Tensor | None = None


class KVStep(Protocol):
    """Where a step stores keys and values, of one request or of many; positions of a request stand together."""

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Iterator[Stored | InBlocks]:
        """Store new keys and values [new, kv_heads, head_dim]; yield what each row attends to, in the order of rows.

        The result may be a view of the cache or of a workspace: it must be read before the next one is asked for, and
        never be written to. Every layer of a step stores at the same place.
        """
        ...


class KVCache(Protocol):
    """Keys and values of one request, all layers. Positions are stored in order, without gaps."""

    num_cached: int
    """Positions whose keys and values are stored: new ones come behind them. Whoever runs a step sets it before."""

    @property
    def num_bytes(self) -> int:
        """Memory that the cache takes, positions that are reserved and not yet stored included."""
        ...

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Iterator[Stored]:
        """As `KVStep.extend`, for one request."""
        ...


class Together:
    """Caches that each keep memory of their own, in one step."""

    def __init__(self, parts: Sequence[tuple[KVCache, int]]) -> None:
        """`parts` holds each request's cache and the number of its new positions, in their order."""
        self._parts: list[tuple[KVCache, slice]] = []
        start = 0
        for cache, num_new in parts:
            self._parts.append((cache, slice(start, start + num_new)))
            start += num_new

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Iterator[Stored]:
        for cache, rows in self._parts:
            for stored in cache.extend(layer, keys[rows], values[rows]):
                yield stored._replace(rows=rows)


class NoCache:
    """Stores nothing: each step runs every position again. The naive path that a cache is measured against."""

    num_cached = 0
    num_bytes = 0

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Iterator[Stored]:
        yield Stored(ALL_ROWS, keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
