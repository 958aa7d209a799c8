"""KV blocks of one pool: who holds which, and where a request's next position goes.

Knows counts, block numbers and positions. Refuses to know tensors: what a block holds lies elsewhere, at the slots that
a table names. A block is free, or held by one owner or more; the last one to let go frees it, or leaves it *idle*, with
what it holds, where somebody knows how to find it again. Idle blocks are handed out when no free one is left.

Reference: vLLM's PagedAttention (arXiv:2309.06180).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from nanoserve.errors import BlockError, OutOfBlocksError


class Memory(Protocol):
    """Who remembers what idle blocks hold."""

    @property
    def num_idle(self) -> int: ...

    def is_idle(self, block: int) -> bool: ...

    def keeps(self, block: int) -> bool:
        """The last owner lets go of a block: whether it becomes idle. Otherwise it is free."""
        ...

    def wake(self, block: int) -> None:
        """An idle block gets an owner."""
        ...

    def evict(self, num: int) -> list[int]:
        """Give up so many idle blocks, or more; they are no longer remembered. `num` is `num_idle` at most."""
        ...


class BlockAllocator:
    """A pool of `num_blocks` blocks, numbered from 0. The block freed last is handed out first: it may be warm."""

    def __init__(self, num_blocks: int, memory: Memory | None = None) -> None:
        if num_blocks < 1:
            raise BlockError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks, self._memory = num_blocks, memory
        self._free = list(reversed(range(num_blocks)))
        self._num_owners = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, idle ones among them."""
        return len(self._free) + self.num_idle

    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds and somebody remembers."""
        return self._memory.num_idle if self._memory else 0

    def num_owners(self, block: int) -> int:
        """How many hold a block; 0 for a free one. Raises BlockError for a number that is no block of this pool."""
        if not 0 <= block < self.num_blocks:
            raise BlockError(f"block {block} is not of this pool, whose blocks are 0 to {self.num_blocks - 1}")
        return self._num_owners[block]

    def allocate(self, num: int) -> list[int]:
        """Take `num` blocks that nobody holds, all or none: raises OutOfBlocksError, and changes nothing, for more."""
        if num < 0:
            raise BlockError(f"cannot allocate {num} blocks")
        if num > self.num_free:
            raise OutOfBlocksError(f"{num} blocks are wanted and {self.num_free} of {self.num_blocks} are free")
        if self._memory and num > len(self._free):
            # What is free already goes first, then the lowest of those that were evicted.
            self._free = sorted(self._memory.evict(num - len(self._free)), reverse=True) + self._free
        taken = [self._free.pop() for _ in range(num)]
        for block in taken:
            self._num_owners[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each of these blocks. Raises BlockError, and changes nothing, where one is free.

        An idle block may be shared: whoever remembers it says what it holds.
        """
        for block in (blocks := list(blocks)):
            if not self.num_owners(block) and not self._is_idle(block):
                raise BlockError(f"block {block} is free: nobody's block cannot be shared")
        for block in blocks:
            if self._is_idle(block):
                self._memory.wake(block)  # type: ignore[union-attr]
            self._num_owners[block] += 1

    def forget_idle(self) -> None:
        """Give up all idle blocks. Free blocks are handed out in the order of their numbers then, as by a new pool."""
        if self._memory:
            self._free += self._memory.evict(self.num_idle)
            self._free.sort(reverse=True)

    def _is_idle(self, block: int) -> bool:
        return self._memory is not None and self._memory.is_idle(block)

    def free(self, blocks: Iterable[int]) -> None:
        """One owner less for each of these blocks.

        Raises BlockError, and changes nothing, for a block that is free already or of another pool.
        """
        blocks = list(blocks)
        for block, times in Counter(blocks).items():
            if times > self.num_owners(block):
                raise BlockError(f"block {block} is freed {times} times and has {self._num_owners[block]} owners")
        for block in blocks:
            self._num_owners[block] -= 1
            if not self._num_owners[block] and not (self._memory and self._memory.keeps(block)):
                self._free.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise BlockError, naming the leak, unless these are all owners there are, and all others free or idle."""
        held = Counter(block for blocks in tables for block in blocks)
        for block in range(self.num_blocks):
            if held[block] != self._num_owners[block]:
                raise BlockError(
                    f"block {block} has {self._num_owners[block]} owners, and {held[block]} tables hold it"
                )
        nobodys = [block for block in range(self.num_blocks) if not self._num_owners[block]]
        if sorted(self._free) != [block for block in nobodys if not self._is_idle(block)]:
            raise BlockError("the free blocks are not those that nobody holds or remembers")
        if self.num_idle != sum(map(self._is_idle, nobodys)):
            raise BlockError("a block is held and idle at once")


class BlockTable:
    """One request's blocks in the order of its positions. Grows at its end; never shrinks but as a whole."""

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        if block_size < 1:
            raise BlockError(f"a block holds at least one position, not {block_size}")
        self._allocator, self.block_size = allocator, block_size
        self.blocks: list[int] = []
        self.num_tokens = 0

    @property
    def num_spare(self) -> int:
        """Positions at the end of the last block that hold nothing."""
        return len(self.blocks) * self.block_size - self.num_tokens

    def num_missing(self, num_tokens: int) -> int:
        """How many more blocks it takes to hold so many positions in all, a copy of a shared last block included."""
        num_blocks = -(-num_tokens // self.block_size)
        return max(0, num_blocks - len(self.blocks)) + self._must_copy(num_tokens)

    def _must_copy(self, num_tokens: int) -> bool:
        """Whether the next position falls into a block that others read as well."""
        is_partial = self.num_tokens % self.block_size and num_tokens > self.num_tokens
        return bool(is_partial) and self._allocator.num_owners(self.blocks[-1]) > 1

    def grow(self, num_tokens: int) -> tuple[int, int] | None:
        """Make room for positions up to `num_tokens` in all; all or nothing, as `BlockAllocator.allocate`.

        Returns (from, to) where the content of a block has to be copied before anything is written: a last block that
        is shared is replaced by a copy (copy-on-write).
        """
        assert num_tokens >= self.num_tokens, f"a table of {self.num_tokens} positions cannot shrink to {num_tokens}"
        must_copy = self._must_copy(num_tokens)
        new = self._allocator.allocate(self.num_missing(num_tokens))
        copied = None
        if must_copy:
            copied = (self.blocks[-1], new.pop(0))
            self._allocator.free([copied[0]])
            self.blocks[-1] = copied[1]
        self.blocks += new
        self.num_tokens = num_tokens
        return copied

    def slots(self, start: int, end: int) -> list[int]:
        """Where the positions from `start` up to, not including, `end` lie in the pool: block x block size + offset."""
        assert 0 <= start <= end <= self.num_tokens, f"positions {start} to {end} of {self.num_tokens}"
        size = self.block_size
        found: list[int] = []
        for place in range(start // size, -(-end // size)):
            first = self.blocks[place] * size
            found += range(first + max(start - place * size, 0), first + min(end - place * size, size))
        return found

    def adopt(self, blocks: Sequence[int]) -> None:
        """Begin with blocks that are full already, of somebody else or idle; they are shared."""
        assert not self.blocks, "a table begins with a prefix, or without one"
        self._allocator.share(blocks)
        self.blocks, self.num_tokens = list(blocks), len(blocks) * self.block_size

    def swap(self, place: int, block: int) -> None:
        """Hold another block that has the same content, and is shared, instead of the one at this place."""
        self._allocator.share([block])
        self._allocator.free([self.blocks[place]])
        self.blocks[place] = block

    def fork(self) -> "BlockTable":
        """Another table with the same blocks, shared: neither changes what the other reads."""
        self._allocator.share(self.blocks)
        twin = BlockTable(self._allocator, self.block_size)
        twin.blocks, twin.num_tokens = list(self.blocks), self.num_tokens
        return twin

    def release(self) -> None:
        """Give everything back, the last block first: who takes them next gets them in the order of their positions."""
        self._allocator.free(reversed(self.blocks))
        self.blocks, self.num_tokens = [], 0
