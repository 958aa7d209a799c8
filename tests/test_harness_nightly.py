"""A night is red unless everything that it promises was there: steps are scripted, time is a number, git is real."""

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from sample_nights import CPU, GPU, HOUR_S, START, Runner, asv_file, comparison, git, make_repository, write_night
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.harness.asv_process import knows_machine
from benchmarks.harness.errors import ArchiveError, InstrumentError
from benchmarks.harness.fixtures import pytest_itemcollected
from benchmarks.harness.gate.revisions import first_parents
from benchmarks.harness.gate.rules import EXIT_CODES
from benchmarks.harness.markdown import escaped, plain
from benchmarks.harness.nightly import cli, runner
from benchmarks.harness.nightly import night as night_module
from benchmarks.harness.nightly.folder import as_json, newest_finished, newest_night, nights_of
from benchmarks.harness.nightly.judging import said_of_comparison
from benchmarks.harness.nightly.locks import alone, held
from benchmarks.harness.nightly.missed import age_text, is_stale, missed_nights
from benchmarks.harness.nightly.plan import Asked, compare_command, history_environment
from benchmarks.harness.nightly.runner import Command, Ended, ProcessRunner, end_leftover, last_line
from benchmarks.harness.nightly.state import accept, claim_name, load_state
from benchmarks.harness.nightly.status import gravest

SUBJECTS = ("c0 root", "c1 a | b", "c2 two", "c3 three", "c4 four")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return make_repository(tmp_path_factory.mktemp("shared") / "repository", SUBJECTS)


@pytest.fixture(autouse=True)
def _asv_knows_the_machine(monkeypatch):
    monkeypatch.setattr(night_module, "knows_machine", lambda name: True)


@pytest.fixture
def at(shared, tmp_path):
    """A machine whose checkout stands at a commit."""

    def checkout(name):
        git(shared, "checkout", "-q", name)
        machine.c = {tag: git(shared, "rev-parse", tag) for tag in ("c0", "c1", "c2", "c3", "c4")}
        return machine

    machine = Runner(shared, tmp_path)
    yield checkout
    subprocess.run(["rm", "-rf", str(shared / ".asv")], check=True)


def steps_of(night):
    return {step["name"]: step for step in json.loads((night.folder / "status.json").read_text())["steps"]}


def asv(commit):
    return f"asv {commit[:12]}"


# One night.


def test_a_green_night_does_everything_in_the_order_of_its_worth_and_moves_the_baseline(at):
    machine = at("c2")
    night = machine.night()
    c = machine.c
    ran = ["counts", "compare", asv(c["c2"]), "measure", "report", asv(c["c1"]), "publish"]
    assert machine.script.ran == ran
    assert (night.verdict, night.exit_code, night.is_finished) == ("same", 0, True)
    assert (night.head, night.base, night.machine, night.sku) == (c["c2"], c["c1"], "m", "EPYC, 2 CPUs")
    assert night.headline == "same: so it is"
    assert newest_night(machine.places.results, "m") == night
    state = load_state(machine.places.results, "m")
    assert (state.last_good, state.last_measured, state.left) == (c["c2"], c["c2"], ())
    for commit in (c["c1"], c["c2"]):
        assert (machine.places.results / "asv" / "m" / f"{commit[:8]}-env.json").is_file()
    assert (machine.places.site / "machines" / "m" / "summary.md").read_text() == night.summary


def test_the_next_night_compares_with_the_last_good_commit_and_measures_what_came_since(at):
    at("c1").night()
    machine = at("c4")
    night = machine.night()
    c = machine.c
    assert night.base == c["c1"]
    assert [name for name in machine.script.ran if name.startswith("asv")] == [asv(c[n]) for n in ("c4", "c3", "c2")]


# What each comparison may say, and what the whole is then. Written down, not derived.
WHOLE = {
    ("same", "better"): "better",
    ("better", "same"): "better",
    ("same", "worse"): "worse",
    ("worse", "same"): "worse",
    ("worse", "no data"): "worse",
    ("no data", "same"): "no data",
    ("same", "no data"): "no data",
    ("no data", "contaminated"): "no data",
    ("same", "contaminated"): "contaminated",
    ("cannot tell", "contaminated"): "contaminated",
    ("same", "cannot tell"): "cannot tell",
    ("better", "cannot tell"): "cannot tell",
}


