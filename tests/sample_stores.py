"""A subject with a store of prefixes on a scripted clock, whose every number is told by hand, and what measures it."""

import contextlib
from types import SimpleNamespace

from benchmarks.harness.loop import Plan, WarmUp
from benchmarks.harness.measure import Measure
from benchmarks.harness.timing import Emission

MS = 1_000_000
BLOCK = 4
REUSE = {"prefix_tokens": 8, "suffix_tokens": 4}
FOUR = ("cold", "primed", "unseen", "suffix", "prefix")


class Clock:
    def __init__(self):
        self.ns = self.num_reads = 0

    def now_ns(self):
        self.num_reads += 1
        return self.ns


class Subject:
    """2 ms for a prefill, 1 for each position that it runs, 0.25 for each that it reads; 1 for each further token.

    `speeds` slow the machine down from sample to sample, `first_ms` the first prefill ever, `wake_ms` the first after
    everything was forgotten; `found` is what a store gives back of what it has, and `said` what it says of that.
    """

    vocab_size = 1_000_000

    def __init__(
        self,
        clock,
        *,
        speeds=(1,),
        first_ms=0,
        wake_ms=0,
        found=lambda n: n,
        said=lambda n: n,
        logits_off=0.0,
        num_run_off=0,
        relative_tolerance=1e-6,
    ):
        self.clock, self.speeds, self.first_ms, self.wake_ms = clock, speeds, first_ms, wake_ms
        self.found, self.said, self.logits_off, self.num_run_off = found, said, logits_off, num_run_off
        self.relative_tolerance, self.log, self.turns = relative_tolerance, [], []
        self.stored, self.is_awake, self.num_samples = set(), True, 0

    def forget(self, *, name="", **arm):
        assert "state" not in arm
        self.log.append(("forget", name, (), self.clock.num_reads))
        self.stored, self.is_awake = set(), False

    def num_reusable(self, num_stored, num_prompt_tokens, *, prefix_cache="on", **arm):
        return min(num_stored, num_prompt_tokens - 1) // BLOCK * BLOCK if prefix_cache == "on" else 0

    def predict_hits(self, prompts, *, prefix_cache="on", **arm):
        kept, hits = self.stored, []
        self.stored = set()
        for prompt in prompts:
            hits.append(self._found(prompt) if prefix_cache == "on" else 0)
            self._store(prompt)
        self.stored = kept
        return hits

    def reuse_logits(self, prompt_ids, prefix_tokens, **arm):
        self.log.append(("proof", arm["name"], tuple(prompt_ids), self.clock.num_reads))
        num_run = len(prompt_ids) - self.num_reusable(prefix_tokens, len(prompt_ids)) + self.num_run_off
        return SimpleNamespace(cold=[1.0, -8.0], cached=[1.0, -8.0 + self.logits_off], num_run=num_run)

    def next_logits(self, token_ids):
        return [1.0] * self.vocab_size if self.relative_tolerance == 0.01 else [float(i) for i in range(1000)]

    def stream(self, prompt_ids, num_new_tokens, *, name="", **arm):
        self.log.append(("stream", name, tuple(prompt_ids), self.clock.num_reads))
        num_cached, cost_ms = self._prefill(prompt_ids, **arm)
        tokens = [(sum(prompt_ids) + place + arm.get("other", 0)) % 1000 for place in range(num_new_tokens)]
        for place, token in enumerate(tokens):
            self._spend(1 if place else cost_ms)
            is_last = place == num_new_tokens - 1
            told = {} if place else {"num_cached": num_cached, "num_prefilled": len(prompt_ids) - num_cached}
            yield Emission(token_ids=(token,), finish_reason="length" if is_last else None, **told)
        self._store((*prompt_ids, *tokens[:-1]))

    def serve(self, inbox, *, name="", **arm):
        """Everything that waits runs in one step, for one token each."""
        asks = [inbox.popleft() for _ in range(len(inbox))]
        self.log.append(("serve", name, tuple(ask.prompt_ids for ask in asks), self.clock.num_reads))
        told = [self._prefill(ask.prompt_ids, **arm) for ask in asks]
        self._spend(sum(cost_ms for _, cost_ms in told) - 2 * (len(asks) - 1))
        yield [
            (ask.request_id, Emission(token_ids=(sum(ask.prompt_ids) % 1000,), finish_reason="length",
             num_cached=num_cached, num_prefilled=len(ask.prompt_ids) - num_cached))
            for ask, (num_cached, _) in zip(asks, told, strict=True)
        ]  # fmt: skip

    def _prefill(self, prompt_ids, *, prefix_cache="on", read_ms=0.25, price=1, **arm):
        num_found = self.found(self._found(prompt_ids)) if prefix_cache == "on" else 0
        cost_ms = 2 + (len(prompt_ids) - num_found) + read_ms * num_found
        cost_ms += (0 if self.is_awake else self.wake_ms) + self.first_ms
        self.is_awake, self.first_ms = True, 0
        return self.said(num_found), cost_ms * price

    def _spend(self, ms):
        self.clock.ns += round(ms * MS * self.speeds[min(self.num_samples, len(self.speeds) - 1)])

    def _store(self, ids):
        self.stored |= {tuple(ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK)}

    def _found(self, ids):
        return max((end for end in range(BLOCK, len(ids), BLOCK) if tuple(ids[:end]) in self.stored), default=0)

    def asked(self, arm=None):
        """The prompts that were measured: in each turn of an arm the last one."""
        return [told[-1][2] for told in self.turns if told[-1][0] != "proof" and arm in (None, told[-1][1])]


def in_states(*states, **options):
    return {state: {"name": state, "state": state} | options for state in states}


def measuring(
    arms, *quantities, num_samples=1, num_warmups=0, wrap=lambda subject, clock: subject, name="reuse", **how
):
    clock = Clock()
    subject = Subject(clock, **how)

    @contextlib.contextmanager
    def turn(arm, number):
        start = len(subject.log)
        subject.num_samples = number or 0
        yield
        subject.turns.append(subject.log[start:])

    warm_up = WarmUp(max_runs=num_warmups, max_s=60.0)
    plan = Plan(name=name, quantities=quantities, arms=arms, num_samples=num_samples, warm_up=warm_up)
    measure = Measure(plan, wrap(subject, clock), clock, turn=turn)
    return measure, subject


def found(measure):
    return {(m.metric.name, m.arm): m.value for m in measure.measurements}
