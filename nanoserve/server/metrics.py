"""The server's own numbers, for Prometheus: latencies as histograms, what runs and waits, what has been done.

Knows a clock that it is given and the moments of each request's life. Refuses to know HTTP and the engine's inside.
Times begin when a request's body has been read and parsed; a token is there when the step that computed it is over.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from nanoserve.engine import Engine
from nanoserve.request import TokenEvent
from nanoserve.server.thread import Ask, Told

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60,
)  # fmt: skip
_HISTOGRAMS = {
    "ttft": "from a request's arrival to its first token",
    "itl": "between two tokens of a request",
    "e2e": "from a request's arrival to its last token",
    "queue": "from a request's arrival to the step that admits it",
    "event_loop_lag": "by which the event loop came late to what was due, asked 50 times a second",
}
_COUNTERS = {
    "prompt_tokens": "tokens of the prompts that have got a first token",
    "cached_tokens": "of those, found in the prefix cache",
    "generated_tokens": "tokens that came out",
}
OUTCOMES = ("stop", "length", "abort", "error", "timeout", "refused")
"""How a request can end. An abort is its client's; what was refused never got to the engine."""


@dataclasses.dataclass(slots=True)
class _Life:
    """When a request came, and when its last token so far."""

    arrived_s: float
    last_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """What the engine holds, as it was between two of its steps. Blocks are None without a pool."""

    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_blocks: int | None = None
    num_blocks_used: int | None = None


class Numbers:
    """See `thread.Watch`. `refused` and `as_text` may be called from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._registry = CollectorRegistry()
        self._spans = {
            name: Histogram(f"nanoserve_{name}_seconds", f"Seconds {what}", buckets=_SECONDS, registry=self._registry)
            for name, what in _HISTOGRAMS.items()
        }
        self._counts = {
            name: Counter(f"nanoserve_{name}", what.capitalize(), registry=self._registry)
            for name, what in _COUNTERS.items()
        }
        self._requests = Counter("nanoserve_requests", "Requests, by end", ["outcome"], registry=self._registry)
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._registry.register(self)
        self._lives: dict[str, _Life] = {}
        self._look = Look()
        self._num_prompt = self._num_cached = 0
        self._longest_lag_s = 0.0

    def now_s(self) -> float:
        return self._clock()

    def came(self, ask: Ask) -> None:
        self._lives[ask.request_id] = _Life(ask.arrived_s)

    def stepped(self, admitted: Sequence[str], told: Sequence[Told], began_s: float) -> None:
        now_s = self._clock()
        for request_id in admitted:
            if (life := self._lives.get(request_id)) is not None:
                self._spans["queue"].observe(began_s - life.arrived_s)
        for _, what in told:
            if isinstance(what, TokenEvent):
                self._note(what, now_s)

    def _note(self, event: TokenEvent, now_s: float) -> None:
        life = self._lives[event.request_id]
        if life.last_s is None:
            self._note_first(event, now_s - life.arrived_s)
        else:
            self._spans["itl"].observe(now_s - life.last_s)
        life.last_s = now_s
        self._counts["generated_tokens"].inc()
        if event.finish_reason is not None:
            self._spans["e2e"].observe(now_s - life.arrived_s)
            self.left(event.request_id, str(event.finish_reason))

    def _note_first(self, event: TokenEvent, ttft_s: float) -> None:
        self._spans["ttft"].observe(ttft_s)
        self._counts["prompt_tokens"].inc(event.num_cached + event.num_prefilled)
        self._counts["cached_tokens"].inc(event.num_cached)
        self._num_prompt += event.num_cached + event.num_prefilled
        self._num_cached += event.num_cached

    def left(self, request_id: str, why: str) -> None:
        if self._lives.pop(request_id, None) is not None:
            self._requests.labels(why).inc()

    def refused(self, num: int) -> None:
        """Requests of one call that never got to the engine."""
        self._requests.labels("refused").inc(num)

    def lagged(self, seconds: float) -> None:
        """How late the event loop was; everybody who reads or writes waits as long."""
        self._spans["event_loop_lag"].observe(seconds)
        self._longest_lag_s = max(self._longest_lag_s, seconds)

    def look(self, engine: Engine) -> None:
        total, free = engine.num_kv_blocks_total, engine.num_kv_blocks_free
        self._look = Look(
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_steps=engine.counts.num_steps,
            num_preemptions=engine.counts.num_preemptions,
            num_blocks=total,
            num_blocks_used=None if total is None or free is None else total - free,
        )

    def collect(self) -> Iterator[Metric]:
        """What is as it is now; called by prometheus_client."""
        look = self._look
        yield GaugeMetricFamily("nanoserve_requests_running", "Requests that share steps now", look.num_running)
        yield GaugeMetricFamily("nanoserve_requests_waiting", "Requests that wait to be admitted", look.num_waiting)
        if look.num_blocks is not None and look.num_blocks_used is not None:
            share = look.num_blocks_used / look.num_blocks
            yield GaugeMetricFamily("nanoserve_kv_blocks", "KV blocks of the pool", look.num_blocks)
            yield GaugeMetricFamily("nanoserve_kv_blocks_used", "KV blocks that requests hold", look.num_blocks_used)
            yield GaugeMetricFamily("nanoserve_kv_usage_ratio", "KV blocks used / KV blocks of the pool", share)
        if self._num_prompt:
            hits = self._num_cached / self._num_prompt
            yield GaugeMetricFamily("nanoserve_prefix_hit_ratio", "Cached / prompt tokens since the start", hits)
        longest_s = self._longest_lag_s
        yield GaugeMetricFamily(
            "nanoserve_event_loop_lag_longest_seconds", "The longest lag since the start", longest_s
        )
        yield CounterMetricFamily("nanoserve_steps", "Steps that the engine has run", look.num_steps)
        yield CounterMetricFamily("nanoserve_preemptions", "Requests that had to make room", look.num_preemptions)

    def as_text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)
