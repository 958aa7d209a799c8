"""Decode steps that are recorded once and played again: on a GPU a whole step is one launch, likeliest tokens included.

Knows sizes: n requests run in the recording of the next larger *bucket*, and the rows that are left over are padding,
which writes to a block of nobody's and attends to that. Recordings share their inputs, at addresses that never change.
Refuses to know how something is recorded, who asks for what, and prefill: a step that holds more than one new position
of a request, or a prompt whose probabilities are wanted, is not for this file.

Reference: CUDA graphs (CUDA C++ Programming Guide); buckets of batch sizes as in vLLM.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch

from nanoserve.batch import PooledMemory, SeparateMemory, copy_shared
from nanoserve.cache.paged import DecodeStep, PagedPool
from nanoserve.config import SchedulerConfig
from nanoserve.errors import one_line
from nanoserve.models.causal import CausalModel
from nanoserve.sampling import Scores, likeliest
from nanoserve.seats import Scheduled
from nanoserve.staging import Ints
from nanoserve.weights import LoadedModel

T = TypeVar("T")

_chained = itertools.chain.from_iterable

_EVERY = 8
"""Buckets from here on are multiples of it: a step pays for seven padding rows at most, or for as many as it has."""


class Recorder(Protocol):
    """What can do again, faster, what it has seen done."""

    sees_torch: bool
    """Whether torch's own operations are recorded; otherwise only those of the model's `ops` may run meanwhile."""

    def sizes(self, max_running: int) -> Sequence[int]:
        """Numbers of requests that are worth a recording, smallest first; the last is the most that may run."""
        ...

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Run it, once or more, and return what does the same again with whatever lies at the same addresses then.

        Each call returns the same tensors, which the next one overwrites. Any exception means that it cannot be
        recorded: nothing of it is left then.
        """
        ...


class CudaGraphRecorder:
    """Captures CUDA graphs, which share one pool of memory: they never run beside each other."""

    sees_torch = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        with cuda.device(device):
            self._stream, self._pool = cuda.Stream(), cuda.graph_pool_handle()

    def sizes(self, max_running: int) -> list[int]:
        """See `buckets`: a graph takes memory."""
        return buckets(max_running)

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """See `Recorder`. What is compiled or allocated at first use is so in a run before, on the same stream."""
        cuda = self._cuda
        with cuda.device(self._device):
            self._stream.wait_stream(cuda.current_stream())
            with cuda.stream(self._stream):
                run()
            cuda.current_stream().wait_stream(self._stream)
            graph = cuda.CUDAGraph()
            # What other threads do with the device meanwhile is no part of this.
            with cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = run()

        def replay() -> T:
            graph.replay()
            return result

        return replay


def choose_recorder(graphs: str, loaded: LoadedModel, attention: str) -> Recorder | None:
    """`graphs`, one of `config.GRAPHS`, as what will record; None where every step runs eagerly.

    With a kernel that reads blocks where they are: what gathers them has other sizes in every step.
    """
    if graphs == "off":
        return None
    if attention == "native":
        return cast(Recorder, loaded.ops)
    return CudaGraphRecorder(loaded.device) if loaded.device.type == "cuda" and attention == "triton" else None


def make_replays(
    recorder: Recorder | None, loaded: LoadedModel, memory: PooledMemory | SeparateMemory, settings: SchedulerConfig
) -> "Replays | None":
    """What a recorder makes of an engine's steps; None without one."""
    if recorder is None or not isinstance(memory, PooledMemory):
        return None
    max_context = loaded.config.max_context_tokens
    return Replays(recorder, loaded.model, memory, max_running=settings.max_running, max_context=max_context)


def buckets(max_running: int) -> list[int]:
    """Numbers of rows that are recorded, smallest first: 1, 2, 4, then multiples of 8, and the most that may run."""
    sizes = {1, 2, 4, *range(_EVERY, max_running, _EVERY)}
    return sorted({size for size in sizes if size < max_running} | {max_running})