@pytest.mark.parametrize("pair", WHOLE, ids="-".join)
def test_the_gravest_verdict_is_that_of_the_whole(pair):
    whole = WHOLE[pair]
    assert gravest((verdict, verdict) for verdict in pair) == (whole, whole)


def test_of_nothing_there_is_no_data():
    assert gravest([])[0] == "no data"


@pytest.mark.parametrize(("counts", "compare"), [("worse", "same"), ("same", "better"), ("same", "cannot tell")])
def test_the_exit_code_is_that_of_the_gravest_and_only_a_good_night_moves_the_baseline(at, counts, compare):
    machine = at("c2")
    machine.script.said = {"counts": comparison(counts), "compare": comparison(compare)}
    night = machine.night()
    whole = WHOLE[counts, compare]
    assert (night.verdict, night.exit_code) == (whole, EXIT_CODES[whole])
    good = machine.c["c2" if whole in ("same", "better") else "c1"]
    assert load_state(machine.places.results, "m").last_good == good
    assert ("--accept" in night.summary) == (whole == "worse")


@pytest.mark.parametrize("name", ["counts", "HEAD", "measure", "report", "publish"])
def test_a_step_that_fails_is_no_data_and_is_named(at, name):
    machine = at("c2")
    step = asv(machine.c["c2"]) if name == "HEAD" else name
    machine.script.ends = {step: 2}
    night = machine.night()
    assert (night.verdict, night.exit_code) == ("no data", 4)
    assert f"{step} failed, exit status 2: {step} said this last" in night.headline
    assert steps_of(night)[step]["state"] == "failed"
    assert load_state(machine.places.results, "m").last_good == machine.c["c1"]


def test_an_older_commit_that_asv_fails_on_is_shown_and_given_up_and_head_is_tried_again(at):
    machine = at("c2")
    machine.script.ends = {asv(machine.c["c1"]): 2}
    night = machine.night()
    assert night.verdict == "same"
    assert f"| {asv(machine.c['c1'])} | failed |" in night.summary
    assert load_state(machine.places.results, "m").left == ()
    machine = at("c3")
    machine.script.ends = {asv(machine.c["c3"]): 2}
    assert machine.night().verdict == "no data"
    assert load_state(machine.places.results, "m").left == (machine.c["c3"],)
    machine = at("c4")
    machine.script.ends = {}
    machine.night()
    assert asv(machine.c["c3"]) in machine.script.ran


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (comparison("worse"), 0),
        (comparison("same"), 1),
        (comparison("same", num_gated=0), 0),
        ({"verdict": "fine", "headline": "", "rows": []}, 0),
        ({"verdict": "same"}, 0),
    ],
)
def test_a_comparison_that_does_not_fit_together_is_no_data(tmp_path, told, code):
    (tmp_path / "compare.json").write_text(json.dumps(told))
    verdict, headline = said_of_comparison(tmp_path / "compare.json", Ended(code, 1.0))
    assert verdict == "no data"
    assert headline.startswith("no data: ")


def test_a_comparison_that_left_no_file_is_no_data(at):
    machine = at("c2")
    machine.script.files = False
    night = machine.night()
    assert (night.exit_code, night.verdict) == (4, "no data")
    assert "counts.json" in night.headline


def test_a_night_in_which_asv_failed_does_not_turn_green_because_a_part_is_stored(at):
    machine = at("c2")
    machine.script.ends = {asv(machine.c["c2"]): 2}
    assert machine.night().exit_code == 4
    assert machine.night().exit_code == 4
    assert machine.script.ran.count(asv(machine.c["c2"])) == 1
    machine.script.ends = {}
    assert machine.night().exit_code == 0


