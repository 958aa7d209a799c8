"""Results folders of several machines, or of one machine in several places, put together.

Of every file that two folders have, one copy is chosen by what it says, never by the order of the folders: so any
order gives the same bytes, and merging again changes nothing. Knows what makes a copy the better one. Refuses two
folders that claim one name for different machines, before anything is written.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import ArchiveError, InstrumentError
from benchmarks.harness.files import write_whole
from benchmarks.harness.gate.rules import GRAVITY
from benchmarks.harness.identity import differences
from benchmarks.harness.nightly.asv_store import SUITE
from benchmarks.harness.nightly.folder import STATUS, machines_in, nights_folder, nights_of, read_json
from benchmarks.harness.nightly.state import IDENTITY, STATE, read_identity, read_options


def merge(results: Path, sources: Sequence[Path]) -> None:
    """Bring everything of `sources` into `results`. Raises InstrumentError, and writes nothing, where that cannot be.

    A night is taken as a whole: of two copies the one that came further. asv's shared list of the suite is that of the
    newest night: it says which series there are today and how they look, and what older commits have of others stays
    in their own files.
    """
    places = [results, *sources]
    for source in sources:
        if not machines_in(source):
            raise InstrumentError(
                f"{source} is no results folder: it has no nights/MACHINE; name a folder of --results"
            )
    _refuse_one_name_for_two(places)
    texts = {name: _chosen(name, places) for name in _names_of_files(places)}
    nights = [_chosen_night(machine, name, places) for machine, name in _names_of_nights(places)]
    for name, text in texts.items():  # before the nights, which say how new the list of the suite is
        if not (results / name).exists() or (results / name).read_text("utf-8") != text:
            write_whole(results / name, text)
    for night in nights:
        _copy_night(night, results)


def _refuse_one_name_for_two(places: Sequence[Path]) -> None:
    seen: dict[str, tuple[Path, dict[str, Any]]] = {}
    for place in places:
        for machine in machines_in(place):
            path = nights_folder(place, machine) / IDENTITY
            if not path.exists():
                continue
            now = read_identity(path) | read_options(path)
            before, then = seen.setdefault(machine, (path, now))
            found = differences(then, now)
            if found:
                raise InstrumentError(
                    f"{before} and {path} are of two machines, or two ways to measure, under one name: "
                    f"{'; '.join(found)}. Nothing was merged: give one of them another name, and move its folders"
                )


# Single files: asv's, and what stands beside the nights.


def _names_of_files(places: Iterable[Path]) -> list[str]:
    return sorted({name for place in places for name in _files(place)})


def _files(place: Path) -> Iterator[str]:
    patterns = ("asv/*.json", "asv/*/*.json", "asv/provenance/*/*.jsonl", f"nights/*/{IDENTITY}", f"nights/*/{STATE}")
    for pattern in patterns:
        yield from (path.relative_to(place).as_posix() for path in place.glob(pattern))


def _chosen(name: str, places: Sequence[Path]) -> str:
    """The text of a file that several folders may have."""
    copies = {place: (place / name).read_text("utf-8") for place in places if (place / name).is_file()}
    if len({*copies.values()}) > 1 and name.startswith("asv/provenance/") and not name.endswith("/machine.jsonl"):
        return _united(copies.values())
    return max((_worth(name, place, text), text) for place, text in copies.items())[1]


def _united(texts: Iterable[str]) -> str:
    """Lines of passes, each once, in the order of their time."""
    lines = {line for text in texts for line in text.splitlines() if line}
    return "".join(f"{line}\n" for line in sorted(lines, key=lambda line: (_time_in(line, "at"), line)))


def _worth(name: str, place: Path, text: str) -> str:
    """What makes one copy of a file better than another: something that sorts by time."""
    if name == f"asv/{SUITE}":
        return max((night.name for machine in machines_in(place) for night in nights_of(place, machine)), default="")
    if name.endswith(f"/{STATE}"):
        return _time_in(text, "at")
    return _time_in(text, "started_at")


def _time_in(text: str, field: str) -> str:
    """The latest time of a text of JSON; "" where it was cut off, "0" where it has none."""
    try:
        told = json.loads(text)
    except ValueError:
        return ""
    if isinstance(told, dict) and field in told:
        return str(told[field])
    return _latest_of_series(told, field) if isinstance(told, dict) else "0"


def _latest_of_series(told: Mapping[str, Any], field: str) -> str:
    """asv keeps a time for each series, in a column."""
    columns = told.get("result_columns", [])
    if field not in columns:
        return "0"
    place = columns.index(field)
    return str(max((row[place] or 0 for row in told["results"].values() if len(row) > place), default=0)).zfill(20)


# Nights: folders, as a whole.


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    folder: Path
    machine: str
    worth: tuple[Any, ...]


def _names_of_nights(places: Iterable[Path]) -> list[tuple[str, str]]:
    found = ((machine, night.name) for p in places for machine in machines_in(p) for night in nights_of(p, machine))
    return sorted(set(found))


def _chosen_night(machine: str, name: str, places: Sequence[Path]) -> _Copy:
    folders = [nights_folder(place, machine) / name for place in places]
    return max((_copy(folder, machine) for folder in folders if (folder / STATUS).is_file()), key=lambda c: c.worth)


def _copy(folder: Path, machine: str) -> _Copy:
    told = read_json(folder / STATUS)
    ended = [each for each in told.get("steps", ()) if each.get("state") != "running"]
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    if told.get("machine") != machine:
        raise ArchiveError(
            f"{folder / STATUS} is of machine {told.get('machine')!r}, and lies among those of {machine!r}"
        )
    digest = hashlib.sha256(b"\0".join(name.encode() + b"\0" + (folder / name).read_bytes() for name in files))
    worth = (bool(told.get("finished")), len(ended), _gravity(told.get("verdict")), len(files), digest.hexdigest())
    return _Copy(folder, machine, worth)


def _gravity(verdict: object) -> int:
    """Of two copies that came equally far the graver one holds: no red gets lost by merging."""
    return -GRAVITY.index(verdict) if verdict in GRAVITY else -len(GRAVITY)


def _copy_night(night: _Copy, results: Path) -> None:
    """Whole or not at all."""
    target = nights_folder(results, night.machine) / night.folder.name
    if target.resolve() == night.folder.resolve():
        return
    spare, old = target.with_name(f".{target.name}.tmp"), target.with_name(f".{target.name}.old")
    for leftover in (spare, old):
        shutil.rmtree(leftover, ignore_errors=True)
    spare.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(night.folder, spare)
    if target.exists():
        target.rename(old)
    spare.rename(target)
    shutil.rmtree(old, ignore_errors=True)
