"""Keeps two nights out of one results folder, and out of one machine, where they would measure each other.

Knows lock files, which the system gives back when their process dies. Refuses to wait.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.errors import InstrumentError

MACHINE = Path(tempfile.gettempdir()) / "nanoserve-nightly.lock"


@contextlib.contextmanager
def held(results: Path) -> Iterator[None]:
    """The results folder; its lock lies among temporary files, and leaves nothing behind. Raises InstrumentError."""
    name = hashlib.sha256(os.fsencode(results.resolve())).hexdigest()[:16]
    with _locked(Path(tempfile.gettempdir()) / f"nanoserve-nightly-{name}.lock", f"writes into {results}"):
        yield


@contextlib.contextmanager
def alone(results: Path, machine: Path | None = None) -> Iterator[None]:
    """The folder, and the machine by its lock (`MACHINE`). Raises InstrumentError where another night has either."""
    with held(results), _locked(machine or MACHINE, "measures on this machine"):
        yield


@contextlib.contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    import filelock

    lock = filelock.FileLock(path, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise InstrumentError(
            f"another nightly run {what} ({path} is locked): wait for it to end, or end it; nothing was done"
        ) from None
    try:
        yield
    finally:
        lock.release()