class Inputs:
    """What recorded steps read: token ids, positions, slots and contexts [4, rows], and tables [rows, blocks].

    A recording of n rows reads the first n; contexts, and lines for slots, are there once more as kernels read them.
    Tables are as wide as the longest request may need, 4 bytes a block: what lies behind a request's own is not read.
    Of a step only the tables go there that are not there yet: a request has a new block once in many steps.
    """

    def __init__(self, pool: PagedPool, max_rows: int, max_blocks: int) -> None:
        self._pool = pool
        self._rows = torch.zeros((4, max_rows), dtype=torch.int64, device=pool.device)
        self._contexts = torch.zeros(max_rows, dtype=torch.int32, device=pool.device)
        self._lines = torch.zeros(max_rows * pool.num_heads, dtype=torch.int64, device=pool.device)
        self._tables = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=pool.device)
        self._held: list[list[int]] = [[] for _ in range(max_rows)]

    def fill(self, scheduled: Sequence[Scheduled], size: int) -> None:
        """With one position of each request, and with padding from there on: position 0 of a block of nobody's."""
        spare, num_padding = self._pool.spare_block, size - len(scheduled)
        rows = [*map(_row, scheduled), *[(0, 0, spare * self._pool.block_size, 1)] * num_padding]
        tables = [*map(_blocks, scheduled), *[[spare]] * num_padding]
        new = {row: list(blocks) for row, blocks in enumerate(tables) if self._held[row] != blocks}
        width = max(map(len, new.values()), default=0)
        ints = Ints()
        rows_there = ints.put(_chained(zip(*rows, strict=True)))
        new_there = ints.put(new)
        ints.put(_chained(blocks + [0] * (width - len(blocks)) for blocks in new.values()))
        sent = ints.send(self._pool.device)
        _, _, slots, contexts = self._rows[:, :size].copy_(sent[rows_there].view(4, size))
        self._contexts[:size].copy_(contexts)
        self._lines[: size * self._pool.num_heads].copy_(self._pool.lines_to_write(slots))
        for row in new:  # what fails from here on is sent again
            self._held[row] = []
        if new:
            tables_there = sent[new_there.stop :].view(-1, width).int()
            self._tables[:, :width].index_copy_(0, sent[new_there], tables_there)
        for row, blocks in new.items():
            self._held[row] = blocks

    def first(self, size: int, backend: str) -> tuple[torch.Tensor, torch.Tensor, DecodeStep]:
        """Token ids, positions, and where keys and values go."""
        token_ids, positions = self._rows[:2, :size]
        lines = self._lines[: size * self._pool.num_heads]
        kv = DecodeStep(self._pool, lines, self._tables[:size], self._contexts[:size], backend)
        return token_ids, positions, kv


def _row(scheduled: Scheduled) -> tuple[int, int, int, int]:
    """Token id, position, slot, and how many positions it sees."""
    position, table = scheduled.num_computed, scheduled.table
    assert table is not None, f"{scheduled.request.request_id} has no blocks"
    return scheduled.request.token_ids[position], position, table.slots(position, position + 1)[0], position + 1


def _blocks(scheduled: Scheduled) -> list[int]:
    assert scheduled.table is not None
    return scheduled.table.blocks


class Replays:
    """The recordings of an engine, made when a bucket is first used, or ahead of time.

    `notes` says, once, what could not be recorded, in a sentence; all steps run eagerly from then on.
    """

    def __init__(
        self, recorder: Recorder, model: CausalModel, memory: PooledMemory, *, max_running: int, max_context: int
    ) -> None:
        pool = memory.pool
        assert memory.in_place is not None, "what gathers blocks cannot be recorded"
        self._recorder, self._model, self._pool, self._backend = recorder, model, pool, memory.in_place
        self._buckets = recorder.sizes(max_running)
        self._inputs = Inputs(pool, max_running, min(-(-max_context // pool.block_size), pool.num_blocks))
        self._recorded: dict[int, Callable[[], Scores]] = {}
        self.notes: list[str] = []

    def run(self, scheduled: Sequence[Scheduled]) -> Scores | None:
        """Scores of the requests that sample, in their order; None for a step that has to run eagerly."""
        if self.notes or any(each.num_new != 1 or each.prompt_targets for each in scheduled):
            return None
        copy_shared(self._pool, scheduled)
        size = next(size for size in self._buckets if size >= len(scheduled))
        self._inputs.fill(sorted(scheduled, key=lambda each: not each.samples), size)
        if not self._is_recorded(size):
            return None
        logits, found = self._recorded[size]()
        num = sum(each.samples for each in scheduled)
        return Scores(logits[:num], None if found is None else found[:, :num])

    @torch.inference_mode()
    def warm_up(self) -> int:
        """Record all buckets, the largest first: smaller ones find their memory there. Returns how many there are."""
        for size in reversed(self._buckets):
            self._inputs.fill([], size)
            self._is_recorded(size)
        return len(self._recorded)

    def _is_recorded(self, size: int) -> bool:
        """Whether there is a recording of a bucket now."""
        if size not in self._recorded and not self.notes:
            try:
                self._recorded[size] = self._recorder.record(lambda: self._step(size))
            except Exception as error:  # whatever it is, a step can run without
                self.notes.append(f"a step of {size} requests cannot be recorded, steps run eagerly: {one_line(error)}")
                self._recorded.clear()
        return size in self._recorded

    def _step(self, size: int) -> Scores:
        token_ids, positions, kv = self._inputs.first(size, self._backend)
        logits = self._model.compute_logits(self._model(token_ids, positions, kv))
        return Scores(logits, likeliest(logits) if self._recorder.sees_torch else None)
