"""One pass: this process runs one benchmark test, all its cases, and leaves plain numbers behind.

Knows pytest's session and what it may not touch in an environment of asv's. Refuses to know what asv does with the
numbers (`bridge.py`) and how they come about. A contaminated case leaves no number: it is marked, and not used.
"""

import contextlib
import io
import os
import shlex
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.fixtures import RESULTS, case_id, is_benchmark
from benchmarks.harness.provenance import prove_installed
from benchmarks.harness.results import BenchmarkResult
from benchmarks.harness.sidecar import keep_beside
from benchmarks.harness.sources.nanoserve import package_folder

ARGUMENTS = "NANOSERVE_BENCH_ARGS"
"""Environment variable with extra pytest arguments for every pass, such as `--model tiny`."""

TRACKED = "not desk"
"""pytest's `-m` expression for the cases that asv follows."""

_SAMPLING = ("--samples=3", "--max-warmups=1")
"""Sixteen passes have to fit into a quarter of an hour: a third of them would be warm-up otherwise."""

Pass = dict[str, Any]
"""What one pass leaves: `id`, `values` by (metric, arm, case), why a case `failed` or was `skipped`, and which are
`contaminated`."""


def run_pass(name: str, node: str, cases: Sequence[str], folder: Path) -> Pass:
    """Measure all cases of one benchmark in this process. Raises when nothing at all could be measured."""
    prove_installed(package_folder(), Path(os.environ.get("ASV_ENV_DIR", sys.prefix)))
    taken = Taken()
    test = str(folder.parent / node)
    _, output = run_pytest(folder, ["--benchmark-only", "-m", TRACKED, *_SAMPLING, test], taken)
    if not taken.results and not taken.skipped:
        raise InstrumentError(f"{name} measured nothing:\n{output}")
    measured = {"id": uuid.uuid4().hex} | taken.under_names(cases)
    keep_beside(measured["id"], name, taken.results)
    return measured


def run_pytest(folder: Path, arguments: Sequence[str], plugin: object) -> tuple[int, str]:
    """Run pytest in this process on the checkout's benchmarks and the environment's nanoserve: exit status and output.

    `importlib` mode and an empty `pythonpath` keep the checkout, which holds a nanoserve as well, off the path.
    """
    root = folder.parent
    settings = [f"--rootdir={root}", f"--confcutdir={root}", "-c", str(root / "pyproject.toml")]
    isolation = ["--import-mode=importlib", "-o", "pythonpath=", "-p", "no:cacheprovider", "-p", "no:xdist"]
    extra = shlex.split(os.environ.get(ARGUMENTS, ""))
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = pytest.main([*settings, *isolation, *arguments, *extra], plugins=[plugin])
    return int(status), output.getvalue()


class Collected:
    """pytest plugin that keeps the benchmark tests that were collected."""

    def __init__(self) -> None:
        self.items: list[pytest.Function] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.items = [item for item in items if isinstance(item, pytest.Function) and is_benchmark(item)]


class Taken(Collected):
    """pytest plugin that turns a session's results into plain numbers, so that nothing is printed or drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[BenchmarkResult] = []
        self.failed: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: Any = yield
        if report.failed:
            self.failed[case_id(item)] = report.longreprtext
        elif report.skipped:
            # An expected failure is reported as skipped, with its exception in place of a reason.
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
            self.skipped[case_id(item)] = reason
        return report  # type: ignore[no-any-return]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.results = session.config.stash.get(RESULTS, [])
        session.config.stash[RESULTS] = []

    def under_names(self, cases: Sequence[str]) -> dict[str, Any]:
        """What was taken, its cases named as they were when the series were made.

        pytest escapes an id that is not ASCII once more each time it collects in the same process, so that names
        of two collections are matched by position.
        """
        ours = [case_id(item) for item in self.items]
        if len(ours) != len(cases):
            raise InstrumentError(f"{len(ours)} cases were collected where the series have {len(cases)}")
        name = dict(zip(ours, cases, strict=True))
        return {
            "values": {key: v for each in self.results for key, v in _costs_of(each, name[each.case])},
            "failed": {name[case]: why for case, why in self.failed.items()},
            "skipped": {name[case]: why for case, why in self.skipped.items()},
            "contaminated": {name[each.case] for each in self.results if each.is_contaminated},
        }


def _costs_of(result: BenchmarkResult, case: str) -> Iterator[tuple[tuple[str, str | None, str], float]]:
    """What asv stores of one case, by metric, arm and case: of times the best run, of ratios the median pair."""
    for m in result.measurements:
        value = m.value if m.metric.compares_arms else m.best
        if m.metric.gate and value is not None:
            yield (m.metric.name, None if m.metric.compares_arms else m.arm, case), m.metric.cost(value)
