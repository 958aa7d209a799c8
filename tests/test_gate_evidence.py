"""Evidence: whatever two builds left behind is a pair, a count, a named gap, or new; nothing gets lost in between."""

import dataclasses
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_launches import CASE, ITL, key, launches, result, side
from sample_results import BENCHMARK

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.gate.evidence import Counts, Launch, Pairs, Side, name_of_case
from benchmarks.harness.gate.sorting import collect
from benchmarks.harness.metrics import METRICS, metric

TIMED = [each for each in METRICS.values() if each.has_ratio and not each.is_exact]


def filled(evidence):
    """Which kinds of findings there are."""
    kinds = ("pairs", "set_aside", "counts", "gaps", "new", "skipped", "contaminated")
    return {kind for kind in kinds if getattr(evidence, kind)}


@pytest.mark.parametrize(
    ("base", "head", "what"),
    [
        ((), (), "one at least, not 0 of base and 0 of head"),
        ((1.0,), (1.0, 2.0), "not 1 of base and 2 of head"),
        ((1.0, math.nan), (1.0, 1.0), "base sample 1 is nan"),
        ((1.0,), (math.inf,), "head sample 0 is inf"),
        ((0.0,), (1.0,), "base sample 0 is 0.0"),
        ((1.0,), (-1.0,), "head sample 0 is -1.0"),
    ],
)
def test_pairs_that_have_no_ratio_are_refused(base, head, what):
    with pytest.raises(InstrumentError, match=what):
        Pairs(base=base, head=head)


@pytest.mark.parametrize("of", TIMED, ids=lambda each: each.name)
@given(values=st.tuples(st.floats(1e-6, 0.9), st.floats(1e-6, 0.9)))
def test_a_log_above_zero_means_that_head_is_worse_in_every_metric(of, values):
    low, high = sorted(values)
    good, bad = (low, high) if of.better == "lower" else (high, low)
    (log,) = Pairs(base=(good,), head=(bad,)).logs(of)
    (back,) = Pairs(base=(bad,), head=(good,)).logs(of)
    assert log >= 0
    assert back == -log
    assert of.is_worse(good, bad) <= (log > 0)


def test_logs_are_those_of_costs():
    pairs = Pairs(base=(10.0, 4.0), head=(9.5, 4.0))
    assert pairs.logs(metric("decode_tokens_per_s")) == (pytest.approx(math.log(10 / 9.5)), 0.0)
    assert pairs.logs(metric("itl_p50_s")) == (pytest.approx(math.log(0.95)), 0.0)
    with pytest.raises(InstrumentError, match="hit_rate has a sample whose cost is zero"):
        Pairs(base=(0.5,), head=(1.0,)).logs(metric("hit_rate"))


def test_pairs_and_counts_are_sorted_by_quantity_and_launch():
    counts = {("cached", "num_operators"): (592, 593)}
    ratios = {ITL: 1.0, ("cached over naive", "speedup"): 1.0}
    found = collect(launches(3, ratios, counts=counts, num_pairs=6))
    assert found.keys == (key(*ITL), key("", "speedup"), key("cached", "num_operators"))
    assert found.num_launches == 3
    assert [len(each.base) for each in found.pairs_of(key(*ITL))] == [6, 6, 6]
    assert len({each.base for each in found.pairs_of(key(*ITL))}) == 3
    assert found.counts == {key("cached", "num_operators"): Counts(base=592, head=593, num_launches=3)}
    assert filled(found) == {"pairs", "counts"}
    assert found.pairs_of(key("naive", "ttft_s")) == ()
    assert [told["model"] for told in found.provenance] == ["tiny", "tiny"]


def test_of_nothing_there_is_no_evidence():
    found = collect([])
    assert (found.keys, found.gaps, found.num_launches, found.provenance) == ((), {}, 0, ({}, {}))


FINE = {ITL: [1.0, 1.1]}
TWO = {ITL: [1.0, 1.1], ("cached", "ttft_s"): [5.0, 5.0]}


def one_odd(base, head, num=3):
    """Launches of which the last one is odd."""
    return [*(Launch(base=side(FINE), head=side(FINE)) for _ in range(num - 1)), Launch(base=base, head=head)]


