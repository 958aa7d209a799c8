"""Each check of the doctor in its good, warning and missing state, on machines that are faked from end to end."""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from scripted_gpus import ScriptedDriver, ScriptedGpu
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.harness import doctor
from benchmarks.harness.doctor import Finding
from benchmarks.harness.gate.reference import Reference, save_reference
from benchmarks.harness.gpu.driver import use_driver
from benchmarks.harness.gpu.lock import GpuLocks
from benchmarks.harness.gpu.readings import ForeignProcess, GpuState
from benchmarks.harness.overhead import Stopwatch
from nanoserve import catalog

ROOT = Path(__file__).parents[1]
OK, WARN, MISSING = "ok", "warn", "missing"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A home, a cache and a repository folder that hold nothing; git sees no settings of the user's."""
    for name in ("home", "cache", "repository"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "ROOT", tmp_path / "repository")
    return tmp_path


def expect(finding, state, *words):
    assert finding.state == state
    for word in words:
        assert word in f"{finding.what} {finding.mend}"
    assert bool(finding.mend) == (state != OK), "whatever is not ok comes with a command that mends it"
    assert "\n" not in finding.what + finding.mend


# packages


@pytest.fixture
def installed(monkeypatch):
    """Pretend that nanoserve asks for these requirements and that these versions are here."""

    def pretend(requirements, versions):
        def version(name):
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


def test_packages_that_are_here_are_ok(installed):
    installed(["torch>=2", 'asv==0.6.6; extra == "dev"'], {"torch": "2.13.0+cpu", "asv": "0.6.6"})
    expect(doctor.check_packages(), OK)


def test_an_absent_package_is_missing(installed):
    installed(["torch>=2", 'asv==0.6.6; extra == "dev"'], {"torch": "2.13.0"})
    expect(doctor.check_packages(), MISSING, "asv==0.6.6", 'pip install -e ".[dev]"')


def test_a_package_of_another_version_than_the_pinned_one_is_missing(installed):
    installed(["torch>=2", 'asv==0.6.6; extra == "dev"'], {"torch": "2.13.0", "asv": "0.6.4"})
    expect(doctor.check_packages(), MISSING, "asv==0.6.6 (but 0.6.4)")


def test_packages_for_another_platform_are_not_asked_for(installed):
    installed(['colorama; sys_platform == "never"'], {})
    expect(doctor.check_packages(), OK)


@pytest.mark.parametrize("absent", ["nanoserve", "packaging"])
def test_packages_cannot_even_be_listed(monkeypatch, absent):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError("nanoserve")

    if absent == "nanoserve":
        monkeypatch.setattr(importlib.metadata, "requires", requires)
    else:
        monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    expect(doctor.check_packages(), MISSING, absent)


# model


def test_a_model_that_is_fetched_is_ok(machine, monkeypatch):
    monkeypatch.setattr(catalog, "is_fetched", lambda: True)
    expect(doctor.check_model(), OK, str(machine / "cache"))


def test_a_model_that_is_not_fetched_is_a_warning():
    expect(doctor.check_model(), WARN, "93 MB", "nanoserve generate")


# asv's machine file


def machine_file(machine, text):
    (machine / "home" / ".asv-machine.json").write_text(text)


def test_asv_knows_this_machine(machine):
    machine_file(machine, json.dumps({"version": 1, platform.node(): {}, "other": {}}))
    expect(doctor.check_asv_machine(), OK, platform.node())


def test_asv_takes_this_machine_for_another(machine):
    machine_file(machine, json.dumps({"version": 1, "laptop": {}}))
    expect(doctor.check_asv_machine(), WARN, "laptop", "asv machine --yes")


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        (None, "asv machine --yes"),
        (json.dumps({"version": 1, "a": {}, "b": {}}), "asv machine --yes"),
        (json.dumps({"version": 1}), "asv machine --yes"),
        (json.dumps({"version": 2, platform.node(): {}}), "rm "),
        ('{"version": 1, "half', "rm "),
        ("[1]", "rm "),
        ("", "rm "),
    ],
    ids=["no-file", "others-only", "empty", "other-format", "truncated", "list", "zero-bytes"],
)
def test_asv_does_not_know_this_machine(machine, text, mend):
    if text is not None:
        machine_file(machine, text)
    finding = doctor.check_asv_machine()
    expect(finding, MISSING, "asv machine --yes")
    assert finding.mend.startswith(mend)


