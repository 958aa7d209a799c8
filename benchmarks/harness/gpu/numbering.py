"""Which GPU CUDA means by a number: the driver counts all of them, CUDA those that it is shown, in an order of its own.

Knows CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER and NVML's handles. Refuses to guess: where the two orders may differ it
says what to set.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from benchmarks.harness.gpu.nvml import attempt, text


def find(nvml: Any, device: str) -> tuple[Any, str | None]:
    """NVML's handle for a device as CUDA numbers it; without one, why."""
    index = _index_of(device)
    physical = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    wanted = _visible(len(physical))[index : index + 1]
    if not wanted:
        return None, f"{device} is not visible: CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}"
    if not wanted[0].isdigit():
        return _find_uuid(nvml, physical, wanted[0])
    if _is_order_unknown({text(attempt(nvml, "nvmlDeviceGetName", handle)) for handle in physical}):
        return None, (
            f"cannot tell which GPU {device} is: CUDA numbers unlike GPUs by speed, NVML by bus; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return physical[int(wanted[0])], None


def _find_uuid(nvml: Any, physical: Sequence[Any], uuid: str) -> tuple[Any, str | None]:
    """By UUID; that of a GPU, not that of a slice, may be shortened."""
    if uuid.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(uuid), None
    found = [handle for handle in physical if str(text(attempt(nvml, "nvmlDeviceGetUUID", handle))).startswith(uuid)]
    return (found[0], None) if len(found) == 1 else (None, f"{len(found)} GPUs have a UUID that begins with {uuid}")


def _index_of(device: str) -> int:
    """`cuda:1` is 1; `cuda` is whichever device torch currently uses."""
    import torch

    number = device.partition(":")[2]
    return int(number) if number else torch.cuda.current_device()


def _visible(num_physical: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES leaves, as NVML indices or UUIDs; CUDA ignores the list from its first bad entry on."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return [str(number) for number in range(num_physical)]

    def valid() -> Iterator[str]:
        for entry in map(str.strip, value.split(",")):
            is_index = entry.isdecimal() and int(entry) < num_physical
            if not is_index and not entry.startswith(("GPU-", "MIG-")):
                return
            yield entry

    return list(valid())


def _is_order_unknown(names: Collection[str | None]) -> bool:
    return len(names) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
