"""A planted slowdown: by exactly so much on a scripted clock, with the tokens untouched."""

import pytest

from benchmarks.harness.errors import InstrumentError
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


def test_everything_else_is_the_subjects_own():
    slowed = Slowed(Subject(Clock()), 0.1, Clock())
    assert (slowed.vocab_size, slowed.relative_tolerance, slowed.next_logits([1])) == (7, 0.5, [0.0])


@pytest.mark.parametrize("share", [-0.1, float("nan"), float("inf")])
def test_an_impossible_share_is_refused(share):
    with pytest.raises(InstrumentError, match="planted slowdown"):
        Slowed(Subject(Clock()), share, Clock())
