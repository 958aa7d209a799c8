"""Steps that wait for their turn: in order, whatever ends them, and with a clock that counts none of the waiting."""

from collections import deque

import pytest

from benchmarks.harness.serving import Ask, measure_window
from benchmarks.harness.stepwise import Stepwise, StoppableClock
from benchmarks.harness.timing import Emission, measure_stream


class Clock:
    def __init__(self):
        self.at_ns = 0

    def now_ns(self):
        return self.at_ns


class Subject:
    vocab_size, relative_tolerance = 7, 0.5

    def __init__(self, clock, log, *, breaks_at=None, ends=True):
        self._clock, self._log, self._breaks_at, self._ends = clock, log, breaks_at, ends
        self.given = []

    def stream(self, prompt_ids, num_new_tokens, **arm):
        return self._kept(self._stream(num_new_tokens))

    def serve(self, inbox, **arm):
        return self._kept(self._serve(inbox))

    def _kept(self, steps):
        """Somebody else holds them as well: nothing is closed for want of an owner."""
        self.given.append(steps)
        return steps

    def _stream(self, num_new_tokens):
        try:
            for token in range(num_new_tokens):
                self._step(token)
                is_last = self._ends and token == num_new_tokens - 1
                yield Emission(token_ids=(token,), finish_reason="length" if is_last else None)
        finally:
            self._log.append("closed")

    def _serve(self, inbox):
        left = {}
        try:
            while left or inbox:
                left |= {ask.request_id: ask.new_tokens for ask in inbox}
                inbox.clear()
                self._step(sum(left.values()))
                left = {name: num - 1 for name, num in left.items()}
                yield [
                    (name, Emission(token_ids=(num,), finish_reason=None if num else "length"))
                    for name, num in left.items()
                ]
                left = {name: num for name, num in left.items() if num}
        finally:
            self._log.append("closed")

    def _step(self, number):
        self._clock.at_ns += 10
        self._log.append("step")
        if number == self._breaks_at:
            raise RuntimeError("planted")

    def next_logits(self, token_ids):
        return [0.0]


def stepwise(clock, log, **how):
    """Waiting for the turn takes 1000 ns, giving it back 100."""
    stoppable = StoppableClock(clock)

    def wait(name, ns):
        clock.at_ns += ns
        log.append(name)

    subject = Subject(clock, log, **how)
    return Stepwise(subject, stoppable, lambda: wait("begin", 1000), lambda: wait("end", 100)), stoppable


def test_each_step_lies_between_its_own_begin_and_end():
    log = []
    subject, _ = stepwise(Clock(), log)
    assert [emission.token_ids for emission in subject.stream([1], 3)] == [(0,), (1,), (2,)]
    assert log == ["begin", "step", "end"] * 3 + ["closed"]


def test_the_clock_counts_steps_and_no_waiting():
    clock = Clock()
    subject, stoppable = stepwise(clock, [])
    run = measure_stream(subject.stream([1], 4), stoppable)
    assert (run.ttft_s, run.itls_s) == (pytest.approx(10e-9), pytest.approx([10e-9] * 3))
    assert clock.at_ns > 4000


def test_a_stream_that_does_not_say_that_it_ends_is_asked_once_more():
    log = []
    subject, _ = stepwise(Clock(), log, ends=False)
    assert len(list(subject.stream([1], 2))) == 2
    assert log == ["begin", "step", "end"] * 2 + ["begin", "closed", "end"]


def test_the_turn_is_given_back_when_a_step_raises_and_when_nobody_reads_on():
    for how in ({"breaks_at": 1}, {}):
        log = []
        subject, _ = stepwise(Clock(), log, **how)
        stream = subject.stream([1], 5)
        next(stream)
        if how:
            with pytest.raises(RuntimeError, match="planted"):
                next(stream)
        else:
            stream.close()
        assert (log.count("begin"), log.count("closed")) == (log.count("end"), 1)


# Many requests.


def asks(*sizes):
    return [Ask(f"{place}", 0.0, (1, 2), size) for place, size in enumerate(sizes)]


def test_a_step_of_many_requests_is_one_turn_and_a_window_ends_without_another():
    log, clock = [], Clock()
    subject, stoppable = stepwise(clock, log)
    runs = measure_window(subject.serve, asks(3, 2), stoppable)
    assert log == ["begin", "step", "end"] * 3 + ["closed"]
    assert [run.token_ids for run in runs] == [(2, 1, 0), (1, 0)]
    assert [run.ttft_s for run in runs] == pytest.approx([10e-9] * 2)
    assert runs[0].itls_s == pytest.approx([10e-9] * 2)
    assert clock.at_ns == 3 * (1000 + 10 + 100)


def test_what_waits_for_a_turn_is_due_no_sooner():
    """The second is due after 15 ns of steps: after the second step, however long the turns take."""
    subject, stoppable = stepwise(Clock(), [])
    late = Ask("late", 15e-9, (1, 2), 1)
    _, run = measure_window(subject.serve, [*asks(4), late], stoppable)
    assert (run.scheduled_ns, run.sent_ns, run.stamps[0].at_ns) == (15, 20, 30)


@pytest.mark.parametrize("how", ["left", "breaks", "stops"])
def test_a_window_that_is_left_gives_its_turn_back_and_ends_its_requests(how):
    log = []
    subject, _ = stepwise(Clock(), log, breaks_at=3 if how == "breaks" else None)
    steps = subject.serve(deque(asks(4 if how != "stops" else 1)))
    next(steps)
    if how == "left":
        steps.close()
    else:
        with pytest.raises(RuntimeError if how == "breaks" else StopIteration):
            next(steps)
    assert (log.count("begin"), log.count("closed")) == (log.count("end"), 1)


def test_a_clock_that_was_stopped_twice_goes_on_where_it_was():
    clock = Clock()
    stoppable = StoppableClock(clock)
    for passed in (5, 7):
        with stoppable.stopped():
            clock.at_ns += 1000
        clock.at_ns += passed
    assert stoppable.now_ns() == 12


def test_everything_else_is_the_subjects_own():
    subject, _ = stepwise(Clock(), [])
    assert (subject.vocab_size, subject.relative_tolerance, subject.next_logits([1])) == (7, 0.5, [0.0])
