"""What the machine gave meanwhile: its ceilings before and after each round, and whether idle workers were at rest.

Knows ceilings, process ids and the shares of efficiency. Refuses to judge a peer by them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.harness.ceilings import Ceilings
from benchmarks.harness.efficiency import Cost, mbu, mfu
from benchmarks.harness.peers.process import Reply
from benchmarks.harness.peers.rounds import Turn
from benchmarks.harness.timing import RunTiming, Stamp

REST_S = 0.5


class Look(NamedTuple):
    """What one look gave, and the cores that each worker took while nobody asked it anything."""

    round: int
    read_bytes_per_s: float
    flops_per_s: float
    cores_at_rest: Mapping[str, float]


class Host:
    """Looks at the machine between rounds.

    It is looked at in several dtypes: which of them reads fastest is the kernel's business, not the memory's. The last
    one is that of the products.
    """

    def __init__(self, pids: Mapping[str, int], make_ceilings: Callable[[], Sequence[Ceilings]]) -> None:
        self._pids, self._make = pids, make_ceilings
        self.looks: list[Look] = []

    def look(self, number: int) -> None:
        """A second or so, in which no worker has anything to do."""
        at_rest = cores_at_rest(self._pids)
        found = self._make()
        for ceilings in found:
            ceilings.look()
        read, flops = max(each.read_bytes_per_s or 0.0 for each in found), found[-1].flops_per_s or 0.0
        self.looks.append(Look(number, read, flops, at_rest))


def cores_at_rest(pids: Mapping[str, int]) -> dict[str, float]:
    """Processor time over time, of each process and its children, beside each other; none for one that has died."""
    before, start_s = _used_s(pids), time.monotonic()
    time.sleep(REST_S)
    after, spent_s = _used_s(pids), time.monotonic() - start_s
    return {name: (after[name] - before[name]) / spent_s for name in before.keys() & after.keys()}


def _used_s(pids: Mapping[str, int]) -> dict[str, float]:
    import psutil

    used = {}
    for name, pid in pids.items():
        try:
            root = psutil.Process(pid)
            times = [each.cpu_times() for each in (root, *root.children(recursive=True))]
        except psutil.Error:
            continue
        used[name] = sum(each.user + each.system for each in times)
    return used


class Share(NamedTuple):
    """A peer's MBU or MFU in one scene: the median over rounds, of the best ceiling of the run."""

    peer: str
    what: str
    value: float


def shares(turns: Sequence[Turn], cost: Cost, looks: Sequence[Look], peers: Sequence[str]) -> list[Share]:
    """MBU of scenes that decode and MFU of long prompts, for peers whose weights cost what `cost` says."""
    read, flops = max(look.read_bytes_per_s for look in looks), max(look.flops_per_s for look in looks)
    told = []
    for peer in peers:
        its = [turn for turn in turns if turn.peer == peer and turn.replies and _is_plain(turn)]
        for scene in dict.fromkeys(turn.scene for turn in its):
            runs = [run_of(turn.replies[0], scene.prompt_tokens) for turn in its if turn.scene == scene]
            if scene.new_tokens > 1:
                told += _share(peer, f"MBU at context {scene.prompt_tokens}", [mbu(run, cost, read) for run in runs])
            if scene.prompt_tokens >= 512:
                told += _share(peer, f"MFU of prompt {scene.prompt_tokens}", [mfu(run, cost, flops) for run in runs])
    return told


def _is_plain(turn: Turn) -> bool:
    return turn.scene.num_requests == 1 and not turn.scene.prefix_tokens


def _share(peer: str, what: str, values: Sequence[float | None]) -> list[Share]:
    known = [value for value in values if value is not None]
    return [Share(peer, what, median(known))] if known else []


def run_of(reply: Reply, prompt_tokens: int) -> RunTiming:
    """The event log of a reply's first request."""
    stamps = tuple(Stamp(at_ns, 1) for at_ns in reply.stamps_ns[0])
    return RunTiming(sent_ns=reply.sent_ns, stamps=stamps, num_prompt_tokens=prompt_tokens)


def about_looks(looks: Sequence[Look]) -> dict[str, Any]:
    """For the file: what every look gave, in order, and the most that each worker took at rest."""
    names = sorted({name for look in looks for name in look.cores_at_rest})
    return {
        "read_bytes_per_s": [look.read_bytes_per_s for look in looks],
        "flops_per_s": [look.flops_per_s for look in looks],
        "cores_at_rest": {name: max(look.cores_at_rest.get(name, 0.0) for look in looks) for name in names},
    }
