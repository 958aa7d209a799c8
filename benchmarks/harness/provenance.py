"""Where a number comes from: which source was imported, on which machine, with which versions.

Knows files, git and the operating system. Refuses to know how anything was measured.
"""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import INSTRUMENT_VERSION
from benchmarks.harness.errors import ForeignPackageError

_PACKAGES = (
    *("torch", "numpy", "scipy", "safetensors", "pytest", "pytest-benchmark", "asv_runner"),
    *("fastapi", "uvicorn", "httptools", "uvloop", "httpx2"),
)


def provenance(package: Path | None, subject: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that can move a number: the imported `package` folder, the `subject`'s own words, and this machine.

    No package is for what runs elsewhere.
    """
    return {
        "instrument_version": INSTRUMENT_VERSION,
        "package": None if package is None else str(package),
        "source_sha256": None if package is None else source_hash(package),
        "commit": None if package is None else commit_of(package),
        **subject,
        "cpu": cpu_model(),
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": installed_versions(),
    }


def source_hash(package: Path) -> str:
    """SHA-256 over the names and contents of the package's Python files, in a fixed order."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def commit_of(package: Path) -> str | None:
    """The commit that asv says it installed, else the checkout's, `+dirty` when it has changes.

    None where git does not know the package: outside a checkout, or in an environment inside one.
    """
    if "ASV_COMMIT" in os.environ:
        return os.environ["ASV_COMMIT"]
    if not _git(package, "ls-files", "--", "."):
        return None
    head = _git(package, "rev-parse", "HEAD")
    return f"{head}+dirty" if head and _git(package, "status", "--porcelain", "--", ".") else head


def cpu_model() -> str:
    """The processor's own name for itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def installed_versions() -> dict[str, str]:
    """Versions of the packages that can move a number, as far as they are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def prove_installed(package: Path, environment: Path) -> None:
    """Raise ForeignPackageError unless the imported package lies in the environment's own site-packages.

    asv files a result under the commit that it installed; measuring a checkout that happened to come first on the
    path would file the wrong engine's numbers, for every commit.
    """
    real = package.resolve()
    if environment.resolve() not in real.parents or real.parent.name != "site-packages":
        raise ForeignPackageError(
            f"nanoserve was imported from {package}, which is not the package installed in {environment}; nothing was "
            f"measured. Remove whatever puts the other one on the path: PYTHONPATH, ASV_PYTHONPATH, `pythonpath` in an "
            f"ini file, an editable install"
        )


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
