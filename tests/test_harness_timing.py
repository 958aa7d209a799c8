"""The stopwatch against times that were computed by hand. Row numbers are those of the table of known faults."""

import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.clock import DeviceClock
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.invariants import check_run
from benchmarks.harness.metrics import METRICS, STREAM_METRICS
from benchmarks.harness.results import summarise_runs
from benchmarks.harness.timing import Emission, RunTiming, Stamp, measure_call, measure_stream, speedup


class ScriptedClock:
    """Shows the time that the script has come to, and counts how often it was looked at."""

    def __init__(self, at_ms=0.0):
        self.at_ms = at_ms
        self.num_reads = 0

    def now_ns(self):
        self.num_reads += 1
        return round(self.at_ms * 1e6)


def play(sent_ms, events, **options):
    """Stream `events`, (time in ms, number of tokens), and measure it."""
    clock = ScriptedClock(sent_ms)

    def stream():
        for at_ms, num_tokens in events:
            clock.at_ms = at_ms
            yield Emission(token_ids=(7,) * num_tokens)
        clock.at_ms += 1000.0  # whoever looks at the clock again sees a second more

    return measure_stream(stream(), clock, **options), clock


def one_by_one(*times_ms):
    return [(at_ms, 1) for at_ms in times_ms]


def one_token(**also):
    return Emission(token_ids=(7,), **also)


def derived(run, name):
    return getattr(run, name) if hasattr(run, name) else METRICS[name].sample(run)


ROWS = {
    "1: four tokens": (
        one_by_one(2000, 2500, 2900, 3400),
        {
            "ttft_s": 2.0,
            "itls_s": (0.5, 0.4, 0.5),
            "itl_p50_s": 0.5,
            "e2e_s": 3.4,
            "decode_tokens_per_s": 3 / 1.4,
            "e2e_tokens_per_s": 4 / 3.4,
        },
    ),
    "2: one token": (
        one_by_one(1500),
        {
            "ttft_s": 1.5,
            "itls_s": (),
            "itl_p50_s": None,
            "tpot_s": None,
            "decode_tokens_per_s": None,
            "e2e_tokens_per_s": 1 / 1.5,
        },
    ),
    "3: no token": ([], dict.fromkeys((*STREAM_METRICS, "e2e_tokens_per_s"))),
    "6: TTFT is no gap": (one_by_one(1000, 1010, 1020, 1030), {"ttft_s": 1.0, "itls_s": (0.01, 0.01, 0.01)}),
    "7: chunks": (
        [(100, 1), (130, 3), (160, 3)],
        {
            "num_tokens": 7,
            "tpot_s": 0.01,
            "itls_s": None,
            "itl_p50_s": None,
            "e2e_s": 0.16,
            "step_gaps_s": (0.03, 0.03),
            "step_gap_p50_s": 0.03,
        },
    ),
    "7: one chunk has no time per token": (
        [(100, 5)],
        {"num_tokens": 5, "ttft_s": 0.1, "e2e_s": 0.1, "tpot_s": None, "decode_tokens_per_s": None},
    ),
    "8: a role event is no token": ([(5, 0), *one_by_one(100, 110)], {"ttft_s": 0.1, "itls_s": (0.01,)}),
    "9: a usage event is no token": (
        [*one_by_one(100, 110, 120), (500, 0)],
        {"e2e_s": 0.12, "tpot_s": 0.01},
    ),
    "10: the first token is prefill's": (one_by_one(*range(1000, 1101, 10)), {"num_tokens": 11, "tpot_s": 0.01}),
}


@pytest.mark.parametrize("sent_ms", [0, 86_400_000])
@pytest.mark.parametrize("row", ROWS)
def test_known_times(row, sent_ms):
    events, expected = ROWS[row]
    run, _ = play(sent_ms, [(sent_ms + at_ms, num_tokens) for at_ms, num_tokens in events])
    assert {name: derived(run, name) for name in expected} == {
        name: value if value is None else pytest.approx(value, rel=1e-12) for name, value in expected.items()
    }
    assert_invariants(run)


def assert_invariants(run):
    """What holds for every run; an undefined number is None, and there is no third kind."""
    assert (run.ttft_s is None) == (run.e2e_s is None) == (run.num_tokens == 0)
    if run.tpot_s is not None:
        assert run.e2e_s == pytest.approx(run.ttft_s + (run.num_tokens - 1) * run.tpot_s)
    if run.stamps and run.itls_s is not None:
        assert sum(run.itls_s) == pytest.approx(run.e2e_s - run.ttft_s)
        assert len(run.itls_s) == run.num_tokens - 1
    for rate in (run.decode_tokens_per_s, run.e2e_tokens_per_s):
        assert rate is None or rate > 0
    check_run(run)


