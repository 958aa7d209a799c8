"""What a step of a decoder has to read and compute at least, from its shape alone.

Knows the shape's numbers. Refuses to know devices and how well anything is done. Lower bounds: activations, norms,
biases and what tells positions are left out, and of attention all but what a causal mask leaves; so no share of a
ceiling is flattered.
"""

import dataclasses
from typing import Protocol


class Shape(Protocol):
    """The fields of nanoserve's ModelConfig that count."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class StepCost:
    """See `efficiency.Cost`. Without `keeps_kv`, a decode step runs every position and reads weights only.

    `has_gate`: an MLP is three matrices, as Llama's is, else the two of GPT-2.
    """

    shape: Shape
    bytes_per_number: int
    keeps_kv: bool = True
    has_gate: bool = True

    def read_bytes(self, context: int) -> float:
        """Every weight once (of the embedding, the output head's copy), and the keys and values of the context."""
        kv = 2 * self.shape.num_layers * self.shape.num_kv_heads * self.shape.head_dim * context
        return self.bytes_per_number * (self._num_weights + self._num_head_weights + (kv if self.keeps_kv else 0))

    def prefill_flops(self, num_tokens: int) -> float:
        """Products of every position with every weight, of the last one with the head, and causal attention."""
        attention = 4 * self.shape.num_layers * self.shape.num_heads * self.shape.head_dim
        pairs = num_tokens * (num_tokens + 1) / 2
        return 2 * num_tokens * self._num_weights + 2 * self._num_head_weights + attention * pairs

    @property
    def _num_weights(self) -> int:
        """Of the products in all layers."""
        shape = self.shape
        attention = 2 * shape.hidden_size * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
        num_matrices = 3 if self.has_gate else 2
        return shape.num_layers * (attention + num_matrices * shape.hidden_size * shape.intermediate_size)

    @property
    def _num_head_weights(self) -> int:
        return self.shape.vocab_size * self.shape.hidden_size
