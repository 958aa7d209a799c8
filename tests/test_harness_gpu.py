"""GPU readings against a fake NVML: no GPU is needed, and every reading can be missing."""

import json
import os
import sys
from types import SimpleNamespace

import pytest

from benchmarks.harness.gpu.driver import NoGpu
from benchmarks.harness.gpu.nvidia import NvidiaDriver, throttle_names

READINGS = {
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlSystemGetDriverVersion": "570.1",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=150_000_000_000, free=149_000_000_000),
    "nvmlDeviceGetPowerUsage": 412_500,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlDeviceGetCurrentClocksEventReasons": 0x25,
    "nvmlDeviceGetComputeRunningProcesses": [],
}
CLOCKS = {("now", "sm"): 1755, ("max", "sm"): 1980, ("now", "mem"): 3201, ("max", "mem"): 3202}
FIELD_OF = {
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetUUID": "uuid",
    "nvmlSystemGetDriverVersion": "driver_version",
    "nvmlDeviceGetMemoryInfo": ("memory_total_bytes", "memory_free_bytes"),
    "nvmlDeviceGetClockInfo": ("sm_clock_mhz", "memory_clock_mhz"),
    "nvmlDeviceGetMaxClockInfo": ("sm_clock_max_mhz", "memory_clock_max_mhz"),
    "nvmlDeviceGetPowerUsage": "power_w",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit_w",
    "nvmlDeviceGetTemperature": "temperature_c",
    "nvmlDeviceGetMigMode": "is_mig",
}


class FakeNvml:
    """A driver with `uuids` for GPUs. A handle is the UUID; a slice's handle begins with MIG-."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = "sm", "mem", 0

    class NVMLError(Exception):
        pass

    def __init__(self, uuids=("GPU-aa",), **readings):
        self._uuids, self._readings = list(uuids), READINGS | readings
        self.broken = set()

    def __getattr__(self, name):
        if name not in self._readings:
            raise AttributeError(name)
        return lambda *arguments: self._answer(name, self._readings[name])

    def _answer(self, name, value):
        if name in self.broken:
            raise self.NVMLError(f"{name} is not supported")
        return value

    def nvmlInit(self):  # noqa: N802 (NVML's name)
        self._answer("nvmlInit", None)

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self._uuids)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return self._uuids[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return uuid

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return self._answer("nvmlDeviceGetUUID", handle)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):  # noqa: N802
        if not handle.startswith("MIG-"):
            raise self.NVMLError("not a slice")
        return "GPU-aa"

    def nvmlDeviceGetClockInfo(self, handle, kind):  # noqa: N802
        return self._clock("nvmlDeviceGetClockInfo", handle, ("now", kind))

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):  # noqa: N802
        return self._clock("nvmlDeviceGetMaxClockInfo", handle, ("max", kind))

    def _clock(self, name, handle, key):
        if handle.startswith("MIG-"):
            raise self.NVMLError("a slice has no clock")
        return self._answer(name, CLOCKS[key])


class FakeCuda:
    """torch's memory counters: the high-water mark stays until it is reset."""

    def __init__(self):
        self.level = self.peak = 0
        self.calls = []

    def synchronize(self, device):
        self.calls.append("synchronize")

    def reset_peak_memory_stats(self, device):
        self.peak = self.level

    def memory_allocated(self, device):
        return self.level

    def max_memory_allocated(self, device):
        return self.peak

    def current_device(self):
        return 1

    def set_device(self, device):
        self.calls.append(f"set {device}")

    def use(self, num_bytes, keep=0):
        self.calls.append("use")
        self.peak = max(self.peak, self.level + num_bytes)
        self.level += keep


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake))
    return fake


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, cuda):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


@pytest.fixture
def nvml(monkeypatch):
    def install(*arguments, **readings):
        fake = FakeNvml(*arguments, **readings)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


def test_every_reading(nvml):
    nvml()
    state = NvidiaDriver().gpu("cuda:0").state()
    assert json.loads(json.dumps(state.as_dict())) == state.as_dict()
    assert state.as_dict() == {
        "name": "NVIDIA H200",
        "uuid": "GPU-aa",
        "driver_version": "570.1",
        "is_mig": False,
        "memory_total_bytes": 150_000_000_000,
        "memory_free_bytes": 149_000_000_000,
        "sm_clock_mhz": 1755,
        "sm_clock_max_mhz": 1980,
        "memory_clock_mhz": 3201,
        "memory_clock_max_mhz": 3202,
        "throttle_reasons": ["idle", "software power cap", "software thermal slowdown"],
        "temperature_c": 61,
        "power_w": 412.5,
        "power_limit_w": 700.0,
        "foreign_processes": [],
        "note": None,
    }


