"""A worker's pytest session: it runs the benchmarks turn by turn and sends what it measured.

Knows pytest's hooks and the fixtures' stash. Refuses to know processes and pipes (`worker.py`, `turns.py`), and what
becomes of the results.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.fixtures import LED, Led, benchmark_id, case_id, is_benchmark
from benchmarks.harness.gate.builds import prove_built
from benchmarks.harness.gate.turns import Connection, Turns
from benchmarks.harness.guards import OlderBuild
from benchmarks.harness.machine import family_of
from benchmarks.harness.passes import run_pytest
from benchmarks.harness.publishing import take_results
from benchmarks.harness.results import BenchmarkResult
from benchmarks.harness.sources.nanoserve import package_folder


def serve(root: Path, build: Path, sha256: str, connection: Connection, arguments: Sequence[str]) -> None:
    """Run the benchmarks that `arguments` choose, and send what came of them. Raises EOFError without a leader."""
    prove_built(package_folder(), build, sha256)
    serving = Serving(Turns(connection))
    status, output = run_pytest(root / "benchmarks", ["--benchmark-only", *arguments], serving, OlderBuild(root))
    serving.turns.end({"status": status, "output": output[-4000:], **serving.told()})


class Serving:
    """pytest plugin: lets each run wait for its turn, and gathers results, failures and skips by benchmark and case."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self._results: list[BenchmarkResult] = []
        self._failed: list[tuple[str, str, str]] = []
        self._skipped: list[tuple[str, str, str]] = []
        self._items: list[pytest.Item] = []

    def pytest_configure(self, config: pytest.Config) -> None:
        leader = os.getppid()  # the other worker is a child of it, and no stranger
        turns = self.turns
        config.stash[LED] = Led(turns.take, turns.begin_step, turns.end_step, lambda: family_of(leader), leader)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._items = [item for item in items if is_benchmark(item)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item in self._items:
            self.turns.begin_item(self._items.index(item), item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: Any = yield
        if report.failed:
            self._failed.append((benchmark_id(item), case_id(item), report.longreprtext[-2000:]))
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
            self._skipped.append((benchmark_id(item), case_id(item), reason))
        return report  # type: ignore[no-any-return]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._results = take_results(session.config)

    def told(self) -> dict[str, Any]:
        """Everything but the event logs, as fields of a message."""
        return {
            "results": [result.as_dict() | {"runs": {}} for result in self._results],
            "failed": self._failed,
            "skipped": self._skipped,
        }
