"""Which GPU a session runs on: the free one, the one that was named, or the one of its xdist worker.

Knows the policy, on a driver's answers and on locks. Refuses to know pytest, and how a GPU or a lock is looked at.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness.errors import DeviceError
from benchmarks.harness.gpu.driver import Gpu
from benchmarks.harness.gpu.lock import GpuLocks, Holder, file_name

WAIT_S = 600.0
"""How long a session waits for a GPU that another one has, unless it is told otherwise."""

_LOOK_EVERY_S = 1.0

Say = Callable[[str], None]


class Worker(NamedTuple):
    """One of the processes that xdist runs side by side, counted from 0."""

    number: int
    num_workers: int

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> "Worker | None":
        """This process, as xdist tells it; None for one that xdist did not start."""
        name, count = environment.get("PYTEST_XDIST_WORKER"), environment.get("PYTEST_XDIST_WORKER_COUNT", "1")
        return cls(_number_of(name), int(count)) if name else None


def _number_of(worker: str) -> int:
    """`gw3` is 3; a name that somebody has given by hand is of no number."""
    number = worker.removeprefix("gw")
    return int(number) if number.isdecimal() else 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A GPU as it looks to a session that chooses; `strangers` are processes on it that are neither ours nor kin."""

    gpu: Gpu
    key: str
    strangers: tuple[int, ...]
    free_bytes: int
    holder: Holder | None


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """The GPU of a session. `release` ends it; a claim without a lock of its own holds nobody off."""

    gpu: Gpu
    key: str
    release: Callable[[], None] = lambda: None


def asks_for_gpu(asked: str) -> bool:
    """Whether `--device` leaves it to this file which GPU is taken; a CPU and every misspelling are not for it."""
    return asked == "auto" or asked.partition(":")[0] == "cuda"


def meant(asked: str, gpus: Sequence[Gpu], worker: Worker | None = None) -> Sequence[Gpu]:
    """The GPUs that `auto`, `cuda` or `cuda:N` leaves to choose from: for a worker of xdist its own.

    Raises DeviceError for a number that is not there.
    """
    if ":" in asked:
        return [gpus[_index(asked, len(gpus))]]
    return gpus if worker is None else [gpus[worker.number % len(gpus)]]


def _index(asked: str, num_gpus: int) -> int:
    number = asked.partition(":")[2]
    if not number.isdecimal() or int(number) >= num_gpus:
        there = ", ".join(f"cuda:{index}" for index in range(num_gpus))
        raise DeviceError(f"--device {asked} is not there: choose one of auto, cpu, cuda, {there}")
    return int(number)


def refuse_workers(asked: str, num_gpus: int, num_workers: int) -> None:
    """Raise DeviceError unless each of the workers that measure side by side has a GPU of its own."""
    if ":" in asked and num_workers > 1:
        raise DeviceError(f"--device {asked} is one GPU, and {num_workers} workers want one each: leave out -n")
    if num_workers > num_gpus:
        mend = f"pytest --benchmark-only -n {num_gpus} --dist loadgroup" if num_gpus > 1 else "leave out -n"
        raise DeviceError(
            f"{num_workers} workers are more than GPUs here, {num_gpus}, and two never measure on one: {mend}"
        )


def pick(seen: Sequence[Sight]) -> Sight | None:
    """The best of what nobody else computes on; None says that waiting is better: a lock will be free.

    Where strangers are on every GPU and nobody says when they leave, the one with the most free memory.
    """
    ranked = sorted(seen, key=lambda each: (bool(each.strangers), -each.free_bytes))  # of equals the lowest number
    unlocked = [each for each in ranked if each.holder is None]
    if not unlocked or (unlocked[0].strangers and len(unlocked) < len(ranked)):
        return None
    return unlocked[0]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chooser:
    """Looks, takes and waits for one session, which belongs to `family`; `relatives` are no strangers."""

    locks: GpuLocks
    family: str
    say: Say
    relatives: Callable[[], Collection[int]] = tuple
    wait_s: float = WAIT_S
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def claim(self, gpus: Sequence[Gpu]) -> Claim:
        """One of these. Raises DeviceError when another session has each of them for longer than `wait_s`."""
        until_s, told = self.clock() + self.wait_s, False
        while True:
            with self.locks.choosing(max(self.wait_s, _LOOK_EVERY_S)):
                seen = self.look(gpus)
                taken = self._take(seen)
            if taken is not None:
                return taken
            if self.clock() >= until_s:
                raise DeviceError(f"{_held(seen)}, after {self.wait_s:g} s; wait longer with --gpu-wait-s")
            if not told:
                self.say(f"{_held(seen)}: waiting for one, {self.wait_s:g} s at most")
            told = True
            self.sleep(_LOOK_EVERY_S)

    def look(self, gpus: Sequence[Gpu]) -> list[Sight]:
        """How each of them looks now."""
        relatives = self.relatives()
        return [self._look_at(gpu, relatives) for gpu in gpus]

    def _look_at(self, gpu: Gpu, relatives: Collection[int]) -> Sight:
        state = gpu.state(relatives)
        key = file_name(state.uuid or gpu.device)  # the same in every process; a slice of a GPU has its own UUID
        return Sight(
            gpu=gpu,
            key=key,
            strangers=tuple(process.pid for process in state.foreign_processes),
            free_bytes=state.memory_free_bytes or 0,  # a GPU's own `free_bytes` may take memory there to answer
            holder=self.locks.holder_of(key),
        )

    def _take(self, seen: Sequence[Sight]) -> Claim | None:
        """The GPU of the family if it has one already, or else the best that is free."""
        ours = next((each for each in seen if each.holder and each.holder.family == self.family), None)
        if ours:
            return Claim(ours.gpu, ours.key)
        best = pick(seen)
        if best is None:
            return None
        if best.strangers:
            self.say(f"{best.gpu.device} is in use by {_processes(best.strangers)}: what is measured will be flagged")
        return Claim(best.gpu, best.key, self.locks.take(best.key, self.family).release)


def _held(seen: Sequence[Sight]) -> str:
    return f"no GPU is free: {'; '.join(f'{each.gpu.device} {told_of(each)}' for each in seen)}"


def told_of(sight: Sight) -> str:
    """What a GPU is doing, in words."""
    if sight.holder:
        return f"is locked by a session of ours, {_processes([sight.holder.pid])}"
    return f"is in use by {_processes(sight.strangers)}" if sight.strangers else "is free"


def _processes(pids: Sequence[int]) -> str:
    known = [str(pid) for pid in pids if pid]
    return f"process {', '.join(known)}" if known else "an unknown process"


def claim_of(claim: Claim, worker: Worker | None) -> dict[str, Any]:
    """For a result's provenance: which GPU, and how many workers measured side by side, this one included."""
    return {
        "gpu": claim.key,
        "worker": None if worker is None else worker.number,
        "num_workers": 1 if worker is None else worker.num_workers,
    }
