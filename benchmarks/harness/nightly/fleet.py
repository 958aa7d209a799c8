"""Many machines beside each other: who is red, who is silent. A row a machine, and no number of one beside another's.

Knows finished nights and their age. Refuses to compare measurements: that is the gate's, on one machine.
"""

import dataclasses
import datetime
import shlex
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.harness.gate.rules import EXIT_CODES, GRAVITY, Verdict
from benchmarks.harness.markdown import table
from benchmarks.harness.nightly.folder import Night, machines_in, newest_finished, nights_folder, read_json
from benchmarks.harness.nightly.missed import age_text, is_of_future, is_stale
from benchmarks.harness.nightly.state import IDENTITY


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One machine of a fleet, and its newest finished night, if it ever had one."""

    machine: str
    sku: str
    night: Night | None
    age: str
    is_stale: bool
    is_of_future: bool = False

    @property
    def verdict(self) -> Verdict:
        return "no data" if self.night is None or self.is_stale else self.night.verdict

    @property
    def told(self) -> tuple[str, str, str]:
        """Its commit, how long ago that was, and what came out."""
        if self.night is None:
            return "", self.age, "no data: no night has come to its end"
        headline = self.night.headline
        return (
            self.night.head[:12],
            self.age,
            f"no data: silent since; it said {headline}" if self.is_stale else headline,
        )


def members(results: Path, now: datetime.datetime, max_age_hours: float, machines: Sequence[str] = ()) -> list[Member]:
    """Those asked for, though they be missing, or else all of the folder. Raises ArchiveError for a broken one."""
    return [_member(results, name, now, max_age_hours) for name in (machines or machines_in(results))]


def _member(results: Path, machine: str, now: datetime.datetime, max_age_hours: float) -> Member:
    path, night = nights_folder(results, machine) / IDENTITY, newest_finished(results, machine)
    last = None if night is None else night.finished_at
    sku = str(read_json(path).get("sku")) if path.exists() else "unknown"
    stale = is_stale(last, now, max_age_hours)
    future = last is not None and is_of_future(last, now)
    return Member(machine=machine, sku=sku, night=night, age=age_text(last, now), is_stale=stale, is_of_future=future)


def exit_code_of(fleet: Sequence[Member]) -> int:
    """Of the gravest verdict; a fleet of nobody has no data."""
    said = {each.verdict for each in fleet} or {"no data"}
    return EXIT_CODES[next(verdict for verdict in GRAVITY if verdict in said)]


def fleet_table(fleet: Sequence[Member]) -> str:
    """One table, in Markdown, the machines of one kind together."""
    ordered = sorted(fleet, key=lambda each: (each.sku, each.machine))
    rows = [
        (sku if not place else "", each.machine, each.verdict, *each.told)
        for sku, alike in groupby(ordered, key=lambda each: each.sku)
        for place, each in enumerate(alike)
    ]
    return table(("kind", "machine", "verdict", "head", "age", "headline"), rows)


def remedy(results: Path, silent: Sequence[Member]) -> str:
    """What to type where a machine is silent; "" where none is."""
    return "\n".join(f"{each.machine}: {_mend(results, each)}" for each in silent)


def _mend(results: Path, member: Member) -> str:
    if member.night is not None and member.is_of_future:
        folder = shlex.quote(str(member.night.folder))
        return f"a clock was wrong, its newest night finished in the future; without it: rm -r {folder}"
    return f"{_silence(member)}; on that machine: {_command(results, member)}"


def _silence(member: Member) -> str:
    return "no night has ever finished" if member.night is None else f"the last night finished {member.age} ago"


def _command(results: Path, member: Member) -> str:
    return shlex.join(["python", "-m", "benchmarks", "nightly", "--results", str(results), "--machine", member.machine])
