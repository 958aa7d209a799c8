"""Decides what runs in the next step: which requests, how many new positions of each, and who has to make room.

Knows requests and counts of blocks, not tensors: a schedule can be tested without a model. The whole policy, in one
step: grow the running requests, oldest first, and where the pool is used up preempt the youngest; then admit from the
head of the queue, never skipping it. What has finished is released by `commit`, before the next step. A prompt that is
longer than what a step may run is taken in chunks, and leaves a position to each running request (Sarathi-Serve,
arXiv:2403.02310). Older means: of a lower number of priority, then added earlier.

A preempted request gives all its blocks back, waits at its old place in the queue, and runs its prompt and what it has
generated again when its turn comes (recomputation, as in vLLM, arXiv:2309.06180). Its text is the same, whatever the
pool's size.

Whoever was in a step that failed is a *suspect*: taken back as by a preemption, and alone in a step, one after another,
until a token has come of it. So the one that makes steps fail fails alone.

With a prefix cache, a request begins behind what of it is remembered, its own blocks from before a preemption included.
Blocks are remembered once they are full and have run.
"""

import bisect
from collections.abc import Hashable, Iterator

from nanoserve.cache.blocks import BlockAllocator, BlockTable
from nanoserve.cache.prefix import PrefixTree
from nanoserve.config import SchedulerConfig
from nanoserve.errors import ConfigError, OutOfBlocksError, RequestError
from nanoserve.request import FinishReason, Request
from nanoserve.seats import Counts, Scheduled, Seat


