"""Runs a command in a process group of its own: bounded, told about, and never left behind.

Knows processes and signals. Refuses to know what a command is for.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

HEARTBEAT_S = 60.0
"""A log that is read later wants a sign of life, and not every line."""

_GRACE_S = 20.0
"""Between the request to end and the kill: a worker gives its machine back meanwhile."""

_LOOK_S = 0.2

Hear = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to run, the file that gets all it prints, how long it may take, and what its environment has beside ours."""

    words: Sequence[str]
    log: Path
    limit_s: float
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Ended(NamedTuple):
    """How it ended. Out of time, it was ended, and has no exit status of its own."""

    returncode: int | None
    seconds: float

    @property
    def is_out_of_time(self) -> bool:
        return self.returncode is None


class Runner(Protocol):
    """Runs one command after the other."""

    def run(self, command: Command, began: Callable[[int, float], None]) -> Ended:
        """Tells `began` the process's id and when it was created. Whatever is raised meanwhile ends the whole group."""
        ...


class ProcessRunner:
    """The real one: in the folder `root`, saying the last line of the log from time to time."""

    def __init__(self, root: Path, hear: Hear, every_s: float = HEARTBEAT_S) -> None:
        self._root, self._hear, self._every_s = root, hear, every_s

    def run(self, command: Command, began: Callable[[int, float], None]) -> Ended:
        start_s = time.monotonic()
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with command.log.open("ab") as log:
            process = subprocess.Popen(
                [*command.words], cwd=self._root, env=os.environ | command.environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            began(process.pid, _created(process.pid))
            is_late = self._waits_in_vain(process, command)
        finally:
            if process.poll() is None or _is_left(process.pid):
                _end_group(process.pid, lambda: process.poll() is not None and not _is_left(process.pid, 0))
        return Ended(None if is_late else process.returncode, time.monotonic() - start_s)

    def _waits_in_vain(self, process: "subprocess.Popen[bytes]", command: Command) -> bool:
        end_s = time.monotonic() + command.limit_s
        next_s = time.monotonic() + self._every_s
        while process.poll() is None:
            now_s = time.monotonic()
            if now_s >= end_s:
                return True
            if now_s >= next_s:
                self._hear(last_line(command.log))
                next_s = now_s + self._every_s
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(_LOOK_S, max(end_s - now_s, 0.0)))
        return False


def _is_left(leader: int, patience_s: float = 1.0) -> bool:
    """Whether something of a group outlives its leader; what is about to end by itself is given a moment."""
    end_s = time.monotonic() + patience_s
    while True:
        try:
            os.killpg(leader, 0)
        except (ProcessLookupError, PermissionError):
            return False
        if time.monotonic() >= end_s:
            return True
        time.sleep(0.02)


def end_leftover(pid: int, created: float) -> bool:
    """End the group of a step whose own night was killed, if it still runs; tells whether it did.

    A process that got the same id later began at another time, and is left alone.
    """
    import psutil

    if created <= 0 or _created(pid) != created:
        return False
    process = psutil.Process(pid)
    _end_group(pid, lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    return True


def last_line(log: Path) -> str:
    """The last line that says something, "" where there is none."""
    try:
        lines = log.read_bytes()[-4000:].decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _created(pid: int) -> float:
    """When it was created, 0 for one that is not there."""
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


def _end_group(leader: int, has_ended: Callable[[], bool]) -> None:
    """Ask, wait, kill: the leader and whatever it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGINT)
        end_s = time.monotonic() + _GRACE_S
        while not has_ended() and time.monotonic() < end_s:
            time.sleep(0.05)
        os.killpg(leader, signal.SIGKILL)
    end_s = time.monotonic() + _GRACE_S
    while not has_ended() and time.monotonic() < end_s:
        time.sleep(0.05)
