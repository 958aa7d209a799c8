"""The asv that this process works for: its command line, its configuration and what it calls this machine.

Knows asv's options and environment variables, and nothing of asv's code: asv is not installed in its environments. It
tells a pass neither what was selected nor which machine it files results under; both stand on its command line.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

_NAMES = ("asv", "asv.exe")
_MACHINE_FILE = "~/.asv-machine.json"

_VALUES = (
    "--bench -b", "--machine -m", "--attribute -a", "--cpu-affinity", "--environment -E", "--python", "--launch-method",
    "--config", "--date-period", "--set-commit-hash", "--sort", "--factor -f",
)  # fmt: skip
_PERHAPS_VALUES = ("--parallel -j", "--durations")
_FLAGS = (
    "--verbose -v", "--profile -p", "--show-stderr -e", "--quick -q", "--dry-run -n", "--skip-existing -k",
    "--skip-existing-successful", "--skip-existing-failed", "--skip-existing-commits", "--record-samples",
    "--no-record-samples", "--append-samples", "--interleave-rounds", "--no-interleave-rounds", "--no-pull",
    "--interleave-processes", "--no-interleave-processes", "--no-stats", "--only-changed", "--no-only-changed",
    "--invert -i", "--skip-save",
)  # fmt: skip
_S = {"run": ["--steps"], "continuous": ["--split"], "find": []}
"""Every option of `asv run`, `continuous` and `find` (0.6), and what `-s` means to each."""


@dataclasses.dataclass(frozen=True, slots=True)
class AsvCommand:
    """What a command line of asv asks for. No patterns: everything, also where that could not be read for certain."""

    patterns: tuple[str, ...] = ()
    machine: str | None = None
    config: str = "asv.conf.json"
    measures: bool = False

    def selects(self, name: str, params: Sequence[str]) -> bool:
        """Whether asv runs this series with these parameters, which are written as asv writes them; its own rule."""
        told = f"{name}({', '.join(params)})" if params else name
        return not self.patterns or any(re.search(pattern, told) for pattern in self.patterns)


def asv_command() -> AsvCommand:
    """The command of the nearest asv among the processes that started this one; of none, that asks for everything."""
    found = (words for words in map(_words_of_asv, _command_lines()) if words is not None)
    return parse_command(next(found, []))


def _command_lines() -> Iterator[Sequence[str]]:
    try:
        import psutil
    except ImportError:
        return
    with contextlib.suppress(psutil.Error, OSError):
        for process in psutil.Process().parents():
            yield process.cmdline()


def _words_of_asv(command_line: Sequence[str]) -> Sequence[str] | None:
    """What follows `asv`, `python .../bin/asv` or `python -m asv`; None for every other process."""
    for place, word in enumerate(command_line):
        if word == "-m":
            return command_line[place + 2 :] if command_line[place + 1 : place + 2] == ["asv"] else None
        if Path(word).name in _NAMES:
            return command_line[place + 1 :]
        if place and not word.startswith("-"):
            return None
    return None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_command(words: Sequence[str]) -> AsvCommand:
    """Read asv's arguments. Whatever is not understood makes the command ask for everything: slower, never wrong."""
    command = next((word for word in words if word in ("run", "continuous", "find")), "")
    if not command:
        return AsvCommand()
    try:
        known, unknown = _parser(command).parse_known_args(words)
    except ValueError:
        return AsvCommand(measures=True)
    if any(word.startswith("-") for word in unknown):
        known.bench = []
    patterns = [known.wanted] if command == "find" else known.bench or []
    return AsvCommand(tuple(patterns), known.machine, Path(known.config or "asv.conf.json").name, measures=True)


def _parser(command: str) -> argparse.ArgumentParser:
    parser = _Parser(add_help=False)
    parser.add_argument("command", choices=[command])
    for names in _VALUES:
        parser.add_argument(*names.split(), action="append" if names.startswith("--bench") else "store")
    for names in _PERHAPS_VALUES:
        parser.add_argument(*names.split(), nargs="?")
    for names in _FLAGS:
        parser.add_argument(*names.split(), action="store_true")
    parser.add_argument("-s", *_S[command], action="store_true" if command == "continuous" else "store")
    if command == "find":
        parser.add_argument("range")
        parser.add_argument("wanted")
    return parser


def is_about_to_measure() -> bool:
    """Whether this process lists the benchmarks for a command that goes on to measure them."""
    return sys.argv[1:2] == ["discover"] and asv_command().measures


def results_folder() -> Path | None:
    """Where this asv keeps its results; None outside of asv."""
    if "ASV_CONF_DIR" not in os.environ:
        return None
    folder = Path(os.environ["ASV_CONF_DIR"])
    text = (folder / asv_command().config).read_text("utf-8")
    # Its comments are more than a JSON parser takes, and asv's own parser is not installed here.
    lines = itertools.filterfalse(re.compile(r"\s*//").match, text.splitlines())
    found = re.search(r'"results_dir"\s*:\s*"([^"]+)"', "\n".join(lines))
    return folder / (found[1] if found else "results")


def machine_name() -> str:
    """The name under which this asv files results: of `--machine` or the host's, as its machine file resolves it."""
    host = platform.node()
    asked = asv_command().machine or host
    machines = _machines()
    only = next(iter(machines.values())) if len(machines) == 1 and asked == host else {}
    name = machines.get(asked, only).get("machine", asked)
    return str(name)


def knows_machine(name: str) -> bool:
    """Whether asv has been told of a machine of this name; it asks questions otherwise."""
    return any(name in (key, entry.get("machine")) for key, entry in _machines().items())


def _machines() -> dict[str, Any]:
    try:
        stored = json.loads(Path(os.path.expanduser(_MACHINE_FILE)).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: entry for name, entry in stored.items() if isinstance(entry, dict)}
