"""Two workers take turns: in pairs, in random order, alone where the other is elsewhere, and to the end if one dies."""

import os
import time

import psutil
import pytest

from benchmarks.harness.gate import lockstep
from benchmarks.harness.gate.lockstep import Package, Share, launch_alone, launch_pair

SCRIPT = """
import json, os, sys, time
from multiprocessing.connection import Connection
root, folder, sha, fd, *arguments = sys.argv[1:]
link = Connection(int(fd))
name = os.path.basename(folder)
log = open(os.path.join(root, "log"), "a", buffering=1)

def say(kind, **fields):
    link.send_bytes(json.dumps({"kind": kind, **fields}).encode())

def turn(item, number):
    say("turn", item=item, turn=number, name=f"case {item}", arm="a",
        sample=number - 1 if number else None, may_stop=number > 0)
    told = json.loads(link.recv_bytes())["kind"]
    if told == "enough":
        return True
    assert told == "go"
    print(name, item, number, file=log)
    say("done")

def end(**fields):
    say("end", **{"status": 0, "output": "", "results": [], "failed": [], "skipped": [["b", "1", "why"]], **fields})

"""
STEADY = "for item in (0, 1):\n    for number in range(4):\n        turn(item, number)\nend()\n"


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Run a pair of scripted workers; each script sees turn, end, say, name, arguments."""

    def run(base=STEADY, head=None, **options):
        script = tmp_path / "worker.py"
        body = "".join(f"    {line}\n" for line in base.splitlines())
        other = "".join(f"    {line}\n" for line in (head or base).splitlines())
        script.write_text(f"{SCRIPT}if name == 'base':\n{body}else:\n{other}")
        monkeypatch.setattr(lockstep.worker_script, "__file__", str(script))
        packages = [Package(tmp_path / side, "") for side in ("base", "head")]
        return launch_pair(*packages, tmp_path, ["-x"], **{"seed": 1, **options})

    run.log = lambda: [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    return run


def test_each_turn_is_taken_by_both_before_the_next(pair):
    led = pair()
    log = pair.log()
    pairs = [log[i : i + 2] for i in range(0, len(log), 2)]
    assert [sorted(side for side, *_ in two) for two in pairs] == [["base", "head"]] * 8
    assert [two[0][1:] for two in pairs] == [two[1][1:] for two in pairs]
    assert [two[0][1:] for two in pairs] == [[str(i), str(n)] for i in (0, 1) for n in range(4)]
    assert set(led.spent_s) == {"case 0", "case 1"}


def test_who_goes_first_is_drawn_and_the_same_seed_draws_the_same(pair, tmp_path):
    orders = []
    for seed in (1, 1, 2):
        pair(seed=seed)
        orders.append([side for side, *_ in pair.log()][::2])
        (tmp_path / "log").unlink()
    assert orders[0] == orders[1] != orders[2]
    assert set(orders[0]) == {"base", "head"}


def test_who_is_behind_goes_alone_until_both_are_at_the_same_place(pair):
    pair(head="turn(0, 0)\nfor number in range(4):\n    turn(1, number)\nend()\n")
    alone = [line for line in pair.log() if line[1] == "0" and line[2] != "0"]
    assert alone == [["base", "0", str(n)] for n in (1, 2, 3)]
    assert pair.log().index(["base", "0", "3"]) < min(pair.log().index([side, "1", "0"]) for side in ("base", "head"))


def test_arguments_for_head_are_given_to_head_alone(pair):
    tell = "say('end', status=0, output='', results=[], failed=[], skipped=[['b', '1', ' '.join(arguments)]])\n"
    led = pair(tell, head_arguments=["--planted-slowdown=3"])
    assert led.launch.base.skipped == {("b", "1"): "-x"}
    assert led.launch.head.skipped == {("b", "1"): "-x --planted-slowdown=3"}


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("print('a last word'); sys.stdout.flush(); os._exit(7)", "ended with status 7\na last word"),
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("link.send_bytes(b'no JSON')", "no message of a worker: b'no JSON'"),
        ("say('end', status=4, output='usage: no such option', results=[], failed=[], skipped=[])", "no such option"),
    ],
    ids=["exit", "kill", "garbage", "usage"],
)
@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_worker_that_breaks_off_takes_only_its_own_results_along(pair, end, told, when):
    led = pair(head=f"{'turn(0, 0)' if when == 'later' else ''}\n{end}\n")
    ((case, why),) = led.launch.head.failed.items()
    assert case == ("", "")
    assert told in why
    assert led.launch.base.skipped == {("b", "1"): "why"}
    assert sum(side == "base" for side, *_ in pair.log()) == 8


def test_a_worker_that_says_nothing_is_not_waited_for_for_ever(pair):
    led = pair(head="turn(0, 0)\ntime.sleep(600)\n", patience_s=1.0)
    assert "said nothing for" in led.launch.head.failed["", ""]
    assert led.launch.base.skipped
    assert children() == []


def children():
    return [process for process in psutil.Process().children(recursive=True) if "worker.py" in str(process.cmdline())]


def test_an_interrupted_leader_leaves_no_worker(pair):
    def interrupt(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair(say=interrupt)
    assert children() == []


def test_nothing_on_the_path_reaches_a_worker(pair, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.curdir)
    tell = "end(skipped=[['b', '1', os.environ.get('PYTHONPATH', 'none')]])\n"
    assert pair(tell).launch.base.skipped == {("b", "1"): "none"}


def test_a_case_that_has_had_its_share_is_told_that_it_is_enough(pair):
    """Both sides at once, after the samples that every launch takes; the other case goes on."""
    until = "for item in (0, 1):\n    for number in range(9):\n        if turn(item, number): break\n{}end()\n"
    led = pair(until.format("        time.sleep(0.01 if item else 0)\n"), share=Share(min_samples=3, max_s=0.0))
    assert [line for line in pair.log() if line[0] == "base"] == [["base", i, str(n)] for i in "01" for n in range(4)]
    assert sorted(pair.log()) == sorted([side, i, str(n)] for side in ("base", "head") for i in "01" for n in range(4))
    assert led.launch.head.skipped


def test_the_seconds_of_a_test_are_those_of_its_turns(pair):
    work = "turn(0, 0)\nturn(0, 1)\ntime.sleep(0.3)\nturn(1, 0)\nend()\n"
    start_s = time.monotonic()
    led = pair(work)
    assert set(led.spent_s) == {"case 0"}, "a warm-up is no measuring"
    assert 0 < sum(led.spent_s.values()) < time.monotonic() - start_s - 0.3


def test_a_worker_alone_needs_no_partner(pair, tmp_path):
    pair()  # writes the script
    side, spent_s = launch_alone(Package(tmp_path / "base", ""), tmp_path, ["-x"])
    assert side.skipped == {("b", "1"): "why"}
    assert set(spent_s) == {"case 0", "case 1"}
    assert len(pair.log()) == 16 + 8
