"""What an engine tells of itself between steps: requests, blocks, bytes, and what came about so far.

Knows the scheduler's counts, and what a position takes. Refuses to know tensors and time, and changes nothing: it may
be asked as often as somebody likes.
"""

from nanoserve.cache.prefix import PrefixCounts
from nanoserve.scheduler import Scheduler
from nanoserve.seats import Counts
from nanoserve.weights import LoadedModel


class Gauges:
    """The part of an engine that only tells."""

    loaded: LoadedModel
    _scheduler: Scheduler

    @property
    def counts(self) -> Counts:
        """What came about so far: steps, positions, preemptions. Grows with every step."""
        return self._scheduler.counts

    @property
    def prefix_counts(self) -> PrefixCounts | None:
        """What the prefix cache found, kept and gave up so far; None without one. Grows with every step."""
        return None if self._scheduler.prefixes is None else self._scheduler.prefixes.counts

    @property
    def num_running(self) -> int:
        """Requests that share the next step; in a static batch, those that have finished and wait for others too."""
        return self._scheduler.num_running

    @property
    def max_running(self) -> int:
        """Requests that may share a step."""
        return self._scheduler.config.max_running

    @property
    def num_waiting(self) -> int:
        """Requests that are queued, those that had to make room for others among them."""
        return self._scheduler.num_waiting

    @property
    def admitted(self) -> tuple[str, ...]:
        """Ids of the requests that the last step took in for the first time: a preempted one does not come again."""
        return self._scheduler.admitted

    @property
    def max_request_tokens(self) -> int:
        """Tokens of prompt and answer together that a request may have: what context and pool can hold."""
        pool, context = self._scheduler.pool, self.loaded.config.max_context_tokens
        # The last token's keys and values are needed by nobody.
        return context if pool is None else min(context, pool.num_blocks * self._scheduler.config.block_size + 1)

    @property
    def num_kv_blocks_total(self) -> int | None:
        """KV blocks of the whole pool; None without a pool."""
        return None if self._scheduler.pool is None else self._scheduler.pool.num_blocks

    @property
    def num_kv_blocks_free(self) -> int | None:
        """KV blocks that no request holds, though the prefix cache may remember them; None without a pool."""
        return None if self._scheduler.pool is None else self._scheduler.pool.num_free

    @property
    def num_kv_blocks(self) -> int | None:
        """KV blocks that running requests hold, a shared one once; None without a pool."""
        held = {block for table in self._scheduler.tables for block in table.blocks}
        return None if self._scheduler.pool is None else len(held)

    @property
    def kv_waste_bytes(self) -> int | None:
        """Bytes inside blocks that are held where no position lies; None without a pool."""
        return self._bytes_of(sum(table.num_spare for table in self._scheduler.tables))

    @property
    def kv_unused_bytes(self) -> int | None:
        """Bytes of the pool's blocks that no request holds; None without a pool."""
        pool = self._scheduler.pool
        return None if pool is None else self._bytes_of(pool.num_free * self._scheduler.config.block_size)

    def _bytes_of(self, num_positions: int) -> int | None:
        per_token = self.loaded.config.kv_bytes_per_token(self.loaded.dtype.itemsize)
        return None if self._scheduler.pool is None else num_positions * per_token
