"""How much memory a device has to give, and what a model's weights take.

Knows torch's allocator, the machine's memory, and control groups (v1 and v2): in a container or a batch job it is the
group's limit that kills, not the machine's. Refuses to know the arithmetic of a pool (`cache/sizing.py`).

References: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from nanoserve.cache.sizing import PoolPlan, plan_pool
from nanoserve.config import EngineConfig, ModelConfig, SchedulerConfig
from nanoserve.errors import ConfigError
from nanoserve.models.families import build_model

_PROC_CGROUP, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def free_bytes(device: torch.device, *, proc_cgroup: Path = _PROC_CGROUP, cgroups: Path = _CGROUPS) -> int:
    """Bytes that can still be allocated on a CPU or a CUDA device.

    On a GPU, what the driver has and what torch has from it and does not use, which may be in pieces. On a CPU, what
    is available without swapping, and not more than any control group around this process allows.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return min([int(psutil.virtual_memory().available), *_left_in_groups(proc_cgroup, cgroups)])


def plan_for(
    shape: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    config: EngineConfig,
    settings: SchedulerConfig,
    *,
    is_loaded: bool = True,
) -> PoolPlan | None:
    """How large a model's pool becomes where nobody says so in blocks; weights yet to be loaded come off what is free.

    None where that is said, and without a pool. Raises ConfigError for a pool that `config.cache` does not have.
    """
    if config.cache != "paged" and (settings.num_blocks or config.kv_memory != "auto"):
        raise ConfigError(f"num_blocks and kv_memory size the pool of cache 'paged'; cache {config.cache!r} has none")
    if config.cache != "paged" or settings.num_blocks:
        return None
    return plan_pool(
        shape,
        bytes_per_number=dtype.itemsize,
        block_size=settings.block_size,
        max_running=settings.max_running,
        max_step_tokens=settings.max_step_tokens,
        free_bytes=free_bytes(device),
        weights_bytes=0 if is_loaded else weights_bytes(shape, dtype),
        kv_memory=config.kv_memory,
        keeps_prefixes=config.prefix_policy(is_static=settings.is_static) is not None,
        device_kind=device.type,
    )


def weights_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What the weights of a model of this shape take once they are loaded."""
    with torch.device("meta"):
        model = build_model(config)
    return sum(weight.numel() for weight in model.parameters()) * dtype.itemsize


class _Files(NamedTuple):
    """Where one version of control groups says what it allows, and what is used."""

    limit: str
    usage: str
    reclaimable: str
    """The entry of memory.stat for file pages that the kernel drops before it refuses memory; children included."""


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def _left_in_groups(proc_cgroup: Path, cgroups: Path) -> Iterator[int]:
    """What each limited group around this process has left, the process's own and its parents up to the root.

    A container often sees its own group as the root, and a path that is the host's: folders that are not there count
    as unlimited, and the way up ends at the root.
    """
    for line in _read(proc_cgroup).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        files, root = (_V1, cgroups / "memory") if controllers else (_V2, cgroups)
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts) + 1):
            yield from _left_in(root.joinpath(*parts[:depth]), files)


def _left_in(group: Path, files: _Files) -> Iterator[int]:
    """One number, or none where the group has no limit."""
    limit = _number(_read(group / files.limit))
    if limit is not None:
        used = _number(_read(group / files.usage)) or 0
        yield max(0, limit - max(0, used - _reclaimable(group, files.reclaimable)))


def _reclaimable(group: Path, entry: str) -> int:
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == entry:
            return _number(value) or 0
    return 0


def _read(path: Path) -> str:
    """The text of a file, empty where there is none that can be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError):
        return ""


def _number(text: str) -> int | None:
    """A whole number of at least 0; None for anything else, `max` and nothing among it."""
    stripped = text.strip()
    return int(stripped) if stripped.isascii() and stripped.isdigit() and len(stripped) < 20 else None