def test_asv_is_told_of_a_machine_that_it_does_not_know(at, monkeypatch):
    monkeypatch.setattr(night_module, "knows_machine", lambda name: False)
    machine = at("c2")
    machine.night()
    assert machine.script.ran[:4] == ["counts", "compare", "machine", asv(machine.c["c2"])]


def test_a_checkout_that_moved_meanwhile_is_no_data(at):
    machine = at("c2")
    work = machine.script._work

    def moving(name, command):
        if name == "measure":
            git(machine.places.root, "checkout", "-q", "c3")
        return work(name, command)

    machine.script._work = moving
    night = machine.night()
    assert night.headline.startswith("no data: another commit was checked out meanwhile")
    assert load_state(machine.places.results, "m").last_good == machine.c["c1"]


# Which commits.


def test_a_commit_that_does_not_build_is_skipped_and_named_with_the_reason(at):
    at("c1").night()
    machine = at("c4")
    machine.broken = {machine.c["c3"]: "no *setup* | file"}
    night = machine.night()
    assert night.verdict == "same"
    assert asv(machine.c["c3"]) not in machine.script.ran
    assert f"- {machine.c['c3'][:12]}: no \\*setup\\* \\| file" in night.summary
    assert load_state(machine.places.results, "m").left == ()


def test_a_head_that_does_not_build_is_no_data_and_the_others_are_measured(at):
    machine = at("c2")
    machine.broken = {machine.c["c2"]: "broken"}
    night = machine.night()
    assert (night.exit_code, night.headline) == (4, "no data: HEAD does not build: broken")
    assert machine.script.ran == [asv(machine.c["c1"]), "publish"]


def test_a_first_night_compares_with_the_nearest_parent_that_builds(at):
    machine = at("c4")
    machine.broken = {machine.c["c3"]: "why", machine.c["c2"]: "why"}
    machine.script.said = {"counts": comparison("worse")}
    night = machine.night()
    assert night.base == machine.c["c1"]
    assert f"It was:\n\n- {machine.c['c4'][:12]} c4 four" in night.summary
    assert "- " + machine.c["c3"][:12] + ": why" in night.summary


def test_with_several_commits_since_the_base_all_that_build_are_named(at):
    at("c1").night()
    machine = at("c4")
    machine.broken = {machine.c["c3"]: "why"}
    machine.script.said = {"compare": comparison("worse")}
    told = machine.night().summary
    since = told[told.index("Since the base:") : told.index("To look closer")]
    assert [machine.c[n][:12] in since for n in ("c1", "c2", "c4")] == [False, True, True]


def test_a_first_commit_has_nothing_to_be_compared_with_and_is_red(at):
    machine = at("c0")
    night = machine.night()
    assert (night.exit_code, night.base) == (4, None)
    assert night.headline == "no data: there is no earlier commit that builds, nothing could be compared"
    assert "counts" not in machine.script.ran
    assert asv(machine.c["c0"]) in machine.script.ran


def test_a_last_good_commit_that_git_has_lost_is_refused_with_the_way_out(at):
    machine = at("c2")
    machine.night()
    accept(machine.places.results, "m", "f" * 40, START)
    with pytest.raises(InstrumentError, match="nightly --accept COMMIT"):
        machine.night()


def test_what_was_merged_is_one_commit_of_the_history(tmp_path):
    root = make_repository(tmp_path / "repository", ["c0 root"])
    git(root, "checkout", "-q", "-b", "side")
    git(root, "commit", "-q", "--allow-empty", "-m", "on the side")
    git(root, "checkout", "-q", "main")
    git(root, "merge", "-q", "--no-ff", "-m", "merge | it", "side")
    head = git(root, "rev-parse", "HEAD")
    assert [each.subject for each in first_parents(head, root, limit=9)] == ["merge | it", "c0 root"]
    assert first_parents(head, root, since="c0", limit=9) == ((head, "merge | it"),)
    assert first_parents(head, root, limit=1) == ((head, "merge | it"),)


