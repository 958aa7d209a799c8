"""What a machine is, as far as times depend on it, and the guard over names: one name, one machine.

asv takes a host name for a machine. The host may come back with another GPU, another processor or half its memory, and
its numbers would go on in the same series. Knows what a machine says of itself and one file beside asv's results.
Refuses to know asv's own files.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.asv_process import machine_name
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.files import write_whole
from benchmarks.harness.gpu.driver import driver
from benchmarks.harness.provenance import cpu_model
from benchmarks.harness.sidecar import provenance_folder

FILE = "machine.jsonl"
"""In the provenance folder of each machine. asv would take any .json below its results for its own."""

_GIB = 2**30
_MAX_MEMORY_STEP = 0.05
"""A kernel or a driver update moves the size of memory by less, another size by more."""


def identity(reference: str | None = None) -> dict[str, Any]:
    """This machine: processor, CPUs, memory, and the GPU that CUDA numbers first with its driver.

    The same on every run; what is not there, or is not shown, is None. `reference` names the build that times are
    anchored to: anchored times are not comparable with others, so it is part of what a machine is.
    """
    import psutil

    gpu = driver().gpu("cuda:0").state()
    return {
        "cpu": cpu_model(),
        "num_cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / _GIB),
        "gpu": gpu.name,
        "gpu_memory_gib": None if gpu.memory_total_bytes is None else round(gpu.memory_total_bytes / _GIB),
        "driver": gpu.driver_version,
        "reference": reference,
    }


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What the two differ in, in words; what `stored` does not mention counts as None."""
    return list(_differences(stored, now))


def _differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name, value in now.items():
        before = stored.get(name)
        if before != value and not (name.endswith("_gib") and _is_close(before, value)):
            yield f"{name.removesuffix('_gib')} was {before}, is {value}"


def _is_close(one: Any, other: Any) -> bool:
    if not (isinstance(one, int) and isinstance(other, int)):
        return False
    return abs(one - other) <= max(1, _MAX_MEMORY_STEP * max(one, other))


def refuse_another_machine(reference: str | None = None) -> None:
    """Hold this machine against the one whose results asv keeps under its name; the first one is remembered.

    Raises InstrumentError, which says what to type, when they differ. Outside of asv nothing is compared.
    """
    folder = provenance_folder()
    if folder is None:
        return
    path, now = folder / FILE, identity(reference)
    if not path.exists():
        write_whole(path, json.dumps(now, allow_nan=False) + "\n")
        return
    found = differences(_read(path), now)
    if found:
        name, free = machine_name(), _free_name(folder)
        raise InstrumentError(
            f"asv keeps results under the name {name!r} that are of another machine: {'; '.join(found)}. Two machines "
            f"never share a series, so nothing was measured. Give this one a name of its own:\n"
            f"    asv machine --machine {free} --yes\n"
            f"and name it in each command: --machine {free}\n"
            f"(the one before stands in {path})"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InstrumentError(f"{path} does not say which machine it is of ({error}); remove it: rm {path}") from error


def _free_name(folder: Path) -> str:
    """The name with the first number that no machine beside it has."""
    stem, number = folder.name, 2
    while (folder.parent / f"{stem}-{number}").exists():
        number += 1
    return f"{stem}-{number}"
