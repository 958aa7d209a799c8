"""The zero-tolerance gate: one more of anything is red, and so is whatever cannot be compared."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.exact import NOTHING, Change, exact_changes, format_changes, histogram_changes, is_red

COUNTS = st.dictionaries(st.text(max_size=3), st.integers(0, 10**30), min_size=1)


def verdicts(base, head, better="lower"):
    return {change.key: change.verdict for change in exact_changes(base, head, better)}


@pytest.mark.parametrize(
    ("base", "head", "better", "verdict"),
    [
        (149, 149, "lower", None),
        (149, 150, "lower", "worse"),
        (149, 148, "lower", "better"),
        (149, 150, "higher", "better"),
        (149, 148, "higher", "worse"),
        (0, 0, "lower", None),
        (0, 1, "lower", "worse"),
        (10**17, 10**17 + 1, "lower", "worse"),  # the same number, as floats
        pytest.param(10**400, 10**400, "lower", None, id="more than a float holds"),
        (0.5, math.nextafter(0.5, 1), "lower", "worse"),
        (3, 3.0, "lower", None),
    ],
)
def test_verdict(base, head, better, verdict):
    assert verdicts({"n": base}, {"n": head}, better) == ({} if verdict is None else {"n": verdict})


@pytest.mark.parametrize("nothing", [None, math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_no_data_on_either_side_and_on_both(nothing):
    for base, head in [(nothing, 1), (1, nothing), (nothing, nothing)]:
        (change,) = exact_changes({"n": base, "m": 1}, {"n": head, "m": 1})
        assert (change.key, change.verdict, change.difference) == ("n", "no data", None)
        assert is_red([change])


def test_a_missing_key_is_no_data():
    assert verdicts({"gone": 1, "kept": 1}, {"kept": 1, "new": 0}) == {"gone": "no data", "new": "no data"}


def test_nothing_compared_is_red():
    changes = exact_changes({}, {})
    assert [(change.key, change.verdict) for change in changes] == [(NOTHING, "no data")]
    assert is_red(changes)
    assert format_changes(changes) == "no data: nothing was compared"


def test_each_key_has_its_own_direction():
    better = {("hits", "warm"): "higher", "flops": "lower"}
    assert verdicts({("hits", "warm"): 3, "flops": 3}, {("hits", "warm"): 2, "flops": 2}, better) == {
        ("hits", "warm"): "worse",
        "flops": "better",
    }


@pytest.mark.parametrize("better", [{}, {"flops": "Lower"}, "less", {"flops": None}])
def test_a_key_without_a_direction_is_refused_even_if_it_did_not_change(better):
    with pytest.raises(InstrumentError, match=r"flops has the direction .*; choose from: lower, higher"):
        exact_changes({"flops": 1}, {"flops": 1}, better)


@given(counts=COUNTS)
def test_the_same_counts_are_green(counts):
    assert exact_changes(counts, dict(reversed(counts.items()))) == []
    assert not is_red([])


@given(counts=COUNTS, data=st.data())
def test_one_more_of_anything_is_red_and_one_less_is_not(counts, data):
    key = data.draw(st.sampled_from(sorted(counts)))
    changes = exact_changes(counts, counts | {key: counts[key] + 1})
    assert [(change.key, change.difference, change.verdict) for change in changes] == [(key, 1, "worse")]
    assert is_red(changes)
    assert not is_red(exact_changes(counts | {key: counts[key] + 1}, counts))


def test_a_better_count_does_not_outweigh_a_worse_one():
    assert is_red(exact_changes({"flops": 1000, "ops": 1}, {"flops": 1, "ops": 2}))


def test_changes_are_told_in_sentences_the_red_ones_first():
    changes = exact_changes(
        {"flops": 200, "ops": 1149, ("peak", "KB"): 0, "gone": 1}, {"flops": 100, "ops": 1151, ("peak", "KB"): 8}
    )
    assert format_changes(changes).splitlines() == [
        "worse: ops 1,149 -> 1,151 (+2, +0.17%), lower is better",
        "worse: peak KB 0 -> 8 (+8), lower is better",
        "no data: gone 1 -> unknown, lower is better",
        "better: flops 200 -> 100 (-100, -50.00%), lower is better",
    ]
    assert format_changes([]) == "every count is the same"


def test_an_operator_that_one_side_never_ran_counts_nothing_there():
    assert histogram_changes({"mm": 4, "add": 1, "cat": 2}, {"mm": 4, "add": 3, "mul": 1}) == [
        Change(key="add", base=1, head=3, better="lower", verdict="worse"),
        Change(key="cat", base=2, head=0, better="lower", verdict="better"),
        Change(key="mul", base=0, head=1, better="lower", verdict="worse"),
    ]
    assert histogram_changes({}, {}) == []
