"""What lies below asv's results and cannot be used: files that a kill or a full disk cut off, or of another format.

Knows the versions of asv's formats, and what asv 0.6 makes of such a file: one of results stops `run` and `continuous`
for its commit, and all else passes over it with a warning; one of a machine stops `publish`. Refuses to mend anything.
"""

import dataclasses
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_VERSIONS = {"benchmarks.json": 2, "machine.json": 1}
_RESULTS_VERSION = 2
"""As asv 0.6 writes them; every other file is of results."""

_WRITE_SUITE = "asv run --bench just-discover"
_UPDATE = "asv update"
_UPGRADE = "python -m pip install --upgrade asv"


@dataclasses.dataclass(frozen=True, slots=True)
class Unreadable:
    """One file, what is wrong with it, and the command that mends it."""

    path: Path
    why: str
    mend: str


def unreadable_results(results: Path) -> list[Unreadable]:
    """Every file of asv's, and of the provenance beside its results, that cannot be used; sorted by path."""
    asvs = (_unreadable_json(path) for path in results.rglob("*.json"))
    provenance = (_unreadable_lines(path) for path in (results / "provenance").rglob("*.jsonl"))
    found = (each for every in (asvs, provenance) for each in every if each is not None)
    return sorted(found, key=lambda each: each.path)


def _unreadable_json(path: Path) -> Unreadable | None:
    ours = _VERSIONS.get(path.name, _RESULTS_VERSION)
    try:
        version = _version_of(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError) as error:
        mend = _WRITE_SUITE if path.name == "benchmarks.json" else _remove(path)
        return Unreadable(path, f"cut off, or not asv's: {error}", mend)
    if version == ours:
        return None
    is_old = version < ours
    return Unreadable(path, f"of format {version}, where asv reads {ours}", _UPDATE if is_old else _UPGRADE)


def _version_of(whole: Any) -> int:
    version = whole.get("version") if isinstance(whole, Mapping) else None
    if not isinstance(version, int):
        raise ValueError("it has no version")
    return version


def _unreadable_lines(path: Path) -> Unreadable | None:
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                json.loads(line)
    except (OSError, ValueError) as error:
        return Unreadable(path, f"cut off, or no lines of JSON: {error}", _remove(path))
    return None


def _remove(path: Path) -> str:
    return f"rm {shlex.quote(str(path))}"
