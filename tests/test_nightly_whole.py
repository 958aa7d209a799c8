"""A whole night on real commits: killed in the middle, gone on with, red for the right commit, and nothing done twice.

A repository of three commits of this working tree with few benchmarks: the second does not build, the third runs one
more addition in each layer of the smallest shape. It is about what a night does, not about times.
"""

import json
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from asv_repository import (
    HOST,
    LAYERS,
    ONE_MORE,
    borrow_packages,
    commit,
    commit_of,
    copy_tree,
    git,
    make_environment,
    run,
)

from benchmarks.harness.markdown import plain

CHOSEN = ["--model", "tiny", "--device", "cpu", "-k", "decode_step and 16", "--launches", "4", "--budget-s", "1"]
NIGHTLY = [sys.executable, "-m", "benchmarks", "nightly", *CHOSEN, "--pytest-args", "--samples=2 --max-warmups=1"]

pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    return make_environment(home, "") | {"TMPDIR": str(home)}  # where the lock of the machine lies


@pytest.fixture(scope="module")
def repository(tmp_path_factory, environment):
    folder = tmp_path_factory.mktemp("repository")
    copy_tree(folder)
    borrow_packages(folder)
    for path in (folder / "benchmarks").glob("bench_*.py"):
        if path.name not in ("bench_work.py", "bench_paging.py"):
            path.unlink()
    work = folder / "benchmarks" / "bench_work.py"
    work.write_text(work.read_text().replace("[16, 128]", "[16]"))
    git(folder, environment, "init", "-q", "-b", "main")
    commit(folder, environment, "base")
    project, model = folder / "pyproject.toml", folder / "nanoserve" / "models" / "llama.py"
    project.rename(folder / "kept")
    commit(folder, environment, "does not build")
    (folder / "kept").rename(project)
    source = model.read_text()
    assert LAYERS in source
    model.write_text(source.replace(LAYERS, ONE_MORE))
    commit(folder, environment, "one more | addition")
    return folder


def newest_status(repository):
    paths = sorted((repository / ".benchmarks" / "nightly" / "nights" / HOST).glob("*/status.json"))
    return paths[-1] if paths else None


def steps_of(path):
    return {step["name"]: step for step in json.loads(path.read_text())["steps"]}


def running(repository, name, night):
    """The process of a step, once it runs."""
    for _ in range(1200):
        path = newest_status(repository)
        step = steps_of(path).get(name, {}) if path else {}
        if step.get("state") == "running":
            return psutil.Process(step["process"][0])
        assert night.poll() is None, night.communicate()
        time.sleep(0.1)
    raise AssertionError(f"{name} never began")


@pytest.fixture(scope="module")
def killed(repository, environment):
    """What the first process had done when it was killed, and the process of the step that it left behind."""
    with subprocess.Popen(NIGHTLY, cwd=repository, env=environment, stdout=-1, stderr=-1, text=True) as night:
        left = running(repository, "compare", night)
        night.kill()
    assert night.returncode == -signal.SIGKILL
    return newest_status(repository), steps_of(newest_status(repository)), left


@pytest.fixture(scope="module")
def done(repository, environment, killed):
    """The same command once more."""
    return run(NIGHTLY, repository, environment)


def test_a_killed_night_is_gone_on_with(killed, done, repository):
    path, before, left = killed
    assert newest_status(repository) == path, "the same night"
    assert steps_of(path)["counts"] == before["counts"], "not done again"
    assert not left.is_running()
    assert "compare: ended what the killed night had left running" in done.stderr


def test_it_is_red_for_the_commit_that_does_more_work(done, repository):
    assert done.returncode == 1
    told = json.loads(newest_status(repository).read_text())
    head, broken, base = (commit_of(repository, name) for name in ("HEAD", "HEAD~1", "HEAD~2"))
    assert (told["verdict"], told["exit_code"], told["head"], told["base"]) == ("worse", 1, head, base)
    assert f"It was:\n\n- {head[:12]} one more | addition\n" in done.stdout
    assert re.search(rf"do not build\n\n- {broken[:12]}: .*pyproject\.toml", done.stdout)
    assert f"--accept {head[:12]}" in done.stdout
    counted = json.loads((newest_status(repository).parent / "counts.json").read_text())
    assert {row["exact"] for row in counted["rows"] if row["metric"]} == {True}, "no benchmark that takes time"
    changed = {row["metric"] for row in counted["rows"] if row["verdict"] == "worse"}
    assert "num_operators" in changed
    assert changed <= {"num_operators", "allocated_bytes", "peak_bytes"}


def test_the_folder_holds_what_it_promises(done, repository):
    results, night = repository / ".benchmarks" / "nightly", newest_status(repository).parent
    files = {path.name for path in night.iterdir() if path.is_file()}
    assert files == {
        "status.json", "summary.md", "counts.json", "counts.md", "compare.json", "compare.md", "benchmarks.json",
        "report.html", "report.csv", "report.md",
    }  # fmt: skip
    assert plain((night / "summary.md").read_text()) == done.stdout
    head, base = commit_of(repository, "HEAD"), commit_of(repository, "HEAD~2")
    stored = {path.name[:8] for path in (results / "asv" / HOST).glob("*-virtualenv*.json")}
    assert stored == {head[:8], base[:8]}
    passes = (results / "asv" / "provenance" / HOST).glob("*-*.jsonl")
    assert {path.name[:12] for path in passes} == {head[:12], base[:12]}
    published = json.loads((repository / ".benchmarks" / "nightly-site" / "asv" / "index.json").read_text())
    assert [*published["machines"]] == [HOST]
    assert set(published["revision_to_hash"].values()) >= {head, base}
    assert (repository / ".benchmarks" / "nightly-site" / "machines" / HOST / "report.html").is_file()
    git_says = subprocess.run(["git", "status", "--porcelain"], cwd=repository, capture_output=True, check=True)
    assert git_says.stdout == b"", "the checkout is left as it was"


def test_without_time_the_next_night_is_no_data_and_measures_nothing_twice(done, repository, environment):
    first = newest_status(repository)
    again = run([*NIGHTLY, "--max-hours", "0.000001"], repository, environment)
    assert again.returncode == 4
    assert newest_status(repository) != first
    ended = {name: step["state"] for name, step in steps_of(newest_status(repository)).items()}
    assert ended == {
        "counts": "out of time", "compare": "out of time", "measure": "out of time", "publish": "done",
        f"asv {commit_of(repository, 'HEAD')[:12]}": "not needed",
    }  # fmt: skip
    merging = ["--merge", ".benchmarks/nightly", "--results", "merged", "--site", ".benchmarks/fleet"]
    merged = run([sys.executable, "-m", "benchmarks", "nightly", *merging], repository, environment)
    assert merged.returncode == 4
    assert f"| {HOST} | no data |" in merged.stdout
    assert (repository / ".benchmarks" / "fleet" / "machines" / HOST / "summary.md").is_file()
    assert (repository / ".benchmarks" / "fleet" / "asv" / "index.json").is_file()
    checked = run([sys.executable, "-m", "benchmarks", "nightly", "--check"], repository, environment)
    assert checked.returncode == 0, "red, but not silent"
