"""Gives each peer an environment of its own, so that none decides which torch another runs with.

Knows virtual environments, pip and the mark that says that one is whole. Refuses to know what a peer does.
"""

import importlib.util
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness.errors import PeerError
from benchmarks.harness.files import write_whole
from benchmarks.harness.nightly.runner import Command, Runner, last_line
from benchmarks.harness.peers.registry import Peer

LIMIT_S = 3600.0
"""llama.cpp is compiled, on two cores in ten minutes."""

Say = Callable[[str], None]


class Environments:
    """The folders below `root`, one for each environment that a peer names."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def python(self, peer: Peer) -> Path:
        """The interpreter that runs the peer's worker."""
        return self._folder(peer) / "bin" / "python" if peer.environment else Path(sys.executable)

    def environ(self, peer: Peer) -> dict[str, str]:
        """What the peer's worker has in its environment beside ours."""
        return {name: value.format(home=self._folder(peer)) for name, value in peer.environ.items()}

    def has(self, peer: Peer) -> bool:
        """Whether the peer can run: what it needs is here, in the pinned versions."""
        if not peer.environment:
            return importlib.util.find_spec(peer.needs) is not None
        try:
            return bool(json.loads(self._mark(peer).read_text("utf-8")) == [*peer.requirements])
        except (OSError, ValueError):
            return False

    def install(self, peer: Peer, runner: Runner, say: Say) -> None:
        """Make the peer's environment anew. Raises PeerError with the end of pip's log, and leaves no mark then."""
        if not peer.environment:
            raise PeerError(f"{peer.name} runs in the environment of this command: {how_to_install(peer)}")
        folder = self._folder(peer)
        shutil.rmtree(folder, ignore_errors=True)
        for words in commands(peer, folder):
            say(f"{peer.name}: {shlex.join(words)}")
            log = self._root / f"{peer.environment}.log"
            ended = runner.run(Command(words=words, log=log, limit_s=LIMIT_S, environment=peer.build), lambda *_: None)
            if ended.returncode != 0:
                note = f" ({peer.note})" if peer.note else ""
                raise PeerError(f"{peer.name} was not installed{note}: {last_line(log)}; all of it is in {log}")
        write_whole(self._mark(peer), json.dumps(peer.requirements))

    def _folder(self, peer: Peer) -> Path:
        return self._root / peer.environment

    def _mark(self, peer: Peer) -> Path:
        return self._folder(peer) / "installed.json"


def commands(peer: Peer, folder: Path) -> list[Sequence[str]]:
    """What makes the environment, in order."""
    python = str(folder / "bin" / "python")
    made: list[Sequence[str]] = [
        [sys.executable, "-m", "venv", str(folder)],
        [python, "-m", "pip", "install", "--progress-bar", "off", *peer.requirements],
    ]
    return [*made, [python, "-m", "pip", "uninstall", "--yes", *peer.without]] if peer.without else made


def how_to_install(peer: Peer) -> str:
    """A command to copy."""
    return f"python -m benchmarks peers --install {peer.name}" if peer.environment else 'pip install -e ".[dev]"'


def listed(peers: Sequence[Peer], environments: Environments) -> str:
    """A line for each peer: whether it is here, what it is, and the command that brings it."""
    width = max(len(peer.name) for peer in peers)
    lines = []
    for peer in peers:
        state = "installed" if environments.has(peer) else f"absent: {how_to_install(peer)}"
        note = f" ({peer.note})" if peer.note and not environments.has(peer) else ""
        lines.append(f"{peer.name:{width}}  {peer.what}; {state}{note}")
    return "\n".join(lines)
