"""Looks at a machine the way a careful person would before measuring on it.

Each check knows one thing that spoils or prevents a measurement and the command that mends it. Nothing is changed or
fetched here, and what a system does not show (no /sys, no git, no torch) is never an error.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from benchmarks.harness.gpu.driver import Gpu

ROOT = Path(__file__).parents[2]

_INSTALL = 'python -m pip install -e ".[dev]"'
_COMMIT = "git add -A && git commit -m 'First commit'"
_MEASURED = "nanoserve pyproject.toml"  # what asv takes from a commit; the benchmarks it takes from the checkout
_MAX_LOAD_PER_CPU = 0.25
_MAX_GPU_MEMORY_IN_USE = 0.1
_WHO_COMPUTES = "nvidia-smi --query-compute-apps=gpu_uuid,pid,name,used_memory --format=csv"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """`missing` prevents something, `warn` makes numbers worse, `ok` is fine. `mend` is a command to copy."""

    topic: str
    state: Literal["ok", "warn", "missing"]
    what: str
    mend: str = ""


def examine() -> list[Finding]:
    """Run every check, in the order in which a newcomer meets the things."""
    return [check() for check in CHECKS]


def render(findings: list[Finding]) -> str:
    """One line a finding, its mending command below it."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:8}{finding.topic:15}{finding.what}")
        if finding.mend:
            lines.append(f"{'':23}mend: {finding.mend}")
    return "\n".join(lines)


def check_packages() -> Finding:
    """What pyproject.toml asks for, pinned versions included: another version of a tool moves numbers."""
    try:
        unmet = [what for what in map(_unmet, importlib.metadata.requires("nanoserve") or []) if what]
    except ImportError as error:
        unmet = [str(error.name)]
    if unmet:
        return Finding("packages", "missing", f"not installed: {', '.join(unmet)}", _INSTALL)
    return Finding("packages", "ok", "everything that pytest and asv need is installed")


def _unmet(requirement: str) -> str | None:
    """The requirement, unless it is met, with the version that is here instead."""
    from packaging.requirements import Requirement

    wanted = Requirement(requirement)
    if wanted.marker and not wanted.marker.evaluate({"extra": "dev"}):
        return None
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{wanted.name}{wanted.specifier}"
    is_met = wanted.specifier.contains(version, prereleases=True)
    return None if is_met else f"{wanted.name}{wanted.specifier} (but {version})"


def check_model() -> Finding:
    """The trained default model, fetched at its first use."""
    from nanoserve.catalog import cache_dir, is_fetched

    if is_fetched():
        return Finding("model", "ok", f"smollm2-135m is in {cache_dir()}")
    return Finding("model", "warn", "smollm2-135m, 93 MB, is not fetched yet", "nanoserve generate 'Hello, world'")


def check_asv_machine() -> Finding:
    """asv asks questions on a terminal unless its machine file knows this host, by name or as the only entry."""
    path, host, mend = Path(os.path.expanduser("~/.asv-machine.json")), platform.node(), "asv machine --yes"
    if not path.exists():
        return Finding("asv machine", "missing", "unknown to asv: its first command would stop and ask", mend)
    try:
        machines = dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        machines = {"version": None}
    if machines.pop("version", 1) != 1:
        return Finding("asv machine", "missing", f"asv cannot read {path}", f"rm {shlex.quote(str(path))}; {mend}")
    if host not in machines and len(machines) == 1:
        what = f"asv takes this host, {host}, for the only one in {path}: {next(iter(machines))}"
        return Finding("asv machine", "warn", what, mend)
    if host not in machines:
        return Finding("asv machine", "missing", f"{path} lacks this host, {host}: asv would stop and ask", mend)
    return Finding("asv machine", "ok", f"{host} is in {path}")


def check_git() -> Finding:
    """asv measures commits: it sees neither uncommitted changes nor history that a shallow clone lacks."""
    status, top = _git("rev-parse", "--show-toplevel")
    if status is None:
        return Finding("git", "missing", f"git cannot run: {top}", "sudo apt-get install git")
    if "dubious ownership" in top:
        mend = f"git config --global --add safe.directory {shlex.quote(str(ROOT))}"
        return Finding("git", "missing", "git refuses a repository that belongs to another user", mend)
    if status or Path(top).resolve() != ROOT.resolve():
        return Finding("git", "missing", "no repository: asv measures commits", f"git init -b main && {_COMMIT}")
    return _check_history()


