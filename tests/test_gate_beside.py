"""The reference beside a session: a partner for every run, wherever the two fall out of step; and what is anchored."""

import contextlib
import dataclasses
import math

import pytest
from sample_launches import CASE, key, result
from test_gate_lockstep import SCRIPT

from benchmarks.harness.gate import lockstep
from benchmarks.harness.gate.anchoring import anchor, told_anchored, with_anchors
from benchmarks.harness.gate.beside import Beside, plain_id
from benchmarks.harness.gate.evidence import Side
from benchmarks.harness.gate.lockstep import Package, Share, Worker
from benchmarks.harness.gate.reference import Reference, load_reference
from benchmarks.harness.gate.turns import WorkerError
from benchmarks.harness.loop import Enough

RESULT = "say('end', status=0, output='', results=[], failed=[['b', '1', 'why']], skipped=[])\n"


@pytest.fixture
def beside_of(tmp_path, monkeypatch):
    """A session beside a scripted reference; `log` gets the runs of both in the order in which they happened."""
    with contextlib.ExitStack() as stack:

        def make(body, share=None, seed=1):
            script = tmp_path / "worker.py"
            script.write_text(SCRIPT + body)
            monkeypatch.setattr(lockstep.worker_script, "__file__", str(script))
            worker = stack.enter_context(contextlib.closing(Worker(Package(tmp_path / "ref", ""), tmp_path, [], 5.0)))
            return Beside(worker, lambda item: item, share or Share(), seed)

        def run(beside, item, number):
            with beside.take("a", number - 1 if number else None), (tmp_path / "log").open("a") as log:
                log.write(f"own {item} {number}\n")

        make.run = run
        make.log = lambda: [tuple(line.split()) for line in (tmp_path / "log").read_text().splitlines()]
        yield make


STEADY = f"for item in range(3):\n    for number in range(9):\n        if turn(item, number): break\n{RESULT}"


def test_every_run_has_a_partner_before_it_or_after_it(beside_of):
    beside = beside_of(STEADY)
    for item in range(3):
        beside.pytest_runtest_setup(item)
        for number in range(9):
            beside_of.run(beside, item, number)
    log = beside_of.log()
    pairs = [log[i : i + 2] for i in range(0, len(log), 2)]
    assert [{who for who, *_ in two} for two in pairs] == [{"own", "ref"}] * 27
    assert all(two[0][1:] == two[1][1:] for two in pairs)
    assert {two[0][0] for two in pairs} == {"own", "ref"}, "a coin decides who is first"


def test_cases_that_the_session_leaves_out_or_breaks_off_are_not_run_by_the_reference(beside_of):
    beside = beside_of(STEADY)
    beside.pytest_runtest_setup(0)
    for number in range(2):
        beside_of.run(beside, 0, number)
    beside.pytest_runtest_setup(2)
    for number in range(3):
        beside_of.run(beside, 2, number)
    with pytest.raises(WorkerError, match="the reference measured nothing:\nwhy"):
        beside.close()
    ran = [line[1:] for line in beside_of.log() if line[0] == "ref"]
    assert ran == [("0", "0"), ("0", "1"), ("2", "0"), ("2", "1"), ("2", "2")]


def test_a_reference_that_lacks_a_case_leaves_the_session_alone_there(beside_of):
    beside = beside_of(f"for number in range(2):\n    turn(1, number)\n{RESULT}")
    for item in (0, 1):
        beside.pytest_runtest_setup(item)
        for number in range(2):
            beside_of.run(beside, item, number)
    assert [line[:2] for line in beside_of.log()].count(("ref", "0")) == 0
    assert [line[:2] for line in beside_of.log()].count(("ref", "1")) == 2


def test_a_share_that_is_used_up_ends_the_sampling_of_both(beside_of):
    beside = beside_of(STEADY, Share(min_samples=2, max_s=0.0))
    beside.pytest_runtest_setup(0)
    for number in range(3):
        beside_of.run(beside, 0, number)
    with pytest.raises(Enough):
        beside_of.run(beside, 0, 3)
    assert len(beside_of.log()) == 6


