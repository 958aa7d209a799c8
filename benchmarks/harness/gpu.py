"""What one GPU says about itself: name, clocks, heat, who else is on it, and how much memory a call takes.

Knows NVML, torch's memory counters, and how CUDA numbers devices. Refuses to judge what it reads (`machine` does).
A reading that a driver does not give is None: no reading is ever a reason to fail, or made up.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

_THROTTLE_REASONS = {
    0x001: "idle",
    0x002: "application clocks setting",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clocks setting",
}  # NVML API reference, nvmlClocksEventReasons

HARMLESS_REASONS = frozenset({"idle", "application clocks setting"})
"""Reasons for a low clock that somebody chose, or that end when work arrives."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForeignProcess:
    """A process that computes on the GPU and is not ours; its memory is None where the driver does not tell."""

    pid: int
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One moment of a GPU. Clocks in MHz, temperature in Celsius. None, or no process, is what could not be read.

    On a slice of a GPU (MIG) the memory is the slice's; clocks, power and heat are the whole GPU's.
    """

    name: str | None = None
    uuid: str | None = None
    driver_version: str | None = None
    is_mig: bool | None = None
    memory_total_bytes: int | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    foreign_processes: tuple[ForeignProcess, ...] = ()
    note: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        state = dataclasses.asdict(self)
        reasons = self.throttle_reasons
        return state | {
            "throttle_reasons": None if reasons is None else list(reasons),
            "foreign_processes": list(state["foreign_processes"]),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Device memory in tensors: the level before a call, and the highest during it."""

    level_bytes: int
    peak_bytes: int

    @property
    def added_bytes(self) -> int:
        """What the call itself needed at its worst moment."""
        return self.peak_bytes - self.level_bytes


class Gpu(Protocol):
    """One device to look at."""

    def state(self, also_ours: Collection[int] = ()) -> GpuState:
        """Read everything now. Processes in `also_ours` are no strangers: the other arm of a comparison, for one."""

    def peak_memory(self, call: Callable[[], object]) -> PeakMemory | None:
        """Run `call` once; its peak above the level it found, never an earlier high-water mark. None: not countable."""


class NoGpu:
    """What stands in where nothing runs on a GPU."""

    def state(self, also_ours: Collection[int] = ()) -> GpuState:
        return GpuState()

    def peak_memory(self, call: Callable[[], object]) -> PeakMemory | None:
        call()
        return None


