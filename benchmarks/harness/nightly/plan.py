"""What a night was asked for, and the command lines that come of it.

Knows the options of the tools that do the work: the gate, asv, pytest, the report. Refuses to run any of them.
"""

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness.errors import InstrumentError

ARGUMENTS = "NANOSERVE_BENCH_ARGS"
"""What asv's passes hand on to pytest."""

COUNTING = "count_work"
"""pytest's -k for the benchmarks that count and time nothing."""

COUNTED_MODEL = "tiny"
"""Whether the engine does more work than before shows on the smallest shape, in seconds."""

FEWEST_LAUNCHES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of a night. One that was killed goes on only with the same."""

    machine: str
    model: str = ""
    device: str = "auto"
    k: str = ""
    launches: int = 12
    budget_s: float = 60.0
    pytest_args: str = ""

    @property
    def measured(self) -> Mapping[str, str]:
        """What makes the numbers of two nights another thing: these never share a history."""
        told = {"--model": self.model, "--device": self.device, "-k": self.k, "--pytest-args": self.pytest_args}
        return {name: value or "not given" for name, value in told.items()}

    @property
    def pytest_options(self) -> tuple[str, ...]:
        """Raises InstrumentError where --pytest-args cannot be taken apart."""
        try:
            more = shlex.split(self.pytest_args)
        except ValueError as error:
            raise InstrumentError(f"--pytest-args cannot be read, {error}: {self.pytest_args!r}") from None
        model = [f"--model={self.model}"] if self.model else []
        chosen = ["-k", self.k] if self.k else []
        return (*model, f"--device={self.device}", *chosen, *more)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The checkout, the results folder, and where pages go. asv keeps what it measures at night in `store` alone."""

    root: Path
    results: Path
    site: Path

    @property
    def store(self) -> Path:
        return self.results / "asv"

    @property
    def config(self) -> Path:
        """asv's configuration for nights; it lies in the root, which all that it names is found from."""
        return self.root / ".asv-nightly.json"


def _python(*words: object) -> list[str]:
    return [sys.executable, "-m", *map(str, words)]


def counts_command(base: str, head: str, night: Path, asked: Asked) -> list[str]:
    """Exact counts of both commits; the benchmarks that count take no time worth choosing among."""
    chosen = ("-k", COUNTING, "--model", COUNTED_MODEL, "--device", asked.device, "--launches", FEWEST_LAUNCHES)
    return [*_python("benchmarks", "compare", base, head, *chosen), *_files(night, "counts")]


def compare_command(base: str, head: str, night: Path, asked: Asked) -> list[str]:
    """Everything on the asked model. A commit against itself needs the fewest launches: it only watches the machine."""
    launches = FEWEST_LAUNCHES if base == head else asked.launches
    options = [f"--launches={launches}", f"--budget-s={asked.budget_s:g}", f"--device={asked.device}"]
    return [*_python("benchmarks", "compare", base, head, *options, *given_words(asked)), *_files(night, "compare")]


def given_words(asked: Asked) -> list[str]:
    """What was asked to be measured, as `compare` takes it; the device apart."""
    given = {"--model": asked.model, "-k": asked.k, "--pytest-args": asked.pytest_args}
    return [word for name, value in given.items() if value for word in (name, value)]


def _files(night: Path, name: str) -> list[str]:
    return ["--json", str(night / f"{name}.json"), "--markdown", str(night / f"{name}.md")]


def name_machine_command(machine: str) -> list[str]:
    """asv asks questions about a machine that it has not been told of."""
    return _python("asv", "machine", "--machine", machine, "--yes")


def history_step(commit: str) -> str:
    """What the step is called that brings a commit into asv's history."""
    return f"asv {commit[:12]}"


def history_command(config: Path, commit: str, machine: str) -> list[str]:
    """One commit into asv's history; without samples it could not be judged later."""
    return _python("asv", "--config", config, "run", f"{commit}^!", "--record-samples", "--machine", machine)


def history_environment(asked: Asked) -> Mapping[str, str]:
    """What is set already stays, ours comes after it and counts."""
    before = os.environ.get(ARGUMENTS, "")
    return {ARGUMENTS: f"{before} {shlex.join(asked.pytest_options)}".strip()}


def publish_command(config: Path) -> list[str]:
    """asv's pages, of what `config` names."""
    return _python("asv", "--config", config, "publish", "--no-pull")


def measure_command(night: Path, asked: Asked) -> list[str]:
    """The checkout on its own, for the page."""
    return _python(
        "pytest",
        "benchmarks",
        "--benchmark-only",
        f"--benchmark-json={night / 'benchmarks.json'}",
        *asked.pytest_options,
    )


def report_command(night: Path) -> list[str]:
    """The page of what was measured, a CSV and a Markdown file beside it."""
    return _python("benchmarks", "report", night / "benchmarks.json", "--output", night / "report.html")
