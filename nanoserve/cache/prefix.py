"""Prefixes that were computed before: a radix tree over token ids whose digit is a whole KV block; who leaves first.

Knows ids, block numbers, and when each block was used. Refuses to know tensors and requests. A block is found again by
what it stands for: the model and dtype of its space, its own ids and all ids before them from position 0. No edge is
longer than a block, as eviction takes one at a time, the last of a prefix before those that it builds on.

The pool asks the tree which blocks that nobody holds are worth keeping (`BlockAllocator`): those are *idle*, and make
room when they are needed. What a request holds is never idle, so it is never evicted.

References: RadixAttention (SGLang, arXiv:2312.07104); automatic prefix caching of vLLM. `size` is GreedyDual-Size with
frequency (Cherkasova 1998), without its clock.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from nanoserve.errors import BlockError, ConfigError, unknown

Ids = tuple[Hashable, ...]
"""What one block stands for: as many token ids as it has positions."""


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A block that is remembered. `depth` blocks lead to it, it included; `num_uses` is 1 when it comes.

    `last_use` and `born` count admissions. `ticket` is its newest place in the queue of idle blocks, 0 for none.
    """

    ids: Ids
    block: int
    parent: "Node | None"
    siblings: "dict[Ids, Node]" = dataclasses.field(repr=False)
    depth: int
    last_use: int
    born: int
    num_uses: int = 1
    ticket: int = 0
    children: "dict[Ids, Node]" = dataclasses.field(default_factory=dict, repr=False)


Policy = Callable[[Node], Any]
"""What the idle blocks are sorted by: the smallest leaves first, of equals the one that became idle first."""

POLICIES: Mapping[str, Policy] = {
    "lru": lambda node: node.last_use,
    "lfu": lambda node: (node.num_uses, node.last_use),
    "fifo": lambda node: node.born,
    "size": lambda node: (node.num_uses / node.depth, node.last_use),
}
"""Used longest ago; used least often since it is here; here for longest; used least often for the length of its prefix.

Among blocks that nothing builds on: a prefix is never taken away below its continuation.
"""


@dataclasses.dataclass(slots=True)
class PrefixCounts:
    """What came about so far: exact, and the same on every machine.

    Each request counts once, when it is first admitted: not while it waits, and not when it comes back after a
    preemption. `num_query_tokens` are those of the requests, `num_hit_tokens` those of them that were found then: what
    is lost again in a preemption before the first token counts here, and not in the event of that token.
    """

    num_queries: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_added_blocks: int = 0
    num_evicted_blocks: int = 0


