"""A worker process as its leader sees it: asked by a line, answered by a line, and never waited for without end.

Knows pipes, time limits and what a reply has to hold. Refuses to know engines and what is asked of them.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.errors import PeerError

LOAD_S = 900.0
"""vLLM compiles when it loads."""

ASK_S = 300.0

_END_S = 5.0
_LEAVE_S = 1.0  # nothing of a worker that has been told to end is wanted any more


class Reply(NamedTuple):
    """When a worker began on what it was asked, when each token of each request came out, and the tokens."""

    sent_ns: int
    stamps_ns: Sequence[Sequence[int]]
    token_ids: Sequence[Sequence[int]]


class PeerWorker:
    """One process, alive until `close`. After a `PeerError` look at `is_alive`: a refusal costs nobody's life."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as printed:
            self._process = subprocess.Popen(
                [*words], env={**environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed,
                text=True, encoding="utf-8", start_new_session=True,
            )  # fmt: skip
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def about(self, patience_s: float = LOAD_S) -> dict[str, Any]:
        """What it says of itself when it has loaded. Raises PeerError when it has not."""
        about: dict[str, Any] = self._receive(patience_s)["ready"]
        return about

    def ask(self, prompts: Sequence[Sequence[int]], num_new_tokens: int, patience_s: float = ASK_S) -> Reply:
        """Have prompts answered together. Raises PeerError for a refusal, a death, silence and a short answer."""
        with contextlib.suppress(OSError):  # it has died: `_receive` says so
            print(json.dumps({"prompts": prompts, "num_new_tokens": num_new_tokens}), file=self._to_it, flush=True)
        told = self._receive(patience_s)
        reply = Reply(told["sent_ns"], told["stamps_ns"], told["token_ids"])
        _check(reply, len(prompts), num_new_tokens)
        return reply

    def close(self) -> None:
        """End the process and all that it has started, whatever they are doing."""
        with contextlib.suppress(OSError):
            self._to_it.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
        self._kill()

    @property
    def _to_it(self) -> Any:
        return self._process.stdin

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _receive(self, patience_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=patience_s)
        except queue.Empty:
            self._kill()
            raise PeerError(f"said nothing for {patience_s:.0f} s and was killed") from None
        if line is None:
            raise PeerError(f"{self._how_it_ended()}; its log is {self._log}")
        try:
            told: dict[str, Any] = json.loads(line)
        except ValueError:
            self._kill()
            raise PeerError(f"said what is no answer: {line[:200]!r}") from None
        if "failed" in told:
            raise PeerError(told["failed"])
        return told

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._kill()
            return "closed its output and was killed"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)


def _check(reply: Reply, num_requests: int, num_new_tokens: int) -> None:
    """A short answer is not a fast one."""
    counts = [len(ids) for ids in reply.token_ids]
    if counts != [num_new_tokens] * num_requests or counts != [len(stamps) for stamps in reply.stamps_ns]:
        raise PeerError(f"gave {counts} tokens where {num_requests} times {num_new_tokens} were asked")
    for stamps in reply.stamps_ns:
        times = [reply.sent_ns, *stamps]
        if times != sorted(times):
            raise PeerError(f"stamped tokens out of order: {times[:5]} ...")
