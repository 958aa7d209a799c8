"""What a cache of blocks can find again, by its size: LRU at every size in one pass, and what no policy exceeds.

Knows requests as the keys of their blocks, from the first on. A block is what its key and all keys before it say; a
request that is longer than the cache keeps as many of its first blocks as fit. Refuses to know any cache: one that
replays requests is handed in.

References: stack distances, Mattson, Gecsei, Slutz and Traiger, IBM Systems Journal 9(2), 1970; the optimum, Belady,
IBM Systems Journal 5(2), 1966.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from benchmarks.harness.errors import InstrumentError

Requests = Sequence[Sequence[Hashable]]
"""The keys of each request's blocks."""

OPTIMUM = "optimum"
"""The name of Belady's policy, which looks into the future."""


class UsedBlock(Protocol):
    """A block in a cache: what it stands for, and the number of the request that used it last, from 1."""

    @property
    def ids(self) -> Sequence[Any]: ...

    @property
    def last_use(self) -> int: ...


Key = Callable[[Any], Any]
"""What the blocks that may leave are sorted by: the smallest leaves first."""

Replay = Callable[[str | Key, int | None, Requests], Sequence[int]]
"""Takes a policy, a capacity in blocks and requests; tells how many blocks of each request were found."""


def numbered(requests: Requests) -> list[list[int]]:
    """The same requests with a number in place of each key: equal numbers are equal blocks, with all before them."""
    numbers: dict[tuple[int, Hashable], int] = {}
    found = []
    for keys in requests:
        path, at = [], -1
        for key in keys:
            at = numbers.setdefault((at, key), len(numbers))
            path.append(at)
        found.append(path)
    return found


def lru_hits(requests: Requests) -> list[int]:
    """How many blocks LRU finds, at each place with a capacity of so many blocks; the last place is enough for all.

    Before a request, all blocks stand in a stack, those used last on top, and of one request the first block on top. A
    cache of c blocks holds the c topmost ones, whatever c is. What a request finds again stands in runs, one for each
    earlier request that used the blocks of the run last: so it takes steps by the runs, which are few, and a sum over
    later requests for each.
    """
    last_use: list[int] = []
    uses, ranks = _Sums(len(requests)), np.zeros(sum(map(len, requests)) + 2, dtype=np.int64)
    for now, path in enumerate(numbered(requests)):
        known = [last_use[number] for number in path if number < len(last_use)]
        runs = [(request, len(list(run))) for request, run in itertools.groupby(known)]
        for request, length in runs:
            above = len(last_use) - uses.up_to(request)
            ranks[above + 1] += 1
            ranks[above + length + 1] -= 1
        for request, length in [*((request, -length) for request, length in runs), (now, len(path))]:
            uses.add(request, length)
        last_use += [now] * (len(path) - len(known))
        for number in path:
            last_use[number] = now
    return [int(hits) for hits in ranks.cumsum().cumsum()[: len(last_use) + 1]]


class _Sums:
    """Sums over the first places of a row of numbers that change, in logarithmic time (Fenwick 1994)."""

    def __init__(self, num: int) -> None:
        self._sums = [0] * (num + 1)

    def add(self, place: int, amount: int) -> None:
        place += 1
        while place < len(self._sums):
            self._sums[place] += amount
            place += place & -place

    def up_to(self, place: int) -> int:
        """Of the places from 0 to this one, itself included."""
        place += 1
        total = 0
        while place:
            total += self._sums[place]
            place -= place & -place
        return total


def farthest_next_use(requests: Sequence[Sequence[int]]) -> Callable[[UsedBlock], float]:
    """Belady's optimum for these very requests, as a key: who is needed again last, or never, leaves first.

    Takes requests from `numbered`, and serves every capacity: a block lies at the same place of each request that has
    it, so all of them keep it or none does. No policy that admits every request finds more.
    """
    next_use: dict[tuple[int, int], int] = {}
    upcoming: dict[int, int] = {}
    for now in range(len(requests), 0, -1):
        for number in requests[now - 1]:
            if number in upcoming:
                next_use[number, now] = upcoming[number]
            upcoming[number] = now
    return lambda block: -next_use.get((block.ids[0], block.last_use), math.inf)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HitRates:
    """Blocks found / blocks requested: of each policy, at each capacity, and of a cache that never evicts.

    `num_distinct` blocks are what that one holds in the end; the first use of each is a miss for everybody.
    """

    num_requests: int
    num_blocks: int
    num_distinct: int
    capacities: tuple[int, ...]
    by_policy: Mapping[str, tuple[float, ...]]

    @property
    def unlimited(self) -> float:
        return 1 - self.num_distinct / self.num_blocks


def hit_rates(
    requests: Requests,
    capacities: Sequence[int],
    policies: Sequence[str],
    replay: Replay,
    say: Callable[[str], None] = lambda text: None,
) -> HitRates:
    """What every policy finds at every capacity, in blocks; without capacities, at the powers of two up to enough.

    `lru` comes from its stack distances, `OPTIMUM` from the future, and everything from `replay` else. Raises
    InstrumentError for a capacity below 1, and where nothing is requested.
    """
    paths = numbered(requests)
    num_blocks, num_distinct = sum(map(len, paths)), len(set(itertools.chain.from_iterable(paths)))
    if not num_blocks:
        raise InstrumentError(f"{len(paths)} requests without any block have no hit rate")
    for capacity in capacities:
        if capacity < 1:
            raise InstrumentError(f"a capacity is a whole number of blocks, at least 1, not {capacity}")
    sizes = tuple(sorted(set(capacities))) or powers_of_two(num_distinct)
    hits = {policy: _hits_of(policy, sizes, paths, replay, say) for policy in policies}
    return HitRates(
        num_requests=len(paths),
        num_blocks=num_blocks,
        num_distinct=num_distinct,
        capacities=sizes,
        by_policy={policy: tuple(num / num_blocks for num in found) for policy, found in hits.items()},
    )


def powers_of_two(enough: int) -> tuple[int, ...]:
    """From 1 to the first one that is enough."""
    return tuple(2**power for power in range((enough - 1).bit_length() + 1))


def _hits_of(
    policy: str, sizes: Sequence[int], paths: list[list[int]], replay: Replay, say: Callable[[str], None]
) -> list[int]:
    if policy == "lru":
        say("lru at every capacity")
        by_size = lru_hits(paths)
        return [by_size[min(size, len(by_size) - 1)] for size in sizes]
    key, hits = farthest_next_use(paths) if policy == OPTIMUM else policy, []
    for size in sizes:
        say(f"{policy} at {size:,} blocks")
        hits.append(sum(replay(key, size, paths)))
    return hits
