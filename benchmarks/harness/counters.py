"""What a piece of code does, counted exactly: FLOPs, operators, bytes, kernel launches, graph breaks.

Knows torch's dispatcher, loaded only when something is counted. Refuses to know time, what is being counted, and how a
device counts (`gpu/`).

Operators are counted where they reach a backend: a composite one (`linear`) counts as its parts (`t`, `mm`), so
inference mode changes nothing. Counted are the operators of the calling thread. What bypasses the dispatcher is not:
a Triton kernel outside of a registered operator, the inside of a CUDA graph, scratch space inside a CPU kernel.
A function from `torch.compile` runs uncompiled while its operators are counted; its launches, bytes on CUDA and graph
breaks are those of the compiled one.
"""

import contextlib
import dataclasses
import functools
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.garbage import without_collections
from benchmarks.harness.gpu.driver import driver

T = TypeVar("T")
Shape = Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one call did. Undefined is None.

    `flops`: of matrix products and attention, 2 m n k for each product, masked positions included; element-wise work
    is not in it. `operators`: how often each ran, by name; `num_operators` is their sum, views included.
    `allocated_bytes`: all memory that was taken; a view takes none. `peak_bytes`: the most of it that was held at one
    time. `retained_bytes`: what is still held when the call returns, its result included. On a CPU bytes are those of
    the tensors, on CUDA those of torch's allocator, which rounds up. `num_kernel_launches`: CUDA only, a captured graph
    is one; `num_graph_launches` of them were such.
    `num_graph_breaks`: those of what the warm-ups compiled, None if they compiled nothing.
    """

    flops: int
    num_operators: int
    operators: Mapping[str, int]
    allocated_bytes: int
    peak_bytes: int
    retained_bytes: int
    num_kernel_launches: int | None
    num_graph_launches: int | None
    num_graph_breaks: int | None

    def counts(self) -> dict[str, int]:
        """The counts that are defined, by name, as the exact gate compares them; the histogram only explains."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, int)}


def count_work(
    call: Callable[[], T], *, device: str = "cpu", warmups: int = 1, prepare: Callable[[], object] | None = None
) -> tuple[T, Work]:
    """Run the call and count it; return what it returned, and its work.

    The call is run `warmups` times uncounted, for caches that fill at first use, then once, on CUDA twice; `prepare`
    runs before each of these, uncounted, and puts back what a call changes. Garbage collection waits meanwhile, so a
    tensor in a reference cycle counts as held. Raises InstrumentError for a device that is neither `cpu` nor CUDA.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise InstrumentError(f"work on device {device!r} cannot be counted; choose from: cpu, cuda, cuda:N")
    prepare, compiled = prepare or (lambda: None), _compiled()
    for _ in range(warmups):
        prepare()
        call()
    on_device: Mapping[str, int] = {}
    if device != "cpu":
        prepare()
        on_device = _count_on_cuda(call, device)
    num_graph_breaks = _graph_breaks_since(compiled)
    prepare()
    result, counted = _count_operators(call)
    return result, Work(
        **{"num_kernel_launches": None, "num_graph_launches": None, **counted, **on_device},
        num_graph_breaks=num_graph_breaks,
    )


class StorageLedger:
    """Follows the operators of a run and the memory that they take, one operator after the other.

    A storage belongs to the run if an operator made it, and is held until nothing refers to it any more.
    """

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.allocated_bytes = self.peak_bytes = self.held_bytes = 0
        self._held: dict[int, tuple[Any, int]] = {}

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator and book it: its name, and every storage that is new or has grown after it."""
        self.release()
        # torch.tensor() makes its storage first and shows it to the dispatcher afterwards, as this operator's input.
        is_fresh = str(operator).startswith("aten.lift_fresh")
        before = {} if is_fresh else {key: storage.nbytes() for key, storage in _storages((args, kwargs))}
        result = operator(*args, **kwargs)
        self.operators[str(operator)] += 1
        for key, storage in dict(_storages((args, kwargs, result))).items():
            self._book(key, storage, before.get(key))
        return result

    def release(self) -> None:
        """Take off what has been freed since the last operator."""
        for key in [key for key, (reference, _) in self._held.items() if reference.expired()]:
            self.held_bytes -= self._held.pop(key)[1]

    def _book(self, key: int, storage: Any, bytes_before: int | None) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        num_bytes, (reference, num_held) = storage.nbytes(), self._held.get(key, (None, 0))
        grown = num_bytes - (num_held if bytes_before is None else bytes_before)
        if grown <= 0:
            return
        self.allocated_bytes += num_bytes
        self.held_bytes += grown
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self._held[key] = (reference or StorageWeakRef(storage), num_held + grown)  # type: ignore[no-untyped-call]


