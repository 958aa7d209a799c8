"""Evidence from what asv has stored for two commits: nothing is built, run or written.

Knows what makes two stored quantities comparable. Refuses to know files and names (`asv_files.py`, `asv_commits.py`),
which rounds belong together (`rounds.py`) and what follows from the evidence (`verdict.py`).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.gate.asv_commits import Commit, Entry, read_commits
from benchmarks.harness.gate.asv_files import names_of_series
from benchmarks.harness.gate.evidence import SIDES, Case, Counts, Evidence, Key, Pairs, SideName, name_of_case
from benchmarks.harness.gate.rounds import Paired, Stored, pair_up
from benchmarks.harness.metrics import metric

_MAX_NAMED = 3

_Found = tuple[str, Key | Case, Any]
"""A field of Evidence, the key in it, and what belongs there."""

_Notes = dict[str, list[str]]
"""What is worth telling, and the names of what it is true of."""


def read_stored(results: Path, base: str, head: str, machine: str | None = None) -> Evidence:
    """What asv's results folder says of two commits, each given by its hash or the beginning of it.

    Each of asv's rounds is a launch with one pair. The notes say how they were paired, and what was left out.
    Raises ArchiveError, which says what there is and what to run, where the two cannot be compared as a whole: nothing
    stored of a commit, no machine or environment in common, several to choose from, no samples, a file that cannot be
    read. What is wrong with single quantities becomes a gap.
    """
    commits = read_commits(results, base, head, machine)
    sorting = _Sorting(*commits)
    for key in dict.fromkeys([*commits[0].entries, *commits[1].entries]):
        sorting.add(key)
    suite = names_of_series(results)
    return sorting.evidence(_notes_on_series(commits, suite))


class _Sorting:
    """Sorts the quantities of two commits into what can be compared and what cannot."""

    def __init__(self, base: Commit, head: Commit) -> None:
        self.base, self.head = base, head
        self._found: dict[str, dict[Any, Any]] = {name: {} for name in ("pairs", "counts", "gaps", "new", "skipped")}
        self._disturbed: dict[Case, dict[int, str]] = {}
        self._control: dict[Case, tuple[Pairs, ...]] = {}
        self._notes: _Notes = defaultdict(list)

    def add(self, key: Key) -> None:
        entries = self.base.entries.get(key), self.head.entries.get(key)
        kind, at, found = _state(key, *entries) or self._compared(key)
        self._found[kind][at] = found

    def _compared(self, key: Key) -> _Found:
        base, head = self.base.entries[key], self.head.entries[key]
        if metric(key.metric).is_exact:
            return "counts", key, Counts(base=base.result or 0, head=head.result or 0)
        paired = pair_up(key, *(_stored(entry, of) for entry, of in ((base, self.base), (head, self.head))))
        self._note_pairing(key, paired, base.samples or (), head.samples or ())
        disturbed = dict(paired.disturbed) or _all_disturbed(base, head)
        if disturbed:
            self._disturbed.setdefault(key.of_case, {}).update(disturbed)
        self._control[key.of_case] = tuple(Pairs(base=(base_s,), head=(head_s,)) for base_s, head_s in paired.control_s)
        if paired.lost or not (paired.costs or disturbed):
            return "gaps", key, paired.lost or "no round was measured on both sides"
        return _pairs(key, paired)

    def _note_pairing(self, key: Key, paired: Paired, base: Sequence[float], head: Sequence[float]) -> None:
        name = name_of_case(key.of_case)
        if paired.why_in_order:
            self._notes[f"rounds are paired in their order: {paired.why_in_order}"].append(name)
        alone = {side: len(each) - len(paired.costs) for side, each in zip(SIDES, (base, head), strict=True)}
        if any(alone.values()):
            told = " and ".join(f"{num} of {side}" for side, num in alone.items() if num)
            text = f"of {len(base)} rounds of base and {len(head)} of head, {told} have no partner and are left out"
            self._notes[text].append(name)

    def evidence(self, notes: _Notes) -> Evidence:
        gaps, new = (_by_case(self._found[name], self._known) for name in ("gaps", "new"))
        if _absence("head", None) in gaps.values():
            self._notes["to forget a series that was renamed or removed on purpose: asv rm benchmark=NAME"] = []
        disturbed = self._disturbed
        num_rounds = [len(pairs) + len(disturbed.get(key.of_case, ())) for key, pairs in self._found["pairs"].items()]
        return Evidence(
            num_launches=max(num_rounds, default=0),
            pairs=self._found["pairs"],
            counts=self._found["counts"],
            gaps={**_undeclared(self.base, self.head), **gaps},
            new=new,
            skipped=self._skipped(),
            contaminated=disturbed,
            control=self._control,
            provenance=(self.base.provenance, self.head.provenance),
            notes=tuple(_note(text, names) for text, names in {**self._notes, **notes}.items()),
        )

    @property
    def _known(self) -> list[Key]:
        """Every quantity that a side has measured. What a case does not declare, asv skips on both."""
        return [key for name in ("pairs", "counts", "gaps", "new") for key in self._found[name]]

    def _skipped(self) -> dict[Case, str]:
        known = {key.of_case for key in self._known}
        return {case: why for case, why in self._found["skipped"].items() if case not in known}


# One quantity.


def _state(key: Key, base: Entry | None, head: Entry | None) -> _Found | None:
    """Why a quantity cannot be compared, or None where both sides have it."""
    sides = dict(zip(SIDES, (base, head), strict=True))
    failed = [f"{side} failed: asv has no result of it" for side, each in sides.items() if each and each.has_failed]
    if failed:
        return "gaps", key, failed[0]
    has_base, has_head = (each is not None and not each.is_skipped for each in sides.values())
    if not has_base and not has_head:
        return "skipped", key.of_case, "asv skipped it on both sides, or was not asked for it"
    if not has_base:
        return "new", key, _absence("base", base)
    if not has_head:
        return "gaps", key, _absence("head", head)
    if base and head and base.version != head.version:
        return "gaps", key, "the benchmark's own source was edited between the two runs: not comparable"
    flaws = [f"{side} {why}" for side, each in sides.items() if each and (why := _flaw(key, each))]
    return ("gaps", key, flaws[0]) if flaws else None


def _absence(side: SideName, entry: Entry | None) -> str:
    return f"{side} has no such series" if entry is None else f"{side} skipped it, or asv was not asked for it"


def _flaw(key: Key, entry: Entry) -> str:
    """What is wrong with a number that is there, "" for nothing."""
    numbers = [*(entry.samples or ()), *([] if entry.result is None else [entry.result])]
    for number in numbers:
        if not math.isfinite(number):
            return f"holds {number}, which is no measurement"
    if entry.result is None and metric(key.metric).is_exact:
        return "has no result"
    if entry.samples is None and not metric(key.metric).is_exact:
        return "has no samples; measure it with --record-samples"
    return ""


def _stored(entry: Entry, commit: Commit) -> Stored:
    return Stored(samples=entry.samples or (), passes=commit.passes)


def _pairs(key: Key, paired: Paired) -> _Found:
    """One pair a round, in the metric's own unit."""
    of = metric(key.metric)
    try:
        pairs = tuple(Pairs(base=(of.value_of(base),), head=(of.value_of(head),)) for base, head in paired.costs)
        for each in pairs:
            each.logs(of)
    except InstrumentError as error:
        return "gaps", key, str(error)
    return "pairs", key, pairs


