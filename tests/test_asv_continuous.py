"""The whole way, on real commits: `asv continuous` sees a slowdown of a decode step, and nothing in a comment.

Builds a repository of three commits from this working tree, lets asv build its environment, and runs asv as a person
would. Takes minutes, so it runs with `pytest -m slow`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = "        for layer in self.layers:\n"
SLOWER = f"""{LAYERS}\
            if hidden.shape[0] == 1 and layer.self_attn.layer < 3:
                layer(hidden, rope, cache)
"""
"""In decode steps only, 3 of the 20 layers run twice: 15 % more real work, the same tokens."""

ARGUMENTS = "--model small --device cpu --samples 6 -k 'prompt_length and (16 or 64)'"

pytestmark = pytest.mark.slow


def run(command, folder, environment, check=True):
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)
    sys.stdout.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}")
    if check:
        assert done.returncode == 0
    return done


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A home of its own, so that asv's machine file is not the user's; caches and pip's settings stay the user's."""
    home, user = tmp_path_factory.mktemp("home"), Path.home()
    kept = {
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(user / ".cache")),
        "XDG_CONFIG_HOME": os.environ.get("XDG_CONFIG_HOME", str(user / ".config")),
    }
    identity = {f"GIT_{who}_{what}": "test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # One thread: on two shared cores, two threads wait for each other whenever anything else runs.
    settings = {"HOME": str(home), "PATH": path, "NANOSERVE_BENCH_ARGS": ARGUMENTS, "OMP_NUM_THREADS": "1"}
    return os.environ | kept | identity | settings


@pytest.fixture(scope="module")
def repository(tmp_path_factory, environment):
    """main, and two branches off it: `slower` with the planted slowdown, `comment` with nothing but a comment."""
    folder = tmp_path_factory.mktemp("repository")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    run(["git", "init", "-q", "-b", "main"], folder, environment)
    commit(folder, environment, "base")
    model = folder / "nanoserve" / "models" / "llama.py"
    source = model.read_text()
    assert LAYERS in source
    for branch, changed in (("slower", source.replace(LAYERS, SLOWER)), ("comment", f"{source}# a comment\n")):
        run(["git", "checkout", "-q", "-b", branch, "main"], folder, environment)
        model.write_text(changed)
        commit(folder, environment, branch)
    run([sys.executable, "-m", "asv", "machine", "--yes"], folder, environment)
    return folder


def commit(folder, environment, message):
    run(["git", "add", "-A"], folder, environment)
    run(["git", "commit", "-q", "-m", message], folder, environment)


def continuous(folder, environment, branch):
    run(["git", "checkout", "-q", branch], folder, environment)
    return run([sys.executable, "-m", "asv", "continuous", "main", "HEAD"], folder, environment, check=False)


def flagged(output):
    """The metrics in asv's table of what became slower (its lines begin with a plus)."""
    return re.findall(r"^\| \+ .*track_(\w+)\(", output, flags=re.MULTILINE)


def test_a_slower_decode_step_is_flagged_in_itl_and_not_in_ttft(repository, environment):
    done = continuous(repository, environment, "slower")
    assert done.returncode == 1
    assert "itl_p50_s" in flagged(done.stdout)
    assert "ttft_s" not in flagged(done.stdout)


def test_a_comment_is_not_flagged(repository, environment):
    done = continuous(repository, environment, "comment")
    assert done.returncode == 0
    assert flagged(done.stdout) == []
    assert "BENCHMARKS NOT SIGNIFICANTLY CHANGED" in done.stdout


def test_every_round_was_a_process_of_its_own(repository, environment):
    """8 samples a side, no two alike: none of them was read twice from one pass."""
    results = [json.loads(path.read_text()) for path in (repository / ".asv" / "results").glob("*/*-virtualenv*.json")]
    assert len(results) == 3
    for result in results:
        columns = result["result_columns"]
        for row in result["results"].values():
            for samples in dict(zip(columns, row, strict=False)).get("samples") or []:
                assert len(samples) == len(set(samples)) == 8


def test_the_checkouts_package_is_refused(repository, environment):
    """With the checkout's own nanoserve first on the path, nothing is measured and the reason is told."""
    shadowed = environment | {"ASV_PYTHONPATH": str(repository)}
    command = [sys.executable, "-m", "asv", "run", "HEAD^!", "--quick", "--show-stderr", "--set-commit-hash", "HEAD"]
    done = run([*command[:-2], "--launch-method", "spawn"], repository, shadowed, check=False)
    assert "which is not the package installed in" in done.stdout + done.stderr
    assert done.returncode != 0
