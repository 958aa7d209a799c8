"""What the turns say: a cell for each peer and column, the ratio to the best of the others, tokens that agree.

Knows turns, columns and peers. Refuses to know how it is shown. Whoever failed in one round has no number at all in
that round, and the ratio is taken over the rounds that both have: the host is the same then.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import takewhile
from statistics import median

from benchmarks.harness.peers.columns import Column
from benchmarks.harness.peers.registry import Peer
from benchmarks.harness.peers.rounds import Turn
from benchmarks.harness.stats import Estimate, median_absolute_deviation, paired_ratio


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One peer in one column: a value per round, and why some rounds have none."""

    by_round: Mapping[int, float]
    failure: str = ""

    @property
    def median(self) -> float | None:
        return median(self.by_round.values()) if self.by_round else None

    @property
    def mad(self) -> float | None:
        """The median distance from the median; None below two rounds: no spread."""
        return median_absolute_deviation([*self.by_round.values()])


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """One of our arms over the best other peer of its dtype, paired by round."""

    ours: str
    best: str
    estimate: Estimate


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """How often a peer's greedy tokens are ours, and for how long: runs of `num_tokens` tokens each."""

    num_runs: int
    num_equal_first: int
    num_equal_runs: int
    median_equal: float
    num_tokens: int


def cells(turns: Sequence[Turn], column: Column, peers: Sequence[str]) -> dict[str, Cell]:
    """Every peer's cell, in the order of the peers."""
    found = {}
    for peer in peers:
        its = [turn for turn in turns if turn.peer == peer and turn.scene == column.scene]
        values = {turn.round: column.read(turn.replies) for turn in its if not turn.failure}
        found[peer] = Cell(values, next((turn.failure for turn in its if turn.failure), ""))
    return found


def ratios(found: Mapping[str, Cell], peers: Sequence[Peer], *, is_more_better: bool) -> list[Ratio]:
    """For each of our arms: its value over that of whoever of the others has the best median, where there is one."""
    told = []
    for ours in (peer for peer in peers if peer.is_ours and found[peer.name].by_round):
        rivals = {
            peer.name: middle
            for peer in peers
            if not peer.is_ours and peer.dtype == ours.dtype and (middle := found[peer.name].median) is not None
        }
        if rivals:
            best = (max if is_more_better else min)(rivals, key=lambda name: rivals[name])
            told.append(Ratio(ours.name, best, paired(found[ours.name], found[best])))
    return told


def paired(ours: Cell, other: Cell) -> Estimate:
    """The median of the ratios of rounds that both have."""
    both = sorted(ours.by_round.keys() & other.by_round.keys())
    return paired_ratio([ours.by_round[each] for each in both], [other.by_round[each] for each in both])


def agreements(turns: Sequence[Turn], ours: str, peers: Sequence[str]) -> dict[str, Agreement]:
    """Each other peer's tokens beside ours, over the runs of single requests of more than one token."""
    told = {}
    reference = {(turn.round, turn.scene): turn for turn in turns if turn.peer == ours and turn.replies}
    for peer in (name for name in peers if name != ours):
        pairs = [
            (reference[turn.round, turn.scene].replies[0].token_ids[0], turn.replies[0].token_ids[0])
            for turn in turns
            if turn.peer == peer and turn.replies and (turn.round, turn.scene) in reference and _is_long(turn)
        ]
        if pairs:
            equal = [num_equal(one, other) for one, other in pairs]
            told[peer] = Agreement(
                num_runs=len(pairs),
                num_equal_first=sum(each > 0 for each in equal),
                num_equal_runs=sum(each == len(one) for each, (one, _) in zip(equal, pairs, strict=True)),
                median_equal=median(equal),
                num_tokens=len(pairs[0][0]),
            )
    return told


def _is_long(turn: Turn) -> bool:
    return turn.scene.num_requests == 1 and turn.scene.new_tokens > 1


def num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens come before the first that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
