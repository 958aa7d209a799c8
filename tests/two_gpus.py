"""A pytest plugin, `-p two_gpus`: in a session and its workers the driver has two GPUs, and torch runs on the CPU."""

from scripted_gpus import ScriptedDriver

from benchmarks.harness.gpu.driver import use_driver
from benchmarks.harness.gpu.readings import GpuState

_INSTALLED = use_driver(
    ScriptedDriver([GpuState(name="Scripted", uuid=f"GPU-{number}", memory_free_bytes=8) for number in range(2)])
)
_INSTALLED.__enter__()