def _all_disturbed(base: Entry, head: Entry) -> dict[int, str]:
    sides = [side for side, each in zip(SIDES, (base, head), strict=True) if each.is_all_contaminated]
    return {1: f"every round of {' and of '.join(sides)} was disturbed"} if sides else {}


# Everything together.


def _by_case(found: Mapping[Key, str], keys: Iterable[Key]) -> dict[Key | Case, str]:
    """One entry for a case whose quantities all say the same. A case may fail a build, so that one of them has to."""
    of_case: dict[Case, list[Key]] = defaultdict(list)
    for key in keys:
        of_case[key.of_case].append(key)
    alike = {
        case
        for case, every in of_case.items()
        if len({found.get(key) for key in every}) == 1 and any(metric(key.metric).gate for key in every)
    }
    return {key.of_case if key.of_case in alike else key: why for key, why in found.items()}


def _undeclared(*commits: Commit) -> dict[Key | Case, str]:
    """Series of metrics that are not declared here: they cannot be judged, and are not forgotten either."""
    return {
        (benchmark, ""): f"{name} is of a metric that is not declared; to forget it: asv rm benchmark={name}"
        for commit in commits
        for name, benchmark in commit.undeclared.items()
    }


def _notes_on_series(commits: Sequence[Commit], suite: Iterable[str]) -> _Notes:
    known = {name for commit in commits for name in commit.file.series}
    told = {
        "none of this instrument's, and not judged": [name for commit in commits for name in commit.foreign],
        "in the suite, and stored for neither commit": [name for name in suite if name not in known],
    }
    return {text: names for text, names in told.items() if names}


def _note(text: str, names: Iterable[str]) -> str:
    every = list(dict.fromkeys(names))
    more = f" and {len(every) - _MAX_NAMED} more" if len(every) > _MAX_NAMED else ""
    return f"{text}: {', '.join(every[:_MAX_NAMED])}{more}" if every else text
