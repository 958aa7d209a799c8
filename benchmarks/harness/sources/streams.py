"""Many answers at once over HTTP, pulled like an engine's steps: one event loop, which runs while it is pulled.

Knows asyncio, httpx2 and an injected clock. Refuses to know schedules and metrics. Nothing runs beside the one who
pulls: no thread takes the interpreter away from it, and what arrives between two pulls waits in the kernel.

An answer's bytes are stamped with the moment in which the kernel said that they were there, not with that in which
this process had time for them. Of two tokens in one read the second may have come a little later than that, so such
reads are counted, and so is the time in which nobody asked the kernel (`ClientLog`): a client that is too slow says so.
"""

import asyncio
import dataclasses
import selectors
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.harness.errors import SourceError
from benchmarks.harness.serving import Ask, Inbox, Told
from benchmarks.harness.sources.answer import AnswerReader, quote
from benchmarks.harness.sources.endpoint import Endpoint
from benchmarks.harness.sources.openai import HEADERS
from benchmarks.harness.timing import NS_PER_S, Clock, Emission

if TYPE_CHECKING:
    import httpx2

_LONGEST_WAIT_S = 0.05
_DRAIN_S = 0.5


@dataclasses.dataclass(slots=True)
class ClientLog:
    """What this process saw of itself in one window.

    `away_ns`: of the time in which answers were open (`watched_ns`) that in which it did not ask the kernel what had
    arrived. `num_together`: of all `num_arrivals` those that were found at once with one of the same answer before.
    """

    watched_ns: int = 0
    away_ns: int = 0
    longest_away_ns: int = 0
    num_arrivals: int = 0
    num_together: int = 0

    def __add__(self, other: "ClientLog") -> "ClientLog":
        return ClientLog(
            watched_ns=self.watched_ns + other.watched_ns,
            away_ns=self.away_ns + other.away_ns,
            longest_away_ns=max(self.longest_away_ns, other.longest_away_ns),
            num_arrivals=self.num_arrivals + other.num_arrivals,
            num_together=self.num_together + other.num_together,
        )

    @property
    def away_share(self) -> float:
        return self.away_ns / self.watched_ns if self.watched_ns else 0.0

    @property
    def together_share(self) -> float:
        return self.num_together / self.num_arrivals if self.num_arrivals else 0.0


