"""The verdict, case by case: what is worse, what is not, and what nobody may call good for want of evidence."""

import collections
import dataclasses
import itertools
import math

import pytest
from sample_launches import CASE, ITL, USUAL_S, key, launches, noisy, result, side

from benchmarks.harness.declaration import Metric
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.gate.evidence import Evidence, Launch, Pairs, Side
from benchmarks.harness.gate.sorting import collect
from benchmarks.harness.gate.verdict import EXIT_CODES, Rules, judge
from benchmarks.harness.metrics import METRICS, metric
from benchmarks.harness.stats import wilson_interval

RULES = Rules(margin=0.02)
RATE, TTFT, E2E = ("cached", "decode_tokens_per_s"), ("cached", "ttft_s"), ("cached", "e2e_s")
OPERATORS = ("cached", "num_operators")
SPEEDUP = ("cached over naive", "speedup")


def verdicts(found, rules=RULES):
    judgement = judge(collect(found), rules)
    return judgement, {tuple(row.key[2:]): row.verdict for row in judgement.rows}


# Times.


@pytest.mark.parametrize(
    ("name", "ratio", "usual", "expected"),
    [
        (ITL, 1.0, USUAL_S, "same"),
        (ITL, 1.05, USUAL_S, "worse"),
        (ITL, 0.95, USUAL_S, "better"),
        (ITL, 10.0, USUAL_S, "worse"),
        (ITL, 0.1, USUAL_S, "better"),
        (TTFT, 1.05, 0.016, "worse"),
        (SPEEDUP, 0.95, 3.0, "worse"),
        (SPEEDUP, 1.05, 3.0, "better"),
        (SPEEDUP, 1.0, 3.0, "same"),
        (ITL, 1.1, 1.0e-6, "same"),  # 0.1 us, below the absolute floor of 5 us
        (ITL, 1.1, 45e-6, "same"),
        (ITL, 1.1, 60e-6, "worse"),
        (ITL, 10.0, 1.0e-6, "worse"),
        (TTFT, 1.1, 1.0e-6, "same"),
    ],
)
def test_a_time_is_judged_by_its_ratio_and_both_floors(name, ratio, usual, expected):
    judgement, _ = verdicts(launches(12, {name: ratio}, usual=usual, launch_sd=0.005, pair_sd=0.01))
    (row,) = judgement.rows
    assert row.verdict == expected, row.why
    assert judgement.verdict == expected
    assert judgement.exit_code == {"worse": 1}.get(expected, 0)
    assert (
        row.ratio.interval.low < (ratio if metric(name[1]).better == "lower" else 1 / ratio) < row.ratio.interval.high
    )
    assert row.base < row.head if ratio > 1 else ratio == 1 or row.base > row.head


@pytest.mark.parametrize("num", range(1, 13))
def test_six_samples_a_side_ten_times_slower_are_worse_as_soon_as_anything_can_be_told(num):
    judgement, _ = verdicts(launches(num, {ITL: 10.0}, num_pairs=6))
    assert judgement.verdict == ("worse" if num >= 4 else "cannot tell")
    if num < 4:
        assert judgement.rows[0].why == f"{num} undisturbed launches; it takes 4"


def test_six_launches_of_one_sample_a_side_ten_times_slower_are_worse():
    """What asv prints as 10.00 and does not flag."""
    assert verdicts(launches(6, {ITL: 10.0}, num_pairs=1), Rules(looks_once=True))[0].verdict == "worse"
    assert verdicts(launches(6, {ITL: 10.0}, num_pairs=1))[0].verdict == "worse"


@pytest.mark.parametrize(
    ("rate", "expected", "change"), [(9.5, "worse", -0.05), (10.0, "same", 0.0), (10.5, "better", 0.05)]
)
def test_a_rate_that_falls_is_worse_and_one_that_stays_is_not_improved(rate, expected, change):
    (row,) = judge(collect(launches(12, {RATE: rate / 10}, usual=10.0, launch_sd=0.005)), RULES).rows
    assert row.verdict == expected
    assert row.change.value == pytest.approx(change, abs=0.01)
    assert row.change.interval.low < row.change.value < row.change.interval.high
    assert (row.ratio.value > 1) == (row.change.value < 0)


