"""What the machine did while a pass was measured, and which of it makes the pass contaminated.

Knows the operating system's accounts (through psutil) and a GPU's two states. Refuses to know the measured numbers:
whether a pass was disturbed is decided without looking at its result. What a system does not show is None.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from benchmarks.harness.gpu.readings import GpuState
from benchmarks.harness.gpu.steadiness import MAX_CLOCK_MOVE, held_back, strangers

MAX_STEAL_SHARE = 0.02
"""Of all CPU time. A comparison resolves 2 to 3 %: a hypervisor that takes as much away can be the whole finding."""

MAX_OTHERS_SHARE = 0.10
"""Of all CPU time. A quiet machine with a desktop or an agent stays below; one busy process on up to eight CPUs does
not, nor do more on a larger one in proportion."""

MIN_INTERVAL_S = 0.5
"""CPU time is counted in ticks of 10 ms; over less than this a few ticks are a percent."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MachineState:
    """One moment. Seconds are sums since some start, and only differences mean something; None is not shown here.

    at_s: monotonic. busy_s: CPU time that anything used, without what a hypervisor took. own_s: this process, its
    children and the processes named as ours. steal_s: what the hypervisor gave to others. num_preemptions: how often
    this process had to make room.
    """

    at_s: float
    num_cpus: int
    load_average: tuple[float, float, float] | None = None
    busy_s: float | None = None
    own_s: float | None = None
    steal_s: float | None = None
    num_preemptions: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        load = self.load_average
        return dataclasses.asdict(self) | {"load_average": None if load is None else list(load)}


def machine_state(also_ours: Collection[int] = ()) -> MachineState:
    """Look now. Name in `also_ours` the processes that are part of the measurement without being our children."""
    import psutil

    times = _attempt(psutil.cpu_times)
    return MachineState(
        at_s=time.monotonic(),
        num_cpus=os.cpu_count() or 1,
        load_average=_attempt(_load_average),
        busy_s=None if times is None else sum(getattr(times, kind, 0.0) for kind in _BUSY),
        own_s=_attempt(lambda: sum(map(_cpu_s, _own_processes(also_ours)))),
        steal_s=getattr(times, "steal", None),
        num_preemptions=_attempt(lambda: psutil.Process().num_ctx_switches().involuntary),
    )


_BUSY = ("user", "nice", "system", "irq", "softirq")  # guests are inside user; interrupts, on Windows, inside system


def _attempt(read: Callable[[], Any]) -> Any:
    """A reading, or None where this system has no such thing or does not let us see it."""
    import psutil

    try:
        return read()
    except (psutil.Error, OSError, AttributeError, NotImplementedError):
        return None


def num_usable_cpus() -> int:
    """The CPUs that this process may use, where the system says which."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load_average() -> Any:
    return os.getloadavg()  # looked up inside the attempt: Windows lacks the name


def family_of(pid: int) -> set[int]:
    """A process and everything that it started, however deep; this process and its own as well."""
    return {process.pid for process in _own_processes([pid])}


def own_pids() -> set[int]:
    """This process and everything that it started, however deep."""
    return {process.pid for process in _own_processes()}


def _own_processes(also_ours: Collection[int] = ()) -> Iterator[Any]:
    """Each process once; one that ends while we look is left out."""
    import psutil

    seen: set[int] = set()
    for pid in (os.getpid(), *also_ours):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for member in (process, *process.children(recursive=True)):
                if member.pid not in seen:
                    seen.add(member.pid)
                    yield member


def _cpu_s(process: Any) -> float:
    """CPU seconds of a process and of its children that have ended; 0 when it ends while we look."""
    import psutil

    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return sum(getattr(times, kind, 0.0) for kind in ("user", "system", "children_user", "children_system"))


def others_share(before: MachineState, after: MachineState) -> float | None:
    """CPU time that processes other than ours used, as a part of all CPU time between the two moments, 0 to 1.

    None where it is not shown, where the interval is too short, and where a process of ours ended unseen.
    """
    busy_s, own_s = _difference(before.busy_s, after.busy_s), _difference(before.own_s, after.own_s)
    if busy_s is None or own_s is None or own_s < 0:
        return None
    return _share(max(busy_s - own_s, 0.0), before, after)


def steal_share(before: MachineState, after: MachineState) -> float | None:
    """CPU time that the hypervisor gave to other machines, as a part of all, 0 to 1; None where it is not shown."""
    return _share(_difference(before.steal_s, after.steal_s), before, after)


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _share(seconds: float | None, before: MachineState, after: MachineState) -> float | None:
    interval_s = after.at_s - before.at_s
    if seconds is None or interval_s < MIN_INTERVAL_S:
        return None
    return seconds / (interval_s * after.num_cpus)


def what_happened(
    before: MachineState,
    after: MachineState,
    gpu_before: GpuState | None = None,
    gpu_after: GpuState | None = None,
) -> list[str]:
    """Every reason to call what was measured between the two moments contaminated; empty when there is none to see."""
    reasons = [*_cpu_reasons(before, after)]
    if gpu_before is not None and gpu_after is not None:
        reasons += _gpu_reasons(gpu_before, gpu_after)
    return reasons


def _cpu_reasons(before: MachineState, after: MachineState) -> Iterator[str]:
    stolen, others = steal_share(before, after), others_share(before, after)
    if stolen is not None and stolen > MAX_STEAL_SHARE:
        yield f"the hypervisor took {stolen:.1%} of the CPU time away (more than {MAX_STEAL_SHARE:.0%})"
    if others is not None and others > MAX_OTHERS_SHARE:
        num_cpus = after.num_cpus
        yield (
            f"other processes used {others:.0%} of the CPU time, {others * num_cpus:.1f} of {num_cpus} CPUs "
            f"(more than {MAX_OTHERS_SHARE:.0%})"
        )


def _gpu_reasons(before: GpuState, after: GpuState) -> Iterator[str]:
    yield from strangers((before, after))
    yield from held_back((before, after))
    if "idle" not in (after.throttle_reasons or ()):
        yield from _clock_drop("SM", before.sm_clock_mhz, after.sm_clock_mhz)
        yield from _clock_drop("memory", before.memory_clock_mhz, after.memory_clock_mhz)


def _clock_drop(what: str, before_mhz: int | None, after_mhz: int | None) -> Iterator[str]:
    if before_mhz and after_mhz is not None and after_mhz < before_mhz * (1 - MAX_CLOCK_MOVE):
        yield f"the GPU's {what} clock fell from {before_mhz} to {after_mhz} MHz"
