"""The process that measures one build: an ordinary pytest session whose every run waits for its turn.

    python -P worker.py ROOT PACKAGE_FOLDER SOURCE_SHA256 CONNECTION_FD PYTEST_ARGUMENT...

The benchmarks come from the checkout at ROOT, nanoserve from PACKAGE_FOLDER, everything else from the environment.
Started as a script: the checkout, which holds a nanoserve as well, never comes onto the path. Knows how a process
begins and ends. Refuses to know what it measures (`session.py`) and the other worker.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path


def find_benchmarks(root: Path) -> None:
    """Make the package `benchmarks` of the checkout importable without its root on the path."""
    folder = root / "benchmarks"
    places = [str(folder)]
    spec = importlib.util.spec_from_file_location(
        "benchmarks", folder / "__init__.py", submodule_search_locations=places
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks"] = module
    spec.loader.exec_module(module)


def main(arguments: Sequence[str]) -> None:
    """Serve one session. The process ends with it."""
    root, package_folder, sha256, connection = arguments[:4]
    sys.path.insert(0, package_folder)
    find_benchmarks(Path(root))

    from benchmarks.harness.gate.session import serve

    try:
        serve(Path(root), Path(package_folder), sha256, Connection(int(connection)), arguments[4:])
    except (EOFError, BrokenPipeError):
        os._exit(1)  # the leader is gone: nobody waits for a result


if __name__ == "__main__":
    main(sys.argv[1:])