def test_change_is_of_the_number_itself_and_ratio_of_what_it_costs():
    (row,) = judge(collect(launches(4, {RATE: 0.5}, usual=10.0, launch_sd=0, pair_sd=0)), RULES).rows
    assert (row.ratio.value, row.change.value) == (pytest.approx(2), pytest.approx(-0.5))
    (row,) = judge(collect(launches(4, {("", "hit_rate"): 0.5}, usual=0.4, launch_sd=0, pair_sd=0)), RULES).rows
    assert row.change.value == pytest.approx(-0.5, rel=0.2)


@pytest.mark.parametrize(("ratio", "expected"), [(1.04, "same"), (1.09, "worse"), (0.93, "better"), (0.97, "same")])
def test_below_the_threshold_nothing_is_worse_or_better(ratio, expected):
    found = launches(12, {ITL: ratio}, launch_sd=0.003, pair_sd=0.01)
    assert verdicts(found, Rules(threshold=0.05))[0].verdict == expected
    assert verdicts(found)[0].verdict == ("worse" if ratio > 1 else "better")


def test_noise_that_hides_what_matters_is_neither_the_same_nor_worse():
    judgement, _ = verdicts(launches(12, {ITL: 1.02}, launch_sd=0.06))
    assert (judgement.verdict, judgement.exit_code) == ("cannot tell", 3)
    assert "neither surely changed nor surely within 2 %" in judgement.rows[0].why


def test_a_change_that_is_sure_but_may_be_too_small_cannot_be_told():
    rules = Rules(threshold=0.05, margin=0.01)
    (row,) = judge(collect(launches(8, {ITL: 1.048}, launch_sd=0.006, pair_sd=0.01)), rules).rows
    assert (row.verdict, row.p <= rules.alpha) == ("cannot tell", True)
    assert "but by less than its floors or by more" in row.why


def test_raw_values_pairs_and_launches_are_kept_beside_the_verdict():
    found = launches(5, {ITL: 1.5}, num_pairs=7)
    (row,) = judge(collect(found), RULES).rows
    samples = [each for launch in found for each in launch.base.results[0].measurements[0].samples]
    assert row.base == sorted(samples)[17]
    assert (row.num_launches, row.num_pairs, row.num_disturbed) == (5, 35, 0)


# Families and looks.


def test_the_p_of_a_time_pays_for_looks_and_for_its_family():
    names = {("cached", "itl_p50_s"): 1.02, ("naive", "itl_p50_s"): 1.0, ("cached", "e2e_s"): 1.0}
    found = collect(launches(6, names, launch_sd=0.004, pair_sd=0.01))
    alone = {
        name: judge(dataclasses.replace(found, pairs={key(*name): found.pairs_of(key(*name))}), once).rows[0].p
        for once in (Rules(looks_once=True),)
        for name in names
    }
    together = {tuple(row.key[2:]): row.p for row in judge(found, Rules(looks_once=True)).rows}
    assert together[ITL] == pytest.approx(3 * alone[ITL])
    looked_at = {tuple(row.key[2:]): row.p for row in judge(found, Rules(max_launches=6)).rows}
    assert looked_at[ITL] == pytest.approx(together[ITL] * 7 / 4)  # the last of three looks has 4 of 7 parts of alpha
    early = {tuple(row.key[2:]): row.p for row in judge(found, Rules(max_launches=12)).rows}
    assert early[ITL] > 50 * looked_at[ITL]


def test_report_only_quantities_cost_those_that_gate_nothing():
    few, many = {ITL: 1.02}, {ITL: 1.02, **{("cached", name): 1.0 for name in ("tpot_s", "itl_p90_s", "queue_wait_s")}}
    (few_row,), (many_row, *_) = (judge(collect(launches(8, each)), RULES).rows for each in (few, many))
    assert few_row.p == many_row.p


def test_more_launches_than_planned_are_refused():
    with pytest.raises(InstrumentError, match="13 launches; the looks that were planned are those after 4 to 12"):
        judge(collect(launches(13)), RULES)
    judge(collect(launches(13)), Rules(looks_once=True))


# What cannot be compared.


def without(launch, place, instead):
    sides = list(launch.sides)
    sides[place] = instead
    return Launch(base=sides[0], head=sides[1])


def undefined(name):
    return side({name: None})


FINE = launches(12)


