"""nanoserve's own prefix tree and pool of blocks, run without an engine: what they would find again.

Knows in which order a scheduler asks them. What is counted here is decided by the code that decides it in an engine.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.harness.errors import InstrumentError, MissingFeatureError

if TYPE_CHECKING:
    from nanoserve.cache.blocks import BlockAllocator
    from nanoserve.cache.prefix import PrefixTree

Policy = str | Callable[[Any], Any]
"""A name, or what the blocks that may leave are sorted by."""


def policies_among(names: Sequence[str]) -> tuple[str, ...]:
    """These policies, all that this build has where none is named. Raises MissingFeatureError for one that it lacks."""
    for name in names or ("lru",):
        _prefix_cache(name, 1, 1)
    from nanoserve.cache.prefix import POLICIES

    return tuple(dict.fromkeys(names or POLICIES))


def replay(policy: Policy, capacity: int | None, requests: Sequence[Sequence[Hashable]]) -> list[int]:
    """Serve requests one after another, each given by the keys of its blocks; how many blocks of each were found.

    `capacity` is in blocks, None for as many as it takes. A request that is longer keeps as many of its first blocks as
    fit. Raises InstrumentError for a capacity below 1, MissingFeatureError for a policy that this build lacks.
    """
    if capacity is not None and capacity < 1:
        raise InstrumentError(f"a capacity is at least 1 block, or None for an unlimited one, not {capacity}")
    enough = max(1, sum(map(len, requests)))
    tree, pool = _prefix_cache(policy, 1, enough if capacity is None else min(capacity, enough))
    return [serve_alone(tree, pool, keys[:capacity], len(keys)) for keys in requests]


def predict_hits(
    prompts: Sequence[Sequence[int]], num_blocks: int, block_size: int, policy: Policy = "lru"
) -> list[int]:
    """Tokens of each prompt that are found in the cache when they are served one after another, for one token each.

    The last token of a prompt is never found: it has to be run. Raises InstrumentError for a prompt that a pool of
    `num_blocks` cannot hold.
    """
    longest = max(map(len, prompts), default=0)
    if num_blocks < 1 or longest > num_blocks * block_size:
        raise InstrumentError(f"a prompt of {longest} tokens does not fit into {num_blocks} blocks of {block_size}")
    tree, pool = _prefix_cache(policy, block_size, num_blocks, evicts_runs=True)
    return [serve_alone(tree, pool, prompt, len(prompt) - 1) * block_size for prompt in prompts]


def _prefix_cache(policy: Policy, block_size: int, num_blocks: int, **how: bool) -> "tuple[PrefixTree, BlockAllocator]":
    try:
        from nanoserve.cache.prefix import PrefixTree
    except ImportError as error:
        raise MissingFeatureError("this commit has no prefix cache", "import nanoserve.cache.prefix") from error
    from nanoserve.cache.blocks import BlockAllocator
    from nanoserve.errors import NanoserveError

    probe = f"from nanoserve.cache.prefix import PrefixTree; PrefixTree({block_size}, {policy!r})"
    try:
        tree = PrefixTree(block_size, policy, **how)
    except NanoserveError as error:
        raise MissingFeatureError(str(error), probe) from error
    return tree, BlockAllocator(num_blocks, tree)


def serve_alone(tree: "PrefixTree", pool: "BlockAllocator", ids: Sequence[Hashable], num_findable: int) -> int:
    """One request from its admission to its end; how many blocks of its first `num_findable` ids were found."""
    from nanoserve.cache.blocks import BlockTable
    from nanoserve.seats import remember

    path, table = tree.find(ids)[: num_findable // tree.block_size], BlockTable(pool, tree.block_size)
    num_found = len(path)
    table.adopt([node.block for node in path])
    tree.admit(path, len(ids))
    table.grow(len(ids))
    remember(tree, table, path, ids, num_computed=len(ids))
    table.release()
    return num_found