def test_asv_agrees_about_its_machine_file(machine):
    """The rules above are asv's own: what is ok or a warning loads, what is missing does not."""
    asv_machine = pytest.importorskip("asv.machine")
    for text in ("{}", '{"version": 1, "a": {}}', '{"version": 1, "a": {}, "b": {}}', '{"version": 2}', "[1]", "{"):
        machine_file(machine, text)
        try:
            asv_machine.MachineCollection.load(platform.node())
            is_known = True
        except Exception:
            is_known = False
        assert (doctor.check_asv_machine().state != MISSING) == is_known, text


# git


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(machine):
    """A repository with two commits on main."""
    folder = machine / "repository"
    (folder / "nanoserve").mkdir()
    (folder / "nanoserve" / "engine.py").write_text("one")
    (folder / "pyproject.toml").write_text("")
    git(folder, "init", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "one")
    git(folder, "commit", "-m", "two", "--allow-empty")
    return folder


def test_a_clean_repository_is_ok(repository):
    expect(doctor.check_git(), OK)


def test_changes_that_asv_cannot_see_are_a_warning(repository):
    (repository / "nanoserve" / "engine.py").write_text("two")
    expect(doctor.check_git(), WARN, "uncommitted", "git add nanoserve pyproject.toml && git commit")


def test_a_new_file_of_the_engine_is_a_warning(repository):
    (repository / "nanoserve" / "new.py").touch()
    expect(doctor.check_git(), WARN, "uncommitted")


def test_changes_outside_the_engine_are_fine(repository):
    (repository / "notes.txt").touch()
    expect(doctor.check_git(), OK)


def test_no_branch_main_is_a_warning(repository):
    git(repository, "branch", "-m", "work")
    expect(doctor.check_git(), WARN, "main", "git branch main")
    git(repository, "remote", "add", "origin", "elsewhere")
    expect(doctor.check_git(), WARN, "main", "git fetch origin main:main")


def test_a_shallow_clone_is_missing_its_history(repository, machine, monkeypatch):
    git(machine, "clone", "--depth", "1", repository.as_uri(), "shallow")
    monkeypatch.setattr(doctor, "ROOT", machine / "shallow")
    expect(doctor.check_git(), MISSING, "shallow", "git fetch --unshallow")


def test_a_repository_without_commits_is_missing_them(machine):
    git(machine / "repository", "init", "-b", "main")
    expect(doctor.check_git(), MISSING, "no commit", "git commit")


def test_a_folder_outside_any_repository_is_missing_one():
    expect(doctor.check_git(), MISSING, "no repository", "git init")


def test_a_folder_inside_somebody_elses_repository_is_missing_its_own(repository, monkeypatch):
    monkeypatch.setattr(doctor, "ROOT", repository / "nanoserve")
    expect(doctor.check_git(), MISSING, "no repository", "git init")


def test_a_repository_of_another_user_is_mended_by_trusting_it(repository, monkeypatch):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    expect(doctor.check_git(), MISSING, "another user", f"safe.directory {repository}")


def test_a_machine_without_git_is_missing_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    expect(doctor.check_git(), MISSING, "git cannot run", "install git")


# xdist


@pytest.mark.parametrize(
    "options",
    [
        "-n 4", "-n4", "-nauto", "-n auto", "-vn2", "-xvn auto", "--numprocesses 2", "--numprocesses=auto",
        "--dist load", "--dist=loadfile", "-d --tx 2*popen", "-q -k 'not slow' -n2", "-n", "-n 2 'unbalanced",
    ],
)  # fmt: skip
def test_options_that_start_workers_are_a_warning(monkeypatch, options):
    monkeypatch.setenv("PYTEST_ADDOPTS", options)
    expect(doctor.check_xdist(), WARN, options, "unset PYTEST_ADDOPTS")


@pytest.mark.parametrize(
    "options",
    [
        "",
        "-q",
        "-n0",
        "-n 0",
        "--numprocesses=0",
        "-p no:randomly",
        "-rn",
        "--dist=no",
        "--no-header -k n4",
        "'unbalanced",
    ],
)
def test_options_that_start_no_workers_are_ok(monkeypatch, options):
    monkeypatch.setenv("PYTEST_ADDOPTS", options)
    expect(doctor.check_xdist(), OK)


# disk, load, governor