@pytest.mark.parametrize(
    ("found", "at", "why"),
    [
        (one_odd(side(FINE), side(failed={CASE: "KeyError: 3"})), CASE, "head failed in launch 3: KeyError: 3"),
        (one_odd(side(FINE), side(FINE, failed={CASE: "after"})), CASE, "head failed in launch 3: after"),
        (one_odd(side(failed={CASE: "x"}), side(FINE)), CASE, "base failed in launch 3: x"),
        (one_odd(side(failed={CASE: "x"}), side(failed={CASE: "y"})), CASE, "base failed in launch 3: x"),
        (one_odd(side(FINE), side()), CASE, "head did not measure it in launch 3, and measured it in others"),
        (one_odd(side(), side(FINE)), CASE, "base did not measure it in launch 3, and measured it in others"),
        (one_odd(side(FINE), side(skipped={CASE: "no"})), CASE, "head skipped it: no in launch 3, and measured"),
        (one_odd(side(skipped={CASE: "a"}), side(skipped={CASE: "a"})), CASE, "base skipped it: a in launch 3, and"),
        (one_odd(side(FINE), side(skipped={CASE: "no"}), 1), CASE, "head skipped it: no"),
        (one_odd(side(FINE), side(), 1), CASE, "head did not measure it"),
        (one_odd(side(FINE), side({ITL: None})), key(*ITL), "it is undefined on head in launch 3"),
        (one_odd(side({ITL: None}), side(FINE)), key(*ITL), "it is undefined on base in launch 3"),
        (one_odd(side({ITL: None}), side({ITL: None}), 1), key(*ITL), "it is undefined on base in launch 1"),
        (one_odd(side(FINE), side({ITL: [1.0]})), key(*ITL), "base has 2 samples and head 1 in launch 3"),
        (one_odd(side(FINE), side({ITL: [1.0, 0.0]})), key(*ITL), "head sample 1 is 0.0; .* .launch 3"),
        (one_odd(side(TWO), side(FINE), 1), key("cached", "ttft_s"), "head did not measure it in launch 1"),
        (one_odd(side(TWO), side(TWO)), key("cached", "ttft_s"), "base did not measure it in launch 1"),
        (
            [Launch(base=side({("", "flops"): 9}), head=side({("", "flops"): n})) for n in (9, 10, 9)],
            key("", "flops"),
            "the count varies on head: 9, 10",
        ),
        (
            [Launch(base=side({("", "flops"): n}), head=side({("", "flops"): 9})) for n in (9, 8)],
            key("", "flops"),
            "the count varies on base: 9, 8",
        ),
        (
            [Launch(base=side({("", "flops"): 9}), head=side({("", "flops"): None}))],
            key("", "flops"),
            "undefined on head",
        ),
    ],
)
def test_what_cannot_be_compared_is_a_gap_with_a_reason(found, at, why):
    evidence = collect(found)
    assert list(evidence.gaps) == [at]
    assert re.search(why, evidence.gaps[at]), evidence.gaps[at]
    assert at not in evidence.keys
    assert filled(evidence) <= {"gaps", "pairs"}


@pytest.mark.parametrize(
    ("base", "why"),
    [
        (side(skipped={CASE: "this commit has no prefix cache"}), "base skipped it: this commit has no prefix cache"),
        (side(), "base did not measure it"),
    ],
)
def test_what_only_head_has_is_new(base, why):
    found = collect([Launch(base=base, head=side(FINE))] * 2)
    assert found.new == {CASE: why}
    assert filled(found) == {"new"}


def test_a_quantity_that_only_head_measures_is_new():
    found = collect([Launch(base=side(FINE), head=side(TWO))] * 2)
    assert found.new == {key("cached", "ttft_s"): "base did not measure it"}
    assert found.keys == (key(*ITL),)


def test_what_neither_side_measures_is_skipped():
    found = collect([Launch(base=side(skipped={CASE: "no GPU"}), head=side(skipped={CASE: "no GPU"}))] * 2)
    assert found.skipped == {CASE: "no GPU"}
    assert filled(found) == {"skipped"}


def test_a_case_that_both_sides_leave_out_of_a_launch_was_not_asked_for():
    clear = Side(results=(result(FINE), result(FINE, case="64")))
    found = collect([Launch(base=clear, head=clear), *[Launch(base=side(FINE), head=side(FINE))] * 2])
    assert found.gaps == {}
    assert [len(found.pairs_of(key(*ITL, case=case))) for case in ("16", "64")] == [3, 1]


def test_disturbed_launches_are_set_aside_and_named():
    quiet, loud = side(FINE), side({ITL: [7.0, 7.0]}, disturbed="a process took 90 % of a CPU")
    counted = {**FINE, ("", "flops"): 9}
    found = collect([Launch(base=quiet, head=quiet), Launch(base=quiet, head=loud), Launch(base=loud, head=quiet)])
    assert [each.head for each in found.pairs_of(key(*ITL))] == [(1.0, 1.1)]
    assert [each.head for each in found.set_aside[key(*ITL)]] == [(7.0, 7.0), (1.0, 1.1)]
    assert found.contaminated == {
        CASE: {2: "head: a process took 90 % of a CPU", 3: "base: a process took 90 % of a CPU"}
    }
    loud = side(counted, disturbed="x")
    found = collect([Launch(base=loud, head=loud)] * 2)
    assert found.pairs_of(key(*ITL)) == ()
    assert key(*ITL) in found.keys
    assert found.counts[key("", "flops")].num_launches == 2  # a load changes no count


def test_the_control_of_a_launch_is_its_median_on_each_side():
    both = side(FINE, control_s=[1.0, 9.0, 2.0]), side(FINE, control_s=[4.0, 2.0])
    none = side(FINE), side(FINE, control_s=[4.0])
    found = collect([Launch(base=base, head=head) for base, head in (both, none)])
    assert found.control == {CASE: (Pairs(base=(2.0,), head=(3.0,)),)}


@pytest.mark.parametrize("name", ["instrument_version", "model", "dtype", "device", "device_name", "cpu"])
def test_results_of_different_setups_are_not_compared(name):
    other = side(FINE, **{name: "other"})
    with pytest.raises(InstrumentError, match=f"different {name}: .* and other"):
        collect([Launch(base=side(FINE), head=other)])
    collect([Launch(base=other, head=other)])


def test_one_launch_measures_a_case_once():
    with pytest.raises(InstrumentError, match=r"measured twice: .*test_growth\[16\]"):
        Side(results=(result(FINE), result(FINE)))


def test_evidence_is_frozen_and_cases_are_named_as_pytest_does():
    assert name_of_case(CASE) == f"{BENCHMARK}[16]"
    assert name_of_case((BENCHMARK, "")) == BENCHMARK
    with pytest.raises(dataclasses.FrozenInstanceError):
        collect([]).num_launches = 1
