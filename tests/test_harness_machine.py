"""What makes a pass contaminated: scripted accounts, a system that shows little, and one real busy process."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.harness import machine
from benchmarks.harness.gpu.driver import NoGpu
from benchmarks.harness.gpu.readings import ForeignProcess, GpuState
from benchmarks.harness.machine import MachineState, machine_state, others_share, own_pids, steal_share, what_happened

BEFORE = MachineState(at_s=100.0, num_cpus=4, busy_s=50.0, own_s=7.0, steal_s=1.0)


def after(**changes):
    """Ten seconds later on four CPUs: 40 s of CPU time have passed; ours used 10."""
    return MachineState(**{"at_s": 110.0, "num_cpus": 4, "busy_s": 60.0, "own_s": 17.0, "steal_s": 1.0} | changes)


def test_shares_are_of_all_cpu_time():
    then = after(busy_s=50.0 + 10.0 + 6.0, steal_s=1.0 + 2.0)
    assert others_share(BEFORE, then) == pytest.approx(6 / 40)
    assert steal_share(BEFORE, then) == pytest.approx(2 / 40)
    assert others_share(BEFORE, after(busy_s=58.0)) == 0  # the accounts are rounded


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"busy_s": 60.0 + 3.9}, []),
        ({"busy_s": 60.0 + 4.1}, ["other processes used 10% of the CPU time, 0.4 of 4 CPUs (more than 10%)"]),
        ({"busy_s": 60.0 + 20}, ["other processes used 50% of the CPU time, 2.0 of 4 CPUs (more than 10%)"]),
        ({"steal_s": 1.7}, []),
        ({"steal_s": 2.2}, ["the hypervisor took 3.0% of the CPU time away (more than 2%)"]),
        ({"busy_s": None, "steal_s": None}, []),
        ({"own_s": None, "busy_s": 90.0}, []),
        ({"own_s": 6.0, "busy_s": 90.0}, []),  # a process of ours ended unseen: nothing can be said
        ({"busy_s": 58.0}, []),  # rounding in the accounts
        ({"at_s": 100.4, "busy_s": 69.0}, []),  # too short for accounts in ticks
    ],
)
def test_cpu_reasons(changes, said):
    assert what_happened(BEFORE, after(**changes)) == said


STEADY = GpuState(sm_clock_mhz=1980, memory_clock_mhz=3201, throttle_reasons=("application clocks setting",))
STRANGER = (ForeignProcess(pid=41, memory_bytes=2_500_000_000),)


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        ({}, {}, []),
        ({"throttle_reasons": ("idle",)}, {}, []),
        ({}, {"sm_clock_mhz": 1890}, []),
        ({}, {"sm_clock_mhz": 1755}, ["the GPU's SM clock fell from 1980 to 1755 MHz"]),
        ({}, {"memory_clock_mhz": 1593}, ["the GPU's memory clock fell from 3201 to 1593 MHz"]),
        ({"sm_clock_mhz": 345}, {}, []),
        ({}, {"sm_clock_mhz": 345, "throttle_reasons": ("idle",)}, []),
        ({"sm_clock_mhz": None, "throttle_reasons": None}, {"sm_clock_mhz": 100, "throttle_reasons": None}, []),
        (
            {"throttle_reasons": ("software power cap",)},
            {"throttle_reasons": ("hardware slowdown", "idle")},
            ["the GPU was held back: hardware slowdown, software power cap"],
        ),
        (
            {"foreign_processes": STRANGER},
            {"foreign_processes": STRANGER},
            ["another process, 41, is on the GPU with 2.50 GB of memory"],
        ),
        (
            {},
            {"foreign_processes": (ForeignProcess(pid=5, memory_bytes=None),)},
            ["another process, 5, is on the GPU with an unknown amount of memory"],
        ),
    ],
)
def test_gpu_reasons(first, last, said):
    def state(changes):
        fields = ("sm_clock_mhz", "memory_clock_mhz", "throttle_reasons")
        return GpuState(**{field: getattr(STEADY, field) for field in fields} | changes)

    assert what_happened(BEFORE, after(), state(first), state(last)) == said


def test_without_a_gpu_only_the_cpu_is_asked():
    nothing = NoGpu().state()
    assert what_happened(BEFORE, after(), nothing, nothing) == what_happened(BEFORE, after()) == []


class FakeSystem:
    """psutil on a system with these processes: {pid: (parent, user seconds)}; pid None of a process that ends."""

    Error = psutil.Error

    def __init__(self, monkeypatch, times, processes, **missing):
        self._times, self._processes = times, processes
        monkeypatch.setitem(sys.modules, "psutil", self)

    def cpu_times(self):
        if self._times is None:
            raise NotImplementedError
        return SimpleNamespace(**self._times)

    def Process(self, pid=None):  # noqa: N802 (psutil's name)
        return FakeProcess(self, os.getpid() if pid is None else pid)

    def _children(self, pid, *, recursive):
        direct = [child for child, (parent, _) in self._processes.items() if parent == pid]
        below = [member for child in direct for member in self._children(child, recursive=True)]
        return direct + below if recursive else direct


class FakeProcess:
    def __init__(self, system, pid):
        if pid not in system._processes:
            raise psutil.NoSuchProcess(pid)
        self._system, self.pid = system, pid

    def children(self, recursive):
        pids = self._system._children(self.pid, recursive=recursive)
        return [FakeProcess(self._system, pid) for pid in pids]

    def cpu_times(self):
        seconds = self._system._processes[self.pid][1]
        if seconds is None:
            raise psutil.NoSuchProcess(self.pid)
        return SimpleNamespace(user=seconds, system=0.5, children_user=0.25, children_system=0.25)

    def num_ctx_switches(self):
        if self._system._times is None:
            raise psutil.AccessDenied(self.pid)
        return SimpleNamespace(voluntary=1, involuntary=17)


LINUX = {"user": 10.0, "nice": 1.0, "system": 4.0, "idle": 900.0, "iowait": 9.0, "irq": 0.5, "softirq": 0.5}
ME = os.getpid()
FAMILY = {1: (0, 99.0), ME: (1, 2.0), -2: (ME, 3.0), -3: (-2, 4.0), -9: (1, 50.0), -4: (ME, None)}


def test_accounts_of_a_whole_system(monkeypatch):
    FakeSystem(monkeypatch, LINUX | {"steal": 3.0, "guest": 7.0}, FAMILY)
    state = machine_state()
    assert (state.busy_s, state.steal_s, state.num_preemptions) == (16.0, 3.0, 17)
    assert state.own_s == 3 + 4 + 5  # each with 1 s of system and ended children; the one that ends is left out
    assert own_pids() == {ME, -2, -3, -4}


def test_processes_named_as_ours_count_once_and_with_their_children(monkeypatch):
    FakeSystem(monkeypatch, LINUX, FAMILY)
    assert machine_state(also_ours=[-9, -2, -77]).own_s == 3 + 4 + 5 + 51  # -77 does not exist


def test_a_system_that_shows_nothing_is_no_error(monkeypatch):
    FakeSystem(monkeypatch, None, {})
    monkeypatch.setattr(machine, "os", SimpleNamespace(getpid=os.getpid, cpu_count=lambda: None))
    state = machine_state()
    assert (state.num_cpus, state.load_average, state.busy_s, state.steal_s) == (1, None, None, None)
    assert what_happened(state, state) == []


def test_a_system_without_steal_or_load_shows_the_rest(monkeypatch):
    def refuse():
        raise OSError

    FakeSystem(monkeypatch, {"user": 5.0, "nice": 0.0, "system": 1.0, "idle": 9.0}, FAMILY)
    monkeypatch.setattr(os, "getloadavg", refuse)
    state = machine_state()
    assert (state.busy_s, state.steal_s, state.load_average) == (6.0, None, None)


def test_the_real_system_can_be_read_and_stored():
    state = machine_state()
    assert json.loads(json.dumps(state.as_dict())) == state.as_dict()
    assert state.busy_s > state.own_s >= 0
    assert state.num_cpus >= 1


@pytest.mark.slow
def test_another_process_that_loads_the_machine_during_head_only_is_seen():
    """Strangers burn CPU time in the second interval only."""
    base, _ = _interval()
    with Strangers():
        head, reasons = _interval()
        assert any("other processes used" in reason for reason in reasons)
    assert head > min(base, machine.MAX_OTHERS_SHARE)  # a host may have been loaded before


def test_our_own_load_is_not_others():
    """The same strangers, named as ours, are no longer others."""
    with Strangers() as pids:
        before, before_named = machine_state(), machine_state(also_ours=pids)
        time.sleep(1.0)
        after_, after_named = machine_state(), machine_state(also_ours=pids)
    assert others_share(before, after_) > others_share(before_named, after_named)


def _interval():
    """Others' share and the reasons over long enough for one busy process to get a tenth of a small machine."""
    before = machine_state()
    time.sleep(1.0)
    then = machine_state()
    return others_share(before, then), what_happened(before, then)


class Strangers:
    """Busy processes on a fifth of the CPUs that are not our children: their parent has ended."""

    def __enter__(self):
        spin = "import time; end = time.time() + 30\nwhile time.time() < end: pass"
        start = (
            "import subprocess, sys\n"
            "nowhere = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
            f"for _ in range({1 + machine_state().num_cpus // 5}):\n"
            f"    print(subprocess.Popen([sys.executable, '-c', {spin!r}], **nowhere).pid)"
        )
        done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True)
        self.pids = [int(line) for line in done.stdout.split()]
        return self.pids

    def __exit__(self, *_):
        for pid in self.pids:
            psutil.Process(pid).kill()