def _check_history() -> Finding:
    if _git("rev-parse", "--verify", "HEAD")[0]:
        return Finding("git", "missing", "no commit yet: asv measures commits", _COMMIT)
    if _git("rev-parse", "--is-shallow-repository")[1] == "true":
        return Finding("git", "missing", "a shallow clone: asv cannot reach older commits", "git fetch --unshallow")
    if _git("rev-parse", "--verify", "refs/heads/main")[0]:
        mend = "git fetch origin main:main" if _git("remote")[1] else "git branch main"
        return Finding("git", "warn", "no local branch main, which asv.conf.json names", mend)
    if _git("status", "--porcelain", "--", *_MEASURED.split())[1]:
        mend = f"git add {_MEASURED} && git commit"
        return Finding("git", "warn", "uncommitted changes of the engine: pytest measures them, asv does not", mend)
    return Finding("git", "ok", "clean, with its history")


def _git(*arguments: str) -> tuple[int | None, str]:
    """Exit status, None if git could not run, and what it said on either stream."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return None, str(error)
    return done.returncode, (done.stdout or done.stderr).strip()


def check_xdist() -> Finding:
    """Benchmarks do not time while other workers run."""
    options = os.environ.get("PYTEST_ADDOPTS", "")
    if _starts_workers(options):
        return Finding("xdist", "warn", f"PYTEST_ADDOPTS {options!r} switches timing off", "unset PYTEST_ADDOPTS")
    return Finding("xdist", "ok", "tests run with `pytest -n auto`, measurements without -n")


def _starts_workers(options: str) -> bool:
    """Whether these options of pytest make xdist run: -n 2, -n2, -vn2, --numprocesses=auto, --dist load, -d."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-n", "--numprocesses", default="0")
    parser.add_argument("--dist", default="no")
    for flag in "dlqsvx":  # those without a value: -n can stand behind any of them
        parser.add_argument(f"-{flag}", action="store_true")
    try:
        known, _ = parser.parse_known_args(shlex.split(options))
    except (argparse.ArgumentError, ValueError):
        return "-n" in options
    return bool(known.numprocesses != "0" or known.dist != "no" or known.d)


def check_disk() -> Finding:
    """asv builds an environment of its own, torch included; torch for CUDA is the larger one."""
    is_built = any((ROOT / ".asv" / "env").glob("*"))
    has_cuda = any(package.name.startswith("nvidia-") for package in importlib.metadata.distributions())
    needed = 1 if is_built else 10 if has_cuda else 4
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < needed:
        mend = "rm -rf .asv/env" if is_built else "python -m pip cache purge"
        return Finding("disk", "missing", f"{free:.1f} GB free, asv's environment takes {needed}", mend)
    return Finding("disk", "ok", f"{free:.0f} GB free for asv's environment in .asv/")


def check_load() -> Finding:
    """Whoever else computes here is in every number."""
    try:
        load, num_cpus = os.getloadavg()[0], os.cpu_count() or 1
    except (OSError, AttributeError):
        return Finding("load", "ok", "not visible here")
    what = f"load average {load:.2f} on {num_cpus} CPUs"
    if load > _MAX_LOAD_PER_CPU * num_cpus:
        mend = "top -o cpu" if sys.platform == "darwin" else "top -o %CPU"
        return Finding("load", "warn", f"{what}: something else is running", mend)
    return Finding("load", "ok", what)


def check_clock() -> Finding:
    """What one stamp costs, and what the clock can tell apart; both are inside every measured gap."""
    from benchmarks.harness.clock import DeviceClock
    from benchmarks.harness.overhead import MAX_STAMP_NS, Stopwatch, is_cheap

    found = Stopwatch.of(DeviceClock("cpu"))
    what = f"{found.stamp_ns:.0f} ns a stamp, resolves {found.resolution_ns} ns"
    if not is_cheap(found.stamp_ns):
        mend = "cat /sys/devices/system/clocksource/clocksource0/current_clocksource"
        return Finding("clock", "warn", f"{what}: above {MAX_STAMP_NS:.0f} ns a stamp shows in short gaps", mend)
    return Finding("clock", "ok", what)