class Arrivals(selectors.DefaultSelector):
    """Asks the kernel what has arrived, remembers when it said so, and for how long nobody asked."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.log = clock, ClientLog()
        self._seen_ns: dict[int, int] = {}
        self._back_ns: int | None = None
        self._is_watching = False

    def select(self, timeout: float | None = None) -> Any:
        """As any selector."""
        asked_ns = self._note_absence()
        ready = self.wait(timeout)
        now_ns = self.clock.now_ns()
        if self._is_watching:
            self.log.watched_ns += now_ns - asked_ns
            self._back_ns = now_ns
        for key, _ in ready:
            self._seen_ns[key.fd] = now_ns
        return ready

    def wait(self, timeout: float | None) -> Any:
        """What the kernel says within so many seconds."""
        return super().select(timeout)

    def _note_absence(self) -> int:
        """What passed since the kernel answered last, if somebody is waited for; the time now."""
        now_ns = self.clock.now_ns()
        if self._back_ns is not None:
            away_ns = now_ns - self._back_ns
            self.log.watched_ns += away_ns
            self.log.away_ns += away_ns
            self.log.longest_away_ns = max(self.log.longest_away_ns, away_ns)
        return now_ns

    def begin(self) -> None:
        """Somebody is waited for from now on; what passed before the kernel is asked was no absence."""
        self._back_ns, self._is_watching = None, True

    def end(self) -> None:
        """Nobody is waited for any more."""
        self._note_absence()
        self._back_ns, self._is_watching = None, False

    def seen_ns(self, number: int | None) -> int:
        """When what was read last of a socket was there; now, where it is none of ours."""
        return self._seen_ns.get(-1 if number is None else number) or self.clock.now_ns()


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop that goes by the session's own clock."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._clock = arrivals.clock  # before the loop looks at the time
        super().__init__(arrivals)

    def time(self) -> float:
        """As any loop."""
        return self._clock.now_ns() / NS_PER_S


@dataclasses.dataclass(slots=True)
class _Answer:
    """One request on its way, and when its last token came."""

    ask: Ask
    reader: AnswerReader
    last_ns: int | None = None


class HttpStreams:
    """Requests to one endpoint, one window at a time.

    `log`, `num_sent` and `num_tokens_asked` add up since `forget`; `plain` is a client for what is not streamed, whose
    connection is its own.
    """

    def __init__(self, endpoint: Endpoint, arrivals: Arrivals, transport: "httpx2.AsyncBaseTransport | None" = None):
        import httpx2

        self._endpoint, self._arrivals, self._loop = endpoint, arrivals, ClockedLoop(arrivals)
        how: dict[str, Any] = {"trust_env": False, "verify": endpoint.is_secure, "headers": HEADERS | endpoint.headers}
        self.plain = httpx2.Client(base_url=endpoint.base_url.removesuffix("/v1"), timeout=30.0, **how)
        self._client = httpx2.AsyncClient(
            base_url=endpoint.base_url, transport=transport, timeout=httpx2.Timeout(None, connect=30.0),
            limits=httpx2.Limits(max_connections=None), **how,
        )  # fmt: skip
        self._told: list[tuple[str, Emission]] = []
        self._answers: dict[asyncio.Task[None], _Answer] = {}
        self._failure: SourceError | None = None
        self._is_pulled = False
        self.forget()

    def stream(self, prompt_ids: Sequence[int], num_new_tokens: int) -> Iterator[Emission]:
        """One request alone; see `loop.Subject`."""
        steps = self.serve(Inbox([Ask("alone", 0.0, tuple(prompt_ids), num_new_tokens)]))
        try:
            for told in steps:
                for _, emission in told:
                    yield emission
                    if emission.finish_reason is not None:
                        return
        finally:
            steps.close()

    def serve(self, inbox: deque[Ask]) -> Any:
        """See `serving.ServingSubject`: a pull returns what has arrived, at the latest when the next request is due.

        Raises SourceError, with the URL, for everything that the server or the connection does wrong.
        """
        try:
            while True:
                while inbox:
                    self._send(inbox.popleft())
                yield self._pull(getattr(inbox, "next_due_ns", None))
        finally:
            self._arrivals.end()
            self._hang_up()

    def forget(self) -> None:
        """What is counted from now on begins at nothing."""
        self._arrivals.log, self.num_sent, self.num_tokens_asked = ClientLog(), 0, 0

    def close(self) -> None:
        """End everything, connections too."""
        self._hang_up()
        self._loop.run_until_complete(self._client.aclose())
        self.plain.close()
        self._loop.close()

    @property
    def log(self) -> ClientLog:
        return self._arrivals.log

    def _send(self, ask: Ask) -> None:
        if all(answer.reader.is_done for answer in self._answers.values()):
            self._arrivals.begin()
        answer = _Answer(ask, AnswerReader())
        self.num_sent += 1
        self.num_tokens_asked += ask.new_tokens
        task = self._loop.create_task(self._follow(answer))
        self._answers[task] = answer
        task.add_done_callback(self._answers.pop)

    def _pull(self, next_due_ns: int | None) -> Told:
        wait_s = _LONGEST_WAIT_S
        if next_due_ns is not None:
            wait_s = min(wait_s, max(0.0, (next_due_ns - self._arrivals.clock.now_ns()) / NS_PER_S))
        timer, self._is_pulled = self._loop.call_later(wait_s, self._loop.stop), True
        self._loop.run_forever()
        timer.cancel()
        self._is_pulled = False
        if self._failure is not None:
            raise self._failure
        told, self._told = self._told, []
        return told

    def _hang_up(self) -> None:
        """Answers that have ended are read to their message's end, or their connections could not be used again."""
        ended = [task for task, answer in self._answers.items() if answer.reader.is_done]
        if ended:
            self._loop.run_until_complete(asyncio.wait(ended, timeout=_DRAIN_S))
        left = list(self._answers)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))
        self._told, self._failure = [], None

    async def _follow(self, answer: _Answer) -> None:
        try:
            await self._exchange(answer)
        except Exception as error:
            said = str(error) if isinstance(error, SourceError) else f"{type(error).__name__}: {error}"
            num = answer.reader.num_tokens
            after = f"broke off after {num} tokens: " if num else ""
            self._failure = SourceError(f"{self._endpoint.base_url}/completions: {after}{said}")
            self._failure.__cause__ = error
            self._wake()

    async def _exchange(self, answer: _Answer) -> None:
        async def note(event: str, told: Mapping[str, Any]) -> None:
            if event.endswith("send_request_body.complete"):
                self._tell(answer.ask, Emission(is_sending=True), self._arrivals.clock.now_ns())

        body, how = self._endpoint.body(answer.ask), {"trace": note}
        async with self._client.stream("POST", "completions", json=body, extensions=how) as response:
            await _check_head(response)
            number = _socket_number(response)
            async for chunk in response.aiter_raw():
                self._read(answer, chunk, self._arrivals.seen_ns(number))
        if not answer.reader.is_done:
            answer.reader.cut_off()

    def _read(self, answer: _Answer, chunk: bytes, at_ns: int) -> None:
        """Tell what a read brought. The end is told once all of the answer is known, with its last word."""
        ask, reader = answer.ask, answer.reader
        if reader.is_done:
            return
        arrived = [each for each in reader.feed(chunk) if each.num_tokens]
        for emission in arrived:
            self._tell(ask, dataclasses.replace(emission, finish_reason=None), at_ns)
            self.log.num_arrivals += 1
            self.log.num_together += answer.last_ns == at_ns
            answer.last_ns = at_ns
        if reader.is_done:
            last = reader.close() if self._endpoint.takes_ids else Emission()  # of words nobody knows the tokens
            self._tell(ask, dataclasses.replace(last, finish_reason=reader.finish_reason), at_ns)
        if arrived or reader.is_done:
            self._wake()

    def _wake(self) -> None:
        """End the pull that waits for something to arrive."""
        if self._is_pulled:
            self._loop.stop()

    def _tell(self, ask: Ask, emission: Emission, at_ns: int) -> None:
        self._told.append((ask.request_id, dataclasses.replace(emission, at_ns=at_ns)))


def _socket_number(response: "httpx2.Response") -> int | None:
    stream: Any = response.extensions.get("network_stream")
    socket = stream.get_extra_info("socket") if stream else None
    return None if socket is None else int(socket.fileno())


async def _check_head(response: "httpx2.Response") -> None:
    kind = response.headers.get("content-type", "")
    if response.status_code != 200:
        raise SourceError(f"status {response.status_code}: {quote((await response.aread()).decode(errors='replace'))}")
    if kind.partition(";")[0].strip().lower() != "text/event-stream":
        said = quote((await response.aread()).decode(errors="replace"))
        raise SourceError(f"content type {kind!r} is not text/event-stream: {said}")
