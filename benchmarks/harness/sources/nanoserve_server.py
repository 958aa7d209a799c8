"""nanoserve behind its own HTTP server: a child process for each set of options, started once and always ended.

Knows the command line of `nanoserve serve`, and the sentence with which it says that it takes requests. The child runs
the very package that is imported here, and it goes when this process goes, however that happens.
"""

import contextlib
import dataclasses
import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import MissingFeatureError, SourceError
from benchmarks.harness.sources.endpoint import Endpoint

_SERVE = """
import os, signal, sys, threading
def watch():
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=watch, daemon=True).start()
sys.path.insert(0, {folder!r})
from nanoserve.cli import main
main()
"""
"""Whoever started it holds its standard input; when that closes, nobody is left to serve."""

_READY = re.compile(r"^nanoserve: serving (?P<model>.+) at (?P<url>http://\S+)$", re.MULTILINE)
_START_S = 600.0
_END_S = 15.0
_LOOK_S = 0.02
_TAIL = 2000


@dataclasses.dataclass(slots=True)
class Child:
    """One server. `url` is its root, `model` what it calls its model."""

    process: "subprocess.Popen[bytes]"
    url: str = ""
    model: str = ""

    def close(self) -> None:
        """Let it drain; what has not ended by then is killed."""
        with contextlib.suppress(OSError):
            self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


def command(folder: Path, model: str, options: Mapping[str, Any]) -> list[str]:
    """What starts a server on a free port; `folder` is where the package lies."""
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    serve = ["serve", "--model", model, "--host", "127.0.0.1", "--port", "0"]
    return [sys.executable, "-P", "-c", _SERVE.format(folder=str(folder)), *serve, *flags]


def start(arguments: list[str]) -> Child:
    """Run a command until it says where it serves. Raises SourceError, with its last words, where it does not."""
    with tempfile.TemporaryFile("a+b") as said, tempfile.TemporaryFile("a+b") as complained:
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=said, stderr=complained)
        child = Child(process)
        until_s = time.monotonic() + _START_S
        while process.poll() is None and time.monotonic() < until_s:
            if ready := _READY.search(_read(said)):
                child.url, child.model = ready["url"], ready["model"]
                return child
            time.sleep(_LOOK_S)
        status = process.poll()
        child.close()
        why = f"said nothing for {_START_S:g} s" if status is None else f"ended with status {status}"
        raise SourceError(f"the server {why}: {(_read(said) + _read(complained))[-_TAIL:].strip()}")


def _read(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))


class NanoserveServers:
    """The servers of one session, by their options."""

    def __init__(self, model: str, fixed: Mapping[str, Any]) -> None:
        """`fixed` are the options that all of them have: device and dtype."""
        self._model, self._fixed = model, dict(fixed)
        self._children: dict[tuple[tuple[str, Any], ...], Child] = {}

    def endpoint(self, **options: Any) -> Endpoint:
        """Where a server with these options of an engine serves. Raises MissingFeatureError where there is none."""
        key = tuple(sorted(options.items()))
        if key not in self._children:
            self._children[key] = start(command(_folder(), self._model, self._fixed | options))
        child = self._children[key]
        return Endpoint(base_url=f"{child.url}/v1", model=child.model)

    def close(self) -> None:
        """End all of them."""
        while self._children:
            self._children.popitem()[1].close()


def _folder() -> Path:
    import nanoserve

    if importlib.util.find_spec("nanoserve.server") is None:
        raise MissingFeatureError("this commit has no server", "import nanoserve.server")
    return Path(nanoserve.__file__).parents[1]
