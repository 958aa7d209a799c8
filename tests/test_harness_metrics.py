"""The registry: each metric is declared whole, computed as its words say, and stored so that asv cannot misread it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.errors import UndeclaredMetricError
from benchmarks.harness.metrics import METRICS, STREAM_METRICS, metric
from benchmarks.harness.results import summarise_runs
from benchmarks.harness.timing import RunTiming, Stamp

UNITS = {"s": "seconds", "tokens/s": "seconds", "x": "ratio"}
"""Unit of a metric -> unit of what asv stores."""


def run_of(*times_ms, sent_ms=0):
    return RunTiming(sent_ns=sent_ms * 10**6, stamps=tuple(Stamp(at_ms * 10**6, 1) for at_ms in times_ms))


@pytest.mark.parametrize("each", METRICS.values(), ids=lambda each: each.name)
def test_a_declaration_says_everything(each):
    assert each.title
    assert len(each.formula.split()) > 3
    assert each.better in ("lower", "higher")
    assert each.asv_unit == UNITS[each.unit]
    assert each.name.endswith("_s") == (each.unit in ("s", "tokens/s"))
    assert 0 < each.q < 1
    assert each.compares_arms == (each.name not in STREAM_METRICS)


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
    low, high = sorted(values)
    better, worse = (low, high) if each.better == "lower" else (high, low)
    assert 0 < each.cost(better) <= each.cost(worse)
    if high > low * (1 + 1e-9):
        assert each.cost(better) < each.cost(worse)


def test_a_cost_is_the_number_itself_or_its_reciprocal():
    assert metric("ttft_s").cost(0.25) == 0.25
    assert metric("decode_tokens_per_s").cost(50.0) == 0.02
    assert metric("speedup").cost(4.0) == 0.25


def test_every_stream_metric_against_hand_computed_values():
    run = run_of(150, 160, 180, 210, sent_ms=50)  # gaps 10, 20, 30 ms
    by_hand = {
        "ttft_s": 0.1,
        "itl_p50_s": 0.02,
        "itl_p90_s": 0.028,
        "tpot_s": 0.02,
        "e2e_s": 0.16,
        "decode_tokens_per_s": 50.0,
    }
    assert {name: metric(name).sample(run) for name in STREAM_METRICS} == pytest.approx(by_hand)


def test_gaps_are_pooled_and_requests_weigh_the_same():
    long, short = run_of(100, 110, 120, 130, 140, 150), run_of(100, 200)
    itl, tpot = (summarise_runs(metric(name), "arm", [long, short]) for name in ("itl_p50_s", "tpot_s"))
    assert (itl.value, itl.num_observations) == (pytest.approx(0.01), 6)
    assert (tpot.value, tpot.num_observations) == (pytest.approx(0.055), 2)
    assert itl.samples == tpot.samples == pytest.approx((0.01, 0.1))


def test_a_run_in_chunks_has_no_gaps_between_tokens():
    chunked = RunTiming(sent_ns=0, stamps=(Stamp(10**8, 1), Stamp(2 * 10**8, 4)))
    defined = {name for name in STREAM_METRICS if metric(name).sample(chunked) is not None}
    assert set(STREAM_METRICS) - defined == {"itl_p50_s", "itl_p90_s"}


def test_no_metric_depends_on_when_the_run_was_sent():
    gaps = [120, 7, 9, 40]
    runs = [run_of(*itertools.accumulate(gaps, initial=start), sent_ms=start - 3) for start in (3, 10**6)]
    for name in STREAM_METRICS:
        assert metric(name).sample(runs[0]) == metric(name).sample(runs[1])
