"""One pass: the benchmarks of one file run in one process, all their cases, and leave plain numbers behind.

Knows pytest's session and what it may not touch in an environment of asv's. Refuses to know what asv does with the
numbers (`bridge.py`) and how they come about. A contaminated case leaves no number: it is marked, and not used.
Whatever ends one case, a crash of the process included, leaves the others theirs.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import os
import re
import shlex
import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.apart import run_apart
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.fixtures import benchmark_id, case_id, is_benchmark
from benchmarks.harness.gate.anchoring import MAX_SAMPLES, anchor, reference_beside, told_anchored, with_anchors
from benchmarks.harness.gate.reference import Reference, load_reference
from benchmarks.harness.gate.spin import with_brief_spin
from benchmarks.harness.guards import OlderBuild, TimeLimit
from benchmarks.harness.identity import refuse_another_machine
from benchmarks.harness.profiles import TRACKED
from benchmarks.harness.provenance import prove_installed
from benchmarks.harness.publishing import take_results
from benchmarks.harness.results import BenchmarkResult
from benchmarks.harness.sidecar import keep_beside
from benchmarks.harness.sources.nanoserve import package_folder

ARGUMENTS = "NANOSERVE_BENCH_ARGS"
"""Environment variable with extra pytest arguments for every pass, such as `--model tiny`; `--raw` leaves out the
reference."""

_RAW = "--raw"

_ANCHORED_SAMPLING = (f"--samples={MAX_SAMPLES}", "--max-warmups=1")
"""As many pairs as fit into the share of a case."""

CASE_LIMIT_S = 300.0
"""What runs longer is no case to be measured sixteen times. Loading a model is not counted."""

SILENCE_S = 900.0
"""A process that begins no case for so long hangs where no signal reaches it: loading a model takes less."""

_SAMPLING = ("--samples=3", "--max-warmups=1")
"""Sixteen passes have to fit into a quarter of an hour: a third of them would be warm-up otherwise."""

_SPOILS_THE_PROCESS = "CUDA error"
"""After an error of the device every later call in the same process fails, too."""

_TAIL = 4000

Place = tuple[str, str]
"""A case: the node id of its benchmark without parameters, and its name, "" for one without any."""

Cases = Mapping[str, Sequence[str]]
"""The names of all cases of some benchmarks, in the order of collection, by node id."""

Pass = dict[str, Any]
"""What one pass leaves: `id`, `values` by (node id, metric, arm, case), why a place `failed` or was `skipped`, which
are `contaminated` and which were `left_out`, and why a metric is `absent`, by (node id, metric)."""


def run_pass(
    cases: Cases, folder: Path, chosen: Collection[Place] | None = None, hear: Callable[[str], None] = lambda text: None
) -> Pass:
    """Measure the chosen cases (None: all) of the benchmarks of one file, in a process apart. Says where it is.

    When that process dies or hangs, the case that it was at has failed, and a new process measures the others. Raises
    InstrumentError when nothing at all could be measured.
    """
    every = {(node, case) for node, names in cases.items() for case in names}
    rest = every if chosen is None else every & set(chosen)
    left_out, lost, measured = every - rest, dict[Place, str](), _nothing()
    while rest:
        ended = run_apart(functools.partial(_measure, cases, folder, rest), SILENCE_S, lambda at: hear("::".join(at)))
        culprit, why = (ended.last_words, ended.why) if ended.why else ended.value[1]
        if not why:
            measured = ended.value[0]
            break
        if culprit not in rest:
            when = "before its first case" if culprit is None else f"at {culprit}, which was not to be measured"
            raise InstrumentError(f"the pass broke off {when}: {why}")
        lost[culprit] = f"this case ended the process that measured it: {why}"
        rest = rest - {culprit}
    return {**measured, "failed": measured["failed"] | lost, "left_out": left_out}


def _nothing() -> Pass:
    told: Pass = {"values": {}, "failed": {}, "skipped": {}, "contaminated": set(), "absent": {}}
    return {"id": uuid.uuid4().hex, **told}


Blame = tuple[Place | None, str]
"""Which case has spoilt its process, and how; None and "" where none did."""


def _measure(cases: Cases, folder: Path, chosen: Collection[Place], say: Callable[[Place], None]) -> tuple[Pass, Blame]:
    """The pass itself, in this process."""
    reference = refuse_what_cannot_count(folder.parent)
    taken, older = Taken(cases, chosen, say), OlderBuild(folder.parent)
    told = _session(folder, taken, older, reference)
    measured = {"id": uuid.uuid4().hex, "absent": older.absent, **told}
    if taken.blame[0] is None:
        keep_beside(measured["id"], {node: asv_name_of(node) for node in cases}, taken.results)
    return measured, taken.blame


def _session(folder: Path, taken: "Taken", older: OlderBuild, reference: Reference | None) -> dict[str, Any]:
    """Run the files of the chosen cases, beside the reference if there is one: the fields of a pass."""
    files = sorted({str(folder.parent / node.partition("::")[0]) for node in taken.cases})
    sampling = _SAMPLING if reference is None else _ANCHORED_SAMPLING
    arguments = ["-m", TRACKED, *sampling, *files]
    with contextlib.ExitStack() as stack:
        plugins: list[object] = [taken, older, TimeLimit(CASE_LIMIT_S)]
        if reference is not None:
            os.environ.update(with_brief_spin(os.environ))  # torch has not been loaded yet
            beside = stack.enter_context(reference_beside(reference, folder.parent, arguments, taken.index_of))
            plugins.append(beside)
        _, output = run_pytest(folder, ["--benchmark-only", *arguments], *plugins)
        if not taken.places_told:
            raise InstrumentError(f"{', '.join(files)}: nothing was measured:\n{output}")
        told = taken.told(output[-_TAIL:])
        if reference is None or not taken.results:
            return told
        anchored = anchor(reference, folder.parent, beside.close(), taken.results)
    taken.results = with_anchors(taken.results, anchored, reference)
    return told_anchored(told, anchored)


def refuse_what_cannot_count(checkout: Path) -> Reference | None:
    """Raise InstrumentError where numbers would be filed under a commit or a machine that they are not of.

    Returns the reference that times are anchored to, if there is one.
    """
    prove_installed(package_folder(), Path(os.environ.get("ASV_ENV_DIR", sys.prefix)))
    reference = None if _RAW in _extra_arguments() else load_reference(checkout)
    refuse_another_machine(None if reference is None else str(reference))
    return reference


def run_pytest(folder: Path, arguments: Sequence[str], *plugins: object) -> tuple[int, str]:
    """Run pytest in this process on the checkout's benchmarks and the environment's nanoserve: exit status and output.

    `importlib` mode and an empty `pythonpath` keep the checkout, which holds a nanoserve as well, off the path. No
    plugin but pytest-benchmark is loaded: what happens to be installed may slow a process, or collect its garbage.
    """
    root = folder.parent
    settings = [f"--rootdir={root}", f"--confcutdir={root}", "-c", str(root / "pyproject.toml")]
    paths = ["--import-mode=importlib", "-o", "pythonpath="]
    plugins_of_ours = ["--disable-plugin-autoload", "-p", "benchmark", "-p", "no:cacheprovider"]
    plugins_of_ours += ["-p", "no:benchmarks.harness.resume"]  # a pass is short, and nobody resumes it
    extra = [each for each in _extra_arguments() if each != _RAW]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = pytest.main([*settings, *paths, *plugins_of_ours, *arguments, *extra], plugins=[*plugins])
    return int(status), output.getvalue()


def _extra_arguments() -> list[str]:
    return shlex.split(os.environ.get(ARGUMENTS, ""))


def asv_name_of(node: str) -> str:
    """A node id as asv takes names: `bench_kv_cache.test_prompt_length`. What stands behind a `-` it would count."""
    path, *inside = node.split("::")
    return ".".join([*Path(path).with_suffix("").parts[1:], *inside]).replace("-", "_")


def names_of_cases(items: Iterable[pytest.Item]) -> tuple[str, ...]:
    """The ids of one test's cases, the same in every process: without objects' addresses, equal ones numbered."""
    names: list[str] = []
    for item in items:
        bare = re.sub(r" at 0x[0-9a-fA-F]+", "", case_id(item))
        numbered = itertools.chain([bare], (f"{bare} ({number})" for number in itertools.count(2)))
        names.append(next(name for name in numbered if name not in names))
    return tuple(names)


class Collected:
    """pytest plugin that keeps the benchmark tests that were collected."""

    def __init__(self) -> None:
        self.items: list[pytest.Function] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.items = [item for item in items if isinstance(item, pytest.Function) and is_benchmark(item)]

    def by_node(self) -> dict[str, list[pytest.Function]]:
        """The cases of each test, in their order."""
        found: dict[str, list[pytest.Function]] = {}
        for item in self.items:
            found.setdefault(benchmark_id(item), []).append(item)
        return found


class Taken(Collected):
    """pytest plugin that measures the chosen cases only, and turns what they leave into plain numbers.

    Cases are called what they were called when the series were made. pytest escapes an id that is not ASCII once more
    each time it collects in the same process, so that names of two collections are matched by position.
    """

    def __init__(self, cases: Cases, chosen: Collection[Place], say: Callable[[Place], None]) -> None:
        super().__init__()
        self.cases, self._chosen, self._say = cases, chosen, say
        self._places: dict[Place, Place] = {}
        self._failed: dict[Place, str] = {}
        self._skipped: dict[Place, str] = {}
        self.results: list[BenchmarkResult] = []
        self.blame: Blame = (None, "")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        super().pytest_collection_modifyitems(items)
        for node, ours in self.by_node().items():
            names = self.cases.get(node, ())
            if len(ours) != len(names):
                raise pytest.UsageError(f"{node}: {len(ours)} cases were collected where the series have {len(names)}")
            self._places |= {(node, case_id(item)): (node, name) for item, name in zip(ours, names, strict=True)}
        items[:] = [item for item in self.items if self._place_of(item) in self._chosen]

    def index_of(self, item: pytest.Item) -> int:
        """Its place among all cases of its file, chosen or not."""
        return [*self.items].index(item)  # type: ignore[arg-type]

    def _place_of(self, item: pytest.Item) -> Place:
        return self._places[benchmark_id(item), case_id(item)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._say(self._place_of(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: Any = yield
        place = self._place_of(item)
        if report.failed:
            self._failed[place] = report.longreprtext
        elif report.skipped:
            # An expected failure is reported as skipped, with its exception in place of a reason.
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
            self._skipped[place] = reason.removeprefix("Skipped: ")
        if report.failed and _SPOILS_THE_PROCESS in report.longreprtext:
            self.blame = (place, report.longreprtext)
            item.session.shouldstop = _SPOILS_THE_PROCESS
        return report  # type: ignore[no-any-return]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Take the results out of the session, so that nothing is printed or drawn."""
        results = take_results(session.config)
        self.results = [dataclasses.replace(each, case=self._places[each.benchmark, each.case][1]) for each in results]

    @property
    def places_told(self) -> set[Place]:
        """Every case that has a result, has failed or was skipped."""
        return {(each.benchmark, each.case) for each in self.results} | self._failed.keys() | self._skipped.keys()

    def told(self, output: str) -> dict[str, Any]:
        """The fields of a pass; a chosen case of which nothing is known failed for what the session's output says."""
        untold = {place: f"was not measured:\n{output}" for place in self._chosen if place not in self.places_told}
        return {
            "values": {key: cost for each in self.results for key, cost in _costs_of(each)},
            "failed": self._failed | untold,
            "skipped": self._skipped,
            "contaminated": {(each.benchmark, each.case) for each in self.results if each.is_contaminated},
        }


def _costs_of(result: BenchmarkResult) -> Iterator[tuple[tuple[str, str, str | None, str], float]]:
    """What asv stores of one case, by node id, metric, arm, case: of times the best run, of ratios the median."""
    for m in result.measurements:
        value = m.value if m.metric.unit == "x" else m.best
        if m.metric.gate and value is not None:
            arm = None if m.metric.compares_arms else m.arm
            yield (result.benchmark, m.metric.name, arm, result.case), m.metric.cost(value)
