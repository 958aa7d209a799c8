"""Many requests in one window, against figures worked out by hand. Rows are those of the table of known faults."""

import dataclasses
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.errors import InstrumentError, WrongOutputError
from benchmarks.harness.invariants import check_window
from benchmarks.harness.metrics import TRAFFIC_METRICS, metric
from benchmarks.harness.results import summarise_runs
from benchmarks.harness.timing import RunTiming, Stamp
from benchmarks.harness.traffic import (
    Limits,
    asked_requests_per_s,
    check_all_finished,
    duration_s,
    goodput,
    hit_rate,
    itl_price,
    itl_s,
    mean_tokens_per_s,
    peak_tokens_per_s,
    requests_per_s,
    steady_tokens_per_s,
    tpot_by_token_s,
    utilisation,
    window_speedup,
)

MS = 1_000_000


def run_at(*times_ms, sent_ms=0, **fields):
    """A request whose tokens arrive one by one."""
    return RunTiming(sent_ns=sent_ms * MS, stamps=tuple(Stamp(round(at_ms * MS), 1) for at_ms in times_ms), **fields)


FAILED = RunTiming(sent_ns=0, stamps=(), error="refused")


def one_slot(num_requests=8, every_ms=100, service_ms=500):
    """Requests due at a fixed rate, answered one after another; each is sent when the one before has ended."""
    return [
        run_at(
            service_ms * (i + 1),
            sent_ms=max(every_ms * i, service_ms * i),
            scheduled_ns=every_ms * i * MS,
            admitted_ns=service_ms * i * MS,
        )
        for i in range(num_requests)
    ]


def test_row_13_time_counts_from_the_schedule_and_the_wait_is_told_apart():
    runs = one_slot()
    assert statistics.mean(run.e2e_s for run in runs) == pytest.approx(1.9)
    assert statistics.mean(run.queue_wait_s for run in runs) == pytest.approx(1.4)
    assert {round((run.stamps[-1].at_ns - run.sent_ns) / MS) for run in runs} == {500}  # what was reported once
    assert utilisation(runs, num_slots=1) == pytest.approx(1.0)
    assert requests_per_s(runs) == pytest.approx(2.0)
    check_window(runs, num_slots=1)


def test_row_14_one_of_a_hundred_is_no_result():
    runs = [run_at(100), *[FAILED] * 99]
    judged = goodput(runs, Limits(e2e_s=1))
    assert (judged.num_good, judged.num_failed, judged.num_sent, judged.share_good) == (1, 99, 100, 0.01)
    with pytest.raises(WrongOutputError, match=r"99 of 100 requests did not finish \(refused\)"):
        check_all_finished(runs)


@pytest.mark.parametrize("runs", [[], [FAILED], [FAILED, FAILED]], ids=len)
def test_row_15_nothing_finished_is_undefined_and_a_failure(runs):
    for name in TRAFFIC_METRICS:
        assert summarise_runs(metric(name), "arm", runs, Limits(e2e_s=1)).value is None
    with pytest.raises(WrongOutputError, match=f"{len(runs)} of {len(runs)} requests"):
        check_all_finished(runs)


def test_row_16_one_token_can_not_be_judged_by_its_tpot():
    judged = goodput([run_at(10)], Limits(tpot_s=0.02))
    assert dataclasses.asdict(judged) == {
        "num_good": 0, "num_slow": 0, "num_failed": 0, "num_not_evaluable": 1, "good_per_s": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("run", "limits", "verdict"),
    [
        (run_at(100, 110), {"ttft_s": 0.1, "tpot_s": 0.01, "e2e_s": 0.11}, "num_good"),  # a limit that is met exactly
        (run_at(100, 110), {"ttft_s": 0.099}, "num_slow"),
        (run_at(100, 110), {"tpot_s": 0.009}, "num_slow"),
        (run_at(100), {"ttft_s": 0.05, "tpot_s": 0.02}, "num_slow"),  # one broken limit is enough
        (run_at(100), {"ttft_s": 0.2, "tpot_s": 0.02}, "num_not_evaluable"),
        (run_at(100, error="hung up"), {"ttft_s": 0.2}, "num_failed"),
        (FAILED, {"tpot_s": 1}, "num_failed"),
    ],
)
def test_each_request_has_one_verdict(run, limits, verdict):
    judged = dataclasses.asdict(goodput([run], Limits(**limits)))
    del judged["good_per_s"]
    assert judged == dict.fromkeys(judged, 0) | {verdict: 1}


@pytest.mark.parametrize("limits", [{}, {"ttft_s": 0}, {"tpot_s": -1}, {"e2e_s": float("nan")}])
def test_limits_that_say_nothing_are_refused(limits):
    with pytest.raises(InstrumentError, match="limit"):
        Limits(**limits)


