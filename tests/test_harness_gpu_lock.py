"""Locks on GPUs, with real files and real processes: whoever is killed holds nothing."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from child_process import inherited
from scripted_gpus import ScriptedGpu

from benchmarks.harness.errors import DeviceError
from benchmarks.harness.gpu import lock as lock_module
from benchmarks.harness.gpu.choice import Chooser
from benchmarks.harness.gpu.lock import GpuLocks, Holder, family_of_leader
from benchmarks.harness.gpu.readings import GpuState

ROOT = Path(__file__).parents[1]
HOLD = """
import sys
from pathlib import Path
from benchmarks.harness.gpu.lock import GpuLocks
held = GpuLocks(Path(sys.argv[1])).take(sys.argv[2], "theirs")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds GPU-0 until its input ends, or until it is killed."""
    environment = inherited() | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLD, str(tmp_path / "locks"), "GPU-0"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


@pytest.fixture
def locks(tmp_path):
    return GpuLocks(tmp_path / "locks")


def test_a_lock_is_one_processes_until_it_is_released(locks):
    assert locks.holder_of("GPU-0") is None
    held = locks.take("GPU-0", "ours")
    assert locks.holder_of("GPU-0") == Holder(os.getpid(), "ours")
    with pytest.raises(DeviceError, match=f"taken meanwhile, by process {os.getpid()}"):
        locks.take("GPU-0", "ours")
    assert locks.holder_of("GPU-1") is None
    held.release()
    assert locks.holder_of("GPU-0") is None


def test_another_process_holds_us_off_and_its_end_by_force_does_not(locks, holder):
    assert locks.holder_of("GPU-0") == Holder(holder.pid, "theirs")
    gpus = [ScriptedGpu(GpuState(uuid=f"GPU-{number}"), device=f"cuda:{number}") for number in range(2)]
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        holder.kill()
        holder.wait()

    chooser = Chooser(locks=locks, family="ours", say=lambda text: None, sleep=sleep)
    assert chooser.claim(gpus).gpu.device == "cuda:1"
    assert waited == []
    assert chooser.claim(gpus[:1]).gpu.device == "cuda:0"
    assert len(waited) == 1


def test_nobody_else_looks_while_one_chooses(locks):
    with locks.choosing(1), pytest.raises(DeviceError, match="has been choosing a GPU"), locks.choosing(0):
        pass
    with locks.choosing(0):
        pass


def test_to_look_makes_no_file(locks, tmp_path):
    assert locks.holder_of("GPU-0") is None
    assert list(tmp_path.iterdir()) == []


def test_everybody_may_lock_what_one_user_has_made(locks, tmp_path):
    locks.take("GPU-0", "ours").release()
    assert stat.S_IMODE((tmp_path / "locks").stat().st_mode) == 0o777
    assert stat.S_IMODE((tmp_path / "locks" / "GPU-0.lock").stat().st_mode) == 0o666


def test_what_somebody_else_wrote_beside_a_lock_is_not_believed(locks, tmp_path):
    held = locks.take("GPU-0", "ours")
    for text in ("", "[]", '{"pid": null, "family": "x"}'):
        (tmp_path / "locks" / "GPU-0.json").write_text(text)
        assert locks.holder_of("GPU-0") == Holder(0, "")
    held.release()


def test_a_folder_that_cannot_be_used_is_an_error_with_what_mends_it(tmp_path):
    (tmp_path / "locks").write_text("no folder")
    with pytest.raises(DeviceError, match=f"sudo install -d -m 777 {tmp_path / 'locks'}"):
        GpuLocks(tmp_path / "locks").take("GPU-0", "ours")


def test_all_users_share_one_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    GpuLocks().take("GPU-0", "ours").release()
    assert (tmp_path / "nanoserve-gpu-locks" / "GPU-0.lock").exists()


def test_a_family_goes_by_more_than_a_number_that_comes_back(monkeypatch):
    ours = family_of_leader(os.getpid())
    assert ours == family_of_leader(os.getpid())
    assert ours != family_of_leader(os.getppid())
    monkeypatch.setattr("psutil.Process.create_time", lambda process: 1.0)
    assert ours != family_of_leader(os.getpid())
    assert lock_module.file_name("GPU/a b:1") == "GPU-a-b-1"
