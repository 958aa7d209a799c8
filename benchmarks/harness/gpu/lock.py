"""One lock per GPU, in a folder that all users of a machine share: two sessions never measure on one GPU.

Knows files and processes. Refuses to know which GPU a session wants (`choice.py`). The kernel frees the lock of a
process that ends, however it ends; what is written beside it is for people, and for sessions that take turns.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.errors import DeviceError
from benchmarks.harness.files import write_whole

_CHOOSING = "choosing"
"""The lock that is held while a session chooses: two that look at the same time would see the same GPU free."""


class Holder(NamedTuple):
    """Whose a lock is. Sessions of one family take turns, and share theirs; a pid of 0 is not known."""

    pid: int
    family: str


class GpuLocks:
    """The locks in one folder, each by the key of its GPU, as `choice.py` makes it. Makes the folder at first use."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / "nanoserve-gpu-locks"

    @contextlib.contextmanager
    def choosing(self, limit_s: float) -> Iterator[None]:
        """No other session looks or takes meanwhile. Raises DeviceError where one looks for longer than `limit_s`."""
        lock = self._lock(_CHOOSING)
        if not self._attempt(lock, limit_s):
            raise DeviceError(f"a session has been choosing a GPU for {limit_s:g} s, see: fuser {lock.lock_file}")
        try:
            yield
        finally:
            lock.release()

    def holder_of(self, key: str) -> Holder | None:
        """Who has the lock; None where nobody does. To look makes no file."""
        if not self._path(key).exists():
            return None
        lock = self._lock(key)
        if self._attempt(lock):
            lock.release()
            return None
        return self._told(key)

    def take(self, key: str, family: str) -> Any:
        """The lock, which is ours until its `release`, or until this process ends. It has to be free."""
        lock = self._lock(key)
        if not self._attempt(lock):
            raise DeviceError(f"{lock.lock_file} was taken meanwhile, by process {self._told(key).pid}")
        write_whole(self._note(key), json.dumps(Holder(os.getpid(), family)._asdict()))
        return lock

    def _lock(self, key: str) -> Any:
        import filelock

        self._make_folder()
        return filelock.FileLock(self._path(key), mode=0o666, thread_local=False)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.lock"

    def _make_folder(self) -> None:
        """For everybody to write, and not sticky: in a sticky folder nobody may take a lock that another user made."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True)
            self._folder.chmod(0o777)

    def _attempt(self, lock: Any, limit_s: float = 0) -> bool:
        import filelock

        try:
            lock.acquire(timeout=limit_s)
        except filelock.Timeout:
            return False
        except OSError as error:
            raise DeviceError(
                f"cannot lock a GPU in {self._folder} ({error.strerror}): it has to be a folder that everybody may "
                f"write to, sudo install -d -m 777 {self._folder}"
            ) from error
        return True

    def _note(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def _told(self, key: str) -> Holder:
        try:
            told = json.loads(self._note(key).read_text("utf-8"))
            return Holder(int(told["pid"]), str(told["family"]))
        except (OSError, ValueError, KeyError, TypeError):  # not written yet, or by something else
            return Holder(0, "")


def family_of_leader(pid: int) -> str:
    """A name for the sessions that the process `pid` leads. A number alone comes back, in a container for one."""
    import psutil

    return f"{pid} of {psutil.Process(pid).create_time():.2f}"


def file_name(text: str) -> str:
    """Whatever a driver calls its GPU, as part of a file's name."""
    return re.sub(r"[^\w.-]", "-", text)
