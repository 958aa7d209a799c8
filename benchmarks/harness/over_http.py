"""A subject whose arms with `via="http"` are asked through HTTP, the others in this process.

Knows a subject, endpoints, and a session's clock. Refuses to know how an endpoint came about (`sources/`), and pytest.
Beside what the client measures it puts what the server says of itself, and what the client saw of its own lateness.
"""

import contextlib
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from benchmarks.harness.errors import WrongOutputError
from benchmarks.harness.kept import BUNDLED
from benchmarks.harness.loop import Subject, Window
from benchmarks.harness.proof import Reuse
from benchmarks.harness.results import Flag
from benchmarks.harness.serving import Ask, Told, runs_by_itself
from benchmarks.harness.sources.client_loop import Arrivals, ClientLog
from benchmarks.harness.sources.endpoint import Endpoint
from benchmarks.harness.sources.server_word import HISTOGRAMS, Total, Word, between, look
from benchmarks.harness.sources.streams import HttpStreams
from benchmarks.harness.timing import NS_PER_S, Clock, Emission, RunTiming
from benchmarks.harness.wrapped import Wrapped

T = TypeVar("T")

MAX_AWAY_SHARE = 0.25
"""Of a window. A client that listens for less than three quarters of it may be what its server waits for."""

MAX_TOGETHER_SHARE = 0.05
"""Of all arrivals. In the reads of more than that the gaps between tokens are partly unknown."""

MAX_DELAY_S = 0.010
"""Who sends later than this makes another load than was asked for."""

Find = Callable[..., Endpoint]
"""The endpoint with these options of an engine."""

Connect = Callable[[Endpoint, Clock], HttpStreams]
"""What sends requests to an endpoint, by the session's clock."""


def _connect(endpoint: Endpoint, clock: Clock) -> HttpStreams:
    return HttpStreams(endpoint, Arrivals(clock))


class OverHttp(Wrapped):
    """Routes each arm; close it at the end of a test. What nobody times goes the same way as what is timed.

    What has to be known of an engine (what it finds again, its logits) is asked of the subject in this process, which
    has the same weights and options.
    """

    def __init__(
        self, subject: Subject, find: Find, clock: Clock, *, has_word: bool = True, connect: Connect = _connect
    ) -> None:
        """`has_word` says whether endpoints tell of themselves as nanoserve's server does."""
        super().__init__(subject)
        self._find, self._clock, self._has_word, self._connect = find, clock, has_word, connect
        self._streams: dict[str, HttpStreams] = {}
        self._looked_at: HttpStreams | None = None
        self._before: Word | None = None
        self._words: dict[str, list[Word]] = defaultdict(list)
        self._logs: dict[str, list[ClientLog]] = defaultdict(list)
        self._num_asked: dict[str, list[int]] = defaultdict(list)

    def stream(self, prompt_ids: Sequence[int], num_new_tokens: int, **arm: Any) -> Iterator[Emission]:
        """See `loop.Subject`."""
        if runs_by_itself(arm):
            return self._to(arm).stream(prompt_ids, num_new_tokens)
        return self._subject.stream(prompt_ids, num_new_tokens, **arm)

    def serve(self, inbox: deque[Ask], **arm: Any) -> Iterator[Told]:
        """See `serving.ServingSubject`."""
        if runs_by_itself(arm):
            return self._to(arm).serve(inbox)  # type: ignore[no-any-return]
        return self._subject.serve(inbox, **arm)

    def forget(self, **arm: Any) -> None:
        """A server forgets nothing; prompts that are to be new are new to it as well."""
        if not runs_by_itself(arm):
            self._subject.forget(**arm)

    def num_reusable(self, num_stored: int, num_prompt_tokens: int, **arm: Any) -> int | None:
        return super().num_reusable(num_stored, num_prompt_tokens, **_bare(arm))

    def reuse_logits(self, prompt_ids: Sequence[int], prefix_tokens: int, **arm: Any) -> Reuse:
        return super().reuse_logits(prompt_ids, prefix_tokens, **_bare(arm))

    @contextlib.contextmanager
    def looked_at(self, arm: str, options: Mapping[str, Any], number: int | None) -> Iterator[None]:
        """Around one run: ask the server before and after, and keep what the client saw; not of warm-ups."""
        if not runs_by_itself(options):
            yield
            return
        self._looked_at = streams = self._to(options)
        self._begin_look()
        yield
        self._looked_at = None
        if number is not None:
            self._end_look(arm, streams)

    def _begin_look(self) -> None:
        if self._looked_at is not None:
            self._before = self._word(self._looked_at)
            self._looked_at.forget()

    def _end_look(self, arm: str, streams: HttpStreams) -> None:
        self._logs[arm].append(streams.log)
        self._num_asked[arm].append(streams.num_tokens_asked)
        if self._before is not None:
            after = self._word(streams, self._before["e2e_s"].num + streams.num_sent)
            self._words[arm].append(between(self._before, after or self._before))

    def _word(self, streams: HttpStreams, at_least: int = 0) -> Word | None:
        return look(streams.plain, at_least) if self._has_word else None

    def untimed(self, act: Callable[[Subject], T]) -> T:
        """See `loop.untimed`. A look begins after it."""
        done = act(self)
        self._begin_look()
        return done

    def tell(self, samples: Mapping[str, Sequence[Window]]) -> tuple[list[Flag], dict[str, Any]]:
        """Flags and details of all samples: by arm what the server says, and where the client was too slow.

        Raises WrongOutputError where the server counts other observations than the client.
        """
        flags, details = list[Flag](), dict[str, Any]()
        for arm, logs in self._logs.items():
            windows = samples.get(arm, ())
            num, runs = len(windows), [run for window in windows for run in window]
            log = sum(logs[:num], ClientLog())  # a sample that was broken off has left more looks than windows
            flags += [Flag(kind="client", arm=arm, what=what) for what in slow_client(log, runs)]
            flags += [
                Flag(kind="short", arm=arm, what=what) for what in short_answers(runs, sum(self._num_asked[arm][:num]))
            ]
            flags += [Flag(kind=BUNDLED, arm=arm, what=what) for what in bundles(runs)]
            details.setdefault("client", {})[arm] = _told_of(log)
            if self._words[arm]:
                beside = server_beside(self._words[arm][:num], runs)
                check_counts(beside, arm)
                details.setdefault("server", {})[arm] = beside
                flags += [Flag(kind="server", arm=arm, what=what) for what in disagreements(beside)]
        return flags, details

    def close(self) -> None:
        """End all connections."""
        while self._streams:
            self._streams.popitem()[1].close()

    def _to(self, arm: Mapping[str, Any]) -> HttpStreams:
        endpoint = self._find(**_bare(arm))
        if endpoint.base_url not in self._streams:
            self._streams[endpoint.base_url] = self._connect(endpoint, self._clock)
        return self._streams[endpoint.base_url]


