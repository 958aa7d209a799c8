"""What asv has in a results folder of one machine: what is there, and what a kill has cut off.

Knows asv's folders. Refuses to know what is in a results file beyond whether it can be read.
"""

from pathlib import Path

from benchmarks.harness.errors import ArchiveError
from benchmarks.harness.gate.asv_files import read_file
from benchmarks.harness.unreadable import unreadable_results

SUITE = "benchmarks.json"


def remove_unreadable(store: Path, machine: str) -> list[str]:
    """Remove what kills have left of a machine: asv would measure and publish nothing beside it. Says what it was."""
    said = []
    for each in unreadable_results(store) if store.is_dir() else ():
        if each.path.parent.name == machine:
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
