"""One model in the form that each peer reads, made once from the same tensors and kept.

Knows folders, and which program converts into what. Refuses to know what a tensor is called (`gguf_writer.py`) and
where the model came from (`sources/nanoserve_export.py`). What was kept is not looked at again: to convert anew,
delete the model's folder.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.errors import PeerError
from benchmarks.harness.nightly.runner import Command, Runner, last_line
from benchmarks.harness.peers.gguf_writer import write_gguf
from benchmarks.harness.peers.registry import Peer

LIMIT_S = 1800.0

_OPENVINO_FORMATS = {"openvino-bf16": "fp16", "openvino-int8": "int8"}
"""optimum's name for weights of 16 bits is fp16; the arithmetic is bfloat16 all the same (`registry.py`)."""

Export = Callable[[str, Path], None]
"""Writes a model's Hugging Face folder, its config.json last."""

Say = Callable[[str], None]


class WeightStore:
    """The forms of one model, below a folder of its own."""

    def __init__(self, root: Path, model: str, export: Export, runner: Runner, say: Say) -> None:
        self._model, self._export, self._runner, self._say = model, export, runner, say
        self._home = root / file_name(model)

    @property
    def folder(self) -> Path:
        """The Hugging Face folder in bfloat16, exported on first use."""
        folder = self._home / "hf"
        if not (folder / "config.json").is_file():
            self._say(f"{self._model}: exporting its weights")
            self._export(self._model, folder)
        return folder

    def path_for(self, peer: Peer, python: Path) -> Path:
        """What the peer loads, converted on first use with what its own environment has. Raises PeerError."""
        if peer.weights in ("model", "folder"):
            return self.folder
        if peer.weights == "gguf":
            return self._gguf()
        return self._openvino(peer, python)

    def _gguf(self) -> Path:
        path = self._home / "bf16.gguf"
        if not path.is_file():
            self._say(f"{self._model}: writing GGUF")
            write_gguf(self.folder, path)
        return path

    def _openvino(self, peer: Peer, python: Path) -> Path:
        target, spare = self._home / peer.weights, self._home / f".{peer.weights}.tmp"
        if target.is_dir():
            return target
        self._say(f"{self._model}: converting to {peer.weights}")
        shutil.rmtree(spare, ignore_errors=True)
        words = [str(python.parent / "optimum-cli"), "export", "openvino", "--model", str(self.folder),
                 "--task", "text-generation-with-past", "--weight-format", _OPENVINO_FORMATS[peer.weights],
                 str(spare)]  # fmt: skip
        log = self._home / f"{peer.weights}.log"
        if self._runner.run(Command(words=words, log=log, limit_s=LIMIT_S), lambda *_: None).returncode != 0:
            raise PeerError(f"its weights were not converted: {last_line(log)}; all of it is in {log}")
        spare.replace(target)
        return target


def file_name(model: str) -> str:
    """A model's name, folder or hub id as the name of one file."""
    return re.sub(r"[^\w.-]+", "-", model).strip("-.") or "model"
