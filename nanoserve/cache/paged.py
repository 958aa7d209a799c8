"""One pool of KV blocks for all requests and all layers, and what a step's requests read and write in it.

Knows slots and tensors. Where a request's positions lie is its table's word (`blocks.py`); a step turns tables into
slots once, and every layer uses them. Writes go to all slots at once. Requests with one new position each are read
together: gathered into a workspace, or left in place for a kernel that follows the tables. A request alone in its group
whose blocks happen to follow each other is read in place as well.

Reference: PagedAttention (arXiv:2309.06180).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from nanoserve.cache.blocks import BlockTable
from nanoserve.cache.kv import InBlocks, Stored, copy_lines
from nanoserve.config import ModelConfig
from nanoserve.staging import Ints

_SPREAD = 2
"""Requests are read together while the longest context has at most so many times the blocks of the shortest."""

_SMALL_BLOCKS = 8
"""Contexts of so few blocks are always read together: what is read in vain costs less than another kernel call."""

_SPARE = 8
"""A workspace that is too small grows by an eighth more than is wanted: contexts grow with every step."""

_chained = itertools.chain.from_iterable


Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


class PagedPool:
    """Keys and values [layers, 2, kv_heads, slots, head_dim]; slot = block x block size + offset.

    A head's positions follow each other, as attention reads them. A *line* is one head's numbers of one slot, the
    head x slots + slot-th of all: what is written and gathered goes by lines.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        store: Store = copy_lines,
        has_spare: bool = False,
    ) -> None:
        """`store` writes new keys or values [new, kv_heads, head_dim] to lines, at as many places.

        With a spare block behind the others there is one that no request ever holds, for rows of no request's.
        """
        num_slots = (num_blocks + has_spare) * block_size
        shape = (config.num_layers, 2, config.num_kv_heads, num_slots, config.head_dim)
        self._buffer = torch.empty(shape, dtype=dtype, device=device)
        self._layers = [(layer[0], layer[1]) for layer in self._buffer]
        self._lines = [(layer[0].flatten(0, 1), layer[1].flatten(0, 1)) for layer in self._buffer]
        self._workspace = torch.empty((2, 0, config.head_dim), dtype=dtype, device=device)
        self._heads, self.num_heads = torch.arange(config.num_kv_heads, device=device) * num_slots, config.num_kv_heads
        self.block_size, self.num_blocks, self.device = block_size, num_blocks, device
        self.spare_block, self._store = num_blocks, store

    @property
    def num_bytes(self) -> int:
        return self._buffer.nbytes

    def copy_block(self, source: int, target: int) -> None:
        """All layers of a block, for a request that writes where others read."""
        blocks = self._buffer.view(*self._buffer.shape[:3], -1, self.block_size, self._buffer.shape[4])
        blocks[:, :, :, target] = blocks[:, :, :, source]

    def lines_to_write(self, slots: torch.Tensor) -> torch.Tensor:
        """Lines of slots [new], in the order of keys and values [new, kv_heads, head_dim]."""
        return (slots[:, None] + self._heads).flatten()

    def lines_to_read(self, slots: torch.Tensor) -> torch.Tensor:
        """Lines of slots [any], in the order of keys and values [kv_heads, any, head_dim]."""
        return (self._heads[:, None] + slots).flatten()

    def write(self, layer: int, lines: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keys and values [new, kv_heads, head_dim] to as many lines."""
        for stored, new in zip(self._lines[layer], (keys, values), strict=True):
            self._store(stored, lines, new)

    def whole(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, slots, head_dim] of a layer, as they lie."""
        return self._layers[layer]

    def gather(self, layer: int, lines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [lines, head_dim], copied to where the next call overwrites them."""
        num = lines.numel()
        if self._workspace.shape[1] < num:
            self._workspace = self._workspace[:, :0].clone()  # or both would be there at once
            self._workspace = self._workspace.new_empty((2, num + num // _SPARE, *self._workspace.shape[2:]))
        found = [
            torch.index_select(stored, 0, lines, out=space[:num])
            for stored, space in zip(self._lines[layer], self._workspace, strict=True)
        ]
        return found[0], found[1]


@dataclasses.dataclass(frozen=True, slots=True)
class PagedPart:
    """One request's part of a step: its table, the positions that are stored, and how many new ones follow."""

    table: BlockTable
    num_stored: int
    num_new: int

    @property
    def context(self) -> int:
        return self.num_stored + self.num_new


def in_reading_order(part: PagedPart) -> tuple[bool, int]:
    """A key to sort by: requests with one new position first, by context, so that those read together stand so."""
    return part.num_new > 1, len(part.table.blocks)


class PagedStep:
    """One step's requests in the pool, in reading order. Slots are worked out here, once for all layers."""

    def __init__(
        self, pool: PagedPool, parts: Sequence[PagedPart], *, in_place: str | None = None, ints: Ints | None = None
    ) -> None:
        """`in_place` names the kernel that reads requests with one new position where they are; others are gathered.
        The native kernel reads all of them where they are.

        Where `ints` is given, whoever gives them sends them, and calls `arrive` before the first layer.
        """
        assert [*map(in_reading_order, parts)] == sorted(map(in_reading_order, parts)), "not in reading order"
        self._pool, together = pool, ints or Ints()
        self._slots = together.put(_chained(part.table.slots(part.num_stored, part.context) for part in parts))
        single = [part for part in parts if part.num_new == 1 or in_place == "native"] if in_place else []
        self._in_place = _InPlace(single, together, pool.block_size, in_place) if in_place and single else None
        self._groups = [*_groups_of(parts[len(single) :], together, pool.block_size, first_row=len(single))]
        if ints is None:
            self.arrive(together.send(pool.device))

    def arrive(self, sent: torch.Tensor) -> None:
        """All of the step's integers are on the device."""
        pool = self._pool
        self._writes = pool.lines_to_write(sent[self._slots])
        self._in_blocks = None if self._in_place is None else self._in_place.of(sent)
        self._reads = [group.read(pool, sent) for group in self._groups]

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Iterator[Stored | InBlocks]:
        self._pool.write(layer, self._writes, keys, values)
        if self._in_blocks is not None:
            all_keys, all_values = self._pool.whole(layer)
            yield self._in_blocks(keys=all_keys, values=all_values)
        for read in self._reads:
            yield self._stored(layer, read)

    def _stored(self, layer: int, read: "_Read") -> Stored:
        keys, values = self._pool.whole(layer)
        if isinstance(read.place, slice):
            return Stored(read.rows, keys[None, :, read.place], values[None, :, read.place])
        by_request = (keys.shape[0], read.num_requests, -1, keys.shape[2])
        keys, values = (each.view(by_request).transpose(0, 1) for each in self._pool.gather(layer, read.place))
        return Stored(read.rows, keys, values, read.mask)


class DecodeStep:
    """One new position of each request; lines to write, tables and contexts are on the device already, all in place."""

    def __init__(
        self, pool: PagedPool, lines: torch.Tensor, tables: torch.Tensor, contexts: torch.Tensor, backend: str
    ) -> None:
        self._pool, self._writes = pool, lines
        rows = slice(0, len(contexts))
        self._in_blocks = functools.partial(
            InBlocks, rows=rows, tables=tables, contexts=contexts, block_size=pool.block_size, backend=backend
        )

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Iterator[InBlocks]:
        self._pool.write(layer, self._writes, keys, values)
        all_keys, all_values = self._pool.whole(layer)
        yield self._in_blocks(keys=all_keys, values=all_values)


class _Tables:
    """Block numbers [requests, blocks], 0 behind a request's own, and contexts [requests], among a step's integers."""

    def __init__(self, parts: Sequence[PagedPart], ints: Ints) -> None:
        longest = max(len(part.table.blocks) for part in parts)
        self._shape = (len(parts), longest)
        self._blocks = ints.put(
            _chained(part.table.blocks + [0] * (longest - len(part.table.blocks)) for part in parts)
        )
        self._contexts = ints.put(part.context for part in parts)

    def of(self, sent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sent[self._blocks].view(self._shape), sent[self._contexts]


class _InPlace:
    """Requests that a kernel reads where they are, each with its new rows."""

    def __init__(self, parts: Sequence[PagedPart], ints: Ints, block_size: int, backend: str) -> None:
        self._tables, self._block_size, self._backend = _Tables(parts, ints), block_size, backend
        starts = [0, *itertools.accumulate(part.num_new for part in parts)]
        self._rows = slice(0, starts[-1])
        self._row_starts = None if starts[-1] == len(parts) else ints.put(starts)

    def of(self, sent: torch.Tensor) -> Callable[..., InBlocks]:
        """All but keys and values, which are each layer's own."""
        tables, contexts = (each.int() for each in self._tables.of(sent))
        return functools.partial(
            InBlocks,
            rows=self._rows,
            tables=tables,
            contexts=contexts,
            block_size=self._block_size,
            backend=self._backend,
            row_starts=None if self._row_starts is None else sent[self._row_starts].int(),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Read:
    """What one group of rows reads: slots that follow each other, or the lines of all slots of all its requests."""

    rows: slice
    place: slice | torch.Tensor
    num_requests: int = 1
    mask: torch.Tensor | None = None


class _Group:
    """Requests that are read together, before and after their tables have come to the device."""

    def __init__(self, parts: Sequence[PagedPart], ints: Ints, block_size: int, first_row: int) -> None:
        self.rows = slice(first_row, first_row + sum(part.num_new for part in parts))
        self._contexts = [part.context for part in parts]
        blocks = parts[0].table.blocks
        is_run = len(parts) == 1 and all(after - before == 1 for before, after in itertools.pairwise(blocks))
        self._run = slice(blocks[0] * block_size, blocks[0] * block_size + self._contexts[0]) if is_run else None
        self._tables = None if is_run else _Tables(parts, ints)

    def read(self, pool: PagedPool, sent: torch.Tensor) -> _Read:
        if self._run is not None:
            return _Read(self.rows, self._run)
        assert self._tables is not None
        size = pool.block_size
        tables, ends = self._tables.of(sent)
        positions, ends = torch.arange(max(self._contexts), device=pool.device)[None], ends[:, None]
        # A position that a request does not have reads its last one: what lies unwritten in the pool may be anything.
        inside = torch.minimum(positions, ends - 1)
        slots = tables.gather(1, inside // size) * size + inside % size
        mask = (positions < ends)[:, None, None] if len(set(self._contexts)) > 1 else None
        return _Read(self.rows, pool.lines_to_read(slots.flatten()), len(self._contexts), mask)


def _groups_of(parts: Sequence[PagedPart], ints: Ints, block_size: int, first_row: int) -> Iterator[_Group]:
    for each in _groups(parts):
        group = _Group(each, ints, block_size, first_row)
        yield group
        first_row = group.rows.stop


def _groups(parts: Sequence[PagedPart]) -> list[list[PagedPart]]:
    """Those that are read together: one new position each, and contexts that are not too different."""
    groups: list[list[PagedPart]] = []
    for part in parts:
        if groups and part.num_new == 1 and len(part.table.blocks) <= _most_blocks(groups[-1][0]):
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _most_blocks(shortest: PagedPart) -> int:
    return max(_SPREAD * len(shortest.table.blocks), _SMALL_BLOCKS)
