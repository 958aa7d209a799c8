"""From what the scheduler decided to what the model runs: token ids, positions, rows, and where keys and values go.

Knows the memory of an engine's requests: one pool for all, or a cache for each. Refuses to know the policy, sampling
and text.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from nanoserve.cache.contiguous import ContiguousCache
from nanoserve.cache.growing import GrowingCache
from nanoserve.cache.kv import KVCache, KVStep, NoCache, Together
from nanoserve.cache.paged import PagedPart, PagedPool, PagedStep, in_reading_order
from nanoserve.config import SchedulerConfig
from nanoserve.ops import TORCH, Ops
from nanoserve.request import Request
from nanoserve.seats import Scheduled
from nanoserve.staging import Ints
from nanoserve.weights import LoadedModel

_chained = itertools.chain.from_iterable


class PromptRows(NamedTuple):
    """Rows of a step that tell how likely the tokens of a prompt are: each tells of the token that follows it.

    `is_first` where the prompt begins with them.
    """

    request: Request
    rows: slice
    targets: torch.Tensor
    is_first: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """One forward. `last_rows` are the rows that a token comes of, in the order in which requests were scheduled.

    They are None where no token comes. `prompts` are those of which more is wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv: KVStep
    last_rows: torch.Tensor | None
    prompts: Sequence[PromptRows]


class PooledMemory:
    """Keys and values of all requests in one pool; the scheduler's block tables say where."""

    def __init__(self, pool: PagedPool, in_place: str | None, ops: Ops = TORCH) -> None:
        self.pool, self.in_place, self._ops = pool, in_place, ops

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward: where reads and writes are the model's own operations, all of it is one."""
        return self._ops.together() if self.in_place == "native" else contextlib.nullcontext()

    @property
    def num_bytes(self) -> int:
        """The whole pool, used or not, and a spare block where it has one."""
        return self.pool.num_bytes

    def batch(self, scheduled: Sequence[Scheduled]) -> Batch:
        """Requests in reading order; blocks that have to be copied are copied here."""
        ordered = sorted(zip(map(_paged_part, scheduled), scheduled, strict=True), key=lambda p: in_reading_order(p[0]))
        copy_shared(self.pool, scheduled)
        ints = Ints()
        kv = PagedStep(self.pool, [part for part, _ in ordered], in_place=self.in_place, ints=ints)
        rows = _Rows([(each, self.positions_of(each)) for _, each in ordered], scheduled, ints)
        sent = ints.send(self.pool.device)
        kv.arrive(sent)
        return rows.batch(kv, sent)

    def positions_of(self, scheduled: Scheduled) -> range:
        """The positions that a step runs of a request."""
        return range(scheduled.num_computed, scheduled.num_computed + scheduled.num_new)

    def release(self, request_id: str) -> None:
        """Nothing to free: blocks are the scheduler's."""


class SeparateMemory:
    """A cache for each running request, made when it is first scheduled: a waiting request holds no memory."""

    def __init__(self, make: Callable[[Request], KVCache], device: torch.device, *, stores: bool = True) -> None:
        """Without `stores`, every forward runs all positions, whatever is computed already."""
        self._make, self._device, self._stores = make, device, stores
        self._caches: dict[str, KVCache] = {}

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward: these caches are written by torch, in between."""
        return contextlib.nullcontext()

    @property
    def num_bytes(self) -> int:
        """Of all running requests, positions that are reserved and not yet stored included."""
        return sum(cache.num_bytes for cache in self._caches.values())

    def batch(self, scheduled: Sequence[Scheduled]) -> Batch:
        rows = [(each, self.positions_of(each)) for each in scheduled]
        parts = []
        for each, ran in rows:
            cache = self._cache_of(each.request)
            cache.num_cached = ran.start
            parts.append((cache, len(ran)))
        kv = parts[0][0] if len(parts) == 1 else Together(parts)
        ints = Ints()
        return _Rows(rows, scheduled, ints).batch(kv, ints.send(self._device))

    def positions_of(self, scheduled: Scheduled) -> range:
        """The positions that a step runs of a request: where nothing is stored, all of them."""
        return range(scheduled.num_computed if self._stores else 0, scheduled.num_computed + scheduled.num_new)

    def release(self, request_id: str) -> None:
        self._caches.pop(request_id, None)

    def _cache_of(self, request: Request) -> KVCache:
        if request.request_id not in self._caches:
            self._caches[request.request_id] = self._make(request)
        return self._caches[request.request_id]


def copy_shared(pool: PagedPool, scheduled: Iterable[Scheduled]) -> None:
    """Blocks that others read as well, and a request is about to write to, are copied for it."""
    for each in scheduled:
        if each.copied is not None:
            pool.copy_block(*each.copied)


def make_memory(
    loaded: LoadedModel, cache: str, settings: SchedulerConfig, attention: str, *, has_spare: bool = False
) -> PooledMemory | SeparateMemory:
    """What `cache`, one of `config.CACHES`, asks for; a pool of the settings' size, with a spare block or without."""
    shape, dtype, device = loaded.config, loaded.dtype, loaded.device
    if cache == "paged":
        pool = PagedPool(
            shape, settings.num_blocks, settings.block_size, dtype, device, store=loaded.ops.store, has_spare=has_spare
        )
        return PooledMemory(pool, None if attention == "sdpa" else attention, loaded.ops)

    def make(request: Request) -> KVCache:
        if cache == "none":
            return NoCache()
        if cache == "growing":
            return GrowingCache(shape.num_layers)
        return ContiguousCache(shape, request.num_prompt_tokens + request.params.max_new_tokens, dtype, device)

    return SeparateMemory(make, device, stores=cache != "none")


def _paged_part(scheduled: Scheduled) -> PagedPart:
    assert scheduled.table is not None, f"{scheduled.request.request_id} has no blocks"
    return PagedPart(scheduled.table, scheduled.num_computed, scheduled.num_new)


class _Rows:
    """What stands in a step's rows, before and after it has come to the device."""

    def __init__(self, rows: Sequence[tuple[Scheduled, range]], scheduled: Sequence[Scheduled], ints: Ints) -> None:
        """`rows` holds the positions that run of each request, in the order in which they stand in the batch."""
        self._token_ids = ints.put(_chained(each.request.token_ids[ran.start : ran.stop] for each, ran in rows))
        self._positions = ints.put(_chained(ran for _, ran in rows))
        ends = [*itertools.accumulate(len(ran) for _, ran in rows)]
        last_row = {each.request.request_id: end - 1 for (each, _), end in zip(rows, ends, strict=True)}
        self._last_rows = ints.put(last_row[each.request.request_id] for each in scheduled if each.samples)
        self._prompts = [
            (each, end - each.num_new, ints.put(each.request.token_ids[targets.start : targets.stop]))
            for (each, _), end in zip(rows, ends, strict=True)
            if (targets := each.prompt_targets)
        ]

    def batch(self, kv: KVStep, sent: torch.Tensor) -> Batch:
        last_rows = sent[self._last_rows]
        return Batch(
            token_ids=sent[self._token_ids],
            positions=sent[self._positions],
            kv=kv,
            last_rows=last_rows if last_rows.numel() else None,
            prompts=[
                PromptRows(each.request, slice(row, row + len(each.prompt_targets)), sent[ids], each.num_computed == 0)
                for each, row, ids in self._prompts
            ],
        )
