"""A subject that answers many requests at once on a scripted clock, and what measures it."""

import contextlib

from benchmarks.harness.arrivals import together
from benchmarks.harness.loop import Plan, WarmUp
from benchmarks.harness.measure import Measure
from benchmarks.harness.timing import Emission

MS = 1_000_000
TWO = together(2, prompt_tokens=8, new_tokens=3)


class Clock:
    ns = 0

    def now_ns(self):
        return self.ns

    def nap(self, seconds):
        self.ns += round(seconds * 1e9)


class Subject:
    """A step takes `step_ms`, and `each_ms` for each request that runs, times `speeds[n]` for the n-th prompts seen.

    The tokens follow from the prompt; `wrong` changes the second one of a request, `lacks` leaves the last one out.
    """

    vocab_size, relative_tolerance = 1000, 0.0

    def __init__(self, clock, speeds):
        self.clock, self.speeds = clock, speeds
        self.windows, self.asked, self.is_open = [], [], False

    def forget(self, **arm):
        pass

    def serve(self, inbox, *, name="", step_ms=10, each_ms=0, wrong=None, lacks=None, reason="length"):
        self.windows.append((name, [ask.prompt_ids for ask in inbox]))
        assert not self.is_open, "the window before was not closed"
        running, self.is_open = [], True
        try:
            while True:
                while inbox:
                    running.append([len(running), inbox.popleft(), 0])
                self.clock.ns += round((step_ms + each_ms * len(self._live(running))) * MS * self._slowness())
                yield [self._token(each, wrong, lacks, reason) for each in self._live(running)]
        finally:
            self.is_open = False

    def _live(self, running):
        return [each for each in running if each[2] < each[1].new_tokens]

    def _token(self, each, wrong, lacks, reason):
        place, ask, num = each
        is_last = num + 1 == ask.new_tokens - (place == lacks)
        each[2] = ask.new_tokens if is_last else num + 1
        token = (sum(ask.prompt_ids) + num + (place == wrong and num == 1)) % self.vocab_size
        return ask.request_id, Emission(token_ids=(token,), finish_reason=reason if is_last else None)

    def _slowness(self):
        seen = list(dict.fromkeys(prompts[0] for _, prompts in self.windows))
        return self.speeds[min(seen.index(self.windows[-1][1][0]), len(self.speeds) - 1)]

    def next_logits(self, token_ids):
        self.asked.append(token_ids)
        return [float(token) for token in range(self.vocab_size)]


def measuring(arms, *quantities, num_samples=1, num_warmups=0, speeds=(1,), turn=None):
    clock = Clock()
    warm_up = WarmUp(max_runs=num_warmups, max_s=60.0)
    plan = Plan(name="many", quantities=quantities, arms=arms, num_samples=num_samples, warm_up=warm_up)
    subject = Subject(clock, speeds)
    turn = turn or (lambda arm, number: contextlib.nullcontext())
    return Measure(plan, subject, clock, turn=turn, nap=clock.nap), subject


def named(*arms, **options):
    return {arm: {"name": arm} | options for arm in arms}


def found(measure):
    return {(m.metric.name, m.arm): m for m in measure.measurements}