@given(
    sent_us=st.integers(0, 10**12),
    events=st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 3)), max_size=30),
)
def test_invariants_of_any_run(sent_us, events):
    times, at_us = [], sent_us
    for gap_us, num_tokens in events:
        at_us += gap_us
        times.append((at_us / 1e3, num_tokens))
    run, clock = play(sent_us / 1e3, times)
    assert run.num_tokens == len(run.token_ids) == sum(num_tokens for _, num_tokens in events)
    assert clock.num_reads == 1 + sum(num_tokens > 0 for _, num_tokens in events)
    assert_invariants(run)


def test_a_run_without_tokens_is_no_sample():
    empty, _ = play(0, [])
    stamps = (Stamp(10_000_000, 1), Stamp(20_000_000, 1), Stamp(31_000_000, 1))
    whole = RunTiming(scheduled_ns=0, sent_ns=0, admitted_ns=0, stamps=stamps, num_prompt_tokens=4, num_prefilled=4)
    for name in STREAM_METRICS:
        assert summarise_runs(METRICS[name], "arm", [empty]).value is None
        assert len(summarise_runs(METRICS[name], "arm", [empty, whole]).samples) == 1


def test_the_clock_is_read_once_before_the_stream_and_once_per_emission_with_tokens():
    _, clock = play(0, [(1, 0), (2, 1), (3, 2), (4, 0), (5, 1), (6, 0)])
    assert clock.num_reads == 1 + 3


def test_the_stream_is_timed_from_before_its_first_pull():
    clock = ScriptedClock()

    def stream():
        clock.at_ms += 250  # prefill happens inside the first pull
        yield Emission(token_ids=(1,), finish_reason="length")

    assert measure_stream(stream(), clock) == RunTiming(
        sent_ns=0, stamps=(Stamp(250_000_000, 1),), token_ids=(1,), finish_reason="length"
    )


def test_the_last_finish_reason_is_kept_whatever_event_carries_it():
    run = measure_stream([one_token(), Emission(finish_reason="length"), Emission()], ScriptedClock())
    assert run.finish_reason == "length"


def test_a_call_is_timed_between_exactly_two_looks():
    clock = ScriptedClock(10_000)
    assert measure_call(lambda: setattr(clock, "at_ms", 12_500), clock) == 2.5
    assert clock.num_reads == 2


@pytest.mark.parametrize(
    ("slow_s", "fast_s", "expected"),
    [
        (87.3, 15.2, 87.3 / 15.2),
        (1, 0, None),
        (0, 1, None),
        (None, 1, None),
        (1, None, None),
        (-1, 1, None),
        (1, -1, None),
    ],
)
def test_speedup_is_a_ratio_or_undefined(slow_s, fast_s, expected):
    assert speedup(slow_s, fast_s) == expected


@pytest.mark.parametrize("times_ms", [(100, 90), (-1,), (10, 20, 19, 30)])
def test_a_clock_that_goes_backwards_is_an_error(times_ms):
    with pytest.raises(InstrumentError, match="backwards"):
        play(0, one_by_one(*times_ms))
    clock = ScriptedClock(10)
    with pytest.raises(InstrumentError, match="backwards"):
        measure_call(lambda: setattr(clock, "at_ms", 9), clock)


def test_a_stamp_without_tokens_is_refused():
    with pytest.raises(InstrumentError, match="without tokens"):
        RunTiming(sent_ns=0, stamps=(Stamp(5, 0), Stamp(10, 1)))


def test_row_12_the_wall_clock_is_never_asked(monkeypatch):
    def stepped_back():
        raise AssertionError("the wall clock was read")

    for name in ("time", "time_ns"):
        monkeypatch.setattr(time, name, stepped_back)
    run = measure_stream([one_token(), one_token()], DeviceClock("cpu"))
    assert 0 <= run.ttft_s <= run.e2e_s


def test_the_device_is_waited_for_before_the_clock_is_read(monkeypatch):
    log = []
    fake_cuda = SimpleNamespace(synchronize=log.append)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake_cuda))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: log.append("clock") or 5)
    assert DeviceClock("cuda:1").now_ns() == 5
    assert log == ["cuda:1", "clock"]


# A request that waits, one that breaks off, and what a source may say beside its tokens.


def test_row_11_a_run_that_never_ended_has_no_end():
    broken = RunTiming(sent_ns=0, stamps=(Stamp(500_000_000, 1), Stamp(510_000_000, 1)), error="the server hung up")
    assert broken.ttft_s == 0.5
    for name in ("e2e_s", "tpot_s", "tpot_by_token_s", "decode_tokens_per_s", "e2e_tokens_per_s"):
        assert derived(broken, name) is None
    assert not broken.is_finished


def test_a_stream_that_breaks_off_is_an_error_or_a_failed_run():
    def stream():
        yield one_token()
        raise OSError("connection reset")

    with pytest.raises(OSError, match="connection reset"):
        measure_stream(stream(), ScriptedClock())
    run = measure_stream(stream(), ScriptedClock(5), keep_errors=True)
    assert (run.error, run.num_tokens, run.is_finished) == ("OSError: connection reset", 1, False)


