"""The registry: each metric is declared whole, computed as its words say, and stored so that asv cannot misread it."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.declaration import Metric
from benchmarks.harness.errors import InstrumentError, UndeclaredMetricError
from benchmarks.harness.metrics import METRICS, STREAM_METRICS, TRAFFIC_METRICS, metric
from benchmarks.harness.results import summarise_runs
from benchmarks.harness.timing import RunTiming, Stamp

UNITS = {"s": "seconds", "tokens/s": "seconds", "requests/s": "seconds", "x": "ratio", "share": "ratio"}
"""Unit of a metric -> unit of what asv stores."""


def run_of(*times_ms, sent_ms=0):
    return RunTiming(sent_ns=sent_ms * 10**6, stamps=tuple(Stamp(at_ms * 10**6, 1) for at_ms in times_ms))


@pytest.mark.parametrize("each", METRICS.values(), ids=lambda each: each.name)
def test_a_declaration_says_everything(each):
    assert each.title
    assert len(each.formula.split()) > 3
    assert each.better in ("lower", "higher")
    assert each.asv_unit == UNITS.get(each.unit, each.unit)
    assert each.name.endswith("_s") == (each.unit in ("s", "tokens/s", "requests/s"))
    assert each.name.endswith("_bytes") == (each.unit == "bytes")
    assert 0 < each.q < 1
    kinds = (each.name in STREAM_METRICS, each.name in TRAFFIC_METRICS, each.compares_arms, each.is_exact)
    others = (each.along is not None or each.across is not None, each.weighting == "ceiling")
    assert sum((*kinds, *others)) == 1, (kinds, others)
    assert each.weighting in ("gap", "request", "token", "pair", "sweep", "window", "ceiling", "count")


@pytest.mark.parametrize("each", METRICS.values(), ids=lambda each: each.name)
def test_counts_gate_without_a_floor_and_times_with_one(each):
    floors = (each.floor_relative, each.floor_absolute)
    if not each.has_ratio:
        assert (each.gate, floors) == (False, (0, 0)), "what may be zero is judged by nobody"
    else:
        assert (each.gate, floors) == (True, (0, 0)) if each.is_exact else each.floor_relative > 0


def test_the_names_that_asv_keeps_are_unique_and_hold_no_dash():
    names = [each.asv_name for each in METRICS.values()]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


def test_an_undeclared_name_is_refused_with_the_declared_ones():
    with pytest.raises(UndeclaredMetricError, match="'goodput'") as raised:
        metric("goodput")
    assert all(name in str(raised.value) for name in METRICS)
    assert all(metric(name) is each for name, each in METRICS.items())


@pytest.mark.parametrize("each", METRICS.values(), ids=lambda each: each.name)
@given(values=st.tuples(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6)))
def test_what_asv_stores_is_positive_and_smaller_when_better(each, values):
    largest = max(*values, 2e-6) if each.unit == "share" else 0.5  # a share lies between 0 and 1
    low, high = sorted(value * 0.5 / largest for value in values)
    better, worse = (low, high) if each.better == "lower" else (high, low)
    assert 0 < each.cost(better) <= each.cost(worse)
    if high > low * (1 + 1e-9):
        assert each.cost(better) < each.cost(worse)


def test_a_cost_is_the_number_itself_or_its_reciprocal():
    assert metric("ttft_s").cost(0.25) == 0.25
    assert metric("decode_tokens_per_s").cost(50.0) == 0.02
    assert metric("speedup").cost(4.0) == 0.25
    assert metric("hit_rate").cost(0.0) == 1.0


def test_the_names_that_asv_keeps_are_derived_and_say_what_is_stored():
    named = {name: metric(name).asv_name for name in ("ttft_s", "decode_tokens_per_s", "requests_per_s", "speedup")}
    assert named == {
        "ttft_s": "ttft_s",
        "decode_tokens_per_s": "decode_s_per_token",
        "requests_per_s": "s_per_request",
        "speedup": "inverse_speedup",
    }


@pytest.mark.parametrize(
    ("name", "base", "head", "worse"),
    [
        ("ttft_s", 1.0, 1.02, True),
        ("ttft_s", 1.0, 0.5, False),
        ("ttft_s", 1.0, 1.009, False),  # below the relative floor
        ("ttft_s", 1e-6, 1.1e-6, False),  # 10 %, but far below the absolute one
        ("decode_tokens_per_s", 10.0, 9.5, True),
        ("decode_tokens_per_s", 10.0, 10.5, False),
        ("decode_tokens_per_s", 10.0, 10.0, False),
        ("num_operators", 1000.0, 1001.0, True),
        ("num_operators", 1000.0, 1000.0, False),
    ],
)
def test_a_change_below_a_floor_is_none_and_a_count_has_no_floor(name, base, head, worse):
    assert metric(name).is_worse(base, head) == worse


DECLARATION = {
    "name": "new_s", "title": "New", "unit": "s", "formula": "as said", "weighting": "request", "better": "lower",
    "gate": False, "observe": lambda run: (),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"observe": None}, "not in 0"),
        ({"over": lambda runs: None}, "not in 2"),
        ({"unit": "furlongs"}, "unknown unit 'furlongs'; known: s, x"),
        ({"weighting": "count", "observe": None, "unit": "bytes", "floor_relative": 0.01}, "counts have no floor"),
        ({"coefficient": True, "gate": True}, "is a coefficient: none can be a gate"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused(changed, message):
    with pytest.raises(InstrumentError, match=message):
        Metric(**DECLARATION | changed)


def test_every_stream_metric_against_hand_computed_values():
    run = run_of(150, 160, 180, 210, sent_ms=50)  # gaps 10, 20, 30 ms
    by_hand = {
        "ttft_s": 0.1,
        "itl_p50_s": 0.02,
        "itl_p90_s": 0.028,
        "itl_p99_s": 0.0298,
        "step_gap_p50_s": 0.02,
        "tpot_s": 0.02,
        "tpot_by_token_s": 0.02,
        "e2e_s": 0.16,
        "queue_wait_s": 0.04,
        "schedule_delay_p50_s": 0.007,
        "schedule_delay_p99_s": 0.007,
        "prefill_tokens_per_s": 12 / 0.06,
        "decode_tokens_per_s": 50.0,
        "e2e_tokens_per_s": 25.0,
        "itl_growth": 3.0,
        "itl_slope_s": 10.0,  # 10 ms more with each position
    }
    run = dataclasses.replace(run, admitted_ns=90_000_000, num_prefilled=12, num_prompt_tokens=12)
    run = dataclasses.replace(run, scheduled_ns=run.sent_ns, sent_ns=run.sent_ns + 7_000_000)
    assert {name: metric(name).sample(run) for name in STREAM_METRICS} == pytest.approx(by_hand)


def test_gaps_are_pooled_and_requests_weigh_the_same():
    long, short = run_of(100, 110, 120, 130, 140, 150), run_of(100, 200)
    itl, tpot = (summarise_runs(metric(name), "arm", [long, short]) for name in ("itl_p50_s", "tpot_s"))
    assert (itl.value, itl.num_observations) == (pytest.approx(0.01), 6)
    assert (tpot.value, tpot.num_observations) == (pytest.approx(0.055), 2)
    assert itl.samples == tpot.samples == pytest.approx((0.01, 0.1))


def test_a_run_in_chunks_has_no_gaps_between_tokens():
    chunked = RunTiming(sent_ns=0, stamps=(Stamp(10**8, 1), Stamp(2 * 10**8, 4)))
    whole = dataclasses.replace(chunked, stamps=(Stamp(10**8, 1), Stamp(2 * 10**8, 1)))
    undefined = [{name for name in STREAM_METRICS if metric(name).sample(run) is None} for run in (chunked, whole)]
    assert undefined[0] - undefined[1] == {"itl_p50_s", "itl_p90_s", "itl_p99_s"}


def test_no_metric_depends_on_when_the_run_was_sent():
    gaps = [120, 7, 9, 40]
    runs = [run_of(*itertools.accumulate(gaps, initial=start), sent_ms=start - 3) for start in (3, 10**6)]
    for name in STREAM_METRICS:
        assert metric(name).sample(runs[0]) == metric(name).sample(runs[1])


def test_the_interval_of_a_quantile_is_that_of_the_median_run():
    runs = [run_of(100, *(100 + gap * i for i in range(1, 4))) for gap in (10, 20, 30, 40, 50, 60)]
    p90 = summarise_runs(metric("itl_p90_s"), "arm", runs)
    assert (p90.low, p90.high) == (pytest.approx(0.19 / 14), pytest.approx(0.79 / 14))
