"""Looks at the machine while benchmarks run, and says whether they had it to themselves.

Knows the order of looking: before a case, at the turn of each of its samples, after it, and once at the end of the
pass. What a look means is known elsewhere: `machine.py` and `gpu.py` read, `control.py` runs the fixed kernel,
`band.py` knows what that kernel usually takes here.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import band
from benchmarks.harness.clock import DeviceClock
from benchmarks.harness.control import Control, CpuKernel, device_kernel
from benchmarks.harness.gpu import Gpu, GpuState, gpu_of
from benchmarks.harness.machine import MachineState, machine_state, others_share, steal_share, what_happened
from benchmarks.harness.overhead import Stopwatch
from benchmarks.harness.results import Flag
from benchmarks.harness.timing import RunTiming

_MIN_TURNS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was seen around a case or a pass: facts for its provenance, and flags where it was not alone."""

    facts: Mapping[str, Any]
    flags: tuple[Flag, ...]


class Watch:
    """One for a session, which is one pass. Costs nothing before the first case that is timed."""

    def __init__(
        self,
        *,
        control: Callable[[], Control],
        stopwatch: Callable[[], Stopwatch],
        gpu: Gpu,
        history: Path,
        key: str,
        look: Callable[[], MachineState] = machine_state,
    ) -> None:
        self._make_control, self._make_stopwatch, self._gpu, self._look = control, stopwatch, gpu, look
        self._history, self._key = history, key
        self._control: Control | None = None
        self._stopwatch: Stopwatch | None = None
        self._before: tuple[MachineState, GpuState] | None = None
        self._num_turns_before = 0
        self._happened: list[str] = []

    @classmethod
    def on(cls, device: str, history: Path) -> "Watch":
        """Watch this machine, and `device` if it is a GPU. The control's history is kept in the file `history`."""
        gpu = gpu_of(device)
        num_threads = _num_usable_cpus()
        key = band.machine_identity(num_threads=num_threads, device_name=gpu.state().name)

        def control() -> Control:
            kernel = device_kernel(device) if device.startswith("cuda") else CpuKernel(num_threads)
            return Control(DeviceClock(device), kernel)

        def stopwatch() -> Stopwatch:
            return Stopwatch.of(DeviceClock(device))

        return cls(control=control, stopwatch=stopwatch, gpu=gpu, history=history, key=key)

    def begin(self) -> None:
        """A case begins."""
        self._stopwatch = self._stopwatch or self._make_stopwatch()
        self._control = self._control or self._make_control()
        self._num_turns_before = len(self._control.durations_s)
        self._before = (self._look(), self._gpu.state())

    def turn(self) -> None:
        """Run the control once; belongs before each sample."""
        assert self._control is not None, "no case has begun"
        self._control.turn()

    def end(self, runs: Mapping[str, Sequence[RunTiming]]) -> Seen:
        """The case has ended with these runs: what happened meanwhile, and whether the clock was good enough.

        Without runs nothing was timed, and nothing can have been disturbed.
        """
        assert self._before is not None
        assert self._control is not None
        assert self._stopwatch is not None
        before, gpu_before = self._before
        after, gpu_after = self._look(), self._gpu.state()
        reasons = what_happened(before, after, gpu_before, gpu_after) if runs else []
        self._happened += reasons
        facts = {
            "load_average": None if after.load_average is None else list(after.load_average),
            "steal_share": steal_share(before, after),
            "others_share": others_share(before, after),
            "control_s": list(self._control.durations_s[self._num_turns_before :]),
            "gpu": {"before": gpu_before.as_dict(), "after": gpu_after.as_dict()} if gpu_after.name else None,
            "stopwatch": self._told_of(self._stopwatch, runs),
        }
        flags = [Flag(kind="contaminated", arm="", what=reason) for reason in reasons]
        flags += [Flag(kind="resolution", arm=arm, what=what) for arm, what in self._stopwatch.doubts(runs)]
        return Seen(facts=facts, flags=tuple(flags))

    @staticmethod
    def _told_of(stopwatch: Stopwatch, runs: Mapping[str, Sequence[RunTiming]]) -> dict[str, Any]:
        costs = {"cost_s": stopwatch.costs_s(runs), "share_of_run": stopwatch.share_of(runs)}
        return stopwatch.as_dict() | costs

    def close_pass(self) -> Seen:
        """Judge the whole pass by its control and remember it: facts and flags for every case of it.

        A pass of fewer than four turns is neither judged nor remembered. One with a disturbed case teaches nothing.
        """
        durations_s = self._control.durations_s if self._control is not None else ()
        if len(durations_s) < _MIN_TURNS:
            return Seen(facts={}, flags=())
        history, unreadable = band.load_history(self._history, self._key)
        this = band.summarise(durations_s)
        verdict = band.judge(this, history)
        history, moved = band.learn(history, this, band.judge(this, history, self._happened))
        unwritable = band.save_history(self._history, self._key, history)
        notes = [note for note in (unreadable, moved, unwritable) if note]
        flags = tuple(Flag(kind="contaminated", arm="", what=reason) for reason in verdict.reasons)
        facts = dataclasses.asdict(this) | {"state": verdict.state, "notes": notes}
        return Seen(facts={"control": facts}, flags=flags)


def _num_usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
