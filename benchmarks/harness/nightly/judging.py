"""What the gate's comparison says to a night: its verdict, or that there is none.

Knows the JSON that `compare` writes. Refuses to weigh anything again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import ArchiveError
from benchmarks.harness.gate.rules import EXIT_CODES, Verdict
from benchmarks.harness.nightly.folder import read_json
from benchmarks.harness.nightly.runner import Ended
from benchmarks.harness.nightly.status import Said


def said_of_comparison(path: Path, ended: Ended) -> Said:
    """What a comparison that came to its end has said. Whatever does not fit together is no data.

    Where both sides have the same source, no difference is the engine's: one that is found says that this machine
    cannot be trusted tonight, and that none could be told is no reason for red.
    """
    try:
        told = read_json(path)
        verdict, headline, rows = told["verdict"], str(told["headline"]), told["rows"]
    except (ArchiveError, KeyError) as error:
        return "no data", f"no data: {path.name} does not say what was found: {error}"
    if verdict not in EXIT_CODES or EXIT_CODES[verdict] != ended.returncode:
        return "no data", f"no data: {path.name} says {verdict!r}, its exit status {ended.returncode}"
    if not any(row["gate"] and row["verdict"] not in ("new", "skipped") for row in rows):
        return "no data", "no data: no quantity was compared that gates"
    return _said_of_one_engine(verdict, headline) if _is_one_source(told) else (verdict, headline)


def _said_of_one_engine(verdict: Verdict, headline: str) -> Said:
    if verdict in ("worse", "better"):
        return "contaminated", f"contaminated: the same engine twice, on this machine, is {headline}"
    if verdict == "cannot tell":
        return "same", "same: the same engine twice, and nothing surely changed"
    return verdict, f"the same engine twice: {headline}"


def _is_one_source(told: Mapping[str, Any]) -> bool:
    """Whether what was measured on both sides is known, and equal."""
    sources = [each.get("source_sha256") for each in told.get("provenance", {}).values()]
    return len(sources) == 2 and sources[0] == sources[1] is not None
