"""Provenance beside each asv result: asv keeps a number per commit and environment, this keeps where it came from.

Knows where asv puts results and who runs a pass. One file per commit and environment, in `provenance/` of the results
folder; a line per pass and case. asv reads `.json` only and passes over these.
"""

import datetime
import json
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.results import BenchmarkResult


def keep_beside(pass_id: str, benchmark: str, results: Sequence[BenchmarkResult]) -> Path | None:
    """Add the results of one pass, event logs aside, and return the file; outside of asv there is none."""
    if "ASV_CONF_DIR" not in os.environ or "ASV_COMMIT" not in os.environ:
        return None
    name = f"{os.environ['ASV_COMMIT'][:12]}-{os.environ.get('ASV_ENV_NAME', 'environment')[:100]}.jsonl"
    path = _results_folder(Path(os.environ["ASV_CONF_DIR"])) / "provenance" / platform.node() / name
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    lines = [
        json.dumps({"pass": pass_id, "at": now, "name": benchmark, **result.as_dict(), "runs": {}}, allow_nan=False)
        for result in results
    ]
    _append(path, lines)
    return path


def _append(path: Path, lines: Sequence[str]) -> None:
    """All lines or none: a kill in the middle leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text("utf-8") if path.exists() else ""
    fresh = path.with_suffix(".tmp")
    fresh.write_text(before + "".join(f"{line}\n" for line in lines), "utf-8")
    fresh.replace(path)


def _results_folder(configured: Path) -> Path:
    """What asv's configuration says, whose comments no JSON parser takes; asv itself is not in its environments."""
    text = (configured / "asv.conf.json").read_text("utf-8")
    found = re.search(r'^\s*"results_dir"\s*:\s*"([^"]+)"', text, re.MULTILINE)
    return configured / (found[1] if found else "results")