def test_a_reference_that_dies_ends_the_pass_and_not_in_silence(beside_of):
    beside = beside_of("turn(0, 0)\nos._exit(3)\n")
    beside.pytest_runtest_setup(0)
    with contextlib.suppress(WorkerError):
        beside_of.run(beside, 0, 0)
    with pytest.raises(WorkerError, match="ended with status 3"):
        beside_of.run(beside, 0, 1)


@pytest.mark.parametrize(("seen", "plain"), [("16", "16"), (r"\xe9,-x", r"\xe9,-x"), (r"\\\\xe9", r"\xe9")])
def test_an_id_that_was_escaped_twice_is_told_as_it_was(seen, plain):
    assert plain_id(seen) == plain


# What is anchored.

REFERENCE = Reference(commit="a" * 40, source_sha256="b" * 64, generation=1, set_at="2026-01-01")


def side(itl, *, operators=592, **how):
    return result({("cached", "itl_p50_s"): itl, ("cached", "num_operators"): operators}, **how)


def key_of(case="16"):
    return key("cached", "itl_p50_s", case)


def test_the_first_pass_sets_the_nominal_cost_and_later_ones_follow_it(tmp_path):
    first = anchor(REFERENCE, tmp_path, Side(results=(side([0.010] * 3),)), [side([0.011] * 3)])
    assert first.costs == {key_of(): pytest.approx(0.011)}
    known = load_reference(tmp_path)
    slow = anchor(known, tmp_path, Side(results=(side([0.020] * 3),)), [side([0.022] * 3)])
    assert slow.costs == {key_of(): pytest.approx(0.011)}, "a host half as fast changes nothing"
    assert slow.reference == {key_of(): pytest.approx(0.020)}
    assert load_reference(tmp_path).nominal == {key_of(): 0.010}


def test_counts_stay_raw_and_the_details_say_what_was_stored(tmp_path):
    results = [side([0.022] * 3)]
    anchored = anchor(REFERENCE, tmp_path, Side(results=(side([0.020] * 3, operators=9),)), results)
    place = (CASE[0], "itl_p50_s", "cached", "16")
    count = (CASE[0], "num_operators", "cached", "16")
    told = told_anchored({"values": {place: 0.022, count: 592}, "failed": {}, "contaminated": set()}, anchored)
    assert told["values"] == {place: pytest.approx(0.022), count: 592}
    (with_details,) = with_anchors(results, anchored, REFERENCE)
    assert with_details.details["anchored"] == {
        "reference": "aaaaaaaaaaaa, generation 1",
        "costs": {"cached itl_p50_s": {"stored": pytest.approx(0.022), "reference": pytest.approx(0.020)}},
    }


def test_a_case_that_the_reference_has_not_measured_fails_and_says_what_to_do(tmp_path):
    beside = Side(results=(side([0.01] * 3),), failed={(CASE[0], "32"): "no cache 'paged'"})
    anchored = anchor(REFERENCE, tmp_path, beside, [side([0.01] * 3), side([0.01] * 3, case="32")])
    assert anchored.costs.keys() == {key_of()}
    (why,) = anchored.lacking.values()
    assert "no cache 'paged'. Choose a newer one" in why
    told = told_anchored({"values": {}, "failed": {}, "contaminated": set()}, anchored)
    assert told["failed"].keys() == {(CASE[0], "32")}


def test_a_pass_disturbed_on_either_side_is_not_used(tmp_path):
    disturbed = side([0.01] * 3, disturbed="planted")
    for both in ((disturbed, side([0.01] * 3)), (side([0.01] * 3), disturbed)):
        anchored = anchor(REFERENCE, tmp_path, Side(results=both[:1]), [both[1]])
        told = told_anchored({"values": {}, "failed": {}, "contaminated": set()}, anchored)
        assert (told["contaminated"], told["failed"]) == ({CASE}, {})
        assert math.isnan(anchored.costs.get(key_of(), math.nan))


def test_names_of_cases_are_those_of_the_pass(tmp_path):
    reference = dataclasses.replace(side([0.02] * 3), case=r"\xe9")
    anchored = anchor(REFERENCE, tmp_path, Side(results=(reference,)), [side([0.01] * 3, case=r"\\xe9")])
    assert anchored.costs.keys() == {key_of(r"\\xe9")}
