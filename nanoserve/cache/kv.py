"""The interface that attention sees, and the cache that stores nothing.

Every cache answers one question per layer: given the new positions' keys and values, which keys and values does
attention read? It refuses to know queries, masks and how attention is computed.
"""

from typing import Protocol

import torch


class KVCache(Protocol):
    """Keys and values of one request, all layers. Positions are stored in order, without gaps."""

    num_cached: int
    """Positions whose keys and values are stored: the next forward runs the positions from here on."""

    @property
    def num_bytes(self) -> int:
        """Memory that the cache takes, positions that are reserved and not yet stored included."""
        ...

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values [new, kv_heads, head_dim]; return all of them as [kv_heads, context, head_dim].

        The result may be a view of the cache: it must be read before the next call and never be written to.
        `num_cached` stays as it is until `advance`, so that every layer of a step stores at the same place.
        """
        ...

    def advance(self, num_new: int) -> None:
        """Close a step: `num_new` positions are now stored in every layer."""
        ...


class NoCache:
    """Stores nothing: each step runs every position again. The naive path that a cache is measured against."""

    num_cached = 0
    num_bytes = 0

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return keys.transpose(0, 1), values.transpose(0, 1)

    def advance(self, num_new: int) -> None:
        pass