def _count_operators(call: Callable[[], T]) -> tuple[T, dict[str, Any]]:
    """Run the call under torch's FLOP counter, which takes composite operators apart, and a ledger below it."""
    from torch.utils.flop_counter import FlopCounterMode

    _warm_up_dispatch()
    ledger, flops = StorageLedger(), FlopCounterMode(display=False, custom_mapping=_missing_formulas())
    with without_collections(), _watching(ledger), flops:
        result = call()
        ledger.release()
    return result, {
        "flops": flops.get_total_flops(),
        "num_operators": ledger.operators.total(),
        "operators": dict(sorted(ledger.operators.items())),
        "allocated_bytes": ledger.allocated_bytes,
        "peak_bytes": ledger.peak_bytes,
        "retained_bytes": ledger.held_bytes,
    }


@functools.cache
def _warm_up_dispatch() -> None:
    """The first operator under a mode imports hundreds of modules, and leftovers of that hold the frames above it."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        torch.ones(1)


def _count_on_cuda(call: Callable[[], object], device: str) -> dict[str, int]:
    """Launches and bytes as the device's own counters tell them."""
    with without_collections():
        return dataclasses.asdict(driver().gpu(device).count_work(call))


def _watching(ledger: StorageLedger) -> contextlib.AbstractContextManager[Any]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return ledger.run(func, args, kwargs or {})

    return Watch()  # type: ignore[no-untyped-call]


def _storages(tree: Any) -> Iterator[tuple[int, Any]]:
    """Each strided tensor's storage, with its address, which stays its own for as long as anything refers to it."""
    import torch
    from torch.utils._pytree import tree_leaves

    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            storage = leaf.untyped_storage()
            yield storage._cdata, storage


def _missing_formulas() -> dict[Any, Callable[..., int]]:
    """Products that torch's FLOP counter takes for free: attention on a CPU, vectors, and products in place."""
    from torch import ops

    products = ("mv", "dot", "vdot", "_int_mm")
    compiled = [each for each in vars(ops.nanoserve).values() if hasattr(each, "overloads")]
    sums = ("addmv", "addmv_", "addmm_", "baddbmm_", "addbmm", "addbmm_")
    return {
        ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        **dict.fromkeys(compiled, told_flops),
        **{getattr(ops.aten, name): product_flops for name in products},
        **{getattr(ops.aten, name): lambda _, a, b, *__, **___: product_flops(a, b) for name in sums},
    }


def told_flops(at: object, counts: object, scale: float, flops: int, **_: object) -> int:
    """Of an operator of nanoserve's compiled kernels, which has them as an argument."""
    return flops


def attention_flops(queries: Shape, keys: Shape, values: Shape, *_: object, **__: object) -> int:
    """Scores and weighted sum for [batch, heads, new, size] over [batch, kv_heads, context, size], masked or not."""
    batch, num_heads, num_new, size = queries
    return 2 * batch * num_heads * num_new * keys[2] * (size + values[3])


def product_flops(left: Shape, right: Shape, *_: object, **__: object) -> int:
    """2 m n k of [..., m, k] times [..., k, n]; either may be a vector [k]."""
    return 2 * math.prod(left) * (right[-1] if len(right) > 1 else 1)


def _compiled() -> tuple[int, int]:
    """Frames that torch.compile has seen in this process, and graph breaks in them."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters: Mapping[str, Mapping[str, int]] = getattr(dynamo, "counters", {})
    return counters.get("frames", {}).get("total", 0), sum(counters.get("graph_break", {}).values())


def _graph_breaks_since(before: tuple[int, int]) -> int | None:
    num_frames, num_breaks = _compiled()
    return num_breaks - before[1] if num_frames > before[0] else None