ON_HEAD = {
    "undefined": [without(each, 1, undefined(ITL)) for each in FINE],
    "undefined once": [*FINE[:2], without(FINE[2], 1, undefined(ITL)), *FINE[3:]],
    "failed once": [*FINE[:2], without(FINE[2], 1, side(failed={CASE: "RuntimeError"})), *FINE[3:]],
    "failed once on base": [*FINE[:2], without(FINE[2], 0, side(failed={CASE: "RuntimeError"})), *FINE[3:]],
    "deleted": [without(each, 1, side()) for each in FINE],
    "renamed": [without(each, 1, Side(results=(result({ITL: [1.0]}, case="17"),))) for each in FINE],
    "skipped": [without(each, 1, side(skipped={CASE: "later"})) for each in FINE],
}
NOTHING = {
    "no launches": [],
    "no cases": [Launch(base=side(), head=side())] * 12,
    "a first run": [without(each, 0, side()) for each in FINE],
    "skipped on both": [Launch(base=side(skipped={CASE: ""}), head=side(skipped={CASE: ""}))] * 12,
}


@pytest.mark.parametrize("found", [*ON_HEAD.values(), *NOTHING.values()], ids=[*ON_HEAD, *NOTHING])
def test_what_is_missing_is_never_good(found):
    judgement, _ = verdicts(found)
    assert (judgement.verdict, judgement.exit_code) == ("no data", 4)


def merged(some, more, merge):
    """Launch by launch, side by side."""
    pairs = zip(some, more, strict=True)
    return [Launch(base=merge(a.base, b.base), head=merge(a.head, b.head)) for a, b in pairs]


def beside(found, fine):
    """The launches with a second case that is measured well."""

    def add(of, good):
        return dataclasses.replace(of, results=(*of.results, dataclasses.replace(good.results[0], case="fine")))

    return merged(found, fine, add)


@pytest.mark.parametrize("found", ON_HEAD.values(), ids=ON_HEAD)
def test_a_good_case_does_not_make_up_for_a_missing_one(found):
    assert verdicts(beside(found, FINE))[0].verdict == "no data"
    assert verdicts(beside(found, launches(12, {ITL: 1.3})))[0].verdict == "worse"


@pytest.mark.parametrize("found", [*list(NOTHING.values())[1:], FINE], ids=[*list(NOTHING)[1:], "fine"])
def test_what_base_never_had_is_no_reason_against_a_good_case(found):
    judgement, _ = verdicts(beside(found, FINE))
    assert (judgement.verdict, judgement.exit_code) == ("same", 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_never_become_evidence(bad):
    with pytest.raises(InstrumentError):
        result({ITL: [1.0, bad]})
    with pytest.raises(InstrumentError):
        Pairs(base=(1.0,), head=(bad,))


def test_a_new_case_beside_others_is_said_and_not_red():
    new = result({ITL: [1.0]}, case="64")
    judgement, _ = verdicts([Launch(base=each.base, head=Side(results=(*each.head.results, new))) for each in FINE])
    assert judgement.verdict == "same"
    (new,) = [row for row in judgement.rows if row.verdict == "new"]
    assert (new.key.case, new.why) == ("64", "no baseline: base did not measure it")


def test_a_first_run_has_no_baseline_and_says_so():
    judgement, _ = verdicts([Launch(base=side(skipped={CASE: "no such option"}), head=each.head) for each in FINE])
    assert (judgement.verdict, judgement.exit_code, judgement.open_cases) == ("no data", 4, ())
    assert [row.why for row in judgement.rows] == ["no baseline: base skipped it: no such option"]


# Counts, and what only reports.


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [((592, 592), "same"), ((592, 593), "worse"), ((592, 591), "better"), ((0, 1), "worse"), ((5, None), "no data")],
)
def test_counts_have_no_tolerance(counts, verdict):
    judgement, by_name = verdicts(launches(2, counts={OPERATORS: counts}))
    assert by_name[OPERATORS] == verdict
    if counts[1] is not None and counts[0] != counts[1]:
        (row,) = [row for row in judgement.rows if row.key.metric == "num_operators"]
        assert row.why == f"{counts[1] - counts[0]:+}; counts have no tolerance"
        assert (row.base, row.head) == counts


def test_a_count_that_varies_is_no_count():
    found = [Launch(base=side({OPERATORS: 5}), head=side({OPERATORS: n})) for n in (5, 6)]
    judgement, _ = verdicts(found)
    assert (judgement.verdict, judgement.rows[0].why) == ("no data", "the count varies on head: 5, 6")