class Scheduler:
    """Waiting and running requests. `schedule` admits and preempts, `commit` releases; nothing else moves a request."""

    def __init__(
        self, config: SchedulerConfig | None = None, prefixes: PrefixTree | None = None, space: Hashable = None
    ) -> None:
        """`prefixes` is for this pool alone; `space` is what else requests must share to share blocks.

        Raises ConfigError where the blocks of the two are not of one size.
        """
        self.config = config or SchedulerConfig()
        self.pool = BlockAllocator(self.config.num_blocks, prefixes) if self.config.num_blocks else None
        if prefixes is not None and (self.pool is None or prefixes.block_size != self.config.block_size):
            raise ConfigError(
                f"a prefix cache of blocks of {prefixes.block_size} tokens needs a pool of such blocks, not one of "
                f"{self.config.num_blocks} blocks of {self.config.block_size}"
            )
        self.prefixes, self._space = prefixes, space
        self.counts = Counts()
        self.admitted: tuple[str, ...] = ()
        self._waiting: list[Seat] = []
        self._running: list[Seat] = []
        self._suspects: list[Seat] = []
        self._scheduled: list[Scheduled] = []
        self._num_added = 0
        self._ids: set[str] = set()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def tables(self) -> list[BlockTable]:
        """The blocks of all running requests, oldest first; none without a pool."""
        return [seat.table for seat in self._running if seat.table is not None]

    def add(self, request: Request) -> None:
        """Queue a request, behind all of its priority.

        Raises RequestError when its id is in use, and when the whole pool could not hold it at its longest.
        """
        if request.request_id in self._ids:
            raise RequestError(f"request id {request.request_id!r} is already in use; choose another one")
        self.check_fits(request)
        table = None if self.pool is None else BlockTable(self.pool, self.config.block_size)
        _put(self._waiting, Seat(request, (request.priority, self._num_added), table))
        self._num_added += 1
        self._ids.add(request.request_id)

    def check_fits(self, request: Request) -> None:
        """Raise RequestError for a request that the whole pool could not hold at its longest."""
        if self.pool is not None:
            request.check_fits_pool(self.pool.num_blocks, self.config.block_size)

    def schedule(self) -> list[Scheduled]:
        """What runs in the next step, oldest first. Empty only when there is no work.

        `admitted` are the ids of those that are in a step for the first time.
        """
        self._scheduled, self.admitted = [], ()
        if self._suspects:
            self._schedule_alone(self._suspects[0])
        else:
            self._schedule_all()
        self._count()
        return self._scheduled

    def _schedule_all(self) -> None:
        budget, place = self.config.max_step_tokens, 0
        while place < len(self._running):  # the young ones may have been preempted meanwhile
            budget -= self._continue(self._running[place], budget - (len(self._running) - place - 1))
            place += 1
        self._admit(budget)
        self._scheduled += self._padding()

    def _schedule_alone(self, seat: Seat) -> None:
        """A suspect; whoever has what it needs of the pool makes room, the youngest first."""
        if seat not in self._running:
            self._find_prefix(seat)
            self._waiting.remove(seat)
            _put(self._running, seat)
            self._count_admission(seat)
        num_new = len(seat.request.token_ids) - seat.num_computed
        while not self._schedule(seat, self._chunk(num_new, self.config.max_step_tokens, is_first=True)):
            others = [each for each in self._running if each is not seat and each.request.finish_reason is None]
            self._preempt(others[-1] if others else seat)
            if not others:  # rows of a static batch that have finished hold the rest: they leave after this step
                self._scheduled += self._padding()
                return

    def _continue(self, seat: Seat, budget: int) -> int:
        """Schedule what a running request has to run next, as far as budget and pool go; the positions taken."""
        if seat.request.finish_reason is not None:
            return 1  # a padding row's
        num_new = min(len(seat.request.token_ids) - seat.num_computed, budget)
        assert num_new > 0, f"{seat.request.request_id} has nothing to run, or nothing is left for it"
        while not self._schedule(seat, num_new):
            youngest = next(each for each in reversed(self._running) if each.request.finish_reason is None)
            self._preempt(youngest)
            if youngest is seat:
                return 0
        return num_new

    def _schedule(self, seat: Seat, num_new: int) -> bool:
        copied = None
        if seat.table is not None:
            try:
                copied = seat.table.grow(seat.num_computed + num_new)
            except OutOfBlocksError:
                return False
        self._scheduled.append(seat.part(seat.num_computed, num_new, copied=copied))
        return True

    def _preempt(self, seat: Seat) -> None:
        """Take a running request's blocks, send it back to the queue. It is not scheduled yet: older ones go first."""
        self._running.remove(seat)
        is_answered = seat.request.num_output_tokens > 0
        is_decoding = is_answered and seat.num_before == seat.num_computed == len(seat.request.token_ids) - 1
        seat.num_again = seat.num_computed + is_decoding
        seat.give_back()
        self.counts.num_preemptions += 1
        _put(self._waiting, seat)

    def _admit(self, budget: int) -> None:
        """From the head of the queue, as long as rows, positions and blocks last."""
        if self.config.is_static and self._running:
            return
        is_first = True
        while self._waiting and len(self._running) < self.config.max_running and budget > 0:
            seat = self._waiting[0]
            self._find_prefix(seat)
            num_new = self._chunk(len(seat.request.token_ids) - seat.num_computed, budget, is_first=is_first)
            if not num_new or not self._has_room(seat) or not self._schedule(seat, num_new):
                if self.prefixes is not None:
                    seat.give_back()
                return
            is_first = False
            _put(self._running, self._waiting.pop(0))
            self._count_admission(seat)
            budget -= num_new

    def _find_prefix(self, seat: Seat) -> None:
        """What is remembered of a request, in whole blocks; its last token has to run in any case."""
        if self.prefixes is not None and not seat.wants_whole_prompt:
            seat.reuse(self.prefixes.find(seat.request.token_ids[:-1], self._space))

    def _count_admission(self, seat: Seat) -> None:
        """A request's hits are counted once. `num_computed` is what it has found now."""
        if seat.num_hits is None:
            seat.num_hits = seat.num_computed
            self.admitted += (seat.request.request_id,)
            if self.prefixes is not None:
                self.prefixes.admit(seat.path, len(seat.request.token_ids))
        self.counts.num_recomputed += max(0, seat.num_again - seat.num_computed)
        seat.num_again = 0

    def _chunk(self, num_tokens: int, budget: int, *, is_first: bool) -> int:
        """How many positions of a prompt may run now: a part of it, or, without chunks, all of it or none."""
        if self.config.chunks_prefill or num_tokens <= budget:
            return min(num_tokens, budget)
        return num_tokens if is_first else 0

    def _has_room(self, seat: Seat) -> bool:
        """Room for all that is known of it, above a reserve for the growth of others; none is needed without others."""
        if self.pool is None or seat.table is None:
            return True
        reserve = self.config.watermark_blocks if self._running else 0
        return seat.table.num_missing(len(seat.request.token_ids)) + reserve <= self.pool.num_free

    def _padding(self) -> Iterator[Scheduled]:
        """In a static batch the rows that have finished run on until the last one has."""
        if self.config.is_static:
            for seat in self._running:
                if seat.request.finish_reason is not None:
                    yield seat.part(seat.num_computed - 1, 1, samples=False, is_padding=True)

    def _count(self) -> None:
        self.counts.num_steps += bool(self._scheduled)
        self.counts.num_positions += sum(each.num_new for each in self._scheduled)
        self.counts.num_padding += sum(each.is_padding for each in self._scheduled)

    def commit(self) -> list[Request]:
        """The step has run: what it computed is stored, and what it finished is released, and returned."""
        ran = {each.request.request_id: each for each in self._scheduled if not each.is_padding}
        for seat in self._running:
            if (each := ran.get(seat.request.request_id)) is not None:
                seat.num_computed += each.num_new
                if each.samples:
                    seat.num_before = seat.num_computed
                    self._clear(seat)
                if self.prefixes is not None:
                    seat.remember(self.prefixes, self._space)
        self._scheduled = []
        return self._release()

    def _clear(self, seat: Seat) -> None:
        """Whatever made a step fail, it was not this one; or it has left."""
        if seat in self._suspects:
            self._suspects.remove(seat)

    def take_back(self) -> list[Request]:
        """The step has failed: whoever was in it waits again, and is a suspect. Returns all who hold nothing now.

        Rows of a static batch that have finished are among them, and are released.
        """
        self.counts.num_failed_steps += 1
        back = [seat for seat in self._running if seat.request.finish_reason is None]
        for seat in back:
            self._preempt(seat)
            _put(self._suspects, seat)
        return [*(seat.request for seat in back), *self._release()]

    def _release(self) -> list[Request]:
        """Whoever has finished gives its row back; in a static batch, once the last one has."""
        done = [seat for seat in self._running if seat.request.finish_reason is not None]
        if self.config.is_static and len(done) < len(self._running):
            return []
        for seat in done:
            self._leave(self._running, seat)
        return [seat.request for seat in done]

    def _leave(self, queue: list[Seat], seat: Seat) -> None:
        queue.remove(seat)
        self._ids.remove(seat.request.request_id)
        self._clear(seat)
        if seat.table is not None:
            seat.table.release()

    def abort(self, request_id: str) -> list[Request]:
        """Take a request out wherever it is; it comes first, then who had only waited for it, in a static batch.

        Raises RequestError when the id is unknown or has finished.
        """
        for queue in (self._waiting, self._running):
            for seat in queue:
                if seat.request.request_id == request_id and seat.request.finish_reason is None:
                    seat.request.finish_reason = FinishReason.ABORT
                    self._leave(queue, seat)
                    return [seat.request, *self._release()]
        raise RequestError(f"no request {request_id!r} is waiting or running")

    def check(self) -> None:
        """Raise BlockError where a block is held by nobody that runs: for tests, between steps."""
        if self.pool is not None:
            self.pool.check(table.blocks for table in self.tables)


def make_scheduler(config: SchedulerConfig, prefix_policy: str | None, space: Hashable) -> Scheduler:
    """With a prefix cache for `prefix_policy`, what of it is evicted first, or without one for None."""
    prefixes = None if prefix_policy is None else PrefixTree(config.block_size, prefix_policy, evicts_runs=True)
    return Scheduler(config, prefixes, space)


def _put(queue: list[Seat], seat: Seat) -> None:
    """In at its place."""
    bisect.insort(queue, seat, key=lambda each: each.place)