def test_goodput_without_limits_is_refused():
    with pytest.raises(InstrumentError, match="without stated limits"):
        summarise_runs(metric("goodput_requests_per_s"), "arm", [run_at(10)])


def test_weighting_by_request_and_by_token():
    """One long answer at 10 ms a token, one short at 100 ms."""
    runs = [run_at(*range(100, 201, 10)), run_at(100, 200)]
    assert tpot_by_token_s(runs) == pytest.approx(0.2 / 11)
    by_request = summarise_runs(metric("tpot_s"), "arm", runs)
    by_token = summarise_runs(metric("tpot_by_token_s"), "arm", runs)
    assert (by_request.value, by_token.value) == (pytest.approx(0.055), pytest.approx(0.2 / 11))
    assert by_request.samples == by_token.samples == pytest.approx((0.01, 0.1))


def test_throughput_of_two_requests_that_overlap():
    runs = [run_at(500, 1000, 1500), run_at(1000, 2000, sent_ms=500)]
    assert duration_s(runs) == 2.0
    assert mean_tokens_per_s(runs) == 2.5
    assert requests_per_s(runs) == 1.0
    assert peak_tokens_per_s(runs) == pytest.approx(
        3.0
    )  # tokens at 500, 1000, 1000 after 0; or 1000, 1000, 1500 after 500


def test_a_peak_is_no_grid_and_no_instant():
    burst = [run_at(*[1000 + 100 * i for i in range(11)], 5000)]
    assert peak_tokens_per_s(burst) == pytest.approx(10.0)
    assert peak_tokens_per_s([run_at(10, 20)]) == mean_tokens_per_s([run_at(10, 20)])  # shorter than a second
    assert peak_tokens_per_s([run_at(200, 1500)]) == mean_tokens_per_s([run_at(200, 1500)])


def test_hits_are_counted_over_all_prompts():
    runs = [run_at(5, num_prompt_tokens=64, num_cached=48), run_at(5, num_prompt_tokens=64, num_cached=0)]
    assert hit_rate(runs) == 48 / 128
    assert hit_rate([run_at(5)]) is None


def test_a_slot_without_admission_times_is_not_known_to_be_busy():
    assert utilisation([run_at(5)], num_slots=1) is None


requests = st.lists(
    st.tuples(st.integers(0, 3000), st.lists(st.integers(0, 900), max_size=6), st.booleans(), st.integers(0, 15)),
    min_size=1,
    max_size=8,
)


@given(requests=requests)
def test_invariants_of_any_window(requests):
    runs = []
    for sent_ms, gaps, fails, num_cached in requests:
        times = [sent_ms + sum(gaps[: i + 1]) for i in range(len(gaps))]
        counts = {"num_prompt_tokens": 16, "num_cached": num_cached, "admitted_ns": sent_ms * MS}
        runs.append(run_at(*times, sent_ms=sent_ms, error="broke off" if fails else None, **counts))
    limits = Limits(ttft_s=0.3, tpot_s=0.2)
    check_window(runs, limits, num_slots=len(runs))
    judged = goodput(runs, limits)
    assert judged.num_sent == len(runs)
    assert judged.num_failed == sum(not run.is_finished for run in runs)