def test_what_only_reports_never_fails_a_gate(monkeypatch):
    """A diagnostic counter went from 5 to 6, and the latency became better."""
    diagnostic = dataclasses.replace(metric("num_graph_breaks"), gate=False)
    monkeypatch.setitem(METRICS, "num_graph_breaks", diagnostic)
    counts, reported = {("cached", "num_graph_breaks"): (5, 6)}, {("cached", "tpot_s"): 1.5, RATE: 0.5}
    judgement, by_name = verdicts(launches(12, {ITL: 0.9, **reported}, counts=counts))
    assert by_name == {
        ITL: "better", ("cached", "tpot_s"): "worse", RATE: "worse", ("cached", "num_graph_breaks"): "worse"
    }  # fmt: skip
    assert (judgement.verdict, judgement.exit_code) == ("better", 0)


@pytest.mark.parametrize("name", [("cached", "tpot_s"), RATE])
def test_what_only_reports_may_be_missing_but_is_not_enough(name):
    fine = {ITL: [1.0, 1.1]}
    found = [Launch(base=side({**fine, name: [1.0]}), head=side({**fine, name: None}))] * 12
    judgement, by_name = verdicts(found)
    assert (judgement.verdict, by_name[name]) == ("same", "no data")
    alone, _ = verdicts(launches(12, {name: 1.0}))
    assert (alone.verdict, alone.gated) == ("no data", ())


# Direction.


def declared(**changes):
    usual = {
        "name": "x", "title": "X", "unit": "s", "formula": "", "weighting": "count", "better": "lower", "gate": True
    }  # fmt: skip
    return Metric(**(usual | changes))


UNITS = (
    "s",
    "bytes",
    "FLOP",
    "operators",
    "launches",
    "breaks",
    "forwards",
    "tokens",
    "blocks",
    "tokens/s",
    "requests/s",
)


@pytest.mark.parametrize("unit", UNITS)
def test_a_direction_that_contradicts_the_unit_is_refused(unit):
    right, wrong = ("higher", "lower") if unit.endswith("/s") else ("lower", "higher")
    declared(unit=unit, better=right)
    with pytest.raises(InstrumentError, match=f"'x' in {unit} cannot be better when {wrong}: {right}"):
        declared(unit=unit, better=wrong)


def test_a_ratio_goes_either_way_but_no_third():
    assert [declared(unit=unit, better=way).better for unit in ("x", "share") for way in ("lower", "higher")]
    with pytest.raises(InstrumentError, match="cannot be better when bigger: lower, higher"):
        declared(unit="x", better="bigger")


@pytest.mark.parametrize(
    "of", [m for m in METRICS.values() if m.has_ratio and not m.is_exact], ids=lambda each: each.name
)
def test_a_planted_slowdown_is_worse_in_every_metric(of):
    """2.5 times as slow: a time grows, a rate falls, and so does the speedup over an arm that did not change."""
    ratio = 2.5 if of.better == "lower" else 1 / 2.5
    judgement, _ = verdicts(
        launches(4, {("cached", of.name): ratio}, usual=0.5, host_sd=0, launch_sd=0.002, pair_sd=0.004)
    )
    assert judgement.rows[0].verdict == "worse"
    assert judgement.rows[0].ratio.value > 1


# Disturbed.


LOUD = {"disturbed": "other processes took 40 % of the CPUs"}


@pytest.mark.parametrize(
    ("num_quiet", "num_loud", "verdict"),
    [(12, 0, "worse"), (8, 4, "worse"), (6, 6, "worse"), (5, 7, "contaminated"), (3, 1, "contaminated"),
     (3, 0, "cannot tell"), (0, 12, "contaminated"), (4, 1, "worse")],
)  # fmt: skip
def test_a_verdict_needs_four_quiet_launches_and_half_of_all(num_quiet, num_loud, verdict):
    quiet = launches(num_quiet, {ITL: 1.2})
    loud = launches(num_loud, {ITL: 3.0}, told=({}, LOUD))
    judgement, _ = verdicts([*loud, *quiet])
    (row,) = judgement.rows
    assert (judgement.verdict, row.num_launches, row.num_disturbed) == (verdict, num_quiet, num_loud)
    if verdict == "worse":
        assert row.ratio.value == pytest.approx(1.2, rel=0.03)
    if verdict == "contaminated":
        told = f"{num_loud} of {num_quiet + num_loud} launches were disturbed, launch 1 by: head: other processes took"
        assert row.why.startswith(told)
        assert (judgement.exit_code, row.p) == (5, None)


