"""A planted slowdown: by exactly so much on a scripted clock, with the tokens untouched."""

import pytest

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.serving import Ask, measure_window
from benchmarks.harness.slowed import Slowed
from benchmarks.harness.timing import Emission, measure_stream


class Clock:
    """Stands still unless work is done: a step takes what the subject says, a look 1 ns."""

    def __init__(self):
        self.at_ns = 0

    def now_ns(self):
        self.at_ns += 1
        return self.at_ns


class Subject:
    vocab_size, relative_tolerance = 7, 0.5

    def __init__(self, clock):
        self._clock = clock
        self.given, self.is_closed = [], False

    def serve(self, inbox, *, step_ns):
        """Somebody else holds the steps as well: nothing is closed for want of an owner."""
        self.given.append(self._serve(inbox, step_ns))
        return self.given[-1]

    def _serve(self, inbox, step_ns):
        left = {}
        try:
            while True:
                left |= {ask.request_id: ask.new_tokens for ask in inbox}
                inbox.clear()
                self._clock.at_ns += step_ns * len(left)
                left = {name: num - 1 for name, num in left.items()}
                yield [
                    (name, Emission(token_ids=(num,), finish_reason=None if num else "length"))
                    for name, num in left.items()
                ]
                left = {name: num for name, num in left.items() if num}
        finally:
            self.is_closed = True

    def stream(self, prompt_ids, num_new_tokens, **arm):
        for token in range(num_new_tokens):
            self._clock.at_ns += arm["prefill_ns"] if token == 0 else arm["decode_ns"]
            yield Emission(token_ids=(token,))

    def next_logits(self, token_ids):
        return [0.0]


def run(share, clock=None):
    clock = clock or Clock()
    subject = Slowed(Subject(clock), share, clock)
    return measure_stream(subject.stream([1], 5, prefill_ns=20_000, decode_ns=10_000), clock)


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1, 1.0])
def test_each_step_takes_so_much_longer(share):
    found, plain = run(share), run(0.0)
    assert found.ttft_s / plain.ttft_s == pytest.approx(1 + share, abs=1e-3)
    for slow, fast in zip(found.itls_s, plain.itls_s, strict=True):
        assert slow / fast == pytest.approx(1 + share, abs=1e-3)
    assert found.token_ids == plain.token_ids == (0, 1, 2, 3, 4)


def test_without_a_share_a_step_pays_for_looks_at_the_clock_only():
    assert run(0.0).itls_s == pytest.approx([1e-5] * 4, abs=10e-9)


@pytest.mark.parametrize("share", [0.03, 1.0])
def test_each_step_of_many_requests_takes_so_much_longer(share):
    """Also while fewer are left: 20 us for two requests, 10 for one."""

    def window(share):
        clock = Clock()
        subject = Subject(clock)
        slowed = Slowed(subject, share, clock)
        asks = [Ask("long", 0.0, (1,), 5), Ask("short", 0.0, (1,), 2)]
        runs = measure_window(lambda inbox: slowed.serve(inbox, step_ns=10_000), asks, clock)
        assert subject.is_closed
        return runs

    for slow, plain in zip(window(share), window(0.0), strict=True):
        assert slow.token_ids == plain.token_ids
        assert slow.ttft_s / plain.ttft_s == pytest.approx(1 + share, abs=1e-3)
        assert [a / b for a, b in zip(slow.itls_s, plain.itls_s, strict=True)] == pytest.approx(
            [1 + share] * len(plain.itls_s), abs=2e-3
        )


def test_steps_that_are_left_are_closed():
    clock = Clock()
    subject = Subject(clock)
    steps = Slowed(subject, 0.1, clock).serve([Ask("a", 0.0, (1,), 5)], step_ns=10_000)
    next(steps)
    assert not subject.is_closed
    steps.close()
    assert subject.is_closed


def test_everything_else_is_the_subjects_own():
    slowed = Slowed(Subject(Clock()), 0.1, Clock())
    assert (slowed.vocab_size, slowed.relative_tolerance, slowed.next_logits([1])) == (7, 0.5, [0.0])


@pytest.mark.parametrize("share", [-0.1, float("nan"), float("inf")])
def test_an_impossible_share_is_refused(share):
    with pytest.raises(InstrumentError, match="planted slowdown"):
        Slowed(Subject(Clock()), share, Clock())
