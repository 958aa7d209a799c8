"""A night's own record, on disk after every change: a kill leaves all that was known before it.

Knows steps and what became of them. Refuses to know what a step does.
"""

import dataclasses
import datetime
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.errors import ArchiveError
from benchmarks.harness.files import write_whole
from benchmarks.harness.gate.rules import EXIT_CODES, GRAVITY, Verdict
from benchmarks.harness.nightly.folder import SCHEMA, STATUS, as_json, read_json

Ending = Literal["running", "done", "failed", "out of time", "not needed"]
Said = tuple[Verdict, str]
"""A verdict, and the sentence that goes with it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step. `said` where it has a verdict of its own; `process` is that of one that runs: its id, when it began."""

    state: Ending
    returncode: int | None = None
    seconds: float = 0.0
    why: str = ""
    said: Said | None = None
    process: tuple[int, float] | None = None


class Status:
    """The record of one night. Each change is written at once."""

    def __init__(self, folder: Path, told: Mapping[str, Any], steps: Mapping[str, Step] | None = None) -> None:
        self.folder = folder
        self.told = {"schema": SCHEMA, "finished": None, "verdict": None, "exit_code": None, "headline": "", **told}
        self.steps = dict(steps or {})

    @classmethod
    def read(cls, folder: Path) -> "Status":
        """Raises ArchiveError for a file that is none."""
        told = read_json(folder / STATUS)
        try:
            steps = {each.pop("name"): _step(each) for each in told.pop("steps")}
        except (KeyError, TypeError) as error:
            raise ArchiveError(f"{folder / STATUS} is no status of a night: {error}") from error
        return cls(folder, told, steps)

    def write(self) -> None:
        steps = [{"name": name, **dataclasses.asdict(step)} for name, step in self.steps.items()]
        write_whole(self.folder / STATUS, as_json({**self.told, "steps": steps}))

    def keep(self, name: str, step: Step) -> None:
        self.steps[name] = step
        self.write()

    def note(self, field: str, value: Any) -> None:
        """Append to a list of the record, once."""
        if value not in self.told.setdefault(field, []):
            self.told[field].append(value)
            self.write()

    def has_done(self, name: str) -> bool:
        """Whether a step came to its end, good or bad, so that it need not run again."""
        return name in self.steps and self.steps[name].state in ("done", "failed", "not needed")

    def finish(self, said: Said, now: datetime.datetime) -> None:
        """The night is over, with this verdict."""
        verdict, headline = said
        self.told |= {"verdict": verdict, "exit_code": EXIT_CODES[verdict], "headline": headline}
        self.told["finished"] = now.isoformat(timespec="seconds")
        self.write()


def _step(told: Mapping[str, Any]) -> Step:
    pairs = {name: tuple(told[name]) if told[name] else None for name in ("said", "process")}
    return Step(**{**told, **pairs})


def gravest(said: Iterable[Said]) -> Said:
    """Of several verdicts the gravest, and the first sentence that goes with it. Of none: no data."""
    every = list(said) or [("no data", "no data: nothing was compared")]
    return min(every, key=lambda each: GRAVITY.index(each[0]))