@pytest.mark.parametrize("place", [0, 1])
def test_a_load_on_one_side_only_is_contaminated_and_not_worse(place):
    told = [{"control_s": [0.0022, 0.0023, 0.0024]}, {"control_s": [0.0022, 0.0023, 0.0024]}]
    assert verdicts(launches(8, {ITL: 1.4}, told=tuple(told)))[0].verdict == "worse"
    told[place] = {"control_s": [0.0032, 0.0031, 0.0033]}
    judgement, _ = verdicts(
        launches(8, {ITL: 1.4, ("cached", "tpot_s"): 1.4}, counts={OPERATORS: (5, 5)}, told=tuple(told))
    )
    assert (judgement.verdict, judgement.exit_code) == ("contaminated", 5)
    slower = f"ran 39 % slower beside {('base', 'head')[place]}"
    assert all(slower in row.why for row in judgement.rows if row.key.metric != "num_operators")
    assert [row.verdict for row in judgement.rows] == ["contaminated", "contaminated", "same"]


@pytest.mark.parametrize(
    ("control", "verdict"), [([1.09] * 8, "worse"), ([2.0, 0.8] * 4, "worse"), ([1.4] * 3, "worse")]
)
def test_a_control_that_wanders_or_hardly_moves_accuses_nobody(control, verdict):
    every = launches(8, {ITL: 1.4})
    for place, factor in enumerate(control):
        every[place] = launches(1, {ITL: 1.4}, seed=place, told=({"control_s": [1.0]}, {"control_s": [factor]}))[0]
    assert verdicts(every)[0].verdict == verdict


def test_a_disturbed_machine_changes_no_count():
    found = launches(2, counts={OPERATORS: (5, 6)}, told=(LOUD, LOUD))
    judgement, by_name = verdicts(found)
    assert by_name == {ITL: "contaminated", OPERATORS: "worse"}
    assert judgement.verdict == "worse"


# The whole.


GRAVITY = ["worse", "no data", "contaminated", "cannot tell", "better", "same"]


@pytest.mark.parametrize(("graver", "lighter"), list(itertools.combinations(GRAVITY, 2)))
def test_the_gravest_verdict_is_that_of_the_whole(graver, lighter):
    rows = {verdict: _row(verdict) for verdict in GRAVITY}
    judgement = judge(Evidence(num_launches=0, pairs={}), RULES)
    for order in ((graver, lighter), (lighter, graver)):
        whole = dataclasses.replace(judgement, rows=tuple(rows[each] for each in (*order, "same")))
        assert (whole.verdict, whole.exit_code) == (graver, EXIT_CODES[graver])
    reported = dataclasses.replace(rows[graver], is_gated=False)
    assert dataclasses.replace(judgement, rows=(reported, rows[lighter])).verdict == lighter


def _row(verdict):
    (row,) = judge(collect(launches(4)), RULES).rows
    return dataclasses.replace(row, verdict=verdict)


def test_every_kind_has_an_exit_code_of_its_own_and_two_is_left_for_usage():
    assert EXIT_CODES == {"same": 0, "better": 0, "worse": 1, "cannot tell": 3, "no data": 4, "contaminated": 5}


def two_cases(num, first, second):
    """Launches of two cases, whose head is so many times as slow."""
    found = []
    for number in range(num):
        values = [noisy(ratio, seed=f"{case} {number}") for case, ratio in enumerate((first, second))]
        sides = [
            [result({ITL: both[place]}, case=case) for case, both in zip("ab", values, strict=True)] for place in (0, 1)
        ]
        found.append(Launch(base=Side(results=tuple(sides[0])), head=Side(results=tuple(sides[1]))))
    return found


def test_more_launches_go_to_the_cases_that_are_not_clear():
    benchmark = CASE[0]
    judgement = judge(collect(two_cases(7, 1.02, 2.0)), RULES)
    assert judgement.is_clear(benchmark, "b")
    assert not judgement.is_clear(benchmark, "a")
    assert judgement.open_cases == ((benchmark, "a"),)
    assert judge(collect(two_cases(7, 1.02, 2.0)), RULES, num_launches_done=12).open_cases == ()
    assert judge(collect(two_cases(7, 1.02, 2.0)), Rules(looks_once=True)).open_cases == ()
    with pytest.raises(InstrumentError, match=r"holds nothing of .*test_growth\[c\]"):
        judgement.is_clear(benchmark, "c")


def together(some, more):
    """The quantities of both in one case."""

    def join(a, b):
        (one,), (other,) = a.results, b.results
        return Side(results=(dataclasses.replace(one, measurements=one.measurements + other.measurements),))

    return merged(some, more, join)


