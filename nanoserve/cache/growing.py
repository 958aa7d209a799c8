"""Keys and values that are appended by copying: every step makes a longer tensor and copies all older positions.

Knows concatenation. It is how caches are often written first, and is here to be measured against the buffer that is
allocated once: its cost per step grows with the context, in every layer. It reserves nothing.
"""

from collections.abc import Iterator

import torch

from nanoserve.cache.kv import ALL_ROWS, Stored


class GrowingCache:
    """See `KVCache` for the contract."""

    def __init__(self, num_layers: int) -> None:
        self._layers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self.num_cached = 0

    @property
    def num_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in filter(None, self._layers))

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Iterator[Stored]:
        held, keys, values = self._layers[layer], keys.transpose(0, 1), values.transpose(0, 1)
        if held is None:
            keys, values = keys.clone(), values.clone()  # what was given may be overwritten by the next operation
        else:
            keys, values = torch.cat((held[0], keys), dim=1), torch.cat((held[1], values), dim=1)
        self._layers[layer] = keys, values
        yield Stored(ALL_ROWS, keys[None], values[None])
