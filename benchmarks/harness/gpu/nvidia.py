"""NVIDIA's GPUs, through NVML and through torch: the only file that asks either of them anything.

Knows both interfaces. Refuses to judge what it reads (`machine.py` does), and to know how CUDA numbers devices
(`numbering.py`). A reading that a driver does not give is None: no reading is ever a reason to fail, or made up.
"""

import functools
import gc
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from benchmarks.harness.gpu.driver import Gpu, NoGpu
from benchmarks.harness.gpu.numbering import find
from benchmarks.harness.gpu.nvml import attempt, text
from benchmarks.harness.gpu.readings import DeviceWork, ForeignProcess, GpuState, PeakMemory

KERNEL_LAUNCH = re.compile(r"(cuda|cu)Launch(Cooperative)?Kernel(Ex|ExC)?(_v\d+)?|(cuda|cu)GraphLaunch(_v\d+)?")
"""Names of the driver's and the runtime's calls that put work on a GPU; a captured graph is one launch."""

GRAPH_LAUNCH = re.compile(r"(cuda|cu)GraphLaunch(_v\d+)?")
"""Those of them that launch a captured graph."""

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


class NvidiaDriver:
    """See `driver.Driver`."""

    def gpus(self) -> Sequence["NvidiaGpu"]:
        if not cuda_is_usable():
            return []
        import torch

        return [NvidiaGpu(f"cuda:{index}") for index in range(torch.cuda.device_count())]

    def gpu(self, device: str) -> Gpu:
        return NvidiaGpu(device) if device.partition(":")[0] == "cuda" else NoGpu(device)


def cuda_is_usable() -> bool:
    """Whether torch sees a CUDA device; loads torch."""
    import torch

    return torch.cuda.is_available()


class NvidiaGpu:
    """A CUDA device (`cuda`, `cuda:N`). Without NVML it tells no clocks, no heat and no strangers, and why."""

    def __init__(self, device: str) -> None:
        self.device = device

    @functools.cached_property
    def _shown(self) -> tuple[Any, Any, str | None]:
        """NVML, its handle of this device, and a note; no handle where the note says why. Looked up at first use."""
        try:
            import pynvml
        except ImportError:
            return None, None, "nvidia-ml-py is not installed: no clocks, no throttle reasons, no foreign processes"
        try:
            pynvml.nvmlInit()
            return (pynvml, *find(pynvml, self.device))
        except pynvml.NVMLError as error:
            return pynvml, None, f"NVML cannot show {self.device}: {error}"

    @property
    def label(self) -> str:
        """With its memory: a slice of a GPU is not the whole."""
        import torch

        found = torch.cuda.get_device_properties(self.device)
        return f"{found.name}, {found.total_memory} bytes"

    def state(self, also_ours: Collection[int] = ()) -> GpuState:
        nvml, part, note = self._shown
        if part is None:
            return GpuState(note=note)
        whole = self._read("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", part) or part
        memory, power_mw = self._read("nvmlDeviceGetMemoryInfo", part), self._read("nvmlDeviceGetPowerUsage", whole)
        return GpuState(
            name=text(self._read("nvmlDeviceGetName", whole)),
            uuid=text(self._read("nvmlDeviceGetUUID", part)),
            driver_version=text(self._read("nvmlSystemGetDriverVersion")),
            is_mig=self._is_mig(whole),
            memory_total_bytes=None if memory is None else memory.total,
            memory_free_bytes=None if memory is None else memory.free,
            sm_clock_mhz=self._read("nvmlDeviceGetClockInfo", whole, nvml.NVML_CLOCK_SM),
            sm_clock_max_mhz=self._read("nvmlDeviceGetMaxClockInfo", whole, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._read("nvmlDeviceGetClockInfo", whole, nvml.NVML_CLOCK_MEM),
            memory_clock_max_mhz=self._read("nvmlDeviceGetMaxClockInfo", whole, nvml.NVML_CLOCK_MEM),
            throttle_reasons=self._throttle_reasons(whole),
            temperature_c=self._read("nvmlDeviceGetTemperature", whole, nvml.NVML_TEMPERATURE_GPU),
            power_w=_watts(power_mw),
            power_limit_w=_watts(self._read("nvmlDeviceGetEnforcedPowerLimit", whole)),
            foreign_processes=self._foreign_processes(part, also_ours),
            note=note,
        )

    def make_current(self) -> None:
        import torch

        torch.cuda.set_device(self.device)

    def wait(self) -> None:
        import torch

        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int | None:
        import torch

        return int(torch.cuda.mem_get_info(self.device)[0])

    def held_bytes(self) -> int | None:
        import torch

        _empty_library_caches(self.device)
        return int(torch.cuda.memory_allocated(self.device))

    def reset_memory(self) -> None:
        import torch

        _empty_library_caches(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        import torch

        return int(torch.cuda.max_memory_allocated(self.device))

    def peak_memory(self, call: Callable[[], object]) -> PeakMemory | None:
        import torch

        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        level_bytes = torch.cuda.memory_allocated(self.device)
        call()
        torch.cuda.synchronize(self.device)
        peak_bytes = torch.cuda.max_memory_allocated(self.device)
        return PeakMemory(level_bytes=level_bytes, peak_bytes=peak_bytes)

    def busy_s(self, call: Callable[[], object]) -> float:
        import torch

        cuda: Any = torch.cuda  # its events are untyped
        with cuda.device(self.device):
            start, end = (cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

    def count_work(self, call: Callable[[], object]) -> DeviceWork:
        import torch
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            self.wait()
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_stats(self.device)
            result = call()
            self.wait()
            after = torch.cuda.memory_stats(self.device)
            del result
        level = before["allocated_bytes.all.current"]
        names = [event.name for event in profiler.events()]
        return DeviceWork(
            allocated_bytes=after["allocated_bytes.all.allocated"] - before["allocated_bytes.all.allocated"],
            peak_bytes=after["allocated_bytes.all.peak"] - level,
            retained_bytes=after["allocated_bytes.all.current"] - level,
            num_kernel_launches=sum(map(bool, map(KERNEL_LAUNCH.fullmatch, names))),
            num_graph_launches=sum(map(bool, map(GRAPH_LAUNCH.fullmatch, names))),
        )

    def _read(self, name: str, *arguments: Any) -> Any:
        return attempt(self._shown[0], name, *arguments)

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


def _empty_library_caches(device: str) -> None:
    """Of Python, what nobody refers to any more; of cuBLAS, the workspaces that it made at first use."""
    import torch

    gc.collect()
    torch.cuda.synchronize(device)
    clear: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    clear()


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
