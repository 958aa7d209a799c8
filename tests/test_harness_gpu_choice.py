"""Which GPU a session takes: on scripted GPUs, with locks in memory and a clock that a test moves on."""

import contextlib
import itertools

import pytest
from scripted_gpus import ScriptedGpu

from benchmarks.harness.errors import DeviceError
from benchmarks.harness.gpu.choice import Chooser, Claim, Sight, Worker, claim_of, meant, pick, refuse_workers, told_of
from benchmarks.harness.gpu.lock import Holder
from benchmarks.harness.gpu.readings import ForeignProcess, GpuState


def gpu(number, *, strangers=(), free=10):
    processes = tuple(ForeignProcess(pid=pid, memory_bytes=None) for pid in strangers)
    state = GpuState(uuid=f"GPU-{number}", memory_free_bytes=free, foreign_processes=processes)
    return ScriptedGpu(state, device=f"cuda:{number}")


class Locks:
    """What `GpuLocks` promises, without files."""

    def __init__(self, **holders):
        self.holders = {name.replace("_", "-"): holder for name, holder in holders.items()}
        self.taken = []

    def choosing(self, limit_s):
        return contextlib.nullcontext()

    def holder_of(self, key):
        return self.holders.get(key)

    def take(self, key, family):
        assert key not in self.holders
        self.holders[key] = Holder(1, family)
        self.taken.append(key)
        return self

    def release(self):
        del self.holders[self.taken.pop()]


class Waiting:
    """A clock that only moves while somebody sleeps; after `changes[n]` sleeps something happens."""

    def __init__(self, changes=()):
        self.now_s, self.num_sleeps, self.changes, self.said = 0.0, 0, dict(changes), []

    def sleep(self, seconds):
        self.now_s, self.num_sleeps = self.now_s + seconds, self.num_sleeps + 1
        self.changes.get(self.num_sleeps, lambda: None)()

    def chooser(self, locks, **options):
        told = {"family": "me", "say": self.said.append, "clock": lambda: self.now_s, "sleep": self.sleep}
        return Chooser(locks=locks, **told | options)


# What --device leaves.


GPUS = [gpu(0), gpu(1), gpu(2)]


@pytest.mark.parametrize(
    ("asked", "worker", "left"),
    [
        ("auto", None, [0, 1, 2]),
        ("cuda", None, [0, 1, 2]),
        ("cuda:1", None, [1]),
        ("auto", Worker(0, 3), [0]),
        ("cuda", Worker(2, 3), [2]),
        ("auto", Worker(4, 8), [1]),  # untimed: they share
        ("cuda:0", Worker(0, 1), [0]),
    ],
)
def test_what_an_option_and_a_worker_leave(asked, worker, left):
    assert [each.device for each in meant(asked, GPUS, worker)] == [f"cuda:{number}" for number in left]


@pytest.mark.parametrize("asked", ["cuda:3", "cuda:", "cuda:-1", "cuda:x"])
def test_a_gpu_that_is_not_there_is_an_error_with_those_that_are(asked):
    with pytest.raises(DeviceError, match=f"{asked} is not there: choose one of auto, cpu, cuda, cuda:0, cuda:1, cud"):
        meant(asked, GPUS)


def test_a_worker_is_what_xdist_says():
    assert Worker.of({}) is None
    assert Worker.of({"PYTEST_XDIST_WORKER": "gw12", "PYTEST_XDIST_WORKER_COUNT": "16"}) == Worker(12, 16)
    assert Worker.of({"PYTEST_XDIST_WORKER": "by-hand"}) == Worker(0, 1)


def test_more_workers_than_gpus_are_refused_with_both_numbers_and_a_command():
    refuse_workers("auto", 2, 2)
    refuse_workers("cuda:1", 2, 1)
    with pytest.raises(DeviceError, match=r"3 workers are more than GPUs here, 2.*pytest .*-n 2 --dist loadgroup"):
        refuse_workers("auto", 2, 3)
    with pytest.raises(DeviceError, match="leave out -n"):
        refuse_workers("auto", 1, 2)
    with pytest.raises(DeviceError, match="--device cuda:1 is one GPU, and 2 workers"):
        refuse_workers("cuda:1", 4, 2)


# Which of them.


def sight(number, is_used, free_bytes, is_locked):
    holder = Holder(7, "another") if is_locked else None
    return Sight(gpu=number, key=str(number), strangers=(5,) * is_used, free_bytes=free_bytes, holder=holder)


