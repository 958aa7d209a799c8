"""Parts of nanoserve run on their own: the scheduler on a unit clock, reads of keys and values, bookkeeping.

Knows the public names of those parts, inside functions. What a part costs cannot be told from a whole that it is a
thirtieth of; whatever is left out here is left out on both sides of a comparison.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.timing import Emission

if TYPE_CHECKING:
    import torch

    from nanoserve.cache.kv import KVStep
    from nanoserve.weights import LoadedModel

    _Prepared = tuple[KVStep, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """Where to read, and what the new positions bring: queries, keys and values."""

READS = ("paged", "contiguous")
_BLOCK_SIZE = 16


def count_schedule(prompt_tokens: int, new_tokens: Sequence[int], scheduling: Mapping[str, Any]) -> dict[str, int]:
    """Run requests that come at once through a scheduler whose model takes no time; what came about, by metric."""
    from nanoserve.config import SamplingParams, SchedulerConfig
    from nanoserve.request import Request
    from nanoserve.scheduler import Scheduler

    scheduler = Scheduler(SchedulerConfig(**scheduling))
    for number, budget in enumerate(new_tokens):
        scheduler.add(Request(str(number), [0] * prompt_tokens, SamplingParams(max_new_tokens=budget, ignore_eos=True)))
    first_answer = 0
    while scheduler.has_work:
        for each in scheduler.schedule():
            if each.samples:
                each.request.append(0, ())
        if scheduler.commit() and not first_answer:
            first_answer = scheduler.counts.num_steps
    counts = scheduler.counts
    return {
        "num_steps": counts.num_steps,
        "num_positions": counts.num_positions,
        "num_padding": counts.num_padding,
        "num_preemptions": counts.num_preemptions,
        "num_tokens_recomputed": counts.num_recomputed,
        "num_steps_to_first_answer": first_answer,
    }


class Modelless:
    """A model that computes nothing, over a vocabulary of one token: what is left of a step is bookkeeping."""

    def __call__(self, token_ids: "torch.Tensor", positions: "torch.Tensor", cache: object) -> "torch.Tensor":
        return token_ids[:, None].float()

    def compute_logits(self, hidden: "torch.Tensor") -> "torch.Tensor":
        return hidden.new_zeros(len(hidden), 1)


class KVReads:
    """Attention of one new position of each request over all that is stored of it, in every layer, and nothing else.

    The blocks of a pool are handed out in random order, as after a long day. What is stored has the same numbers in
    every cache, and a mark in every other position, which a read that goes elsewhere does not find.
    """

    def __init__(self, loaded: "LoadedModel") -> None:
        self._loaded = loaded
        self._prepared: dict[tuple[str, int, int], _Prepared] = {}

    def stream(self, context_tokens: int, *, reads: str, requests: int = 1) -> Iterator[Emission]:
        """One read; its token is where the last request's largest number stands, the heads of a group added up."""
        import torch

        from nanoserve.attention import attend

        step, new = self._prepare(reads, context_tokens, requests)
        with torch.inference_mode():
            for layer in range(self._loaded.config.num_layers):
                out = attend(*new, layer=layer, cache=step)
        by_group = out[-1].float().view(self._loaded.config.num_kv_heads, -1, self._loaded.config.head_dim).sum(1)
        yield Emission(token_ids=(int(by_group.argmax()),), finish_reason="length")

    def _prepare(self, reads: str, context: int, requests: int) -> "_Prepared":
        if reads not in READS:
            raise InstrumentError(f"reads are of a cache that is one of {', '.join(READS)}, not {reads!r}")
        key = (reads, context, requests)
        if key not in self._prepared:
            step = (self._paged if reads == "paged" else self._contiguous)(context, requests)
            self._prepared[key] = step, self._new(requests)
        return self._prepared[key]

    def _paged(self, context: int, requests: int) -> "KVStep":
        from nanoserve.cache.blocks import BlockAllocator, BlockTable
        from nanoserve.cache.paged import PagedPart, PagedPool, PagedStep

        of, per_request = self._loaded, -(-context // _BLOCK_SIZE)
        pool = PagedPool(of.config, requests * per_request, _BLOCK_SIZE, of.dtype, of.device)
        order = random.Random(0).sample(range(pool.num_blocks), pool.num_blocks)
        parts = []
        for number in range(requests):
            table = BlockTable(BlockAllocator(pool.num_blocks), _BLOCK_SIZE)
            table.blocks, table.num_tokens = order[number * per_request : (number + 1) * per_request], context
            parts.append(PagedPart(table, context - 1, 1))
        self._fill(PagedStep(pool, [PagedPart(part.table, 0, context) for part in parts]), context, requests)
        return PagedStep(pool, parts)

    def _contiguous(self, context: int, requests: int) -> "KVStep":
        from nanoserve.cache.contiguous import ContiguousCache
        from nanoserve.cache.kv import Together

        of = self._loaded
        caches = [ContiguousCache(of.config, context, of.dtype, of.device) for _ in range(requests)]
        self._fill(Together([(cache, context) for cache in caches]), context, requests)
        for cache in caches:
            cache.num_cached = context - 1
        return Together([(cache, 1) for cache in caches])

    def _fill(self, step: "KVStep", context: int, requests: int) -> None:
        """The same numbers for every request and layer."""
        keys, values = self._numbers(context, 2)
        values[::2, -1, context % self._loaded.config.head_dim] += 4
        for layer in range(self._loaded.config.num_layers):
            for _ in step.extend(layer, keys.repeat(requests, 1, 1), values.repeat(requests, 1, 1)):
                pass

    def _new(self, requests: int) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
        """Queries, keys and values."""
        of = self._loaded.config
        keys, values = self._numbers(requests, 2)
        return self._numbers(requests, 1, of.num_heads)[0] / of.head_dim, keys, values

    def _numbers(self, rows: int, num: int, heads: int | None = None) -> "torch.Tensor":
        import torch

        of = self._loaded
        shape = (num, rows, heads or of.config.num_kv_heads, of.config.head_dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(of.device, of.dtype)
