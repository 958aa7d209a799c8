"""A reference beside a session: each run of the session is paired with one of a fixed build, in a process of its own.

The session is the leader here: it lets the reference's worker go before or after each of its own runs, as a coin falls.
Knows turns and places. Refuses to know which build the reference is and what becomes of the numbers.
"""

import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.harness.fixtures import LED, Led
from benchmarks.harness.gate.evidence import Side
from benchmarks.harness.gate.lockstep import Share, Worker, side_of
from benchmarks.harness.gate.turns import WorkerError, send
from benchmarks.harness.loop import Enough


class Beside:
    """pytest plugin of the session that is measured; `worker` runs the same files with the reference.

    `index_of` gives an item's place among all that were collected, chosen or not: the reference runs them all, and is
    told at once that it is enough of those which this session leaves out.
    """

    def __init__(self, worker: Worker, index_of: Callable[[pytest.Item], int], share: Share, seed: int) -> None:
        self._worker, self._index_of, self._share = worker, index_of, share
        self._coin = random.Random(seed)
        self._said: dict[str, Any] | None = None
        self._item, self._spent_s = -1, 0.0
        self._start_s, self._is_first, self._is_sample = 0.0, False, False

    def pytest_configure(self, config: pytest.Config) -> None:
        relatives: Callable[[], tuple[int, ...]] = tuple  # the worker is our child, and no stranger
        config.stash[LED] = Led(self.take, self.begin_step, self.end_step, relatives)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._item, self._spent_s = self._index_of(item), 0.0

    @contextlib.contextmanager
    def take(self, arm: str, sample: int | None) -> Iterator[None]:
        """A run of the session, with the reference's before it or after it. Raises Enough when the share is used up."""
        if sample is not None and sample >= self._share.min_samples and self._spent_s >= self._share.max_s:
            raise Enough
        self._is_sample = sample is not None
        self.begin_step()
        try:
            yield
        finally:
            self.end_step()

    def begin_step(self) -> None:
        """A step of the session, or what opens its run, begins: the reference's comes before it, or after it."""
        self._start_s, self._is_first = time.monotonic(), self._coin.random() < 0.5
        if self._is_first:
            self._run_reference()

    def end_step(self) -> None:
        """It has ended."""
        if not self._is_first:
            self._run_reference()
        if self._is_sample:
            self._spent_s += time.monotonic() - self._start_s

    def _run_reference(self) -> None:
        """One turn of the reference, if it is where this session is; if it has fallen out of the case, none."""
        said = self._listen()
        while said["kind"] == "turn" and said["item"] < self._item:
            said = self._dismiss()
        if said["kind"] == "turn" and said["item"] == self._item:
            self._worker.run_turn()
            self._said = None

    def _listen(self) -> dict[str, Any]:
        if self._said is None:
            self._said = self._worker.receive()
        return self._said

    def _dismiss(self) -> dict[str, Any]:
        with contextlib.suppress(OSError):  # it has died: what follows says so
            send(self._worker.connection, "enough")
        self._said = None
        return self._listen()

    def close(self) -> Side:
        """The session is over: what the reference leaves. Raises WorkerError when it measured nothing."""
        said = self._listen()
        while said["kind"] == "turn":
            said = self._dismiss()
        side = side_of(said)
        if not side.results:
            raise WorkerError(f"the reference measured nothing:\n{'; '.join(side.failed.values())}")
        return side


def plain_id(case: str) -> str:
    """An id as it was before pytest escaped it once more: a process that collects twice does that."""
    return re.sub(r"\\+", r"\\", case)
