"""The reference: what it anchors, that it never changes silently, and that a damaged file says so."""

import json
import math

import pytest

from benchmarks.harness.errors import ArchiveError, InstrumentError
from benchmarks.harness.gate.evidence import Evidence, Key, Pairs
from benchmarks.harness.gate.reference import (
    Reference,
    anchored_costs,
    costs_of_base,
    file_of,
    load_reference,
    save_reference,
    successor,
)

ITL = Key("benchmarks/bench_a.py::test_é", "8-é,b", "cached", "itl_p50_s")
SPEEDUP = Key("benchmarks/bench_a.py::test_a", "", "", "speedup")
REFERENCE = Reference(
    commit="a" * 40, source_sha256="b" * 64, generation=3, set_at="2026-01-01T00:00:00+00:00",
    nominal={ITL: 0.010, SPEEDUP: 0.5},
)  # fmt: skip


def evidence_of(key, base, head):
    return Evidence(num_launches=1, pairs={key: (Pairs(base=tuple(base), head=tuple(head)),)})


@pytest.mark.parametrize("state", [1.0, 2.0, 0.5])
def test_the_state_of_the_host_cancels(state):
    """Base is the reference: whether the machine is fast or slow, 10 % more than it is 10 % more than nominal."""
    base = [state * each for each in (0.010, 0.011, 0.030)]
    found = anchored_costs(evidence_of(ITL, base, [1.1 * each for each in base]), REFERENCE)
    assert found == {ITL: pytest.approx(0.011)}


def test_one_burst_in_one_of_the_pairs_moves_little():
    found = anchored_costs(evidence_of(ITL, [0.01] * 5, [0.01, 0.01, 0.01, 0.01, 0.09]), REFERENCE)
    assert found[ITL] == pytest.approx(0.010)


def test_what_is_better_when_higher_is_anchored_as_a_cost():
    """A speedup of 2 is a cost of 0.5; half the reference's speedup is twice the cost."""
    assert anchored_costs(evidence_of(SPEEDUP, [4.0] * 3, [2.0] * 3), REFERENCE) == {SPEEDUP: pytest.approx(1.0)}


def test_a_nominal_cost_is_the_median_over_launches_of_medians():
    launches = tuple(Pairs(base=(x, x, 9.0), head=(1.0, 1.0, 1.0)) for x in (0.1, 0.2, 0.4))
    assert costs_of_base(Evidence(num_launches=3, pairs={ITL: launches, SPEEDUP: ()})) == {ITL: 0.2}


def test_a_nominal_cost_is_set_once():
    again = REFERENCE.with_nominal({ITL: 99.0, SPEEDUP._replace(case="new"): 7.0})
    assert again.nominal == {**REFERENCE.nominal, SPEEDUP._replace(case="new"): 7.0}


def test_an_unknown_nominal_cost_is_no_number():
    with pytest.raises(InstrumentError, match=r"no nominal cost is known of Key\(.*reference set"):
        anchored_costs(evidence_of(ITL._replace(case="other"), [1.0], [1.0]), REFERENCE)


def test_another_source_is_another_generation_without_costs_and_the_same_is_the_same():
    assert successor(REFERENCE, "c" * 40, REFERENCE.source_sha256) is REFERENCE
    changed = successor(REFERENCE, "c" * 40, "d" * 64)
    assert (changed.commit, changed.generation, changed.nominal) == ("c" * 40, 4, {})
    assert successor(None, "c" * 40, "d" * 64).generation == 1


def test_it_comes_back_from_its_file_as_it_was(tmp_path):
    assert load_reference(tmp_path) is None
    save_reference(tmp_path, REFERENCE)
    assert load_reference(tmp_path) == REFERENCE
    assert [path.name for path in file_of(tmp_path).parent.iterdir()] == ["reference.json"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"schema": 1', '"schema": 2'),
        lambda text: text.replace("0.01", "NaN"),
        lambda text: text.replace("0.01", "-1"),
        lambda text: text.replace('"commit"', '"comit"'),
        lambda text: json.dumps({**json.loads(text), "nominal": [["a", 1.0]]}),
    ],
)
def test_a_damaged_file_is_named_with_what_to_run(tmp_path, spoil):
    save_reference(tmp_path, REFERENCE)
    path = file_of(tmp_path)
    path.write_text(spoil(path.read_text()))
    with pytest.raises(ArchiveError, match=r"reference.json is no reference .* set one anew: python -m benchmarks"):
        load_reference(tmp_path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    save_reference(tmp_path, REFERENCE)
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_reference(tmp_path, REFERENCE.with_nominal({SPEEDUP._replace(case="x"): math.nan}))
    assert load_reference(tmp_path) == REFERENCE