@pytest.mark.parametrize(
    ("free_gb", "packages", "is_built", "mend"),
    [
        (20, ["torch"], False, ""),
        (5, ["torch"], False, ""),
        (3, ["torch"], False, "python -m pip cache purge"),
        (5, ["torch", "nvidia-cudnn"], False, "python -m pip cache purge"),
        (3, ["torch", "nvidia-cudnn"], True, ""),
        (0.5, ["torch"], True, "rm -rf .asv/env"),
    ],
)
def test_disk_space_for_asvs_environment(monkeypatch, free_gb, packages, is_built, mend):
    if is_built:
        (doctor.ROOT / ".asv" / "env" / "abc").mkdir(parents=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100e9, 0, free_gb * 1e9))
    found = [namedtuple("Package", "name")(name) for name in packages]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
    finding = doctor.check_disk()
    expect(finding, MISSING if mend else OK)
    assert finding.mend == mend


@pytest.mark.parametrize(
    ("load", "system", "state", "mend"),
    [(0.5, "linux", OK, ""), (3.0, "linux", WARN, "top -o %CPU"), (3.0, "darwin", WARN, "top -o cpu")],
)
def test_load(monkeypatch, load, system, state, mend):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(sys, "platform", system)
    finding = doctor.check_load()
    expect(finding, state, f"{load:.2f} on 8 CPUs")
    assert finding.mend == mend


def test_load_that_a_system_does_not_tell_is_ok(monkeypatch):
    monkeypatch.delattr(os, "getloadavg")
    expect(doctor.check_load(), OK, "not visible")


@pytest.mark.parametrize(
    ("governors", "state", "words"),
    [
        (["performance", "performance"], OK, "performance"),
        (["performance", "powersave"], WARN, "performance, powersave"),
        (["schedutil", "schedutil"], WARN, "is schedutil"),
        ([], OK, "not visible here"),
    ],
)
def test_governor_of_every_cpu(tmp_path, governors, state, words):
    for number, governor in enumerate(governors):
        folder = tmp_path / f"cpu{number}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(f"{governor}\n")
    expect(doctor.check_governor(tmp_path), state, words)


def test_governor_that_cannot_be_read_is_ok(tmp_path):
    (tmp_path / "cpu0" / "cpufreq" / "scaling_governor").mkdir(parents=True)
    expect(doctor.check_governor(tmp_path), OK, "not visible here")
    expect(doctor.check_governor(tmp_path / "nowhere"), OK, "not visible here")


# clock


@pytest.mark.parametrize(
    ("stamp_ns", "state", "words"),
    [(281.4, OK, "281 ns a stamp, resolves 40 ns"), (2500.0, WARN, "above 2000 ns a stamp")],
)
def test_a_clock_that_costs_too_much_is_told(monkeypatch, stamp_ns, state, words):
    found = Stopwatch(resolution_ns=40, stamp_ns=stamp_ns)
    monkeypatch.setattr(Stopwatch, "of", lambda clock: found)
    expect(doctor.check_clock(), state, words)


# gpu


@pytest.fixture
def gpu(monkeypatch):
    """Pretend a driver, and a torch that sees a GPU with this share of its memory in use, or none."""

    installed = contextlib.ExitStack()

    def pretend(in_use=None, driver=True, cuda="13.0"):
        state = GpuState(name="H200", memory_total_bytes=int(100e9))
        free = ScriptedGpu(state, free_bytes=int(100e9 * (1 - (in_use or 0))))
        installed.enter_context(use_driver(ScriptedDriver([] if in_use is None else [free])))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(shutil, "which", lambda name: "/bin/nvidia-smi" if driver else None)

    with installed:
        yield pretend


def test_a_free_gpu_is_ok(gpu):
    gpu(in_use=0.01)
    expect(doctor.check_gpu(), OK, "Scripted", "--device cpu")


def test_a_gpu_in_use_by_somebody_else_is_a_warning(gpu):
    gpu(in_use=0.5)
    expect(doctor.check_gpu(), WARN, "50.0 GB", "nvidia-smi")


