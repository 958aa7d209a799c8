"""Compiled operations as operators of torch, for whoever watches torch's dispatcher: profilers, counters of FLOPs.

Knows names and FLOPs. Refuses to know kernels: when nobody watches, they are called without this detour.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

NAMES = (
    "linear", "embed", "rms_norm", "angles", "rotate", "gate", "store", "attend", "pack", "pack_int8", "layer_norm",
    "gelu", "add",
)  # fmt: skip
"""In the order in which `kernels.cpp` lists them."""

Call = Callable[[str, Sequence[torch.Tensor | None], Sequence[int], float], None]

_LIBRARY = torch.library.Library("nanoserve", "DEF")  # type: ignore[no-untyped-call]


def is_watched() -> bool:
    """Whether a mode of torch's dispatcher is on."""
    return torch._C._len_torch_dispatch_stack() > 0


def show(call: Call, name: str, at: Sequence[torch.Tensor | None], counts: Sequence[int], scale: float) -> None:
    """Let `call` run an operation inside an operator that is seen, and that has its FLOPs as an argument."""
    shown: Any = getattr(torch.ops.nanoserve, name)
    _CALLS.append(call)
    try:
        shown(at, counts, scale, _flops(name, at, counts))
    finally:
        _CALLS.pop()


_CALLS: list[Call] = []
"""Whose operation the running operator stands for; operators are the process's."""


def _operator(name: str) -> Callable[..., None]:
    def run(at: Sequence[torch.Tensor | None], counts: Sequence[int], scale: float, flops: int) -> None:
        _CALLS[-1](name, at, counts, scale)

    return run


for _name in NAMES:
    _LIBRARY.define(f"{_name}(Tensor?[] at, int[] counts, float scale, int flops) -> ()")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _operator(_name), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    getattr(torch.ops.nanoserve, _name)  # from now on it is listed there


def _flops(name: str, at: Sequence[torch.Tensor | None], counts: Sequence[int]) -> int:
    """2 m n k of products; of attention over all that is stored, masked positions included."""
    if name == "linear":
        rows, num_inputs, num_outputs, *_ = counts
        return 2 * rows * num_inputs * num_outputs
    if name != "attend":
        return 0
    _, num_heads, _, head_dim, *_ = counts
    contexts, starts = at[5], at[6]
    assert contexts is not None
    ends = range(len(contexts) + 1) if starts is None else starts.tolist()  # no product here, which would be counted
    pairs: int = sum(map(operator.mul, (b - a for a, b in itertools.pairwise(ends)), contexts.tolist()))
    return 4 * num_heads * head_dim * pairs
