"""A commit, or the working tree, as an installed nanoserve in a folder of its own.

Knows pip, files and hashes; what git knows stands in `revisions.py`. Refuses to know what is measured with a build. All
other packages come from the environment that runs: nothing is fetched.
"""

import contextlib
import dataclasses
import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.harness.errors import BuildError, ForeignPackageError
from benchmarks.harness.gate.revisions import Revision, export
from benchmarks.harness.provenance import source_hash

PACKAGE = "nanoserve"

_MIN_FREE_BYTES = 200_000_000
_FULL_BYTES = 10_000_000
_MIN_SETUPTOOLS = 77
_NUM_LINES_OF_PIP = 15
_RECORD = "build.json"
_TEMPORARY = "tmp-"
_DIRTY = "dirty-"

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """`folder` holds the installed package and comes first on a worker's path; the hash is of its Python files."""

    revision: Revision
    folder: Path
    source_sha256: str


def build(revision: Revision, root: Path, store: Path, say: Say = lambda text: None) -> Build:
    """Install the revision of the checkout `root` below `store`, unless it is there, unchanged.

    Builds of one store wait for each other; what a killed one left is removed. A new build of the working tree takes
    the place of the last. Raises BuildError, and leaves nothing half-written.
    """
    store = store.absolute()
    with _explained(revision, store), _workspace(store, say) as work:
        folder = _place(revision, root, store, work)
        source_sha256 = _kept(folder)
        if source_sha256 is None:
            say(f"{revision}: builds it in {folder}")
            installed, source_sha256 = _installed(revision, root, work)
            _write_record(installed, folder.name)
            _move(installed, folder, work)
        return Build(revision=revision, folder=folder, source_sha256=source_sha256)


def prove_built(package: Path, build_folder: Path, source_sha256: str) -> None:
    """Raise ForeignPackageError unless the imported `package` is the build's own, as it was built.

    What comes first on the path is measured, whatever the result says; so a worker looks at what it has imported.
    """
    if package.resolve().parent != build_folder.resolve():
        raise ForeignPackageError(
            f"{PACKAGE} was imported from {package}, which is not the build in {build_folder}; nothing was measured. "
            f"Remove whatever puts the other one first on the path, or imports it earlier: a .pth file, "
            f"sitecustomize, an editable install"
        )
    if source_hash(package) != source_sha256:
        raise ForeignPackageError(
            f"the files of {package} have changed since it was built; nothing was measured. Run it again: it is then "
            f"built anew"
        )


# The store: one lock, temporary folders, and builds that are whole.


@contextlib.contextmanager
def _workspace(store: Path, say: Say) -> Iterator[Path]:
    """A temporary folder in the store, which is locked meanwhile: so any other one there is a leftover."""
    store.mkdir(parents=True, exist_ok=True)
    with _locked(store, say):
        (store / ".gitignore").write_text("*\n")  # or else the store would be among the working tree's changes
        for leftover in store.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=store, ignore_cleanup_errors=True)
        with temporary as work, _named_if_full(store):
            yield Path(work).resolve()


