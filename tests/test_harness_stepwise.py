"""Steps that wait for their turn: in order, whatever ends them, and with a clock that counts none of the waiting."""

import pytest

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

    def stream(self, prompt_ids, num_new_tokens, **arm):
        for token in range(num_new_tokens):
            self._clock.at_ns += 10
            self._log.append("step")
            if token == self._breaks_at:
                raise RuntimeError("planted")
            is_last = self._ends and token == num_new_tokens - 1
            yield Emission(token_ids=(token,), finish_reason="length" if is_last else None)

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
    assert log == ["begin", "step", "end"] * 3


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
    assert log == ["begin", "step", "end"] * 2 + ["begin", "end"]


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
        assert log.count("begin") == log.count("end")


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
