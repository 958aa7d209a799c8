"""From `kernels.cpp` to a library that is loaded: which compiler, for which processor, kept where.

Knows compilers and a folder in which what was compiled is kept, by what it was made of. Refuses to know what the
kernels do. No header of torch is needed, so a compilation takes seconds; it happens once on a machine.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from nanoserve.errors import KernelError, one_line

_SOURCE = Path(__file__).parent / "kernels.cpp"
_PARTS = ("attention.h", "linear.h", "rows.h", "tile.h", "tile_int8.h")
_COMPILERS = ("g++", "c++", "clang++")
_COMPILE = ("-std=c++17", "-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC", "-c")
_LINK = ("-shared", "-fopenmp")  # a step of its own: linking with -ffast-math would change rounding in all of Python
_TIMEOUT_S = 120


@functools.cache
def load_library(folder: Path) -> ctypes.CDLL:
    """The kernels, compiled into `folder` unless they are there. Import torch first: both share its threads.

    Raises KernelError, with the reason, where the processor lacks AVX512-BF16 or nothing can compile.
    """
    processor = _processor()
    if not multiplies_bfloat16():
        raise KernelError("this processor does not multiply bfloat16 (AVX512-BF16 and VNNI)")
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise KernelError(f"no C++ compiler is here (one of {', '.join(_COMPILERS)}): apt-get install g++")
    sources = [path.read_text("utf-8") for path in (_SOURCE, *map(_SOURCE.with_name, _PARTS))]
    made_of = (*sources, *_COMPILE, *_LINK, _version(compiler), processor)
    path = folder / f"kernels-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    if not path.is_file():
        _compile(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"{path} cannot be loaded, delete it: {one_line(error)}") from error


def multiplies_bfloat16() -> bool:
    """Whether this processor has the instructions, kernels or not."""
    return {"avx512_bf16", "avx512_vnni"} <= {*_processor().split()}


def _processor() -> str:
    """What it can do: compiled for one processor, kernels may not run on another that shares the folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")


def _version(compiler: str) -> str:
    return _told_by([compiler, "--version"]).stdout


def _compile(compiler: str, path: Path) -> None:
    """Whole or not at all: another process may be at it, too."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            compiled, linked = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
            _run([compiler, *_COMPILE, str(_SOURCE), "-o", str(compiled)])
            _run([compiler, *_LINK, str(compiled), "-o", str(linked)])
            os.replace(linked, path)
    except OSError as error:
        raise KernelError(f"the kernels could not be compiled: {one_line(error)}") from error


def _run(command: list[str]) -> None:
    done = _told_by(command)
    if done.returncode:
        lines = done.stderr.split("\n")
        reason = next((line for line in lines if "error" in line), lines[0] or f"exit status {done.returncode}")
        raise KernelError(f"{Path(command[0]).name} could not compile the kernels: {reason}")


def _told_by(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"the compiler does not run: {one_line(error)}") from error