@pytest.mark.parametrize("reading", FIELD_OF)
def test_a_reading_that_is_not_supported_is_none_and_the_others_stay(nvml, reading):
    fake = nvml()
    whole = NvidiaDriver().gpu("cuda:0").state().as_dict()
    fake.broken = {reading}
    fields = FIELD_OF[reading]
    missing = dict.fromkeys([fields] if isinstance(fields, str) else fields)
    assert NvidiaDriver().gpu("cuda:0").state().as_dict() == whole | missing


def test_throttle_reasons_under_their_older_name_and_none_when_there_is_neither(nvml):
    fake = nvml(nvmlDeviceGetCurrentClocksThrottleReasons=0x8)
    fake.broken = {"nvmlDeviceGetCurrentClocksEventReasons"}
    assert NvidiaDriver().gpu("cuda:0").state().throttle_reasons == ("hardware slowdown",)
    fake.broken |= {"nvmlDeviceGetCurrentClocksThrottleReasons"}
    assert NvidiaDriver().gpu("cuda:0").state().throttle_reasons is None


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (0, ()),
        (0x3, ("idle", "application clocks setting")),
        (0x48, ("hardware slowdown", "hardware thermal slowdown")),
        (0x1000, ("unknown reason 0x1000",)),
    ],
)
def test_throttle_names(mask, names):
    assert throttle_names(mask) == names


def test_the_names_are_nvmls_own():
    pynvml = pytest.importorskip("pynvml")
    bits = {name: value for name, value in vars(pynvml).items() if name.startswith("nvmlClocksEventReason")}
    for name, value in bits.items():
        if name not in ("nvmlClocksEventReasonNone", "nvmlClocksEventReasonAll"):
            assert not throttle_names(value)[0].startswith("unknown"), name


def test_bytes_of_older_libraries_become_text(nvml):
    nvml(nvmlDeviceGetName=b"Tesla T4")
    assert NvidiaDriver().gpu("cuda:0").state().name == "Tesla T4"


def test_without_the_library_or_the_driver_nothing_is_read_and_a_note_says_why(nvml, monkeypatch):
    fake = nvml()
    fake.broken = {"nvmlInit"}
    without_driver = NvidiaDriver().gpu("cuda:0").state()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    without_library = NvidiaDriver().gpu("cuda:0").state()
    assert "nvmlInit is not supported" in without_driver.note
    assert "nvidia-ml-py" in without_library.note
    for state in (without_driver, without_library):
        assert state.name is state.sm_clock_mhz is state.throttle_reasons is None
        assert state.foreign_processes == ()


THREE = ("GPU-aa1", "GPU-aa2", "GPU-b")


@pytest.mark.parametrize(
    ("visible", "device", "found"),
    [
        (None, "cuda:2", "GPU-b"),
        (None, "cuda", "GPU-aa2"),  # torch's current device is number 1
        ("2,0", "cuda:0", "GPU-b"),
        ("2, 0", "cuda:1", "GPU-aa1"),
        ("GPU-b,GPU-aa1", "cuda:1", "GPU-aa1"),
        ("GPU-b", "cuda:0", "GPU-b"),
        ("GPU-aa", "cuda:0", "2 GPUs have a UUID that begins with GPU-aa"),
        ("MIG-7", "cuda:0", "MIG-7"),
        ("0,-1,2", "cuda:1", "cuda:1 is not visible"),  # CUDA stops at the first bad entry
        ("0,7,2", "cuda:1", "cuda:1 is not visible"),
        ("", "cuda:0", "CUDA_VISIBLE_DEVICES=''"),
        (None, "cuda:3", "cuda:3 is not visible"),
    ],
)
def test_the_device_is_the_one_that_cuda_means(nvml, monkeypatch, visible, device, found):
    nvml(THREE)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    state = NvidiaDriver().gpu(device).state()
    assert state.uuid == found or (state.uuid is None and found in state.note)


