"""One launch: two fresh worker processes measure the same benchmarks in turns, one step each, in random order.

Knows processes, turns and what a worker sends at its end. Refuses to know what a run is and what the numbers say. A
worker that dies or hangs takes nothing but its own results along; no worker outlives the call.
"""

import contextlib
import dataclasses
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.archive import read_result
from benchmarks.harness.gate import worker as worker_script
from benchmarks.harness.gate.evidence import Launch, Side
from benchmarks.harness.gate.spin import with_brief_spin
from benchmarks.harness.gate.turns import Place, WorkerError, receive, send

PATIENCE_S = 900.0
"""How long a worker may be silent: model loading, one warm-up or one sample."""

_KILL_AFTER_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How much one launch measures of each case: at least `min_samples` pairs, then until `max_s` seconds are used up.

    Seconds are those of sampling turns, both sides together; warm-ups do not count.
    """

    min_samples: int = 2
    max_s: float = math.inf


class Package(NamedTuple):
    """What one worker measures: the folder that holds `nanoserve`, and the hash that its source has to have."""

    folder: Path
    source_sha256: str


class Led(NamedTuple):
    """A launch, and the seconds of sampling turns that each test took, both sides together."""

    launch: Launch
    spent_s: dict[str, float]


class Worker:
    """One process and the connection to it. What it prints is kept for the case that it fails."""

    def __init__(self, package: Package, root: Path, arguments: Sequence[str], patience_s: float) -> None:
        self.connection, theirs = Pipe()
        self._patience_s = patience_s
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        script = [sys.executable, "-P", worker_script.__file__, str(root), str(package.folder), package.source_sha256]
        with theirs:
            self._process = subprocess.Popen(
                [*script, str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # Ctrl-C reaches the leader alone, and it ends its workers
            )

    def receive(self) -> dict[str, Any]:
        """The next message. Raises WorkerError when the process has died, or says nothing for too long."""
        if not self.connection.poll(self._patience_s):
            raise WorkerError(f"a worker said nothing for {self._patience_s:.0f} s\n{self.printed()}")
        try:
            return receive(self.connection)
        except (EOFError, ConnectionError):
            code = self._wait()
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            raise WorkerError(f"a worker {how}\n{self.printed()}") from None

    def run_turn(self) -> float:
        """Let it go, and wait until its run is over; the seconds that took."""
        start_s = time.monotonic()
        with contextlib.suppress(OSError):  # it died before its turn: `receive` says so
            send(self.connection, "go")
        self.receive()
        return time.monotonic() - start_s

    def printed(self) -> str:
        """The end of what the process has printed so far."""
        self._printed.seek(0)
        return self._printed.read().decode(errors="replace")[-4000:]

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self.connection.close()
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)  # after its last message it ends by itself
        for end in (self._process.terminate, self._process.kill):
            if self._process.poll() is None:
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_KILL_AFTER_S)
        self._printed.close()

    def _wait(self) -> int:
        try:
            return self._process.wait(_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _environment() -> dict[str, str]:
    """Nothing that could bring another nanoserve onto the path, and threads that leave the cores to others."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return with_brief_spin(kept)


def launch_pair(
    base: Package,
    head: Package,
    root: Path,
    arguments: Sequence[str],
    *,
    seed: int,
    head_arguments: Sequence[str] = (),
    share: Share = Share(),
    patience_s: float = PATIENCE_S,
    say: Callable[[str], None] = lambda text: None,
) -> Led:
    """Measure what pytest's `arguments` choose among the benchmarks of the checkout `root`, base against head.

    `seed` decides who goes first in each pair; `head_arguments` are given to head alone. A worker that dies, or is
    silent for longer than `patience_s`, leaves a Side in which the session itself has failed. Whatever happens, no
    process is left.
    """
    workers = [
        (base, root, arguments, patience_s),
        (head, root, [*arguments, *head_arguments], patience_s),
    ]
    sides, spent_s = _lead(workers, seed, share, say)
    return Led(Launch(base=sides[0], head=sides[1]), spent_s)


def launch_alone(
    package: Package, root: Path, arguments: Sequence[str], *, share: Share = Share(), patience_s: float = PATIENCE_S
) -> tuple[Side, dict[str, float]]:
    """Measure one build by itself, as a tool without lock step does: what it leaves, and the seconds of each test."""
    (side,), spent_s = _lead([(package, root, arguments, patience_s)], 0, share, lambda text: None)
    return side, spent_s


def _lead(
    workers: Sequence[tuple[Package, Path, Sequence[str], float]], seed: int, share: Share, say: Callable[[str], None]
) -> tuple[list[Side], dict[str, float]]:
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(contextlib.closing(Worker(*each))) for each in workers]
        leader = _Leader(running, random.Random(seed), share, say)
        return leader.lead(), dict(leader.spent_s)


class _Leader:
    """Goes from turn to turn until all workers have ended."""

    def __init__(
        self, workers: Sequence[Worker], order: random.Random, share: Share, say: Callable[[str], None]
    ) -> None:
        self._workers, self._order, self._share, self._say = workers, order, share, say
        self._said: dict[int, dict[str, Any]] = {}
        self.spent_s: defaultdict[str, float] = defaultdict(float)

    def lead(self) -> list[Side]:
        while True:
            self._listen()
            waiting = {i: said for i, said in self._said.items() if said["kind"] == "turn"}
            if not waiting:
                return [side_of(self._said[i]) for i in range(len(self._workers))]
            first = min(map(_place, waiting.values()))  # whoever is behind may be alone there
            together = [i for i, said in waiting.items() if _place(said) == first]
            if self._is_enough(self._said[together[0]]):
                self._stop(together)
            else:
                self._run(together)

    def _listen(self) -> None:
        """Wait until each worker has said where it is."""
        for i, worker in enumerate(self._workers):
            if i not in self._said:
                self._said[i] = self._attempt(worker.receive)

    def _is_enough(self, said: dict[str, Any]) -> bool:
        is_later = said["may_stop"] and said["sample"] >= self._share.min_samples
        return is_later and self.spent_s[said["name"]] >= self._share.max_s

    def _stop(self, together: list[int]) -> None:
        for i in together:
            del self._said[i]
            with contextlib.suppress(OSError):  # it has died meanwhile: the next `receive` says so
                send(self._workers[i].connection, "enough")

    def _run(self, together: list[int]) -> None:
        self._order.shuffle(together)
        for i in together:
            said = self._said.pop(i)
            self._say(f"{said['name']} {said['arm']}")
            taken_s = self._attempt(self._workers[i].run_turn)
            if not isinstance(taken_s, float):
                self._said[i] = taken_s
            elif said["sample"] is not None:
                self.spent_s[said["name"]] += taken_s

    def _attempt(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except WorkerError as error:
            return {"kind": "end", "status": -1, "output": "", "broken": str(error)}


def _place(said: dict[str, Any]) -> Place:
    return Place(said["item"], said["turn"])


def side_of(told: dict[str, Any]) -> Side:
    """What a worker's last message says, or what is said in its place. Raises ArchiveError for anything else."""
    failed = {(benchmark, case): why for benchmark, case, why in told.get("failed", ())}
    results = tuple(read_result(each) for each in told.get("results", ()))
    skipped = {(benchmark, case): why for benchmark, case, why in told.get("skipped", ())}
    if not results and not failed and not skipped:
        failed = {("", ""): told.get("broken") or f"nothing was measured:\n{told['output']}"}
    return Side(results=results, failed=failed, skipped=skipped)
