"""Provenance beside each asv result: asv keeps a number per commit and environment, this keeps where it came from.

Knows who runs a pass. One file per commit and environment, in `provenance/MACHINE/` of the results folder; a line per
pass and case. asv reads `.json` only and passes over these.
"""

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.asv_process import machine_name, results_folder
from benchmarks.harness.files import write_whole
from benchmarks.harness.results import BenchmarkResult


def provenance_folder() -> Path | None:
    """Where provenance of this machine lies; None outside of asv."""
    results = results_folder()
    return None if results is None else results / "provenance" / machine_name()


def keep_beside(pass_id: str, names: Mapping[str, str], results: Sequence[BenchmarkResult]) -> Path | None:
    """Add the results of one pass, event logs aside, and return the file; outside of asv there is none.

    `names` are what asv calls the benchmarks, by their node ids.
    """
    folder = provenance_folder()
    if folder is None or "ASV_COMMIT" not in os.environ:
        return None
    path = folder / f"{os.environ['ASV_COMMIT'][:12]}-{os.environ.get('ASV_ENV_NAME', 'environment')[:100]}.jsonl"
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    lines = [
        json.dumps(
            {"pass": pass_id, "at": now, "name": names[result.benchmark], **result.as_dict(), "runs": {}},
            allow_nan=False,
        )
        for result in results
    ]
    before = path.read_text("utf-8") if path.exists() else ""
    write_whole(path, before + "".join(f"{line}\n" for line in lines))
    return path