def _bare(arm: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arm.items() if name != "via"}


def _told_of(log: ClientLog) -> dict[str, Any]:
    return {
        "away_share": log.away_share,
        "longest_away_s": log.longest_away_ns / NS_PER_S,
        "num_arrivals": log.num_arrivals,
        "num_together": log.num_together,
    }


def slow_client(log: ClientLog, runs: Sequence[RunTiming]) -> Iterator[str]:
    """Every reason to take the client for the bottleneck, with its figures."""
    if log.away_share > MAX_AWAY_SHARE:
        yield (
            f"the client was the bottleneck: for {log.away_share:.0%} of the time it did not listen (more than "
            f"{MAX_AWAY_SHARE:.0%}), for up to {log.longest_away_ns / 1e6:.3g} ms at once"
        )
    if log.together_share > MAX_TOGETHER_SHARE:
        yield (
            f"the client was the bottleneck, or the server sends tokens in bundles: {log.num_together} of "
            f"{log.num_arrivals} arrivals were read with the one before (more than {MAX_TOGETHER_SHARE:.0%})"
        )
    delays = [run.schedule_delay_s for run in runs if run.schedule_delay_s is not None]
    late = sum(delay > MAX_DELAY_S for delay in delays)
    if late:
        yield (
            f"the client was the bottleneck: {late} of {len(delays)} requests were sent more than "
            f"{MAX_DELAY_S * 1e3:g} ms late, by up to {max(delays) * 1e3:.3g} ms"
        )


def short_answers(runs: Sequence[RunTiming], num_asked: int) -> Iterator[str]:
    """That answers ended by themselves, and how much of what was asked is missing."""
    num_early, num_came = sum(run.finish_reason == "stop" for run in runs), sum(run.num_tokens for run in runs)
    if num_early:
        yield f"{num_early} of {len(runs)} answers ended by themselves: {num_came} of {num_asked} tokens came"


def bundles(runs: Sequence[RunTiming]) -> Iterator[str]:
    """That tokens came several to a message: in such an answer nobody can tell one gap from another."""
    num = sum(run.itls_s is None for run in runs)
    if num:
        yield f"in {num} of {len(runs)} answers tokens came in bundles: they have no ITL, but a TPOT and a step gap"
    gaps_s = [gap_s for run in runs for gap_s in run.itls_s or ()]
    if gaps_s and not statistics.median(gaps_s):
        yield "most tokens were found together with the one before: half of the gaps are 0, and no ITL says anything"


def server_beside(words: Sequence[Word], runs: Sequence[RunTiming]) -> dict[str, dict[str, Any]]:
    """For each latency the client's mean and the server's, and how many observations each of them had.

    The client's count from sending: how late it sent is not the server's doing. Bundled tokens have a mean gap.
    """
    told = {}
    for name in HISTOGRAMS:
        first, *rest = (word[name] for word in words)
        ours, theirs = _seen(name, runs), sum(rest, first)
        told[name] = {
            "client_mean_s": ours.mean_s,
            "server_mean_s": theirs.mean_s,
            "num_client": ours.num,
            "num_server": theirs.num,
        }
    return told


def _seen(name: str, runs: Sequence[RunTiming]) -> Total:
    """The same total, of what the client saw."""
    spans = {"ttft_s": (None, 0), "itl_s": (0, -1), "e2e_s": (None, -1)}
    since, until = spans[name]
    total = Total()
    for run in (run for run in runs if run.stamps):
        start_ns = run.sent_ns if since is None else run.stamps[since].at_ns
        num = run.num_tokens - 1 if name == "itl_s" else 1
        total += Total((run.stamps[until].at_ns - start_ns) / NS_PER_S, num)
    return total


def check_counts(beside: Mapping[str, Mapping[str, Any]], arm: str) -> None:
    """Raise WrongOutputError unless the server counts exactly what the client saw: else one of them is wrong."""
    for name, each in beside.items():
        if each["num_client"] != each["num_server"]:
            raise WrongOutputError(
                f"{arm}: the server counts {each['num_server']} of {name} where its client saw {each['num_client']}; "
                f"if somebody else asks the same server, leave it to the benchmark"
            )


def disagreements(beside: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Where the server claims to be slower than it was seen to be; of gaps neither end is ahead of the other."""
    for name in ("ttft_s", "e2e_s"):
        client_s, server_s = beside[name]["client_mean_s"], beside[name]["server_mean_s"]
        if client_s is not None and server_s > client_s:
            yield f"{name}: the server's mean is {server_s * 1e3:.4g} ms, above the client's {client_s * 1e3:.4g} ms"
