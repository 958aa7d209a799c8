"""asv's results of one machine, in and out of the checkout's own store.

Knows asv's folders. Refuses to know what is in a results file beyond whether it can be read.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.harness.errors import ArchiveError
from benchmarks.harness.files import write_whole
from benchmarks.harness.gate.asv_files import read_file
from benchmarks.harness.unreadable import unreadable_results

SUITE = "benchmarks.json"


def bring_in(kept: Path, store: Path, machine: str) -> None:
    """Fill asv's store with what it lacks of this machine: a fresh checkout has nothing. What is there stays."""
    for source in _files_of(kept, machine):
        target = store / source.relative_to(kept)
        if not target.exists():
            _copy(source, target)


def take_out(store: Path, kept: Path, machine: str) -> None:
    """Keep what asv has of this machine, and the list of the suite. What was cut off is not kept."""
    cut = {each.path for each in unreadable_results(store)} if store.is_dir() else set()
    for source in [*_files_of(store, machine), store / SUITE]:
        if source.is_file() and source not in cut:
            _copy(source, kept / source.relative_to(store))


def remove_unreadable(store: Path, machine: str, commit: str) -> list[str]:
    """Remove what a kill has left of a commit that is about to be measured: asv would refuse it. Says what it was."""
    said = []
    for each in unreadable_results(store) if store.is_dir() else ():
        if each.path.parent.name == machine and each.path.name.startswith(commit[:8]):
            each.path.unlink()
            said.append(f"removed {each.path.name} of {machine}, which asv could not go on with: {each.why}")
    return said


def has_measured(store: Path, machine: str, commit: str) -> bool:
    """Whether asv has a readable file of the commit with a result in it."""
    return any(map(_has_results, (store / machine).glob(f"{commit[:8]}-*.json")))


def _has_results(path: Path) -> bool:
    try:
        series = read_file(path).series
    except ArchiveError:
        return False
    return any(result is not None for each in series.values() for result in each.results)


def _files_of(folder: Path, machine: str) -> Iterator[Path]:
    every: Iterable[Path] = (folder / machine, folder / "provenance" / machine)
    for place in every:
        if place.is_dir():
            yield from sorted(path for path in place.iterdir() if path.suffix in (".json", ".jsonl"))


def _copy(source: Path, target: Path) -> None:
    text = source.read_text("utf-8")
    if not target.exists() or target.read_text("utf-8", errors="replace") != text:
        write_whole(target, text)
