"""A comparison of two builds from beginning to end: launch after launch, until the verdict is clear or time is up.

Knows the order of things. Refuses to know how a launch runs (`lockstep.py`), what launches say (`sorting.py`) and when
a verdict is clear (`verdict.py`).
"""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.gate.builds import Build
from benchmarks.harness.gate.census import gone
from benchmarks.harness.gate.evidence import Case, Evidence, Key, Launch, name_of_case
from benchmarks.harness.gate.lockstep import Led, Package, Share, launch_pair
from benchmarks.harness.gate.progress import SILENT, Progress
from benchmarks.harness.gate.sorting import collect
from benchmarks.harness.gate.verdict import Judgement, Rules, judge


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How much is measured of each case: `budget_s` seconds of turns over all launches, both sides together.

    Each launch takes at least `min_pairs` and at most `max_pairs`, whatever that costs.
    """

    budget_s: float = 60.0
    min_pairs: int = 2
    max_pairs: int = 30

    def __post_init__(self) -> None:
        if not 0 < self.budget_s < math.inf:
            raise InstrumentError(f"a budget is a number of seconds above 0, not {self.budget_s}")
        if not 1 <= self.min_pairs <= self.max_pairs:
            raise InstrumentError(f"cannot take at least {self.min_pairs} and at most {self.max_pairs} pairs a launch")

    @property
    def arguments(self) -> list[str]:
        """One warm-up run each, so that both sides take the same turns; each turn wakes the machine by itself."""
        return [f"--samples={self.max_pairs}", "--max-warmups=1"]

    def share(self, max_launches: int) -> Share:
        """What one of so many launches may take."""
        return Share(min_samples=self.min_pairs, max_s=self.budget_s / max_launches)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What came out, and what it took. `spent_s` are seconds of turns by case, `taken_s` those of everything."""

    judgement: Judgement
    num_launches: int
    spent_s: Mapping[str, float]
    taken_s: float
    notes: tuple[str, ...] = ()


def package_of(build: Build) -> Package:
    """The build as a worker measures it."""
    return Package(build.folder, build.source_sha256)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is compared, of the checkout's benchmarks, and how.

    `selection` are pytest's `-k` and `-m`, `options` its other arguments, such as `--model tiny`; `head_options` are
    given to head alone: a planted slowdown.
    """

    base: Build
    head: Build
    root: Path
    rules: Rules
    sampling: Sampling = Sampling()
    selection: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    head_options: tuple[str, ...] = ()

    def launch(self, number: int, targets: Sequence[str], say: Callable[[str], None]) -> Led:
        """One launch of the tests `targets`; its number decides who goes first in each pair."""
        return launch_pair(
            package_of(self.base), package_of(self.head), self.root,
            [*self.options, *self.sampling.arguments, *targets],
            seed=number, head_arguments=self.head_options, share=self.sampling.share(self.rules.max_launches),
            say=lambda where: say(f"launch {number + 1}: {where}"),
        )  # fmt: skip


def compare(plan: Plan, progress: Progress = SILENT) -> Compared:
    """Launch both builds until every verdict is clear, or the launches are used up.

    A benchmark that base's own tree has and the checkout has not is a gap.
    """
    start_s = time.monotonic()
    progress.now("which benchmarks there are")
    missing, notes = gone(plan.base.revision, plan.root, plan.selection)
    launches: list[Launch] = []
    spent_s: Counter[str] = Counter()
    targets = [*plan.selection, str(plan.root / "benchmarks")]
    while targets:
        led = plan.launch(len(launches), targets, progress.now)
        launches.append(led.launch)
        spent_s.update(led.spent_s)
        judgement = judge(_with_gaps(collect(launches), missing), plan.rules, len(launches))
        targets = [str(plan.root / name_of_case(case)) for case in judgement.open_cases]
        progress.step(f"after launch {len(launches)} of at most {plan.rules.max_launches}: {_told(judgement)}")
    return Compared(
        judgement=judgement, num_launches=len(launches), spent_s=dict(spent_s),
        taken_s=time.monotonic() - start_s, notes=notes,
    )  # fmt: skip


def _told(judgement: Judgement) -> str:
    num_open = len(judgement.open_cases)
    return f"{judgement.verdict}, {num_open} cases go on" if num_open else str(judgement.verdict)


def _with_gaps(evidence: Evidence, missing: Mapping[Case, str]) -> Evidence:
    gaps: dict[Key | Case, str] = {**evidence.gaps}
    return dataclasses.replace(evidence, gaps=gaps | dict(missing.items())) if missing else evidence
