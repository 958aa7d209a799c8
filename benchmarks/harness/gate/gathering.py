"""Launches for a calibration: a build against itself, as it is and with planted slowdowns, in mixed order.

Knows in which order they run and which of them can be used. Refuses to know what they say.
"""

import dataclasses
import math
import random
import time
from collections.abc import Mapping, Sequence

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.gate.comparison import Plan
from benchmarks.harness.gate.evidence import Evidence, Key, name_of_case
from benchmarks.harness.gate.progress import SILENT, Progress
from benchmarks.harness.gate.sorting import collect
from benchmarks.harness.metrics import metric

IDENTICAL = 0.0
"""The level at which nothing is planted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How many launches of equal builds there are, how many at each planted level, a share, and how many draws.

    `seed` decides about the order of the launches and about the draws. Raises InstrumentError for what means nothing.
    """

    num_launches: int = 48
    num_planted: int = 8
    levels: tuple[float, ...] = (0.01, 0.02, 0.03, 0.05, 0.10)
    num_draws: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_launches", "num_planted", "num_draws"):
            if getattr(self, name) < 1:
                raise InstrumentError(f"a calibration's {name} is 1 or more, not {getattr(self, name)}")
        for level in self.levels:
            if not 0 < level < math.inf:
                raise InstrumentError(f"a planted slowdown is a share above 0, such as 0.03, not {level}")
        if len(set(self.levels)) < len(self.levels):
            raise InstrumentError(f"a slowdown is planted twice: {', '.join(map(str, self.levels))}")

    @property
    def counts(self) -> Mapping[float, int]:
        """Launches by level."""
        return {IDENTICAL: self.num_launches, **dict.fromkeys(self.levels, self.num_planted)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The evidence of single launches by level, each with something in it; and what was lost."""

    launches: Mapping[float, tuple[Evidence, ...]]
    taken_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def every(self) -> list[Evidence]:
        return [launch for launches in self.launches.values() for launch in launches]

    @property
    def keys(self) -> tuple[Key, ...]:
        """The times and rates that gate, and that every launch has; also where it was disturbed."""
        every = self.every
        return tuple(key for key in _gated(every[0]) if all(key in launch.pairs for launch in every)) if every else ()

    @property
    def left_out(self) -> Mapping[str, str]:
        """What cannot be calibrated, a case or one quantity of it, and why."""
        whys = {key: why for launch in reversed(self.every) for key, why in launch.gaps.items()}
        lost = {key: None for launch in self.every for key in _gated(launch)}.keys() - set(self.keys)
        found = {name_of_case(case): why for case, why in whys.items() if not isinstance(case, Key)}
        for key in sorted(lost):
            name = name_of_case(key.of_case)
            if name not in found:
                why = whys.get(key, "not every launch has measured it")
                found[f"{name} {key.arm} {key.metric}"] = why
        return found


def brief(why: str) -> str:
    """A reason in one line. Each launch was sorted alone, so that it calls itself the first."""
    return " ".join(why.replace(" in launch 1", "").split())[:300]


def _gated(launch: Evidence) -> list[Key]:
    return [key for key in launch.pairs if metric(key.metric).gate]


def schedule(counts: Mapping[float, int], seed: int) -> list[float]:
    """The level of each launch in order: each level is spread over the whole time, its neighbours are drawn.

    So whatever the host does meanwhile, it does to all levels alike.
    """
    order = random.Random(seed)
    places = [((n + order.random()) / num, level) for level, num in counts.items() for n in range(num)]
    return [level for _, level in sorted(places)]


def gather(plan: Plan, effort: Effort, progress: Progress = SILENT) -> Gathered:
    """Launch the plan's build against itself, as often as the effort says.

    The first launch measures all that the plan selects, the others what has times that gate. A launch in which a
    worker died is a note. Raises InstrumentError when the first one leaves nothing, and for a plan of two builds.
    """
    if plan.base.source_sha256 != plan.head.source_sha256:
        raise InstrumentError(f"a calibration compares a build with itself, not {plan.base.revision} with another one")
    start_s, levels = time.monotonic(), schedule(effort.counts, effort.seed)
    launches: dict[float, list[Evidence]] = {level: [] for level in effort.counts}
    targets, notes = [*plan.selection, str(plan.root / "benchmarks")], []
    for number, level in enumerate(levels):
        progress.step(_told(number, levels, time.monotonic() - start_s))
        evidence = collect([_planted(plan, level).launch(number, targets, progress.now).launch])
        if _gated(evidence):
            launches[level].append(evidence)
        else:
            notes.append(f"launch {number + 1} left nothing: {brief(_why_nothing(evidence))}")
        if number == 0:
            targets = _targets(plan, evidence)
    return Gathered(
        launches={level: tuple(each) for level, each in launches.items()},
        taken_s=time.monotonic() - start_s,
        notes=tuple(notes),
    )


def _planted(plan: Plan, level: float) -> Plan:
    option = () if level == IDENTICAL else (f"--planted-slowdown={100 * level:.10g}",)
    return dataclasses.replace(plan, head_options=(*plan.head_options, *option))


def _told(number: int, levels: Sequence[float], taken_s: float) -> str:
    planted = f", {100 * levels[number]:.10g} % planted" if levels[number] else ""
    left = f", about {taken_s / number * (len(levels) - number) / 60:.0f} min left" if number else ""
    return f"launch {number + 1} of {len(levels)}{planted}{left}"


def _targets(plan: Plan, first: Evidence) -> list[str]:
    """The cases that have times that gate."""
    cases = dict.fromkeys(key.of_case for key in _gated(first))
    if not cases:
        raise InstrumentError(f"nothing was measured that a calibration could use: {_why_nothing(first)}")
    return [str(plan.root / name_of_case(case)) for case in cases]


def _why_nothing(evidence: Evidence) -> str:
    died = evidence.gaps.get(("", ""))
    return died or next(iter(evidence.gaps.values()), "none of these benchmarks has a time that gates")
