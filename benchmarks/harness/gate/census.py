"""Which benchmarks a commit had: a comparison measures today's, and must not overlook one that has gone.

Knows git exports and pytest's collection, in a process of its own. Refuses to run anything that was found.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.gate.evidence import Case
from benchmarks.harness.gate.revisions import Revision, export, has_changed

_TIMEOUT_S = 300


def gone(revision: Revision, root: Path, selection: Sequence[str]) -> tuple[dict[Case, str], tuple[str, ...]]:
    """Cases that a commit's own benchmarks have under pytest's `selection` (`-k`, `-m`), and the checkout's have not.

    Each with why that is red; and notes on what could not be told.
    """
    if not has_changed(revision, root, "benchmarks", "conftest.py", "pyproject.toml"):
        return {}, ()
    before, unknown = _cases_of(revision, root, selection)
    now, broken = _collect(root, selection)
    why = f"{revision} has this benchmark, the checkout has not: deleted or renamed"
    notes = tuple(note for note in (unknown, broken) if note)
    return ({} if broken else dict.fromkeys(sorted(before - now), why)), notes


def _cases_of(revision: Revision, root: Path, selection: Sequence[str]) -> tuple[frozenset[Case], str | None]:
    """A commit whose benchmarks cannot be collected here, or that has none, gives no cases and a note that says so."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        export(revision, root, tree)
        if not (tree / "benchmarks").is_dir():
            return frozenset(), f"{revision} has no benchmarks: none of today's can have been there"
        return _collect(tree, selection)


def _collect(folder: Path, selection: Sequence[str]) -> tuple[frozenset[Case], str | None]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir=."]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    done = subprocess.run(
        [*command, "-o", "addopts=", "--benchmark-only", *selection, "benchmarks"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode not in (0, 5):
        why = f"{done.stdout[-1000:]}{done.stderr[-1000:]}"
        return frozenset(), f"the benchmarks in {folder} cannot be collected:\n{why}"
    names = (line for line in done.stdout.splitlines() if line.startswith("benchmarks/") and "::" in line)
    return frozenset(map(_case, names)), None


def _case(node_id: str) -> Case:
    name, bracket, case = node_id.partition("[")
    return name, case.removesuffix("]") if bracket else ""