@pytest.mark.parametrize(
    ("found", "is_clear"),
    [
        (launches(3), False),
        (launches(1, counts={OPERATORS: (5, 5)}), False),
        ([Launch(base=side({OPERATORS: 5}), head=side({OPERATORS: 5}))], False),  # one launch proves no count
        ([Launch(base=side({OPERATORS: 5}), head=side({OPERATORS: 5}))] * 2, True),
        ([Launch(base=side({ITL: [1.0]}), head=side())], True),
        (launches(8, {ITL: 1.1}, launch_sd=0.004), True),
        (launches(8, {ITL: 1.0}, launch_sd=0.004), True),
        (launches(8, {ITL: 1.02}, launch_sd=0.03), False),
        (launches(8, {ITL: 1.1, E2E: 1.02}, launch_sd=0.03), False),
        (together(launches(8, {ITL: 1.0}, launch_sd=0.004), launches(8, {RATE: 1.0}, launch_sd=0.1)), True),
        (together(launches(8, {ITL: 1.0}, launch_sd=0.004), launches(8, {E2E: 1.0}, launch_sd=0.1)), False),
        (launches(8, {ITL: 1.1}, launch_sd=0.004, told=(LOUD, {})), False),
    ],
)
def test_a_case_is_clear_when_nothing_that_gates_can_change(found, is_clear):
    assert judge(collect(found), Rules(margin=0.05)).is_clear(*CASE) == is_clear


def test_a_case_that_is_the_same_goes_on_while_a_small_change_might_show():
    found = collect(launches(8, {ITL: 1.0}, launch_sd=0.004))
    ends = judge(found, RULES).rows[0].ratio.interval
    widest = max(abs(ends.low - 1), abs(ends.high - 1))
    loose, tight = (judge(found, Rules(margin=factor * widest)) for factor in (1.2, 2.4))
    assert (loose.verdict, loose.is_clear(*CASE)) == ("same", False)
    assert (tight.verdict, tight.is_clear(*CASE)) == ("same", True)


# From beginning to end.


def compared(ratio, seed, num_cases=2):
    """A comparison as it is run: look after each launch, go on with what is open. The verdict, and the launches."""
    names, found = {ITL: ratio, TTFT: ratio, RATE: 1 / ratio}, []
    asked = [str(case) for case in range(num_cases)]
    for number in range(RULES.max_launches):
        sides = [Side(results=tuple(_measured(names, seed, number, asked, place))) for place in (0, 1)]
        found.append(Launch(base=sides[0], head=sides[1]))
        judgement = judge(collect(found), RULES)
        asked = [case for _, case in judgement.open_cases]
        if not asked:
            break
    return judgement.verdict, len(found)


def _measured(names, seed, number, cases, place):
    for case in cases:
        values = {
            name: noisy(ratio, num_pairs=6, seed=f"{seed} {number} {case} {name}") for name, ratio in names.items()
        }
        yield result({name: both[place] for name, both in values.items()}, case=case)


@pytest.mark.parametrize(("ratio", "verdict"), [(1.15, "worse"), (0.87, "better")])
def test_a_comparison_stops_when_it_is_sure(ratio, verdict):
    found = [compared(ratio, seed) for seed in range(5)]
    assert {each[0] for each in found} == {verdict}
    assert max(each[1] for each in found) <= 8


@pytest.mark.slow
@pytest.mark.simulated
def test_identical_builds_in_two_hundred_comparisons():
    """Four gated times, in two cases. Alarms are counted both ways, and nothing else is ever red."""
    found = collections.Counter(compared(1.0, seed)[0] for seed in range(200))
    alarms = found["worse"] + found["better"]
    assert wilson_interval(alarms, 200).low <= RULES.alpha, found
    assert alarms + found["same"] + found["cannot tell"] == 200


# Rules.


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("alpha", 0, "above 0 and below 1"),
        ("alpha", 1.0, "above 0 and below 1"),
        ("alpha", math.nan, "above 0 and below 1"),
        ("margin", 0, "such as 0.03"),
        ("margin", math.inf, "such as 0.03"),
        ("threshold", -0.01, "such as 0.05"),
        ("threshold", math.nan, "such as 0.05"),
        ("confidence", 95, "above 0 and below 1"),
        ("max_launches", 3, "at least 4"),
        ("max_launches", 12.5, "a whole number"),
    ],
)
def test_a_rule_that_means_nothing_is_refused_with_its_choices(name, value, choices):
    with pytest.raises(InstrumentError, match=f"{name} is {value!r}; choose .*{choices}"):
        Rules(**{name: value})
