"""Windows of requests on a scripted clock: what is sent when, and when it was due, to the last nanosecond."""

import statistics
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.errors import WrongOutputError
from benchmarks.harness.invariants import check_run, check_window
from benchmarks.harness.serving import Ask, SkippingClock, measure_window
from benchmarks.harness.timing import Emission, RunTiming, Stamp
from benchmarks.harness.traffic import asked_requests_per_s, duration_s, requests_per_s, utilisation

MS = 1_000_000
START = 12_345 * MS


class Clock:
    def __init__(self):
        self.ns, self.num_reads, self.naps = START, 0, []

    def now_ns(self):
        self.num_reads += 1
        return self.ns

    def nap(self, seconds):
        self.naps.append(seconds)
        self.ns += round(seconds * 1e9)


class Server:
    """Each step gives a token to every request and takes 10 ms; `fails_at` a step it raises, or ends without a word."""

    def __init__(self, clock, *, step_ms=10, fails_at=None, error=None):
        self.clock, self.step_ms, self.fails_at, self.error = clock, step_ms, fails_at, error
        self.taken, self.open, self.num_steps, self.is_closed = [], {}, 0, False

    def serve(self, inbox):
        try:
            while self.num_steps != self.fails_at:
                while inbox:
                    ask = inbox.popleft()
                    self.taken.append((ask.request_id, self.now_ms))
                    self.open[ask.request_id] = ask.new_tokens
                assert self.open, "a step was run for nobody"
                self.num_steps += 1
                self.clock.ns += self.step_ms * MS
                yield [self._token(request_id) for request_id in list(self.open)]
            if self.error:
                raise self.error
        finally:
            self.is_closed = True

    def _token(self, request_id):
        self.open[request_id] -= 1
        left = self.open[request_id] or self.open.pop(request_id)
        token = 100 * ord(request_id[0]) + left
        return request_id, Emission(token_ids=(token,), finish_reason=None if left else "length")

    @property
    def now_ms(self):
        return (self.clock.ns - START) / MS


def ask(request_id, due_ms=0.0, new_tokens=1):
    return Ask(request_id, due_ms / 1e3, (5, 6, 7), new_tokens)


def window(*asks, server=None, clock=None, **how):
    clock = clock or Clock()
    server = server or Server(clock, **how)
    runs = measure_window(server.serve, asks, clock, clock.nap)
    return runs, server, clock


def ms(run):
    """When a run was due, when it was sent, when its tokens came: since the window began."""
    return [(at_ns - START) / MS for at_ns in (run.scheduled_ns, run.sent_ns, *(stamp.at_ns for stamp in run.stamps))]


# When.


def test_all_that_is_due_at_once_is_sent_at_once_and_stamped_together():
    (a, b), server, clock = window(ask("a", new_tokens=3), ask("b", new_tokens=2))
    assert a == RunTiming(
        request_id="a", scheduled_ns=START, sent_ns=START, num_prompt_tokens=3, finish_reason="length",
        stamps=tuple(Stamp(START + at * MS, 1) for at in (10, 20, 30)), token_ids=(9702, 9701, 9700),
    )  # fmt: skip
    assert (ms(b), b.token_ids) == ([0, 0, 10, 20], (9801, 9800))
    assert (server.num_steps, server.is_closed, clock.naps) == (3, True, [])


