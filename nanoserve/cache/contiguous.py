"""One buffer per request, allocated once for its longest possible context: a step writes in place and copies nothing.

Knows shapes and where the next position goes. Its price is the memory of positions that are never reached.
"""

from collections.abc import Iterator

import torch

from nanoserve.cache.kv import ALL_ROWS, Stored
from nanoserve.config import ModelConfig


class ContiguousCache:
    """See `KVCache` for the contract. Unwritten positions hold arbitrary bytes and are never read."""

    def __init__(self, config: ModelConfig, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.num_layers, 2, config.num_kv_heads, num_tokens, config.head_dim)
        self._buffer = torch.empty(shape, dtype=dtype, device=device)
        self._layers = [(layer[0], layer[1]) for layer in self._buffer]
        self.num_cached = 0

    @property
    def num_bytes(self) -> int:
        return self._buffer.nbytes

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Iterator[Stored]:
        start, end = self.num_cached, self.num_cached + keys.shape[0]
        all_keys, all_values = self._layers[layer]
        assert end <= all_keys.shape[1], f"position {end - 1} is outside a cache of {all_keys.shape[1]} positions"
        all_keys[:, start:end] = keys.transpose(0, 1)
        all_values[:, start:end] = values.transpose(0, 1)
        yield Stored(ALL_ROWS, all_keys[None, :, :end], all_values[None, :, :end])
