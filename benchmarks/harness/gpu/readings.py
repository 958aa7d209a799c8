"""What a GPU says about itself: plain values, ready for JSON.

Knows names and units. Refuses to know where a reading comes from (`nvidia.py`) and what follows from it (`machine.py`).
A reading that a driver does not give is None: no reading is ever a reason to fail, or made up.
"""

import dataclasses
from typing import Any

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
    memory_free_bytes: int | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """What one call did on a GPU: memory of torch's allocator, which rounds up, and launches of kernels.

    The launch of a captured graph is one, however many kernels are in it; `num_graph_launches` of all were such.
    """

    allocated_bytes: int
    peak_bytes: int
    retained_bytes: int
    num_kernel_launches: int
    num_graph_launches: int = 0
