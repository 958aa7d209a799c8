"""What the slow tests with a real asv share: the working tree as a repository, a home of its own, short ways to run."""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import json5
from child_process import inherited

ROOT = Path(__file__).parents[1]
HOST = platform.node()

LAYERS = "        for layer in self.layers:\n"
"""The line of `nanoserve/models/llama.py` before which, or after which, work can be planted."""

ONE_MORE = f"{LAYERS}            hidden = hidden + 0\n"
"""An operator more in each layer."""

SLOWER = f"""{LAYERS}\
            if hidden.shape[0] == 1 and layer.self_attn.layer < 4:
                layer(hidden, rope, cache)
"""
"""In decode steps only, 4 of the 20 layers of the shape `small` run twice: a fifth more real work, the same tokens."""


def run(command, folder, environment):
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)
    sys.stdout.write(f"$ {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done


def git(folder, environment, *arguments):
    assert run(["git", *arguments], folder, environment).returncode == 0


def asv(folder, environment, *arguments):
    return run([sys.executable, "-m", "asv", *arguments], folder, environment)


def make_environment(home, arguments):
    """A home of its own, so that asv's machine file is not the user's; caches and pip's settings stay the user's."""
    user = Path.home()
    kept = {
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(user / ".cache")),
        "XDG_CONFIG_HOME": os.environ.get("XDG_CONFIG_HOME", str(user / ".config")),
    }
    identity = {f"GIT_{who}_{what}": "test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return inherited() | kept | identity | {"HOME": str(home), "PATH": path, "NANOSERVE_BENCH_ARGS": arguments}


def copy_tree(folder):
    """What a commit of the working tree would hold, in another folder."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, text=True, capture_output=True, check=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def commit(folder, environment, message):
    git(folder, environment, "add", "-A")
    git(folder, environment, "commit", "-q", "-m", message)


def commit_of(folder, revision):
    command = ["git", "rev-parse", revision]
    return subprocess.run(command, cwd=folder, text=True, capture_output=True, check=True).stdout.strip()


def results_of(folder, revision, machine=HOST):
    """asv's own file of a commit."""
    (path,) = (folder / ".asv" / "results").glob(f"{machine}/{commit_of(folder, revision)[:8]}-virtualenv*.json")
    return path


def lines_beside(folder, revision, machine=HOST):
    """What the passes of a commit left beside asv's results, a line per pass and case."""
    kept = folder / ".asv" / "results" / "provenance"
    paths = kept.glob(f"{machine}/{commit_of(folder, revision)[:12]}-*.jsonl")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


INSTALL = """
import pathlib, shutil, sysconfig
packages = pathlib.Path(sysconfig.get_path('purelib'))
shutil.rmtree(packages / 'nanoserve', ignore_errors=True)
shutil.copytree('{build_dir}/nanoserve', packages / 'nanoserve')
(packages / 'borrowed.pth').write_text('BORROWED')
"""


def borrow_packages(folder):
    """Let asv's environments find this interpreter's packages, and copy nanoserve there instead of making wheels.

    Found through a .pth file: a folder that one names is searched, and the .pth files in it are not obeyed, so that an
    editable nanoserve there stays out of sight.
    """
    path = folder / "asv.conf.json"
    told = json5.loads(path.read_text("utf-8"))
    install = INSTALL.replace("BORROWED", sysconfig.get_path("purelib"))
    changes = {
        "matrix": {},
        "build_command": [],
        "uninstall_command": [],
        "install_command": [f'in-dir={{env_dir}} python -c "{install}"'],
    }
    path.write_text(json.dumps(told | changes, indent=4), "utf-8")