def test_asvs_own_file_says_which_machines_it_knows(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not knows_machine("m")
    (tmp_path / ".asv-machine.json").write_text('{"host": {"machine": "m"}, "version": 1}')
    assert [knows_machine(name) for name in ("host", "m", "other")] == [True, True, False]


@pytest.mark.parametrize("takes", ["measure", "count_work", "tmp_path"])
def test_a_benchmark_can_be_chosen_by_what_it_does(takes):
    item = SimpleNamespace(fixturenames=["benchmark", takes], extra_keyword_matches=set())
    pytest_itemcollected(item)
    assert item.extra_keyword_matches == ({takes} if takes != "tmp_path" else set())


@pytest.mark.parametrize(
    ("said", "whole"),
    [("same", "same"), ("cannot tell", "same"), ("worse", "contaminated"), ("better", "contaminated"),
     ("contaminated", "contaminated"), ("no data", "no data")],
)  # fmt: skip
def test_no_difference_of_a_source_from_itself_can_be_the_engines(tmp_path, said, whole):
    """One that is found is the machine's, and that none is found is no red."""
    path, ended = tmp_path / "compare.json", Ended(EXIT_CODES[said], 1.0)
    path.write_text(json.dumps(comparison(said, sources=("one", "one"))))
    assert said_of_comparison(path, ended)[0] == whole
    for sources in (("one", "two"), (None, None), ("one", None)):
        path.write_text(json.dumps(comparison(said, sources=sources)))
        assert said_of_comparison(path, ended) == (said, f"{said}: so it is")


def test_where_nothing_is_new_head_against_itself_watches_the_machine(at):
    machine = at("c2")
    machine.night()
    machine.clock.now_s += 24 * HOUR_S
    machine.script.said = {"compare": comparison("worse", sources=("one", "one"))}
    night = machine.night()
    assert (night.base, night.verdict) == (night.head, "contaminated")
    assert not [name for name in machine.script.ran if name.startswith("asv")], "its place in the history is taken"
    assert "nothing is new" in night.summary


def test_a_commit_against_itself_takes_the_fewest_launches(tmp_path):
    asked = Asked(machine="m", launches=20, model="tiny", k="a and b", pytest_args="--samples=2")
    assert "--launches=4" in compare_command("x", "x", tmp_path, asked)
    command = compare_command("x", "y", tmp_path, asked)
    assert {"--launches=20", "--budget-s=60", "tiny", "a and b", "--samples=2"} <= {*command}


def test_what_the_user_has_told_asv_stays_and_ours_comes_after_it(monkeypatch):
    monkeypatch.setenv("NANOSERVE_BENCH_ARGS", "--raw")
    asked = Asked(machine="m", model="tiny", device="cpu", k="a and b", pytest_args="--samples 2")
    told = history_environment(asked)
    assert told == {"NANOSERVE_BENCH_ARGS": "--raw --model=tiny --device=cpu -k 'a and b' --samples 2"}


def test_a_red_night_is_judged_against_the_same_base_again_until_a_person_accepts(at):
    machine = at("c2")
    machine.script.said = {"compare": comparison("worse")}
    machine.night()
    machine.clock.now_s += 24 * HOUR_S
    night = machine.night()
    assert (night.base, night.verdict) == (machine.c["c1"], "worse")
    accept(machine.places.results, "m", machine.c["c2"], START)
    machine.clock.now_s += 24 * HOUR_S
    machine.script.said = {}
    night = machine.night()
    assert (night.base, night.verdict) == (machine.c["c2"], "same")


# Time.


def test_what_there_is_no_time_for_is_no_data_and_the_night_is_closed(at):
    machine = at("c2")
    machine.script.seconds = {"compare": 100 * HOUR_S}
    night = machine.night(max_hours=2)
    ended = {name: step["state"] for name, step in steps_of(night).items()}
    assert ended["counts"] == "done"
    assert ended["compare"] == ended[asv(machine.c["c2"])] == ended["measure"] == "out of time"
    assert ended["publish"] == "done"
    assert machine.script.ran == ["counts", "compare", "publish"]
    assert (night.exit_code, night.is_finished) == (4, True)
    assert "compare out of time" in night.headline
    assert machine.clock.now_s <= 2 * HOUR_S + 600


def test_commits_that_there_was_no_time_for_are_named_and_measured_the_next_night(at):
    at("c1").night()
    machine = at("c4")
    c = machine.c
    machine.script.seconds = {asv(c["c3"]): HOUR_S * 100}
    night = machine.night(max_hours=1)
    assert night.verdict == "same", "HEAD was measured: older history is no verdict on it"
    assert f"- {c['c2'][:12]}: not in asv's history yet" in night.summary
    assert load_state(machine.places.results, "m").left == (c["c3"], c["c2"])
    machine.clock.now_s += 24 * HOUR_S
    machine.script.seconds = {}
    machine.night()
    assert [name for name in machine.script.ran if name.startswith("asv")] == [asv(c["c3"]), asv(c["c2"])]
    assert load_state(machine.places.results, "m").left == ()


def test_a_night_of_the_future_is_refused_with_the_command_that_mends_it(at):
    machine = at("c2")
    night = machine.night()
    machine.clock.now_s -= 48 * HOUR_S
    with pytest.raises(InstrumentError, match=f"a clock is wrong, or was.*rm -r {night.folder}"):
        machine.night()
    assert (machine.script.ran, len(nights_of(machine.places.results, "m"))) == ([], 1)


def test_what_a_killed_night_left_running_is_ended_though_another_commit_came(at, monkeypatch):
    machine, ended = at("c2"), []
    machine.script.ends = {"compare": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        machine.night()
    monkeypatch.setattr(night_module, "end_leftover", lambda *process: ended.append(process) or True)
    machine.script.ends = {}
    at("c3").night()
    assert ended == [(1, 0.0)]
    assert "compare: ended what the killed night had left running" in machine.said


@pytest.mark.parametrize("place", [0, 2, 5])
def test_a_killed_night_goes_on_where_it_was_and_does_nothing_twice(at, place):
    machine = at("c2")
    killed = ["counts", "compare", asv(machine.c["c2"]), "measure", asv(machine.c["c1"]), "publish"][place]
    machine.script.ends = {killed: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        machine.night()
    before = machine.script.ran
    unfinished = newest_night(machine.places.results, "m")
    assert (unfinished.is_finished, unfinished.exit_code) == (False, 4)
    assert newest_finished(machine.places.results, "m") is None
    machine.script.ends = {}
    machine.clock.now_s += 10 * HOUR_S
    night = machine.night()
    assert (night.folder, night.verdict) == (unfinished.folder, "same")
    whole = [*before[:-1], *machine.script.ran]
    assert len(whole) == len(set(whole)), "nothing twice"
    assert {"counts", "compare", "measure", "report", "publish"} < set(whole)
    assert machine.script.ran[0] == killed


@pytest.mark.parametrize(("hours", "asked"), [(25, {}), (1, {"launches": 5})])
def test_a_killed_night_that_is_old_or_was_another_one_is_not_gone_on_with(at, hours, asked):
    machine = at("c2")
    machine.script.ends = {"compare": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        machine.night()
    machine.script.ends = {}
    machine.clock.now_s += hours * HOUR_S
    machine.night(**asked)
    assert machine.script.ran[0] == "counts"
    assert len(nights_of(machine.places.results, "m")) == 2


def test_a_cut_off_file_of_asv_is_removed_and_that_is_said(at):
    machine = at("c2")
    cut = machine.places.store / "m" / f"{machine.c['c2'][:8]}-env.json"
    other = machine.places.store / "other" / cut.name
    for path in (cut, other):
        path.parent.mkdir(parents=True)
        path.write_text(asv_file(machine.c["c2"])[:40])
    night = machine.night()
    assert f"removed {cut.name} of m" in night.summary
    assert json.loads(cut.read_text())["commit_hash"] == machine.c["c2"]
    assert len(other.read_text()) == 40, "another machine's is not ours to touch"


def test_numbers_of_other_options_never_share_a_history(at):
    """A trial on the smallest model would stand in the place of the real one."""
    machine = at("c2")
    machine.night(model="tiny")
    with pytest.raises(
        InstrumentError, match=r"(?s)measures with other options: --model was tiny, is not given.*--machine m-2"
    ):
        machine.night()
    assert machine.night(model="tiny", launches=5).verdict == "same"


# Nights that are missing.


@pytest.mark.parametrize(
    ("hours", "dates"),
    [(1, []), (24, []), (35, []), (48, ["2026-03-02"]), (72, ["2026-03-02", "2026-03-03"]), (0.1, [])],
)
def test_a_runner_that_was_off_has_left_nights_without_data(hours, dates):
    assert missed_nights(START, START + datetime.timedelta(hours=hours)) == dates


def test_before_a_first_night_none_is_missing():
    assert missed_nights(None, START) == []


def test_the_summary_names_missed_nights(at):
    machine = at("c2")
    machine.night()
    machine.clock.now_s += 80 * HOUR_S
    told = machine.night().summary
    assert "| no data | no night on 2026-03-02, 2026-03-03; the last one ended 2026-03-01T02:" in told


@pytest.mark.parametrize(
    ("hours", "stale", "text"), [(0, False, "0 h"), (36, False, "36 h"), (36.1, True, "36 h"), (90, True, "4 d")]
)
def test_who_is_silent(hours, stale, text):
    now = START + datetime.timedelta(hours=hours)
    assert (is_stale(START, now, 36), age_text(START, now)) == (stale, text)
    assert (is_stale(None, now, 36), age_text(None, now)) == (True, "never")


# Machines, names and locks.


def test_another_machine_under_the_same_name_is_refused_with_a_free_name(tmp_path):
    claim_name(tmp_path, "m", CPU, {})
    assert claim_name(tmp_path, "m", CPU, {}) == "EPYC, 2 CPUs"
    claim_name(tmp_path, "m-2", CPU, {})
    with pytest.raises(InstrumentError, match=r"(?s)gpu was None, is H200.*--machine m-3"):
        claim_name(tmp_path, "m", GPU, {})
    assert json.loads((tmp_path / "nights/m/machine.json").read_text())["identity"] == CPU


@pytest.mark.parametrize("name", ["", "..", "a/b", "../x", ".hidden"])
def test_a_name_that_is_no_folder_is_refused(tmp_path, name):
    with pytest.raises(InstrumentError, match="no name of a machine"):
        claim_name(tmp_path, name, CPU, {})


def test_two_nights_share_neither_a_folder_nor_a_machine(tmp_path):
    lock = tmp_path / "machine.lock"
    with alone(tmp_path / "one", lock):
        with (
            pytest.raises(InstrumentError, match="another nightly run measures on this machine"),
            alone(tmp_path / "two", lock),
        ):
            pass
        with pytest.raises(InstrumentError, match=r"another nightly run writes into .*one"), held(tmp_path / "one"):
            pass
    with alone(tmp_path / "one", lock):
        assert not (tmp_path / "one").exists(), "locks are not committed"


def test_a_machine_without_nights_is_named_with_those_that_have_some(tmp_path):
    write_night(tmp_path, "there")
    with pytest.raises(ArchiveError, match=r"no night of machine 'm'; machines there: there.*--machine m"):
        newest_night(tmp_path, "m")


NO_ZONE = as_json(
    {
        **dict.fromkeys(("machine", "sku", "head", "base", "headline"), "m"),
        "exit_code": 0,
        "schema": 1,
        "verdict": "same",
        "finished": "2026-03-01T02:00:00",
    }
)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 9, "verdict": null}', NO_ZONE])
def test_a_status_that_is_none_is_refused_by_name(tmp_path, text):
    folder = write_night(tmp_path, "m")
    (folder / "status.json").write_text(text)
    with pytest.raises(ArchiveError, match=r"status\.json"):
        newest_night(tmp_path, "m")


# Processes.


NESTED = """
import signal, subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-S", "-c", deaf])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(runner, "_GRACE_S", 0.3)


def command(text, log, limit_s=60.0):
    return Command(words=[sys.executable, "-c", text], log=log, limit_s=limit_s)


def is_gone(log):
    pid = int(log.read_text().split()[0])
    return any(not is_alive(pid) or time.sleep(0.05) for _ in range(100))


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_process_ends_with_its_status_and_its_output_is_kept(tmp_path):
    said, began = [], []
    done = ProcessRunner(tmp_path, said.append).run(
        command("print('one'); print('two', flush=True); exit(5)", tmp_path / "logs" / "a.txt"),
        lambda pid, created: began.append((pid, created)),
    )
    assert (done.returncode, done.is_out_of_time) == (5, False)
    assert last_line(tmp_path / "logs" / "a.txt") == "two"
    assert began[0][1] > 0


def test_a_process_that_is_out_of_time_is_ended_with_all_that_it_started(tmp_path, quick):
    log = tmp_path / "a.txt"
    done = ProcessRunner(tmp_path, lambda text: None).run(command(NESTED, log, 0.1), lambda *_: wait_for(log))
    assert done.is_out_of_time
    assert is_gone(log)


def wait_for(log):
    while not (log.exists() and "\n" in log.read_text()):
        time.sleep(0.02)


def test_an_interrupted_runner_leaves_no_process(tmp_path, quick):
    log = tmp_path / "a.txt"

    def began(pid, created):
        wait_for(log)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ProcessRunner(tmp_path, lambda text: None).run(command(NESTED, log), began)
    assert is_gone(log)


def test_what_a_killed_night_has_left_running_is_ended_and_nothing_else(tmp_path, quick):
    log = tmp_path / "a.txt"
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", NESTED], stdout=file, start_new_session=True)
    try:
        wait_for(log)
        created = psutil.Process(process.pid).create_time()
        assert not end_leftover(process.pid, created - 5), "another process that got the same id"
        assert process.poll() is None
        assert end_leftover(process.pid, created)
        assert process.wait(10) != 0
        assert is_gone(log)
        assert not end_leftover(process.pid, created)
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_night_as_an_interruption(number):
    before = signal.getsignal(number)

    def night():
        with cli._ended_gently():
            os.kill(os.getpid(), number)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        night()
    assert signal.getsignal(number) is before


# The command.


def invoke(*words):
    return CliRunner().invoke(app, ["nightly", *map(str, words)])


def now():
    return datetime.datetime.now(datetime.UTC)


def test_check_is_green_while_every_machine_has_a_young_night_whatever_it_said(tmp_path):
    write_night(tmp_path, "a", began=now() - datetime.timedelta(hours=20), verdict="worse")
    write_night(tmp_path, "b", began=now() - datetime.timedelta(hours=30), identity=GPU)
    done = invoke("--check", "--results", tmp_path)
    assert done.exit_code == 0, done.output
    assert "| H200 | b | same | aaaaaaaaaaaa | 29 h |" in done.output


def test_check_is_red_for_a_machine_that_is_silent_and_says_what_to_do_there(tmp_path):
    write_night(tmp_path, "a", began=now() - datetime.timedelta(hours=2))
    write_night(tmp_path, "b", began=now() - datetime.timedelta(hours=60))
    write_night(tmp_path, "b", began=now() - datetime.timedelta(hours=1), finished=False)
    done = invoke("--check", "--results", tmp_path)
    assert done.exit_code == 4
    assert "no data: silent since; it said same: of b" in done.output
    command = f"python -m benchmarks nightly --results {tmp_path} --machine b"
    assert f"b: the last night finished 59 h ago; on that machine: {command}" in done.output
    assert invoke("--check", "--results", tmp_path, "--max-age-hours", 70).exit_code == 0
    assert invoke("--check", "--results", tmp_path, "--machine", "a").exit_code == 0


def test_check_is_red_for_a_night_of_the_future_which_would_hide_every_silence(tmp_path):
    night = write_night(tmp_path, "m", began=now() + datetime.timedelta(days=900))
    done = invoke("--check", "--results", tmp_path)
    assert done.exit_code == 4
    assert f"rm -r {night}" in done.output
    write_night(tmp_path, "n", began=now() - datetime.timedelta(minutes=30))
    assert invoke("--check", "--results", tmp_path, "--machine", "n").exit_code == 0, "clocks differ a little"


def test_check_is_red_where_there_is_nothing(tmp_path):
    done = invoke("--check", "--results", tmp_path)
    assert done.exit_code == 4
    assert "to run one: python -m benchmarks nightly" in done.output
    done = invoke("--check", "--results", tmp_path, "--machine", "m")
    assert done.exit_code == 4
    assert "no night has ever finished" in done.output


def test_accept_moves_the_baseline_of_a_machine_that_had_nights(at, tmp_path, monkeypatch):
    machine = at("c2")
    monkeypatch.setattr(cli, "ROOT", machine.places.root)
    refused = invoke("--accept", "c2", "--results", tmp_path, "--machine", "m")
    assert refused.exit_code == 2
    write_night(tmp_path, "m")
    done = invoke("--accept", "c2", "--results", tmp_path, "--machine", "m")
    assert done.exit_code == 0, done.output
    state = load_state(tmp_path, "m")
    assert (state.last_good, state.last_measured) == (machine.c["c2"], "a" * 40)
    assert invoke("--accept", "nothing", "--results", tmp_path, "--machine", "m").exit_code == 2


@pytest.mark.parametrize(
    "words",
    [["--check", "--merge"], ["somewhere"], ["--merge"], ["--check", "--accept", "HEAD"], ["--launches", "3"],
     ["--max-hours", "0"], ["--budget-s", "-1"], ["--pytest-args", "'"], ["--machine", "a/b"], ["--summary", ""],
     ["--summary", "nowhere/summary.md"]],
)  # fmt: skip
def test_wrong_usage_is_refused_before_anything_is_done(tmp_path, words, monkeypatch):
    monkeypatch.setattr("benchmarks.harness.nightly.night.run_night", lambda *_: pytest.fail("it began"))
    monkeypatch.setattr("benchmarks.harness.nightly.locks.MACHINE", tmp_path / "lock")
    done = invoke("--results", tmp_path / "nightly", *words)
    assert done.exit_code == 2, done.output
    assert "error: " in done.output
    assert not (tmp_path / "nightly").exists()


def test_a_summary_is_appended(tmp_path):
    write_night(tmp_path / "r", "m", began=now())
    (tmp_path / "summary.md").write_text("before\n")
    invoke("--check", "--results", tmp_path / "r", "--summary", tmp_path / "summary.md")
    lines = (tmp_path / "summary.md").read_text().splitlines()
    assert lines[0] == "before"
    assert lines[1].startswith("| kind |")


@pytest.mark.slow
def test_what_outlives_its_step_is_ended_with_it(tmp_path):
    """The leader is gone, and what it had started computes on beside the next step."""
    child = "import time; time.sleep(60)"
    leader = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True)"
    command = Command(words=[sys.executable, "-c", leader], log=tmp_path / "log.txt", limit_s=60.0)
    assert ProcessRunner(tmp_path, print).run(command, lambda pid, created: None).returncode == 0
    pid = int((tmp_path / "log.txt").read_text().splitlines()[0])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("text", ["a | b_c [d] `e` ~f~ #1 @g *h*", "2 < 3 & 4 > 1"])
def test_what_is_escaped_for_markdown_is_itself_again_on_a_terminal(text):
    assert escaped(text) != text
    assert plain(escaped(text)) == text


def test_a_device_that_is_not_there_is_refused_before_anything_is_measured(tmp_path):
    done = invoke("--results", tmp_path / "results", "--machine", "m", "--device", "tpu")
    assert done.exit_code == 2
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("listed", ['["a", "b"]', "a,b", "a b"])
def test_a_machine_that_is_expected_and_never_had_a_night_is_red(tmp_path, listed):
    write_night(tmp_path, "a", began=now() - datetime.timedelta(hours=2))
    assert invoke("--check", "--results", tmp_path).exit_code == 0
    done = invoke("--check", "--results", tmp_path, "--expected", listed)
    assert done.exit_code == 4
    assert "b: no night has ever finished" in done.output