def test_a_stop_from_the_keyboard_is_never_a_failed_run():
    def stream():
        yield one_token()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_stream(stream(), ScriptedClock(), keep_errors=True)


def test_latencies_count_from_when_the_request_was_due():
    run, _ = play(300, one_by_one(1000, 1010), scheduled_ns=100_000_000)
    assert (run.arrival_ns, run.ttft_s, run.e2e_s, run.tpot_s) == (100_000_000, 0.9, 0.91, 0.01)


def test_the_wait_in_the_queue_ends_with_the_admission():
    clock = ScriptedClock(300)

    def stream():
        for at_ms, emission in [(700, Emission(is_admission=True)), (1200, one_token(num_cached=48, num_prefilled=16))]:
            clock.at_ms = at_ms
            yield emission

    run = measure_stream(stream(), clock, scheduled_ns=100_000_000, num_prompt_tokens=64)
    assert (run.queue_wait_s, run.ttft_s) == (0.6, 1.1)
    assert run.prefill_tokens_per_s == pytest.approx(16 / 0.5)
    assert clock.num_reads == 3
    assert (run.num_prompt_tokens, run.num_cached, run.num_prefilled) == (64, 48, 16)
    check_run(run)


def test_the_first_counts_told_are_the_prompts():
    steps = [one_token(num_cached=0, num_prefilled=16), one_token(num_cached=16, num_prefilled=1)]
    run = measure_stream(steps, ScriptedClock(), num_prompt_tokens=16)
    assert (run.num_cached, run.num_prefilled) == (0, 16)


def test_a_source_that_tells_no_admission_has_no_known_wait():
    run, _ = play(0, one_by_one(10))
    assert (run.queue_wait_s, run.prefill_tokens_per_s) == (None, None)


def test_tokens_without_ids_are_counted():
    run = measure_stream([one_token(), Emission(num_without_id=3)], ScriptedClock())
    assert (run.num_tokens, run.token_ids) == (4, (7,))


BROKEN = {
    "cached or prefilled": {"num_prompt_tokens": 16, "num_cached": 8, "num_prefilled": 16},
    "hit rate": {"num_prompt_tokens": 16, "num_cached": 16, "num_prefilled": 0},
}


@pytest.mark.parametrize("what", BROKEN)
def test_counts_that_cannot_be_true_together_are_refused(what):
    with pytest.raises(InstrumentError, match=f"invariant of the measurement is broken: .*{what}"):
        check_run(RunTiming(sent_ns=0, stamps=(Stamp(5, 1),), **BROKEN[what]))


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("tpot_s", lambda run: run.e2e_s / run.num_tokens, "TTFT"),
        ("step_gaps_s", lambda run: (run.ttft_s, *(0.01,) * (run.num_tokens - 1)), "gaps do not sum"),
        ("itls_s", lambda run: (run.ttft_s, *(0.01,) * (run.num_tokens - 1)), "mean of the gaps"),
        ("ttft_s", lambda run: -0.5, "TTFT of -0.5"),
    ],
)
def test_a_wrong_formula_breaks_an_invariant_on_a_real_run(monkeypatch, name, wrong, message):
    run, _ = play(0, one_by_one(1000, 1010, 1020))
    check_run(run)
    monkeypatch.setattr(RunTiming, name, property(wrong))
    with pytest.raises(InstrumentError, match=message):
        check_run(run)


def test_a_prefill_in_chunks_is_no_cache_hit():
    """Steps without a token: what they ran is prefill, what they found stored is their own."""
    steps = [
        Emission(num_cached=0, num_prefilled=512),
        one_token(num_cached=512, num_prefilled=100),
        one_token(num_cached=612, num_prefilled=1),
    ]
    run = measure_stream(steps, ScriptedClock(), num_prompt_tokens=612)
    assert (run.num_cached, run.num_prefilled) == (0, 612)
    check_run(run)


def test_counts_told_at_the_end_are_those_of_the_prompt():
    run = measure_stream([one_token(), one_token(), Emission(num_cached=48, num_prefilled=16)], ScriptedClock())
    assert (run.num_cached, run.num_prefilled) == (48, 16)


def test_of_two_finish_reasons_the_last_counts():
    assert (
        measure_stream(
            [one_token(finish_reason="stop"), Emission(finish_reason="length")], ScriptedClock()
        ).finish_reason
        == "length"
    )


def test_tokens_that_arrive_at_one_moment_have_no_time_per_token():
    run, _ = play(0, one_by_one(100, 100))
    assert (run.tpot_s, run.decode_tokens_per_s, run.itls_s) == (None, None, (0.0,))


def test_a_ratio_beyond_all_numbers_is_none():
    assert speedup(1e308, 1e-308) is None


def test_a_run_that_broke_off_says_when():
    clock = ScriptedClock(5)

    def stream():
        yield one_token()
        clock.at_ms = 900
        raise OSError("gone")

    assert measure_stream(stream(), clock, keep_errors=True).broke_off_ns == 900_000_000