def check_governor(cpus: Path = Path("/sys/devices/system/cpu")) -> Finding:
    """A CPU that saves energy measures its own waking up."""
    try:
        found = {path.read_text().strip() for path in cpus.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    except OSError:
        found = set()
    if found - {"performance"}:
        mend = "sudo cpupower frequency-set --governor performance"
        return Finding("cpu governor", "warn", f"is {', '.join(sorted(found))}: clocks will move", mend)
    return Finding("cpu governor", "ok", "performance" if found else "not visible here (virtual, or not Linux)")


def check_gpu() -> Finding:
    """Which device `--device auto` takes, and whether somebody else is on it."""
    try:
        import torch
    except ImportError:
        return Finding("gpu", "warn", "unknown without torch", _INSTALL)
    from benchmarks.harness.gpu.driver import driver

    found = driver().gpus()
    if found:
        return _check_gpus(found)
    if not shutil.which("nvidia-smi"):
        return Finding("gpu", "ok", "none: measuring on the CPU")
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return Finding("gpu", "warn", "hidden by CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES")
    what = f"nvidia-smi is here, but torch {torch.__version__} sees no CUDA device"
    mend = "nvidia-smi" if torch.version.cuda else "python -m pip install --force-reinstall torch"
    return Finding("gpu", "warn", what, mend)


def _check_gpus(gpus: Sequence["Gpu"]) -> Finding:
    """Which are free, and who has the others; of one alone that is free, how much of it."""
    from benchmarks.harness.gpu.choice import Chooser, told_of
    from benchmarks.harness.gpu.lock import GpuLocks

    seen = Chooser(locks=GpuLocks(), family="", say=print).look(gpus)
    num_free = sum(not each.strangers and each.holder is None for each in seen)
    if num_free == len(gpus) == 1:
        return _check_free_gpu(gpus[0])
    what = "; ".join(f"{each.gpu.device} {told_of(each)}" for each in seen)
    return Finding("gpu", "ok", what) if num_free else Finding("gpu", "warn", what, _WHO_COMPUTES)


def _check_free_gpu(gpu: "Gpu") -> Finding:
    name, free_bytes, total_bytes = gpu.label or gpu.device, gpu.free_bytes(), gpu.state().memory_total_bytes
    used_bytes = (total_bytes or 0) - (free_bytes or 0)
    if total_bytes and used_bytes > _MAX_GPU_MEMORY_IN_USE * total_bytes:
        return Finding("gpu", "warn", f"{name}: {used_bytes / 1e9:.1f} GB are in use by something else", _WHO_COMPUTES)
    return Finding("gpu", "ok", f"{name}; measure on the CPU with --device cpu")


def check_asv_results() -> Finding:
    """A file that a kill cut off, or of another format of asv's, blocks its commit or the whole page."""
    from benchmarks.harness.unreadable import unreadable_results

    found = unreadable_results(ROOT / ".asv" / "results")
    if not found:
        return Finding("asv results", "ok", "every file below .asv/results can be read")
    first, more = found[0], f", and {len(found) - 1} more" if found[1:] else ""
    return Finding("asv results", "missing", f"{first.path}: {first.why}{more}", first.mend)


def check_gate() -> Finding:
    """Without a reference asv's times follow the host; without a calibration nobody knows what the gate finds."""
    from benchmarks.harness.errors import InstrumentError
    from benchmarks.harness.gate.calibration_file import calibration_file
    from benchmarks.harness.gate.reference import SET_COMMAND, load_reference

    try:
        reference = load_reference(ROOT)
    except InstrumentError as error:
        return Finding("gate", "missing", str(error), SET_COMMAND)
    if reference is None:
        return Finding("gate", "warn", "no reference is set: asv stores raw times, which follow the host", SET_COMMAND)
    if not calibration_file(ROOT).exists():
        what = "how often the gate is wrong on this machine is not known"
        return Finding("gate", "warn", what, "python -m benchmarks calibrate")
    return Finding("gate", "ok", f"reference {reference}; calibrated")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_packages, check_model, check_asv_machine, check_git, check_xdist, check_disk, check_load, check_clock,
    check_governor, check_gpu, check_asv_results, check_gate,
)  # fmt: skip