class PrefixTree:
    """Blocks by what they stand for, `block_size` ids each; `policy` is a name, or what idle blocks are sorted by.

    Ids may be anything that can be hashed. Finding and adding take as many steps as there are blocks.
    """

    def __init__(self, block_size: int, policy: str | Policy = "lru", *, evicts_runs: bool = False) -> None:
        """With `evicts_runs`, a block takes those before it along that were used with it and only with it.

        Blocks that were filled one after another become free together then, and a request that takes them lies in one
        piece. Raises ConfigError for an unknown policy and a block size below 1.
        """
        if block_size < 1:
            raise ConfigError(f"a block stands for at least one token, not {block_size}")
        if isinstance(policy, str) and policy not in POLICIES:
            raise ConfigError(unknown("prefix cache policy", policy, POLICIES))
        self.block_size, self._evicts_runs = block_size, evicts_runs
        self.counts = PrefixCounts()
        self._key = POLICIES[policy] if isinstance(policy, str) else policy
        self._roots: dict[Hashable, dict[Ids, Node]] = {}
        self._nodes: dict[int, Node] = {}
        self._idle: set[int] = set()
        self._queue: list[tuple[Any, int, Node]] = []
        self._tickets = itertools.count(1)

    def __len__(self) -> int:
        """Blocks that are remembered, held or idle."""
        return len(self._nodes)

    @property
    def num_idle(self) -> int:
        """Remembered blocks that nobody holds: all of them can be evicted."""
        return len(self._idle)

    def find(self, token_ids: Sequence[Hashable], space: Hashable = None) -> list[Node]:
        """The blocks of the longest prefix that this space remembers, in order. Nothing is counted or changed."""
        children, path = self._roots.get(space, {}), []
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            node = children.get(tuple(token_ids[start : start + self.block_size]))
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def admit(self, path: Sequence[Node], num_tokens: int) -> None:
        """A request of so many tokens begins, and uses this path, which may be empty.

        Raises BlockError for a path that is longer than the request.
        """
        if len(path) * self.block_size > num_tokens:
            raise BlockError(
                f"a prefix of {len(path) * self.block_size} tokens is longer than a prompt of {num_tokens}"
            )
        self.counts.num_queries += 1
        self.counts.num_query_tokens += num_tokens
        self.counts.num_hit_tokens += len(path) * self.block_size
        for node in path:
            _use(node, self.counts.num_queries)

    def add(self, parent: Node | None, ids: Ids, block: int, space: Hashable = None) -> Node:
        """Remember a held block behind `parent`, None for a first one; the node that stands there now.

        Where another block already stands for the same, that one stays, is used once more, and the caller may do
        without its own. Raises
        BlockError for a number of ids that is not the block size, and for a block that is remembered already.
        """
        siblings = parent.children if parent else self._roots.setdefault(space, {})
        node = siblings.get(ids)
        if node is None:
            self._check_new(ids, block)
            now = self.counts.num_queries
            node = Node(ids, block, parent, siblings, parent.depth + 1 if parent else 1, now, now)
            siblings[ids] = self._nodes[block] = node
            self.counts.num_added_blocks += 1
        elif node.block != block:
            _use(node, self.counts.num_queries)
        return node

    def _check_new(self, ids: Ids, block: int) -> None:
        if len(ids) != self.block_size:
            raise BlockError(f"a block stands for {self.block_size} tokens, not for {len(ids)}")
        if block in self._nodes:
            raise BlockError(f"block {block} stands for other tokens already")

    # What the pool asks.

    def is_idle(self, block: int) -> bool:
        """Whether it is remembered and held by nobody."""
        return block in self._idle

    def keeps(self, block: int) -> bool:
        """Nobody holds the block any more: whether it becomes idle, and does not go back to the free ones."""
        node = self._nodes.get(block)
        if node is None:
            return False
        self._idle.add(block)
        if not node.children:
            self._put(node)
        return True

    def wake(self, block: int) -> None:
        """Somebody holds an idle block again."""
        self._idle.remove(block)
        self._nodes[block].ticket = 0

    def evict(self, num: int) -> list[int]:
        """Forget so many idle blocks, as the policy says, or more; at most as many as there are."""
        assert num <= self.num_idle, f"{num} blocks are to be evicted and {self.num_idle} are idle"
        evicted: list[int] = []
        while len(evicted) < num:
            evicted += self._evict_run() if self._evicts_runs else [self._forget(self._next())]
        self.counts.num_evicted_blocks += len(evicted)
        return evicted

    def _evict_run(self) -> list[int]:
        node: Node | None = self._next()
        assert node is not None
        run, use = [], (node.num_uses, node.last_use)
        while node and not node.children and self.is_idle(node.block) and (node.num_uses, node.last_use) == use:
            run.append(self._forget(node))
            node = node.parent
        return run

    def _put(self, node: Node) -> None:
        """Last in the queue of those with its key. Places of nodes that came and went are cleared now and then."""
        if len(self._queue) > 2 * len(self._nodes) + 64:
            self._queue = [entry for entry in self._queue if entry[1] == entry[2].ticket]
            heapq.heapify(self._queue)
        node.ticket = next(self._tickets)
        heapq.heappush(self._queue, (self._key(node), node.ticket, node))

    def _next(self) -> Node:
        while True:
            _, ticket, node = heapq.heappop(self._queue)
            if ticket == node.ticket:
                return node

    def _forget(self, node: Node) -> int:
        """A leaf goes; its parent may be the next, and was used whenever its leaf was."""
        assert not node.children, f"block {node.block} goes below its continuation"
        node.ticket = 0
        del node.siblings[node.ids], self._nodes[node.block]
        self._idle.remove(node.block)
        parent = node.parent
        if parent is not None:
            parent.last_use = max(parent.last_use, node.last_use)
            if not parent.children and self.is_idle(parent.block):
                self._put(parent)
        return node.block


def _use(node: Node, now: int) -> None:
    node.num_uses += 1
    node.last_use = now
