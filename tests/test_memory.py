"""What is free: the driver's word and torch's on a GPU; on a CPU the machine's, and any control group's."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from nanoserve import memory
from nanoserve.catalog import SHAPES

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
AVAILABLE = 10_000
V1 = {"limit": "memory.limit_in_bytes", "usage": "memory.usage_in_bytes", "reclaimable": "total_inactive_file"}
V2 = {"limit": "memory.max", "usage": "memory.current", "reclaimable": "inactive_file"}
UNLIMITED_V1 = "9223372036854771712"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with AVAILABLE bytes, where this process is in the groups that are written under `root`."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=AVAILABLE))
    proc, root = tmp_path / "cgroup", tmp_path / "sys"
    root.mkdir()

    def group(path, files, limit, usage=None, reclaimable=None):
        folder = root / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / files["limit"]).write_text(f"{limit}\n")
        if usage is not None:
            (folder / files["usage"]).write_text(f"{usage}\n")
        if reclaimable is not None:
            entry = files["reclaimable"]
            stat = f"anon 1\nnot_{entry} 4000\ninactive_anon 5000\n{entry} {reclaimable}\nactive_file 7\n"
            (folder / "memory.stat").write_text(stat)

    def free(cgroup_lines):
        proc.write_text(cgroup_lines)
        return memory.free_bytes(CPU, proc_cgroup=proc, cgroups=root)

    return SimpleNamespace(group=group, free=free, proc=proc, root=root)


# a CPU


def test_without_control_groups_it_is_what_the_machine_has(machine):
    assert machine.free("") == AVAILABLE
    machine.proc.unlink()
    assert memory.free_bytes(CPU, proc_cgroup=machine.proc, cgroups=machine.root / "absent") == AVAILABLE


def test_here_it_is_some_of_the_machine_s():
    assert 0 < memory.free_bytes(CPU) <= psutil.virtual_memory().total


@pytest.mark.parametrize(("files", "line", "root"), [(V2, "0::/a/b", ""), (V1, "4:memory:/a/b", "memory/")])
def test_a_group_has_left_what_its_limit_says_but_for_what_is_used_and_not_reclaimable(machine, files, line, root):
    machine.group(f"{root}a/b", files, 5000, usage=3000, reclaimable=800)
    assert machine.free(f"{line}\n") == 5000 - (3000 - 800)
    machine.group(f"{root}a/b", files, 50_000, usage=3000)
    assert machine.free(f"{line}\n") == AVAILABLE


@pytest.mark.parametrize(("files", "line", "root"), [(V2, "0::/a/b", ""), (V1, "4:cpu,memory:/a/b", "memory/")])
@pytest.mark.parametrize("limited", ["", "a", "a/b"])
def test_the_tightest_group_on_the_way_up_counts(machine, files, line, root, limited):
    unlimited = UNLIMITED_V1 if files is V1 else "max"
    for path in ("", "a", "a/b"):
        machine.group(f"{root}{path}", files, 4000 if path == limited else unlimited, usage=1000)
    assert machine.free(f"{line}\n") == 3000


def test_a_container_sees_its_group_as_the_root_under_the_host_s_path(machine):
    machine.group("memory", V1, 4000, usage=1000)
    assert machine.free("5:memory:/docker/0123\n0::/docker/0123\n") == 3000
    (machine.root / "memory.limit_in_bytes").write_text("5")  # above the root: nobody's
    assert machine.free("4:memory:/../../other\n") == 3000


def test_with_both_versions_mounted_the_one_with_the_memory_controller_counts(machine):
    machine.group("memory/job", V1, 4000, usage=1000)
    (machine.root / "unified").mkdir()
    assert machine.free("9:name=systemd:/\n4:memory:/job\n3:cpuset:/job\n0::/\n") == 3000


def test_other_controllers_folders_are_not_looked_at(machine):
    machine.group("memory/job", V1, 4000, usage=1000)
    assert machine.free("4:memory:/\n3:cpuset:/job\n") == AVAILABLE
    assert machine.free("4:memoryless:/job\n") == AVAILABLE


@pytest.mark.parametrize("files", [V1, V2])
def test_a_group_that_is_over_its_limit_has_nothing_left(machine, files):
    machine.group("memory" if files is V1 else "", files, 4000, usage=4500, reclaimable=100)
    assert machine.free("1:memory:/\n0::/\n") == 0


def test_no_more_is_left_than_the_limit_whatever_can_be_reclaimed(machine):
    machine.group("", V2, 4000, usage=500, reclaimable=900)
    assert machine.free("0::/\n") == 4000


@pytest.mark.parametrize("limit", ["", "max", "-1", "lots", "4000 4000", "4e3", "\u0664\u0662", "9" * 5000])
def test_a_limit_that_is_no_number_is_none(machine, limit):
    machine.group("", V2, limit, usage=100)
    assert machine.free("0::/\n") == AVAILABLE


def test_odd_files_are_no_error(machine):
    machine.group("", V2, 4000, usage="?", reclaimable="?")
    assert machine.free("0::/\n") == 4000
    (machine.root / "memory.stat").write_bytes(b"\xff\xfe")
    (machine.root / "memory.current").unlink()
    (machine.root / "memory.current").mkdir()
    assert machine.free("0::/\n") == 4000
    for lines in ("garbage", "::", "\n\n", "0::" + "/x" * 3000, "0::/a\0b", "0::/" + "y" * 5000):
        assert machine.free(lines) in (4000, AVAILABLE)
    machine.proc.write_bytes(b"\xff")
    assert memory.free_bytes(CPU, proc_cgroup=machine.proc, cgroups=machine.root) == AVAILABLE


# a GPU


def test_on_a_gpu_it_is_what_the_driver_has_and_what_torch_keeps_unused(monkeypatch):
    asked = []
    for name, value in (("mem_get_info", (1000, 9000)), ("memory_reserved", 700), ("memory_allocated", 400)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: asked.append(device) or value)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: pytest.fail("the machine's memory was asked for"))
    assert memory.free_bytes(GPU) == 1000 + 700 - 400
    assert asked == [GPU] * 3


# weights


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("smollm2-135m-random", 134_515_008),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
    ],
)
def test_weights_take_their_published_number_of_parameters(name, num_parameters):
    assert memory.weights_bytes(SHAPES[name], torch.bfloat16) == 2 * num_parameters
    assert memory.weights_bytes(SHAPES[name], torch.float32) == 4 * num_parameters


def test_weights_take_what_a_loaded_model_does(tiny):
    loaded = sum(weight.nbytes for weight in tiny.model.parameters())
    assert memory.weights_bytes(tiny.config, tiny.dtype) == loaded