def test_of_several_gpus_each_says_who_has_it(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stranger = ForeignProcess(pid=77, memory_bytes=None)
    states = [GpuState(uuid="a"), GpuState(uuid="b", foreign_processes=(stranger,)), GpuState(uuid="c")]
    gpus = [ScriptedGpu(state, device=f"cuda:{number}") for number, state in enumerate(states)]
    held = GpuLocks().take("c", "a session")
    locked = f"cuda:2 is locked by a session of ours, process {os.getpid()}"
    with use_driver(ScriptedDriver(gpus)):
        expect(doctor.check_gpu(), OK, f"cuda:0 is free; cuda:1 is in use by process 77; {locked}")
    with use_driver(ScriptedDriver(gpus[1:])):
        expect(doctor.check_gpu(), WARN, "cuda:1 is in use", "nvidia-smi")
    with use_driver(ScriptedDriver(gpus[2:])):
        expect(doctor.check_gpu(), WARN, locked)
    held.release()


def test_no_gpu_is_ok(gpu):
    gpu(driver=False)
    expect(doctor.check_gpu(), OK, "none")


@pytest.mark.parametrize(
    ("cuda", "mend"), [(None, "python -m pip install --force-reinstall torch"), ("13.0", "nvidia-smi")]
)
def test_a_gpu_that_torch_does_not_see_is_a_warning(gpu, cuda, mend):
    gpu(cuda=cuda)
    finding = doctor.check_gpu()
    expect(finding, WARN, "sees no CUDA device")
    assert finding.mend == mend


def test_a_hidden_gpu_is_a_warning(gpu, monkeypatch):
    gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    expect(doctor.check_gpu(), WARN, "hidden", "unset CUDA_VISIBLE_DEVICES")


def test_a_machine_without_torch_is_told_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    expect(doctor.check_gpu(), WARN, "torch", "pip install")


# all together


def test_render_puts_the_command_below_its_finding():
    findings = [Finding("git", OK, "clean"), Finding("cpu governor", WARN, "is powersave", "sudo something")]
    assert doctor.render(findings).splitlines() == [
        "ok      git            clean",
        "warn    cpu governor   is powersave",
        "                       mend: sudo something",
    ]


def test_every_check_is_run_once_and_none_needs_proc_or_sys(monkeypatch, gpu):
    gpu(driver=False)
    monkeypatch.setattr(doctor.Path, "glob", lambda path, pattern: iter(()))
    monkeypatch.delattr(os, "getloadavg")
    topics = [finding.topic for finding in doctor.examine()]
    assert topics == [
        "packages",
        "model",
        "asv machine",
        "git",
        "xdist",
        "disk",
        "load",
        "clock",
        "cpu governor",
        "gpu",
        "asv results",
        "gate",
    ]
    assert len(doctor.CHECKS) == sum(name.startswith("check_") for name in dir(doctor))


def test_a_results_file_of_asvs_that_was_cut_off_is_named_with_what_mends_it(machine):
    assert doctor.check_asv_results().state == "ok"
    path = doctor.ROOT / ".asv" / "results" / "host" / "0123abcd-env.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"commit_hash": "01')
    found = doctor.check_asv_results()
    assert (found.state, found.mend) == ("missing", f"rm {path}")
    assert str(path) in found.what


def test_the_gate_wants_a_reference_and_a_calibration(machine):
    kept = doctor.ROOT / ".benchmarks"
    kept.mkdir(parents=True)
    assert doctor.check_gate().mend == "python -m benchmarks reference set COMMIT"
    save_reference(doctor.ROOT, Reference(commit="a" * 40, source_sha256="b", generation=2, set_at="2026-01-01"))
    assert doctor.check_gate().mend == "python -m benchmarks calibrate"
    (kept / "calibration.json").write_text("{}")
    assert doctor.check_gate() == Finding("gate", "ok", "reference aaaaaaaaaaaa, generation 2; calibrated")
    (kept / "reference.json").write_text("{")
    assert doctor.check_gate().state == "missing"


@pytest.mark.parametrize(("states", "status"), [((OK, OK), 0), ((OK, WARN), 0), ((WARN, MISSING), 1)])
def test_exit_status_tells_whether_something_is_missing(monkeypatch, states, status):
    checks = tuple(lambda state=state: Finding("topic", state, "what", "mend it") for state in states)
    monkeypatch.setattr(doctor, "CHECKS", checks)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == status
    assert done.output.count("mend: mend it") == 2


@pytest.mark.slow
def test_the_command_runs_on_a_machine_with_an_empty_home():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "doctor"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "missing asv machine" in done.stdout
    assert "warn    model" in done.stdout
