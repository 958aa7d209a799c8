"""Looks at the machine while benchmarks run, and says whether they had it to themselves.

Knows the order of looking: before a case, at the turn of each of its samples, after it, and once at the end of the
pass. What a look means is known elsewhere: `machine.py` and `gpu/` read and judge, `control.py` runs the fixed kernel,
`band.py` knows what that kernel usually takes here.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import band
from benchmarks.harness.clock import DeviceClock
from benchmarks.harness.control import Control, CpuKernel, device_kernel
from benchmarks.harness.gpu.driver import Gpu, NoGpu, driver
from benchmarks.harness.gpu.readings import GpuState
from benchmarks.harness.gpu.steadiness import series, what_moved
from benchmarks.harness.machine import (
    MachineState,
    machine_state,
    num_usable_cpus,
    others_share,
    steal_share,
    what_happened,
)
from benchmarks.harness.overhead import Stopwatch
from benchmarks.harness.results import Flag
from benchmarks.harness.timing import RunTiming

_MIN_TURNS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was seen around a case or a pass: facts for its provenance, and flags where it was not alone."""

    facts: Mapping[str, Any]
    flags: tuple[Flag, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
    """What a watch looks with. `key` names this machine and its control in the control's history."""

    control: Control
    stopwatch: Stopwatch
    gpu: Gpu
    key: str

    @classmethod
    def on(cls, device: str) -> "Equipment":
        """For this machine, and for `device` if it is a GPU: makes threads, and on a GPU takes memory."""
        num_threads, is_gpu = num_usable_cpus(), device.startswith("cuda")
        kernel = device_kernel(device) if is_gpu else CpuKernel(num_threads)
        clock, gpu = DeviceClock(device), driver().gpu(device)
        return cls(
            control=Control(clock, kernel),
            stopwatch=Stopwatch.of(clock),
            gpu=gpu,
            key=band.machine_identity(num_threads=num_threads, device_name=gpu.label),
        )


class Watch:
    """One for a session, which is one pass. Nothing is made, read or run before the first case that is timed."""

    def __init__(
        self,
        equip: Callable[[], Equipment],
        history: Path,
        look: Callable[[Collection[int]], MachineState] = machine_state,
        relatives: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """The control's history is kept in the file `history`; `relatives` are processes that belong to us."""
        self._equip, self._history, self._look_at, self._relatives = equip, history, look, relatives
        self._with: Equipment | None = None
        self._before: tuple[MachineState, GpuState] | None = None
        self._num_turns_before = 0
        self._gpu_turns: list[GpuState] = []
        self._gpu_sampled: list[GpuState] = []
        self._happened: list[str] = []

    def begin(self) -> None:
        """A case begins."""
        self._note_broken_case()
        self._with = self._with or self._equip()
        self._num_turns_before = len(self._with.control.durations_s)
        self._gpu_turns, self._gpu_sampled = [], []
        self._before = self._look()

    def _note_broken_case(self) -> None:
        if self._before is not None:
            self._happened.append("a case broke off")
            self._before = None

    def _look(self) -> tuple[MachineState, GpuState]:
        assert self._with is not None
        relatives = self._relatives()
        return self._look_at(relatives), self._with.gpu.state(relatives)

    def turn(self, *, is_sample: bool = True) -> None:
        """Run the control once; belongs before each run. A GPU is looked at right after it, while it is awake."""
        assert self._with is not None, "no case has begun"
        self._with.control.turn()
        if not isinstance(self._with.gpu, NoGpu):
            self._gpu_turns.append(self._with.gpu.state(self._relatives()))
            self._gpu_sampled += self._gpu_turns[-1:] if is_sample else []

    def end(self, runs: Mapping[str, Sequence[RunTiming]]) -> Seen:
        """The case has ended with these runs: what happened meanwhile, and whether the clock was good enough.

        Without runs nothing was timed, and nothing can have been disturbed.
        """
        assert self._with is not None
        assert self._before is not None
        before, gpu_before = self._before
        self._before = None
        after, gpu_after = self._look()
        happened = what_happened(before, after, gpu_before, gpu_after)
        moved = what_moved(self._gpu_turns, self._gpu_sampled, (gpu_before, gpu_after))
        reasons = [*dict.fromkeys([*happened, *moved])] if runs else []
        self._happened += reasons
        facts = {
            "load_average": None if after.load_average is None else list(after.load_average),
            "steal_share": steal_share(before, after),
            "others_share": others_share(before, after),
            "control_s": list(self._with.control.durations_s[self._num_turns_before :]),
            "gpu": self._gpu_facts(gpu_before, gpu_after) if gpu_after.name or gpu_after.note else None,
            "stopwatch": _told_of(self._with.stopwatch, runs),
        }
        flags = [Flag(kind="contaminated", arm="", what=reason) for reason in reasons]
        flags += [Flag(kind="resolution", arm=arm, what=what) for arm, what in self._with.stopwatch.doubts(runs)]
        return Seen(facts=facts, flags=tuple(flags))

    def _gpu_facts(self, before: GpuState, after: GpuState) -> dict[str, Any]:
        turns = {"turns": series(self._gpu_turns)} if self._gpu_turns else {}
        return {"before": before.as_dict(), "after": after.as_dict()} | turns

    def close_pass(self) -> Seen:
        """Judge the whole pass by its control and remember it: facts and flags for every case of it.

        A pass of fewer than four turns is neither judged nor remembered. One with a disturbed case, or with one that
        raised and so was not looked at, teaches nothing.
        """
        if self._with is None or len(self._with.control.durations_s) < _MIN_TURNS:
            return Seen(facts={}, flags=())
        self._note_broken_case()
        history, unreadable = band.load_history(self._history, self._with.key)
        this = band.summarise(self._with.control.durations_s)
        verdict = band.judge(this, history)
        history, moved = band.learn(history, this, band.judge(this, history, self._happened))
        unwritable = band.save_history(self._history, self._with.key, history)
        notes = [note for note in (unreadable, moved, unwritable) if note]
        flags = tuple(Flag(kind="contaminated", arm="", what=reason) for reason in verdict.reasons)
        facts = dataclasses.asdict(this) | {"state": verdict.state, "num_clean": len(history.clean), "notes": notes}
        return Seen(facts={"control": facts}, flags=flags)


def _told_of(stopwatch: Stopwatch, runs: Mapping[str, Sequence[RunTiming]]) -> dict[str, Any]:
    costs = {"cost_s": stopwatch.costs_s(runs), "share_of_run": stopwatch.share_of(runs)}
    return stopwatch.as_dict() | costs
