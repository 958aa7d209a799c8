"""An interrupted measurement loses nothing: finished cases are written down, and `--resume` goes on after them.

Knows pytest's session and a file of lines, one per finished case, that is there only while a session is unfinished. A
session with other options or other sources is refused: its numbers would not belong together.
"""

import dataclasses
import json
import os
import shlex
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import INSTRUMENT_VERSION
from benchmarks.harness.archive import read_result
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.files import write_whole
from benchmarks.harness.fixtures import LED, is_benchmark, is_timed
from benchmarks.harness.gpu.choice import Worker
from benchmarks.harness.http_fixtures import endpoint_of
from benchmarks.harness.provenance import cpu_model, source_hash
from benchmarks.harness.results import Flag
from benchmarks.harness.sources.nanoserve import package_folder
from benchmarks.harness.stash import PUBLISHED, RESUMED, Published

_OPTIONS = (
    "model",
    "device",
    "dtype",
    "samples",
    "max_warmups",
    "max_warmup_s",
    "planted_slowdown",
    "profile",
    "endpoint",
)


class Journal:
    """The finished cases of one session, in a file of its own."""

    def __init__(self, path: Path, setup: Mapping[str, Any]) -> None:
        """`setup` is what every case in the file has in common."""
        self._path, self._setup, self._is_begun = path, dict(setup), False

    def read(self) -> dict[str, Published]:
        """What an unfinished session has left, by node id; from now on this one goes on with its file.

        Raises InstrumentError where there is nothing, and where it was measured in another way.
        """
        if not self._path.exists():
            raise InstrumentError(f"nothing to resume: no session was interrupted ({self._path} is not there)")
        first, *lines = [line for line in self._path.read_text("utf-8").splitlines() if _is_whole(line)] or ["{}"]
        self._refuse_another(json.loads(first))
        write_whole(self._path, "".join(f"{line}\n" for line in (first, *lines)))  # without the half of a last line
        self._is_begun = True
        return dict(_read(line) for line in lines)

    def _refuse_another(self, setup: Mapping[str, Any]) -> None:
        other = [name for name in self._setup if setup.get(name) != self._setup[name]]
        if other:
            told = ", ".join(f"{name} {setup.get(name)!r}, now {self._setup[name]!r}" for name in other)
            raise InstrumentError(
                f"cannot resume, the interrupted session was another one: {told}; measure in the same way, or leave "
                f"out --resume"
            )

    def keep(self, node: str, published: Published) -> None:
        """Write a case down. The first one of a new session takes the place of what an older one has left."""
        line = {"node": node, "durations_s": published.durations_s, "result": published.result.as_dict()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        goes_on = self._is_begun and self._path.exists()
        with self._path.open("a" if goes_on else "w", encoding="utf-8") as file:
            for each in (line,) if goes_on else (self._setup, line):
                file.write(json.dumps(each, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._is_begun = True

    def close(self) -> None:
        """The session came to its end."""
        self._path.unlink(missing_ok=True)

    @property
    def is_begun(self) -> bool:
        return self._is_begun


def _is_whole(line: str) -> bool:
    """A kill in the middle of a line leaves half of it."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _read(line: str) -> tuple[str, Published]:
    told = json.loads(line)
    return told["node"], Published(read_result(told["result"]), tuple(told["durations_s"]))


JOURNAL = pytest.StashKey[Journal]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Open the journal of a session that measures, and take from it what need not be measured again.

    Workers side by side have none: they would write into one file.
    """
    config = session.config
    is_alone = LED not in config.stash and Worker.of() is None
    if not is_timed(config) or not is_alone or config.getoption("collectonly") or _has_no(session.items):
        return
    journal = Journal(config.rootpath / ".benchmarks" / "unfinished.jsonl", _setup(config))
    if config.getoption("--resume"):
        try:
            kept = journal.read()
        except InstrumentError as error:
            raise pytest.UsageError(str(error)) from None
        for item in session.items:
            if item.nodeid in kept:
                _resume(item, kept[item.nodeid])
    config.stash[JOURNAL] = journal


def _has_no(items: list[pytest.Item]) -> bool:
    return not any(map(is_benchmark, items))


def _setup(config: pytest.Config) -> dict[str, Any]:
    told = {name: config.getoption(f"--{name.replace('_', '-')}") for name in _OPTIONS}
    measured = None if endpoint_of(config) else source_hash(package_folder())
    sources = {"nanoserve": measured, "benchmarks": source_hash(config.rootpath / "benchmarks")}
    return told | sources | {"instrument_version": INSTRUMENT_VERSION, "cpu": cpu_model()}


def _resume(item: Any, kept: Published) -> None:
    """The case is published as it was, and says so: nobody has judged the pass that it was measured in."""
    flag = Flag(
        kind="resumed", arm="", what="measured in a session that was interrupted, and judged without its control"
    )
    flags = (*(each for each in kept.result.flags if each.kind != "resumed"), flag)
    item.stash[RESUMED] = kept._replace(result=dataclasses.replace(kept.result, flags=flags))
    item.obj = _nothing


def _nothing(**fixtures: object) -> None:
    pass


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Write down what was measured before the next case begins."""
    result = yield
    journal, published = pyfuncitem.config.stash.get(JOURNAL, None), pyfuncitem.stash.get(PUBLISHED, None)
    if journal and published and RESUMED not in pyfuncitem.stash:
        try:
            journal.keep(pyfuncitem.nodeid, published)
        except OSError as error:
            warnings.warn(f"this case would be measured again by --resume: {error}", stacklevel=1)
    return result


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A session that came to its end leaves no journal, whatever failed; one that was stopped before does."""
    journal, ended = session.config.stash.get(JOURNAL, None), (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if journal and journal.is_begun and exitstatus in ended and not session.shouldfail:
        journal.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """How to go on."""
    journal = terminalreporter.config.stash.get(JOURNAL, None)
    if journal and journal.is_begun and exitstatus == pytest.ExitCode.INTERRUPTED:
        told = shlex.join(map(str, terminalreporter.config.invocation_params.args))
        terminalreporter.write_line(f"interrupted; what was measured is kept, go on with: pytest {told} --resume")
