"""The results folder: where each thing lies, and what a night has left there.

    asv/MACHINE/                    what asv stored of this machine, and of no other
    asv/provenance/MACHINE/         where it came from
    asv/benchmarks.json             the suite as asv saw it last: the only file that machines share
    nights/MACHINE/machine.json     which machine the name stands for
    nights/MACHINE/state.json       what the next night goes on from
    nights/MACHINE/STAMP-COMMIT/    one night: status.json, summary.md, comparisons, the page, logs

Everything else is owned by one machine, so folders of several machines never conflict. Knows names and reads files.
Refuses to know how a night runs.
"""

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from benchmarks.harness.errors import ArchiveError, InstrumentError
from benchmarks.harness.gate.rules import EXIT_CODES, Verdict

SCHEMA = 1
"""The version of `status.json`."""

STATUS, SUMMARY = "status.json", "summary.md"

_STAMP = "%Y%m%dT%H%M%SZ"
_NIGHT = re.compile(r"(\d{8}T\d{6}Z)-[0-9a-f]{12}")
_MACHINE = re.compile(r"[^\W_][\w.+-]*")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """What one night has left. An unfinished one has no data; its `finished` is None, or else a time in ISO 8601."""

    machine: str
    sku: str
    head: str
    base: str | None
    verdict: Verdict
    exit_code: int
    headline: str
    finished: str | None
    summary: str
    folder: Path

    @property
    def is_finished(self) -> bool:
        return self.finished is not None

    @property
    def began_at(self) -> datetime.datetime:
        return datetime.datetime.strptime(self.folder.name[:16], _STAMP).replace(tzinfo=datetime.UTC)

    @property
    def finished_at(self) -> datetime.datetime | None:
        return None if self.finished is None else datetime.datetime.fromisoformat(self.finished)


def nights_folder(results: Path, machine: str) -> Path:
    """Raises InstrumentError for a name that cannot be a folder's."""
    if not _MACHINE.fullmatch(machine):
        raise InstrumentError(f"{machine!r} is no name of a machine: letters, digits, and . _ + - after the first")
    return results / "nights" / machine


def name_of_night(began: datetime.datetime, commit: str) -> str:
    """Names sort by time."""
    return f"{began.astimezone(datetime.UTC).strftime(_STAMP)}-{commit[:12]}"


def machines_in(results: Path) -> list[str]:
    """Every machine that owns a folder of nights."""
    nights = results / "nights"
    return sorted(each.name for each in nights.iterdir() if each.is_dir()) if nights.is_dir() else []


def nights_of(results: Path, machine: str) -> list[Path]:
    """The folders of a machine's nights, the newest last."""
    folder = nights_folder(results, machine)
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(each for each in found if _NIGHT.fullmatch(each.name) and (each / STATUS).is_file())


def newest_night(results: Path, machine: str) -> Night:
    """The newest night of a machine, finished or not. Raises ArchiveError where there is none, or it is unreadable."""
    found = nights_of(results, machine)
    if not found:
        there = ", ".join(machines_in(results)) or "none"
        raise ArchiveError(
            f"{results} holds no night of machine {machine!r}; machines there: {there}. To run one: "
            f"python -m benchmarks nightly --results {results} --machine {machine}"
        )
    return read_night(found[-1])


def newest_finished(results: Path, machine: str) -> Night | None:
    """The newest night that came to its end, or None."""
    nights = map(read_night, reversed(nights_of(results, machine)))
    return next((night for night in nights if night.is_finished), None)


def read_night(folder: Path) -> Night:
    """Raises ArchiveError, which names the file, for one that is cut off or holds something else."""
    told = read_json(folder / STATUS)
    try:
        finished, verdict = told["finished"], told["verdict"] or "no data"
        if finished is not None and datetime.datetime.fromisoformat(finished).tzinfo is None:
            raise ValueError(f"finished at {finished}, of no time zone")
        if told["schema"] != SCHEMA or verdict not in EXIT_CODES:
            raise ValueError(f"schema {told['schema']!r}, verdict {verdict!r}; this reads schema {SCHEMA}")
        return Night(
            machine=str(told["machine"]),
            sku=str(told["sku"]),
            head=str(told["head"]),
            base=told["base"],
            verdict=cast(Verdict, verdict if finished else "no data"),
            exit_code=int(told["exit_code"]) if finished else EXIT_CODES["no data"],
            headline=str(told["headline"]) if finished else "no data: this night has not come to its end",
            finished=None if finished is None else datetime.datetime.fromisoformat(finished).isoformat(),
            summary=(folder / SUMMARY).read_text("utf-8") if (folder / SUMMARY).is_file() else "",
            folder=folder,
        )
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ArchiveError(
            f"{folder / STATUS} is no status of a night: {error!r}; remove it: rm -r {folder}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """An object. Raises ArchiveError, which names the file."""
    try:
        told = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ArchiveError(f"{path} cannot be read: {error}") from error
    if not isinstance(told, dict):
        raise ArchiveError(f"{path} holds no object: {str(told)[:40]!r}")
    return told


def as_json(told: Mapping[str, Any]) -> str:
    """The same text for the same contents: strict, sorted, a line per entry."""
    return json.dumps(told, allow_nan=False, ensure_ascii=False, indent=1, sort_keys=True) + "\n"