class NvidiaGpu:
    """A CUDA device (`cuda`, `cuda:N`) through NVML; without NVML only its memory peaks can be read."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._nvml: Any = None
        self._handle: Any = None
        self._note: str | None = None
        try:
            import pynvml
        except ImportError:
            self._note = "nvidia-ml-py is not installed: no clocks, no throttle reasons, no foreign processes"
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle, self._note = _find(pynvml, device)
        except pynvml.NVMLError as error:
            self._note = f"NVML cannot show {device}: {error}"

    def state(self, also_ours: Collection[int] = ()) -> GpuState:
        if self._handle is None:
            return GpuState(note=self._note)
        nvml, part = self._nvml, self._handle
        whole = self._read("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", part) or part
        memory, power_mw = self._read("nvmlDeviceGetMemoryInfo", part), self._read("nvmlDeviceGetPowerUsage", whole)
        return GpuState(
            name=_text(self._read("nvmlDeviceGetName", whole)),
            uuid=_text(self._read("nvmlDeviceGetUUID", part)),
            driver_version=_text(self._read("nvmlSystemGetDriverVersion")),
            is_mig=self._is_mig(whole),
            memory_total_bytes=None if memory is None else memory.total,
            sm_clock_mhz=self._read("nvmlDeviceGetClockInfo", whole, nvml.NVML_CLOCK_SM),
            sm_clock_max_mhz=self._read("nvmlDeviceGetMaxClockInfo", whole, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._read("nvmlDeviceGetClockInfo", whole, nvml.NVML_CLOCK_MEM),
            memory_clock_max_mhz=self._read("nvmlDeviceGetMaxClockInfo", whole, nvml.NVML_CLOCK_MEM),
            throttle_reasons=self._throttle_reasons(whole),
            temperature_c=self._read("nvmlDeviceGetTemperature", whole, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power_mw is None else power_mw / 1000,
            foreign_processes=self._foreign_processes(part, also_ours),
            note=self._note,
        )

    def peak_memory(self, call: Callable[[], object]) -> PeakMemory | None:
        import torch

        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        level_bytes = torch.cuda.memory_allocated(self._device)
        call()
        torch.cuda.synchronize(self._device)
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        return PeakMemory(level_bytes=level_bytes, peak_bytes=peak_bytes)

    def _read(self, name: str, *arguments: Any) -> Any:
        return _read(self._nvml, name, *arguments)

    def _is_mig(self, whole: Any) -> bool | None:
        mode = self._read("nvmlDeviceGetMigMode", whole)
        return None if mode is None else bool(mode[0])

    def _throttle_reasons(self, whole: Any) -> tuple[str, ...] | None:
        mask = self._read("nvmlDeviceGetCurrentClocksEventReasons", whole)
        if mask is None:  # its name before NVML 12
            mask = self._read("nvmlDeviceGetCurrentClocksThrottleReasons", whole)
        return None if mask is None else throttle_names(mask)

    def _foreign_processes(self, part: Any, also_ours: Collection[int]) -> tuple[ForeignProcess, ...]:
        running = self._read("nvmlDeviceGetComputeRunningProcesses", part) or []
        strangers = _strangers({process.pid for process in running}, also_ours)
        return tuple(
            ForeignProcess(pid=process.pid, memory_bytes=process.usedGpuMemory)
            for process in running
            if process.pid in strangers
        )


def gpu_of(device: str) -> Gpu:
    """The GPU that torch calls `device`; NoGpu for every device that is not CUDA."""
    return NvidiaGpu(device) if device.partition(":")[0] == "cuda" else NoGpu()


def cuda_name(device: str) -> str:
    """What torch calls a CUDA device, with its memory: a slice of a GPU is not the whole."""
    import torch

    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {found.total_memory} bytes"


def throttle_names(mask: int) -> tuple[str, ...]:
    """The set bits of NVML's mask in words; a bit that has no name here is shown as it is."""
    bits = (1 << position for position in range(mask.bit_length()) if mask >> position & 1)
    return tuple(_THROTTLE_REASONS.get(bit, f"unknown reason {bit:#x}") for bit in bits)


def _strangers(pids: Collection[int], also_ours: Collection[int]) -> set[int]:
    """The pids that are neither ours nor our children's.

    In a container NVML may show the host's pids. When no pid in the list is ours and some do not exist here, the
    first of those is taken for this process: better one stranger missed than oneself taken for a stranger for ever.
    """
    import psutil

    from benchmarks.harness.machine import own_pids

    ours = own_pids() | set(also_ours)
    strangers = set(pids) - ours
    unseen = sorted(pid for pid in strangers if not psutil.pid_exists(pid))
    return strangers - set(unseen[:1]) if strangers == set(pids) else strangers


def _read(nvml: Any, name: str, *arguments: Any) -> Any:
    """One reading; None where this driver, this GPU or this version of the library does not have it."""
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        return getattr(nvml, name)(*arguments)
    return None


def _find(nvml: Any, device: str) -> tuple[Any, str | None]:
    """NVML's handle for a device as CUDA numbers it; without one, why."""
    index = _index_of(device)
    physical = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    wanted = _visible(len(physical))[index : index + 1]
    if not wanted:
        return None, f"{device} is not visible: CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}"
    if not wanted[0].isdigit():
        return _find_uuid(nvml, physical, wanted[0])
    if _is_order_unknown({_text(_read(nvml, "nvmlDeviceGetName", handle)) for handle in physical}):
        return None, (
            f"cannot tell which GPU {device} is: CUDA numbers unlike GPUs by speed, NVML by bus; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return physical[int(wanted[0])], None


def _find_uuid(nvml: Any, physical: Sequence[Any], uuid: str) -> tuple[Any, str | None]:
    """By UUID; that of a GPU, not that of a slice, may be shortened."""
    if uuid.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(uuid), None
    found = [handle for handle in physical if str(_text(_read(nvml, "nvmlDeviceGetUUID", handle))).startswith(uuid)]
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


def _text(value: Any) -> str | None:
    """Older versions of the library answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value