def slow_pick(seen):
    """Rule by rule: a clean one, with the most free memory, the lowest number; strangers only where all have them."""
    clean = [each for each in seen if not each.strangers and not each.holder]
    rest = clean or ([] if any(each.holder for each in seen) else list(seen))
    most = max((each.free_bytes for each in rest), default=None)
    return next((each for each in rest if each.free_bytes == most), None)


def test_the_pick_is_the_one_that_the_rules_name_in_every_case_of_three_gpus():
    looks = list(itertools.product((False, True), (10, 20), (False, True)))
    for case in itertools.product(looks, repeat=3):
        seen = [sight(number, *look) for number, look in enumerate(case)]
        assert pick(seen) is slow_pick(seen), case


def test_what_a_gpu_does_is_told():
    assert told_of(sight(0, False, 1, False)) == "is free"
    assert told_of(sight(0, True, 1, False)) == "is in use by process 5"
    assert told_of(sight(0, True, 1, True)) == "is locked by a session of ours, process 7"


# Taking one.


def test_the_first_free_gpu_is_taken_and_locked_until_it_is_released():
    waiting, locks = Waiting(), Locks()
    claim = waiting.chooser(locks).claim([gpu(0, strangers=[9]), gpu(1), gpu(2)])
    assert (claim.gpu.device, claim.key, locks.taken) == ("cuda:1", "GPU-1", ["GPU-1"])
    claim.release()
    assert locks.holders == {}
    assert waiting.said == []


def test_relatives_are_asked_for_as_no_strangers():
    found = gpu(0)
    Waiting().chooser(Locks(), relatives=lambda: (3, 4)).claim([found])
    assert found.log == [("state", (3, 4))]


def test_a_gpu_without_a_uuid_is_locked_by_its_number():
    assert Waiting().chooser(Locks()).claim([ScriptedGpu(GpuState(), device="cuda:0")]).key == "cuda-0"


def test_where_strangers_are_on_all_the_one_with_most_memory_is_taken_with_a_warning():
    waiting = Waiting()
    claim = waiting.chooser(Locks()).claim([gpu(0, strangers=[8], free=1), gpu(1, strangers=[9, 11], free=2)])
    assert claim.gpu.device == "cuda:1"
    assert waiting.said == ["cuda:1 is in use by process 9, 11: what is measured will be flagged"]


def test_the_other_session_of_a_family_shares_its_gpu_and_takes_no_lock():
    locks = Locks(GPU_1=Holder(5, "me"))
    claim = Waiting().chooser(locks).claim([gpu(0), gpu(1)])
    assert (claim.gpu.device, locks.taken) == ("cuda:1", [])
    claim.release()
    assert locks.holders == {"GPU-1": Holder(5, "me")}


def test_a_session_waits_for_the_first_lock_and_says_once_whose_they_are():
    locks = Locks(GPU_0=Holder(5, "a"), GPU_1=Holder(6, "b"))
    waiting = Waiting({3: lambda: locks.holders.pop("GPU-1")})
    assert waiting.chooser(locks).claim([gpu(0), gpu(1)]).gpu.device == "cuda:1"
    assert waiting.num_sleeps == 3
    (line,) = waiting.said
    assert "cuda:0 is locked by a session of ours, process 5; cuda:1 is locked by a session of ours, process 6" in line


def test_waiting_for_a_lock_is_better_than_a_gpu_with_a_stranger_on_it():
    locks = Locks(GPU_0=Holder(5, "a"))
    waiting = Waiting({1: lambda: locks.holders.pop("GPU-0")})
    assert waiting.chooser(locks).claim([gpu(0), gpu(1, strangers=[9])]).gpu.device == "cuda:0"


def test_nobody_waits_for_ever():
    locks, waiting = Locks(GPU_0=Holder(0, "")), Waiting()
    with pytest.raises(DeviceError, match=r"cuda:0 is locked .* an unknown process, after 5 s.*--gpu-wait-s"):
        waiting.chooser(locks, wait_s=5.0).claim([gpu(0)])
    assert waiting.now_s == 5.0


def test_a_claim_is_told_with_its_worker():
    claim = Claim(gpu(1), "GPU-1")
    assert claim_of(claim, None) == {"gpu": "GPU-1", "worker": None, "num_workers": 1}
    assert claim_of(claim, Worker(1, 4)) == {"gpu": "GPU-1", "worker": 1, "num_workers": 4}