def test_unlike_gpus_are_not_guessed_by_number(nvml, monkeypatch):
    fake = nvml(THREE)
    fake.nvmlDeviceGetName = lambda handle: handle
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in NvidiaDriver().gpu("cuda:0").state().note
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert NvidiaDriver().gpu("cuda:1").state().name == "GPU-aa2"


def test_a_slice_has_its_own_uuid_and_the_whole_gpus_clocks(nvml, monkeypatch):
    nvml(nvmlDeviceGetMigMode=[1, 1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")
    state = NvidiaDriver().gpu("cuda:0").state()
    assert (state.uuid, state.is_mig, state.sm_clock_mhz) == ("MIG-7", True, 1755)


class TestForeignProcesses:
    OURS, CHILD, OTHER, HOST, HOST_2 = os.getpid(), 2, 3, 900_001, 900_002

    @pytest.fixture(autouse=True)
    def _processes(self, monkeypatch):
        monkeypatch.setattr("benchmarks.harness.machine.own_pids", lambda: {self.OURS, self.CHILD})
        monkeypatch.setattr("psutil.pid_exists", lambda pid: pid < 900_000 or pid == self.OURS)

    def _strangers(self, nvml, *pids, also_ours=()):
        running = [SimpleNamespace(pid=pid, usedGpuMemory=pid * 10) for pid in pids]
        nvml(nvmlDeviceGetComputeRunningProcesses=running)
        found = NvidiaDriver().gpu("cuda:0").state(also_ours=also_ours).foreign_processes
        assert all(process.memory_bytes == process.pid * 10 for process in found)
        return [process.pid for process in found]

    def test_neither_we_nor_our_children_are_foreign(self, nvml):
        assert self._strangers(nvml, self.OURS, self.CHILD, self.OTHER) == [self.OTHER]

    def test_the_other_arm_of_a_comparison_is_not_foreign(self, nvml):
        assert self._strangers(nvml, self.OURS, self.OTHER, also_ours=[self.OTHER]) == []

    def test_in_a_container_one_unseen_process_is_taken_for_us(self, nvml):
        assert self._strangers(nvml, self.HOST) == []
        assert self._strangers(nvml, self.HOST, self.HOST_2) == [self.HOST_2]

    def test_an_unseen_process_beside_ours_is_foreign(self, nvml):
        assert self._strangers(nvml, self.OURS, self.HOST) == [self.HOST]

    def test_unknown_memory_stays_unknown(self, nvml):
        nvml(nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=self.OTHER, usedGpuMemory=None)])
        assert NvidiaDriver().gpu("cuda:0").state().as_dict()["foreign_processes"] == [
            {"pid": self.OTHER, "memory_bytes": None}
        ]


def test_a_peak_is_what_the_call_added_and_never_an_earlier_high_water_mark(nvml, cuda):
    nvml()
    gpu = NvidiaDriver().gpu("cuda:0")
    cuda.use(1000, keep=300)  # an earlier benchmark: mark 1000, level 300
    peak = gpu.peak_memory(lambda: cuda.use(50, keep=20))
    assert (peak.level_bytes, peak.peak_bytes, peak.added_bytes) == (300, 350, 50)
    assert cuda.calls[1:] == ["synchronize", "use", "synchronize"]
    assert gpu.peak_memory(lambda: cuda.use(70)).added_bytes == 70


def test_the_current_device_is_the_one_that_a_session_has_chosen(nvml, cuda):
    NvidiaDriver().gpu("cuda:2").make_current()
    NvidiaDriver().gpu("cpu").make_current()
    assert cuda.calls == ["set cuda:2"]


def test_the_high_water_mark_is_the_highest_level_since_it_was_forgotten(nvml, cuda):
    nvml()
    gpu = NvidiaDriver().gpu("cuda:0")
    cuda.use(1000, keep=300)
    assert gpu.peak_bytes() == 1000
    gpu.peak_memory(lambda: cuda.use(50, keep=20))
    assert gpu.peak_bytes() == 350


@pytest.mark.parametrize("device", ["cpu", "mps", "cpu:0"])
def test_no_gpu_knows_nothing_and_still_runs_the_call(device):
    gpu, calls = NvidiaDriver().gpu(device), []
    assert isinstance(gpu, NoGpu)
    assert {value for value in gpu.state().as_dict().values() if value != []} == {None}
    assert gpu.peak_memory(lambda: calls.append(1)) is None
    assert calls == [1]