@contextlib.contextmanager
def _locked(store: Path, say: Say) -> Iterator[None]:
    import filelock

    lock = filelock.FileLock(store / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        say(f"waits for another process that builds in {store}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _place(revision: Revision, root: Path, store: Path, work: Path) -> Path:
    """Where the build belongs. The working tree goes by its contents, so its files are taken now."""
    if not revision.is_dirty:
        return store / revision.commit
    _check_disk(store)
    export(revision, root, work / "source")
    folder = store / f"{_DIRTY}{_contents_hash(work / 'source')}"
    for old in set(store.glob(f"{_DIRTY}*")) - {folder}:
        shutil.rmtree(old)
    return folder


def _kept(folder: Path) -> str | None:
    """The source hash of a build that is there and is still what was recorded; else None."""
    try:
        recorded = json.loads((folder / _RECORD).read_text("utf-8"))
        found = _record(folder, folder.name)
    except (OSError, ValueError):
        return None
    return found["source_sha256"] if found == recorded else None


def _record(installed: Path, name: str) -> dict[str, str | None]:
    return {
        "build": name,
        "python": sys.implementation.cache_tag,
        "source_sha256": source_hash(installed / PACKAGE),
        "contents_sha256": _contents_hash(installed),
    }


def _write_record(installed: Path, name: str) -> None:
    (installed / _RECORD).write_text(json.dumps(_record(installed, name), indent=1), "utf-8")


def _contents_hash(folder: Path) -> str:
    """Over names and contents of all files, but not the record itself nor the bytecode that imports leave."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name == Path(_RECORD) or "__pycache__" in name.parts or (path.is_dir() and not path.is_symlink()):
            continue
        content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
        digest.update(b"%s\0%d\0" % (os.fsencode(name), len(content)) + content)
    return digest.hexdigest()


def _move(installed: Path, folder: Path, work: Path) -> None:
    """Nobody sees half a build: it is whole before it gets its name."""
    if os.path.lexists(folder):
        folder.rename(work / "replaced")
    installed.rename(folder)


# From the files of a revision to an installed package.


def _installed(revision: Revision, root: Path, work: Path) -> tuple[Path, str]:
    """The folder that pip has installed into, and the hash of the package's source, which pip has not changed."""
    source, installed = work / "source", work / "installed"
    _check_tools()
    _check_disk(work)
    if not source.exists():
        export(revision, root, source)
    if not (source / PACKAGE / "__init__.py").is_file():
        raise BuildError(f"{revision} has no {PACKAGE}/__init__.py: there is nothing to install and to measure")
    wanted = _files(source / PACKAGE)
    returncode, output = _pip_install(source, installed)
    if returncode:
        raise BuildError(f"{revision} cannot be built, pip ended with {returncode}:\n{_last_lines(output)}")
    _check_same(revision, wanted, _files(installed / PACKAGE))
    return installed, source_hash(installed / PACKAGE)


_PIP_INSTALL = (
    "-P", "-m", "pip", "--isolated", "--disable-pip-version-check", "--no-input", "install", "--quiet", "--no-deps",
    "--no-index", "--no-build-isolation", "--no-cache-dir", "--target",
)  # fmt: skip


def _pip_install(source: Path, installed: Path) -> tuple[int, str]:
    """Exit status and output. Nobody's settings, no index, no cache; its own temporary files lie beside `source`."""
    where = source.parent
    temporary = where / "temporary"
    temporary.mkdir()
    environment = os.environ | {"PIP_CONFIG_FILE": os.devnull, "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        [sys.executable, *_PIP_INSTALL, installed.name, f"./{source.name}"],  # pip takes a longer path apart at [ and ;
        cwd=where,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate()
    finally:
        _end(process)
    return process.returncode, output.decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """With whatever it has started, if it still runs: all that they wrote is temporary."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_lines(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-_NUM_LINES_OF_PIP:])


def _files(package: Path) -> dict[str, str]:
    """Hash of each Python file by its name: what `source_hash` covers."""
    return {
        path.relative_to(package).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in package.rglob("*.py")
    }


def _check_same(revision: Revision, wanted: dict[str, str], found: dict[str, str]) -> None:
    odd = dict.fromkeys(wanted.keys() - found.keys(), "left out")
    odd |= dict.fromkeys(found.keys() - wanted.keys(), "added")
    odd |= {name: "changed" for name in wanted.keys() & found.keys() if wanted[name] != found[name]}
    if odd:
        named = ", ".join(f"{PACKAGE}/{name} ({why})" for name, why in sorted(odd.items())[:5])
        raise BuildError(
            f"{revision}: what pip installs is not what the commit holds: {named}. A package that pyproject.toml does "
            f"not list, a build/ folder under git or a setup.py that writes source will do that"
        )


# What a build needs.


def _check_tools() -> None:
    if importlib.util.find_spec("pip") is None:
        raise BuildError(f"{sys.executable} has no pip, which installs each commit: python -m ensurepip")
    try:
        version = importlib.metadata.version("setuptools") or "0"
    except importlib.metadata.PackageNotFoundError:
        version = "0"
    if int(version.partition(".")[0]) < _MIN_SETUPTOOLS:
        found = f"setuptools {version} is too old" if version != "0" else "setuptools is not installed"
        raise BuildError(f'{found}, and each commit is built with it: pip install "setuptools>={_MIN_SETUPTOOLS}"')


def _check_disk(folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < _MIN_FREE_BYTES:
        raise OSError(errno.ENOSPC, f"{free_bytes / 1e6:.0f} MB are free")


@contextlib.contextmanager
def _named_if_full(store: Path) -> Iterator[None]:
    """Git and pip do not always say that it was the disk; what they wrote is still there to be seen."""
    try:
        yield
    except BuildError as error:
        if shutil.disk_usage(store).free < _FULL_BYTES:
            raise OSError(errno.ENOSPC, "git or pip has used up the rest") from error
        raise


@contextlib.contextmanager
def _explained(revision: Revision, store: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = f"no space left on the disk ({error.strerror}); a build wants {_MIN_FREE_BYTES / 1e6:.0f} MB"
        else:
            why = str(error)
        raise BuildError(f"{revision} could not be built in {store}: {why}") from error
