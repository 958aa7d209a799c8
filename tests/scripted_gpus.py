"""A driver whose GPUs say what a test has written down for them: no GPU, no NVML and no CUDA is needed."""

from benchmarks.harness.gpu.driver import NoGpu
from benchmarks.harness.gpu.readings import DeviceWork, GpuState, PeakMemory


class ScriptedGpu:
    """One GPU. `states` are told one after another, the last one for ever; `held` likewise, unless it can be asked.

    What runs on it runs on the CPU: `device` is what torch is given.
    """

    label = "Scripted, 80 bytes"

    def __init__(self, *states, device="cpu", held=(0,), free_bytes=80):
        self.device, self._free_bytes = device, free_bytes
        self._states = list(states) or [GpuState(name="Scripted", uuid="GPU-0")]
        self._held = held if callable(held) else list(held)
        self.log = []

    def state(self, also_ours=()):
        self.log.append(("state", tuple(also_ours)))
        return self._states.pop(0) if len(self._states) > 1 else self._states[0]

    def make_current(self):
        self.log.append("current")

    def wait(self):
        self.log.append("wait")

    def free_bytes(self):
        return self._free_bytes

    def held_bytes(self):
        self.log.append("held")
        if callable(self._held):
            return self._held()
        return self._held.pop(0) if len(self._held) > 1 else self._held[0]

    def reset_memory(self):
        self.log.append("reset")

    def peak_bytes(self):
        return 70

    def peak_memory(self, call):
        call()
        return PeakMemory(level_bytes=0, peak_bytes=0)

    def busy_s(self, call):
        call()
        return 1.0

    def count_work(self, call):
        call()
        return DeviceWork(allocated_bytes=0, peak_bytes=0, retained_bytes=0, num_kernel_launches=0)


class ScriptedDriver:
    """GPUs as CUDA would number them; each is a ScriptedGpu, or the state that one is in for ever."""

    def __init__(self, gpus=()):
        self._gpus = [each if isinstance(each, ScriptedGpu) else ScriptedGpu(each) for each in gpus]

    def gpus(self):
        return self._gpus

    def gpu(self, device):
        kind, _, number = device.partition(":")
        return self._gpus[int(number or 0)] if kind == "cuda" else NoGpu(device)
