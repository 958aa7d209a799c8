"""How the sessions of pytest take a GPU: alone, beside other workers, in turns with another session."""

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted_gpus import ScriptedDriver, ScriptedGpu

from benchmarks.harness import fixtures, publishing
from benchmarks.harness.claim import claim_gpu
from benchmarks.harness.errors import DeviceError
from benchmarks.harness.fixtures import CLAIM, LED
from benchmarks.harness.gate.session import Serving
from benchmarks.harness.gate.turns import Turns
from benchmarks.harness.gpu.choice import Claim
from benchmarks.harness.gpu.driver import NoGpu, use_driver
from benchmarks.harness.gpu.lock import GpuLocks
from benchmarks.harness.gpu.readings import GpuState
from benchmarks.harness.sources.nanoserve import UnusableSubjectError

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch, tmp_path):
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gpus = [ScriptedGpu(GpuState(uuid=f"GPU-{number}"), device=f"cuda:{number}") for number in range(2)]
    with use_driver(ScriptedDriver(gpus)):
        yield


def session(device="auto"):
    options = {"--device": device, "--gpu-wait-s": 0.0}
    return SimpleNamespace(
        stash=pytest.Stash(),
        getoption=lambda name, default=None: options.get(name, default),
        pluginmanager=SimpleNamespace(getplugin=lambda name: None),
    )


def claim(device="auto", *, is_timed=True, leader=None):
    return claim_gpu(session(device), timed=is_timed, leader=leader or os.getpid(), relatives=tuple)


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_session_alone_locks_the_gpu_that_it_takes(is_timed):
    taken = claim(is_timed=is_timed)
    assert (taken.gpu.device, GpuLocks().holder_of("GPU-0").pid) == ("cuda:0", os.getpid())
    taken.release()
    assert GpuLocks().holder_of("GPU-0") is None


def test_a_session_takes_what_another_leaves_and_waits_for_nothing_longer_than_it_is_told():
    others = [GpuLocks().take("GPU-0", "another")]
    assert claim("cuda").key == "GPU-1"
    with pytest.raises(DeviceError, match=f"cuda:0 is locked .* process {os.getpid()}, after 0 s.*--gpu-wait-s"):
        claim("cuda:0")
    others.append(GpuLocks().take("GPU-1", "another"))
    with pytest.raises(DeviceError, match=r"cuda:0 is locked .* cuda:1 is locked"):
        claim()


def test_on_a_cpu_nothing_is_asked_and_nothing_is_locked(tmp_path):
    with use_driver(None):
        assert isinstance(claim("cpu"), NoGpu)
    with use_driver(ScriptedDriver()):
        assert claim("auto").device == "cpu"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("asked", "error"), [("cuda:2", DeviceError), ("auto:1", UnusableSubjectError)])
def test_a_device_that_is_not_there_is_refused(asked, error):
    with pytest.raises(error, match=asked):
        claim(asked)


def test_workers_that_measure_have_a_gpu_each_and_untimed_ones_share(monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    untimed = claim(is_timed=False)
    assert (untimed.gpu.device, GpuLocks().holder_of("GPU-1")) == ("cuda:1", None)
    assert claim().key == "GPU-1"
    other = GpuLocks().take("GPU-1", "another")
    with pytest.raises(DeviceError, match="cuda:1 is locked"):
        claim()
    assert isinstance(claim(is_timed=False), Claim)
    other.release()


def test_sessions_that_take_turns_share_a_gpu_and_others_get_another():
    pair = [claim(leader=os.getppid()) for _ in range(2)]
    assert [each.key for each in pair] == ["GPU-0", "GPU-0"]
    assert claim().key == "GPU-1"


def test_a_worker_of_the_gate_names_the_process_that_leads_it():
    config = session()
    Serving(Turns(None)).pytest_configure(config)
    assert config.stash[LED].leader == os.getppid()


def test_workers_beside_this_one_are_no_strangers(monkeypatch):
    assert fixtures._relatives(session())() == ()
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    assert {os.getppid(), os.getpid()} <= fixtures._relatives(session())()


def test_a_result_says_which_gpu_it_is_of(monkeypatch):
    config = session()
    assert publishing._told_of(config) == {}
    config.stash[CLAIM] = claim()
    assert publishing._told_of(config) == {"claim": {"gpu": "GPU-0", "worker": None, "num_workers": 1}}
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "4")
    assert publishing._told_of(config)["claim"] == {"gpu": "GPU-0", "worker": 1, "num_workers": 4}


@pytest.mark.parametrize(("device", "num_gpus", "runs"), [("auto", 2, True), ("auto", 0, False), ("cpu", 2, False)])
def test_a_test_marked_gpu_runs_where_the_driver_has_one(pytestconfig, device, num_gpus, runs):
    policy = pytestconfig.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    item = SimpleNamespace(get_closest_marker=lambda name: name == "gpu", config=session(device))
    with use_driver(ScriptedDriver([ScriptedGpu()] * num_gpus)):
        skipped = contextlib.nullcontext() if runs else pytest.raises(pytest.skip.Exception, match="needs a CUDA")
        with skipped:
            policy.pytest_runtest_setup(item)