def test_row_13_time_counts_from_the_schedule():
    """Eight requests, one every 100 ms, 500 ms of work for each, one slot: of the service alone one would see 500."""
    clock = Clock()

    def one_slot(inbox):
        queue = deque()
        while True:
            while inbox:
                queue.append(inbox.popleft())
            request_id = queue.popleft().request_id
            yield [(request_id, Emission(is_admission=True))]
            clock.ns += 500 * MS
            yield [(request_id, Emission(token_ids=(1,), finish_reason="length"))]

    asks = [ask(str(place), 100 * place) for place in range(8)]
    runs = measure_window(one_slot, asks, clock, clock.nap)
    assert [round(1e3 * run.e2e_s) for run in runs] == [500 * (place + 1) - 100 * place for place in range(8)]
    assert statistics.mean(run.e2e_s for run in runs) == pytest.approx(1.9)
    assert statistics.mean(run.queue_wait_s for run in runs) == pytest.approx(1.4)
    assert {run.stamps[-1].at_ns - run.admitted_ns for run in runs} == {500 * MS}
    assert [(run.sent_ns - START) // MS for run in runs] == [0, 500, 500, 500, 500, 500, 1000, 1000]
    assert (asked_requests_per_s(runs), requests_per_s(runs)) == (pytest.approx(10.0), pytest.approx(2.0))
    assert utilisation(runs, num_slots=1) == pytest.approx(1.0)
    check_window(runs, num_slots=1)


@pytest.mark.parametrize(
    ("due_ms", "sent_ms"), [(0.0, 0), (0.000001, 10), (9.999999, 10), (10.0, 10), (10.000001, 20), (15.0, 20)]
)
def test_what_falls_due_within_a_step_is_sent_after_it_and_counts_from_when_it_was_due(due_ms, sent_ms):
    (_, b), server, clock = window(ask("a", new_tokens=4), ask("b", due_ms))
    assert ms(b) == [due_ms, sent_ms, sent_ms + 10]
    assert b.ttft_s == b.e2e_s == pytest.approx((sent_ms + 10 - due_ms) / 1e3, abs=1e-12)
    assert (server.taken, clock.naps) == ([("a", 0), ("b", sent_ms)], [])


def test_nothing_runs_while_nothing_is_due_and_the_last_nap_ends_when_something_is():
    (a, b), server, clock = window(ask("a"), ask("b", 12.5))
    assert (ms(a), ms(b)) == ([0, 0, 10], [12.5, 12.5, 22.5])
    assert clock.naps == pytest.approx([0.001, 0.001, 0.0005], abs=1e-12)
    assert server.num_steps == 2


def test_before_the_first_request_is_due_nothing_is_pulled():
    (a,), server, clock = window(ask("a", 2.0))
    assert (server.taken, ms(a), len(clock.naps)) == ([("a", 2)], [2, 2, 12], 2)


@pytest.mark.parametrize(("share", "sent_ms"), [(3.0, 34.0), (0.5, 32.0), (0.01, 32.0)])
def test_a_nap_that_is_too_long_or_too_short_moves_no_schedule(share, sent_ms):
    """Asked for what is left and never for less than a nanosecond; who sleeps too long is charged for it."""
    clock, wanted = Clock(), []

    def nap(seconds):
        left_s = (START + 32 * MS - clock.ns) / 1e9
        assert 1e-9 <= seconds <= min(0.001, left_s)
        wanted.append(seconds)
        clock.ns += max(1, round(share * seconds * 1e9))

    _, b = measure_window(Server(clock).serve, [ask("a"), ask("b", 32.0)], clock, nap)
    assert ms(b) == [32.0, sent_ms, sent_ms + 10]
    assert b.e2e_s == (sent_ms - 32.0 + 10) / 1e3
    assert len(wanted) < 5_000


def test_the_clock_is_read_once_before_the_first_step_and_once_after_each_step_and_nap():
    _, server, clock = window(ask("a", new_tokens=7), ask("b", 15.0), ask("c", 90.5))
    assert (server.num_steps, len(clock.naps)) == (8, 21)
    assert clock.num_reads == 1 + 8 + 21


# What.


def test_logs_come_in_the_order_of_the_asks_and_equal_times_keep_it():
    asks = [ask("late", 30.0), ask("c", 0.0), ask("a", 0.0), ask("b", 0.0)]
    runs, server, _ = window(*asks)
    assert [name for name, _ in server.taken] == ["c", "a", "b", "late"]
    assert [run.request_id for run in runs] == ["late", "c", "a", "b"]


def test_a_step_may_tell_nothing_and_counts_of_positions_come_along():
    clock = Clock()

    def chunked(inbox):
        name = inbox.popleft().request_id
        for told in (
            [],
            [(name, Emission(num_cached=0, num_prefilled=2))],
            [(name, Emission(token_ids=(8,), num_prefilled=1))],
            [(name, Emission(token_ids=(9, 9)))],
            [(name, Emission(finish_reason="length"))],
        ):
            clock.ns += 10 * MS
            yield told

    (run,) = measure_window(chunked, [ask("a")], clock, clock.nap)
    assert run.stamps == (Stamp(START + 30 * MS, 1), Stamp(START + 40 * MS, 2))
    assert (run.token_ids, run.num_cached, run.num_prefilled) == ((8, 9, 9), 0, 3)
    assert (run.itls_s, run.finish_reason, clock.num_reads) == (None, "length", 6)
    check_run(run)


def test_a_window_without_requests_pulls_nothing():
    runs, server, clock = window()
    assert (runs, server.num_steps, clock.num_reads) == ((), 0, 1)


def test_a_subject_that_cannot_be_closed_is_none_the_worse():
    clock = Clock()
    told = iter([[("a", Emission(token_ids=(1,), finish_reason="length"))]])
    (run,) = measure_window(lambda inbox: told, [ask("a")], clock, clock.nap)
    assert run.token_ids == (1,)


# Ends.


def test_a_subject_that_stops_while_requests_are_open_is_an_error():
    clock = Clock()
    server = Server(clock, fails_at=2)
    with pytest.raises(WrongOutputError, match="stopped serving while requests were open"):
        window(ask("a"), ask("b", new_tokens=3), server=server, clock=clock)
    assert server.is_closed


def test_what_a_subject_raises_passes_through():
    clock = Clock()
    server = Server(clock, fails_at=1, error=RuntimeError("device lost"))
    with pytest.raises(RuntimeError, match="device lost") as raised:
        window(ask("a", new_tokens=3), ask("later", 500.0), server=server, clock=clock)
    assert raised.value is server.error
    assert (server.is_closed, server.taken) == (True, [("a", 0)])


def test_a_clock_that_fails_leaves_no_request_running():
    class Broken(Clock):
        def now_ns(self):
            if self.num_reads == 2:
                raise OSError("no clock")
            return super().now_ns()

    clock = Broken()
    server = Server(clock)
    with pytest.raises(OSError, match="no clock"):
        window(ask("a", new_tokens=5), server=server, clock=clock)
    assert (server.is_closed, list(server.open)) == (True, ["a"])


# Without waiting.


def test_a_clock_that_skips_keeps_a_schedule_of_minutes_in_no_time():
    real = Clock()
    clock, server = SkippingClock(real), Server(real)
    runs = measure_window(server.serve, [ask("a"), ask("b", 120_000.0)], clock, clock.nap)
    assert ms(runs[1]) == [120_000, 120_000, 120_010]
    assert duration_s(runs) == pytest.approx(120.01)
    assert (server.now_ms, real.naps) == (20, [])


# Any schedule.


@given(
    rows=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 5)), min_size=1, max_size=12),
    step_ms=st.integers(1, 20),
)
def test_each_is_sent_at_the_first_moment_between_two_steps_at_which_it_is_due(rows, step_ms):
    asks = [ask(f"{place}", due_ms, num) for place, (due_ms, num) in enumerate(rows)]
    runs, server, clock = window(*asks, step_ms=step_ms)
    assert clock.num_reads == 1 + server.num_steps + len(clock.naps)
    moments = sorted({START, *(stamp.at_ns for run in runs for stamp in run.stamps)})
    for run, each in zip(runs, asks, strict=True):
        check_run(run)
        assert run.scheduled_ns == START + round(each.due_s * 1e9) <= run.sent_ns
        assert run.sent_ns in {run.scheduled_ns, *moments}
        assert not [at_ns for at_ns in moments if run.scheduled_ns <= at_ns < run.sent_ns]
        assert [stamp.at_ns - run.sent_ns for stamp in run.stamps] == [
            step_ms * MS * count for count in range(1, each.new_tokens + 1)
        ]
    check_window(runs)
    times = [at_ms for _, at_ms in server.taken]
    assert times == sorted(times)