BROKEN = {
    "peak": ("peak_tokens_per_s", lambda runs: 0.5 * mean_tokens_per_s(runs), "below the mean"),
    "goodput": ("requests_per_s", lambda runs: 0.1, "goodput is above throughput"),
    "hit rate": ("hit_rate", lambda runs: 1.0, "hit rate of 1.0"),
    "utilisation": ("utilisation", lambda runs, num_slots: 1.5, "more than 1 slots were busy"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_wrong_formula_breaks_an_invariant_of_its_window(monkeypatch, fault):
    runs = [run_at(10, 20, num_prompt_tokens=8, num_cached=4, admitted_ns=0)]
    check_window(runs, Limits(e2e_s=1), num_slots=1)
    name, wrong, message = BROKEN[fault]
    monkeypatch.setattr(f"benchmarks.harness.invariants.{name}", wrong)
    with pytest.raises(InstrumentError, match=message):
        check_window(runs, Limits(e2e_s=1), num_slots=1)


def failed_at(at_ms):
    return RunTiming(sent_ns=0, stamps=(), error="timeout", broke_off_ns=at_ms * MS)


def test_the_one_of_a_hundred_has_no_rate_and_no_latency():
    """Rates are over the whole wait of those that failed; where nobody knows how long that was, there is none."""
    limits = Limits(e2e_s=1)
    for failure, rate in ((FAILED, None), (failed_at(10_000), 0.1)):
        runs = [run_at(100), *[failure] * 99]
        for name in ("requests_per_s", "goodput_requests_per_s", "mean_tokens_per_s"):
            assert summarise_runs(metric(name), "arm", runs, limits).value == rate
        for name in ("ttft_s", "e2e_s", "tpot_by_token_s"):
            with pytest.raises(WrongOutputError, match="99 of 100 requests did not finish"):
                summarise_runs(metric(name), "arm", runs)


def test_a_window_begins_when_the_first_request_was_due():
    late = [run_at(1000, sent_ms=900, scheduled_ns=0)]
    assert (duration_s(late), requests_per_s(late)) == (1.0, 1.0)


def test_a_slot_is_busy_from_admission_on():
    assert utilisation([run_at(1000, admitted_ns=750 * MS)], num_slots=1) == pytest.approx(0.25)
    with pytest.raises(InstrumentError, match="at least 1 slot, not 0"):
        utilisation([run_at(5, admitted_ns=0)], num_slots=0)


def test_a_prompt_of_unknown_hits_does_not_lower_the_rate():
    known = run_at(5, num_prompt_tokens=64, num_cached=32)
    assert hit_rate([known, run_at(5, num_prompt_tokens=64)]) == 0.5


def test_tokens_of_one_moment_belong_to_the_span_that_they_end():
    """Ten requests in step: after each second ten tokens more."""
    runs = [run_at(*range(1000, 6000, 1000)) for _ in range(10)]
    assert peak_tokens_per_s(runs) == mean_tokens_per_s(runs) == pytest.approx(10.0)


# Windows that are compared.


def test_the_rate_that_was_asked_is_that_of_the_gaps_between_due_times():
    """Four requests in 1.5 s have three gaps of 0.5 s; when each was sent has no part in it."""
    runs = [run_at(9000, sent_ms=8000, scheduled_ns=at_ms * MS) for at_ms in (700, 0, 1500, 100)]
    assert asked_requests_per_s(runs) == 2.0
    assert asked_requests_per_s([run_at(9000, sent_ms=at_ms) for at_ms in (0, 250)]) == 4.0


@pytest.mark.parametrize("runs", [[], [run_at(5)], [run_at(5), run_at(9)]], ids=len)
def test_requests_without_a_gap_have_no_rate(runs):
    assert asked_requests_per_s(runs) is None


def test_steady_throughput_counts_from_the_last_first_token_to_the_first_last_one():
    """From 400 ms, when the third request begins, to 800, when the first ends: 4 + 2 + 1 tokens."""
    runs = [
        run_at(100, 200, 300, 400, 500, 600, 700, 800),
        run_at(200, 400, 600, 800, 1000),
        run_at(400, 700, 1000, 1300),
    ]
    assert steady_tokens_per_s(runs) == 7 / 0.4
    late = [dataclasses.replace(run, sent_ns=50 * MS, scheduled_ns=0) for run in runs]
    assert steady_tokens_per_s(late) == 7 / 0.4
    chunks = RunTiming(sent_ns=0, stamps=(Stamp(100 * MS, 5), Stamp(500 * MS, 5), Stamp(900 * MS, 5)))
    assert steady_tokens_per_s([*runs, chunks]) == (7 + 5) / 0.4


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [FAILED],
        [run_at(100)],
        [run_at(100, 200), run_at(200, 300)],  # the second begins when the first ends
        [run_at(100, 200), run_at(900, 950)],
    ],
)
def test_requests_that_never_decode_together_have_no_steady_throughput(runs):
    assert steady_tokens_per_s(runs) is None


def test_the_gap_of_a_window_is_the_median_of_all_gaps():
    runs = [run_at(0, 10, 20, 30), run_at(0, 100), run_at(0, 20, 60)]  # 10, 10, 10; 100; 20, 40
    assert itl_s(runs) == pytest.approx(0.015)
    assert itl_s([run_at(5), *runs]) == itl_s(runs)
    assert itl_s([run_at(5)]) is itl_s([]) is None


def test_a_window_against_another():
    """The dear one takes twice the time and three times the gap."""
    dear, plain = [run_at(170, 200), run_at(50, 80)], [run_at(90, 100), run_at(10, 20)]
    assert window_speedup(dear, plain) == 2.0
    assert itl_price(dear, plain) == pytest.approx(3.0)
    assert itl_price(plain, dear) == pytest.approx(1 / 3)
    assert window_speedup(dear, [FAILED]) is window_speedup([], plain) is None
    assert itl_price(dear, [run_at(5)]) is itl_price([run_at(5)], plain) is None
