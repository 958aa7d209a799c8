"""`Ops` by compiled kernels: matrices packed once, results in buffers that are used again, a call for each operation.

Knows `kernels.cpp`: its list of operations, and where each of them finds its pointers and numbers. Refuses to know
models and requests. A matrix is packed when it is first used, and its parameter is emptied: no weight is in memory
twice. What was called can be recorded, and run again as one call.
"""

import contextlib
import ctypes
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanoserve.attention import attend_some
from nanoserve.cache.kv import ALL_ROWS, InBlocks, Stored
from nanoserve.cpu import watched
from nanoserve.cpu.packing import PANEL, Arena, Packed, side_by_side
from nanoserve.errors import KernelError
from nanoserve.ops import Rope
from nanoserve.quantized import quantize

T = TypeVar("T")
Tensors = Sequence[torch.Tensor | None]
Called = tuple[str, Tensors, Sequence[int], float]

_KINDS = {name: kind for kind, name in enumerate(watched.NAMES)}

_OP = struct.Struct("q d 8Q 10q")
"""One operation, as `kernels.cpp` declares it: kind, scale, addresses, numbers."""

_NOTHING = (0,) * 10


class NativeOps:
    """See `Ops`, for bfloat16 on a CPU. Results lie in buffers that the next call of the same operation overwrites.

    So a model that it computes is not for two threads at once, whoever drives it.
    """

    sees_torch = False

    def __init__(self, library: ctypes.CDLL, *, is_int8: bool = False) -> None:
        self._call = library.nanoserve_run
        self._call.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
        self._call.restype = None
        self._is_int8 = is_int8
        self._arena = Arena()
        self._packed: dict[nn.Module, Packed] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._queue: list[Called] | None = None
        self._ends = torch.zeros(3, dtype=torch.int32)

    def embed(self, token_ids: torch.Tensor, embedding: nn.Embedding) -> torch.Tensor:
        table = self._pack((embedding,))
        out = self._buffer(f"embed-{id(embedding)}", (len(token_ids), table.num_inputs))
        self._run("embed", (token_ids, table.panels, out, table.scales), out.shape)
        return out

    def add(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        self._run("add", (left, right), left.shape)
        return left

    def norm(self, inputs: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
        """Heads [rows, heads, head_dim] are overwritten."""
        out = inputs if inputs.ndim == 3 else self._buffer("norm", inputs.shape)
        heads = inputs.shape[1] if inputs.ndim == 3 else 1
        assert norm.eps is not None, "an RMSNorm without eps"
        counts = (inputs.shape[0], heads, inputs.shape[-1], inputs.stride(0), out.stride(0))
        self._run("rms_norm", (inputs, norm.weight, out), counts, norm.eps)
        return out

    def layer_norm(self, inputs: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
        out = self._buffer("norm", inputs.shape)
        self._run("layer_norm", (inputs, norm.weight, out, norm.bias), inputs.shape, norm.eps)
        return out

    def gelu(self, inputs: torch.Tensor) -> torch.Tensor:
        out = self._buffer("gate", inputs.shape)
        self._run("gelu", (inputs, out), inputs.shape)
        return out

    def project(self, inputs: torch.Tensor, matrices: Sequence[nn.Linear]) -> Sequence[torch.Tensor]:
        packed = self._pack(matrices)
        out = self._buffer("project", (inputs.shape[0], sum(packed.sizes)))
        self._linear(inputs, packed, out)
        return torch.split(out, list(packed.sizes), dim=1)

    def add_projection(self, residual: torch.Tensor, inputs: torch.Tensor, matrix: nn.Linear) -> torch.Tensor:
        self._linear(inputs, self._pack((matrix,)), residual, residual)
        return residual

    def logits(self, hidden: torch.Tensor, head: nn.Linear | nn.Embedding) -> torch.Tensor:
        """In float32: sums are not rounded before they are compared."""
        packed = self._pack((head,))
        out = self._buffer("logits", (hidden.shape[0], *packed.sizes), torch.float32)
        self._linear(hidden, packed, out)
        return out

    def rope(self, frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Rope:
        """Angles stay in float32, [rows, head_dim / 2]."""
        both = self._buffer("rope", (2, len(positions), len(frequencies)), torch.float32)
        self._run("angles", (frequencies, positions, both[0], both[1]), (len(positions), len(frequencies)))
        return both[0], both[1]

    def rotate(self, heads: torch.Tensor, rope: Rope) -> torch.Tensor:
        rows, num_heads, head_dim = heads.shape
        self._run("rotate", (heads, *rope), (rows, num_heads, head_dim // 2, heads.stride(0)))
        return heads

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        out = self._buffer("gate", gate.shape)
        self._run("gate", (gate, up, out), (*gate.shape, gate.stride(0)))
        return out

    def store(self, lines: torch.Tensor, places: torch.Tensor, new: torch.Tensor) -> None:
        self._run("store", (lines, places, new), (*new.shape, new.stride(0)))

    def attend(self, queries: torch.Tensor, stored: Stored | InBlocks) -> torch.Tensor:
        """What a request has stored, or a pool has in blocks; requests that were gathered are plain torch's."""
        if isinstance(stored, InBlocks) and stored.backend == "native":
            in_pool = (stored.tables, stored.contexts, stored.row_starts)
            return self._attend(queries, (stored.keys, stored.values), in_pool, block_size=stored.block_size)
        if isinstance(stored, InBlocks) or stored.keys.shape[0] > 1:
            self._catch_up()
            return attend_some(queries, stored)
        ends = [stored.keys.shape[2], 0, len(queries)]
        if self._ends.tolist() != ends:
            self._ends = torch.tensor(ends, dtype=torch.int32)
        places = (None, self._ends[:1], self._ends[1:])
        out = None if stored.rows == ALL_ROWS else torch.empty(queries.shape, dtype=queries.dtype)
        return self._attend(queries, (stored.keys[0], stored.values[0]), places, out=out)

    def stack(self, parts: list[torch.Tensor]) -> torch.Tensor:
        self._catch_up()
        return torch.cat(parts)

    def _attend(
        self,
        queries: torch.Tensor,
        stored: tuple[torch.Tensor, torch.Tensor],
        places: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None],
        *,
        block_size: int = 1,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Keys and values [kv_heads, positions or slots, head_dim]; `places` are tables, contexts and row starts."""
        (keys, values), (tables, contexts, _) = stored, places
        out = self._buffer("attend", queries.shape) if out is None else out
        shape = (len(contexts), queries.shape[1], keys.shape[0], queries.shape[2])
        strides = (queries.stride(0), keys.stride(0), keys.stride(1))
        blocks = (block_size, 0 if tables is None else tables.stride(0))
        self._run(
            "attend", (queries, keys, values, out, *places), (*shape, *strides, *blocks), queries.shape[2] ** -0.5
        )
        return out

    def _linear(
        self, inputs: torch.Tensor, by: Packed, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        counts = (inputs.shape[0], by.num_inputs, sum(by.sizes), inputs.stride(0), out.dtype == torch.float32)
        self._run("linear", (inputs, by.panels, out, by.bias, residual, by.scales), counts)

    def _buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Memory for a result, the same for all results of a name: fresh pages would cost more than the operation."""
        num = math.prod(shape)
        held = self._buffers.get(name)
        if held is None or held.numel() < num:
            held = self._buffers[name] = torch.empty(num, dtype=dtype)
        return held[:num].view(shape)

    def _run(self, name: str, at: Tensors, counts: Sequence[int], scale: float = 0.0) -> None:
        if watched.is_watched() and self._queue is None:
            watched.show(self._run_now, name, at, counts, scale)
        else:
            self._run_now(name, at, counts, scale)

    def _run_now(self, name: str, at: Tensors, counts: Sequence[int], scale: float) -> None:
        if self._queue is None:
            self._execute([(name, at, counts, scale)])
        else:
            self._queue.append((name, at, counts, scale))

    def _execute(self, calls: Sequence[Called]) -> None:
        self._call(_packed_ops(calls), len(calls), torch.get_num_threads())

    def _catch_up(self) -> None:
        """Torch is about to look at what was asked for."""
        queue, self._queue = self._queue, None
        if queue is not None:
            self._execute(queue)
            queue.clear()
        self._queue = queue

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """See `Ops`. Between two heavy operations Python finds its caches empty: it is faster when it goes first.

        Whoever watches sees each operation when it is asked for.
        """
        assert self._queue is None, "one step inside another"
        if watched.is_watched():
            yield
            return
        queue = self._queue = []
        try:
            yield
        finally:
            self._queue = None
        self._execute(queue)

    def sizes(self, max_running: int) -> Sequence[int]:
        """See `replay.Recorder`: a recording is a list of some hundred operations."""
        return range(1, max_running + 1)

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """See `replay.Recorder`. Raises KernelError where torch computes something meanwhile: it would not be on tape.

        What is called first makes buffers and packs matrices, so it runs once before.
        """
        run()
        tape = self._queue = []
        try:
            with _ViewsOnly():  # type: ignore[no-untyped-call]
                result = run()
        finally:
            self._queue = None
        packed = _packed_ops(tape)

        def replay() -> T:
            if watched.is_watched():
                for each in tape:
                    self._run(*each)
            else:
                self._call(packed, len(tape), torch.get_num_threads())
            return result

        return replay

    def _pack(self, matrices: Sequence[nn.Linear | nn.Embedding]) -> Packed:
        if matrices[0] not in self._packed:
            self._packed[matrices[0]] = self._packed_of(matrices)
        return self._packed[matrices[0]]

    def _packed_of(self, matrices: Sequence[nn.Linear | nn.Embedding]) -> Packed:
        whole, bias = side_by_side(matrices)
        whole, scales = quantize(whole) if self._is_int8 else (whole, None)
        rows, num_inputs = whole.shape
        panels = self._arena.take((-(-rows // PANEL), num_inputs // 2, PANEL, 2), whole.dtype)
        self._run("pack_int8" if self._is_int8 else "pack", (whole, panels), (rows, num_inputs))
        sizes = tuple(len(each.weight) for each in matrices)
        for each in matrices:
            each.weight = nn.Parameter(each.weight.new_empty(0), requires_grad=False)
        return Packed(panels, sizes, num_inputs, bias, scales, tuple(matrices))

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Matrices come out of their panels again, rounded as int8 if they are."""
        names = {module: f"{name}.weight" for name, module in model.named_modules()}
        unpacked = {
            names[matrix]: weight
            for packed in self._packed.values()
            for matrix, weight in zip(packed.matrices, packed.weights(), strict=True)
        }
        return model.state_dict() | unpacked


def _packed_ops(calls: Sequence[Called]) -> bytes:
    return b"".join(_packed_op(*each) for each in calls)


def _packed_op(name: str, at: Tensors, counts: Sequence[int], scale: float) -> bytes:
    places = [0 if each is None else each.data_ptr() for each in at]
    return _OP.pack(_KINDS[name], scale, *places, *_NOTHING[: 8 - len(at)], *counts, *_NOTHING[: 10 - len(counts)])


class _ViewsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every operation of torch that computes something."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nobody compiles a recording: torch need not import its compiler, for a second, to leave this alone."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            raise KernelError(f"{func} is not among the compiled kernels")
        return func(*args, **(kwargs or {}))
