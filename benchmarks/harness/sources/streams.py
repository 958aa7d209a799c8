"""Many answers at once over HTTP, pulled like an engine's steps: one event loop, which runs while it is pulled.

Knows asyncio, httpx2 and an injected clock. Refuses to know schedules and metrics. Nothing runs beside the one who
pulls: no thread takes the interpreter away from it, and what arrives between two pulls waits in the kernel.

An answer's bytes are stamped with the moment in which the kernel said that they were there, not with that in which
this process had time for them. Of two tokens in one read the second may have come a little later than that, so such
reads are counted, and so is the time in which nobody asked the kernel (`ClientLog`): a client that is too slow says so.
"""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.harness.errors import SourceError
from benchmarks.harness.serving import Ask, Inbox, Told
from benchmarks.harness.sources.answer import AnswerReader, quote
from benchmarks.harness.sources.client_loop import Arrivals, ClientLog, ClockedLoop
from benchmarks.harness.sources.endpoint import Endpoint
from benchmarks.harness.sources.openai import HEADERS
from benchmarks.harness.timing import NS_PER_S, Emission

if TYPE_CHECKING:
    import httpx2

_LONGEST_SILENCE_S = 600.0
_LONGEST_WAIT_S = 0.05
_DRAIN_S, _MESSAGE_END_S = 0.5, 0.005


@dataclasses.dataclass(slots=True)
class _Answer:
    """One request on its way: when something of it came last, and its end, as long as nobody has been told."""

    ask: Ask
    reader: AnswerReader
    last_ns: int | None = None
    end: Emission | None = None


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
            base_url=endpoint.base_url, transport=transport, timeout=httpx2.Timeout(_LONGEST_SILENCE_S, connect=30.0),
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
            self._answers[task].end = None
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))
        self._told, self._failure = [], None

    async def _follow(self, answer: _Answer) -> None:
        try:
            await self._exchange(answer)
            self._tell_end(answer)
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
        """Tell what a read brought."""
        ask, reader = answer.ask, answer.reader
        if reader.is_done:
            return
        arrived = [each for each in reader.feed(chunk) if each.num_tokens]
        for emission in arrived:
            self._tell(ask, dataclasses.replace(emission, finish_reason=None), at_ns)
            self.log.num_arrivals += 1
            self.log.num_together += answer.last_ns == at_ns
            answer.last_ns = at_ns
        if arrived:
            self._wake()
        if reader.is_done:
            last = reader.close() if self._endpoint.takes_ids else Emission()  # of words nobody knows the tokens
            answer.end = dataclasses.replace(last, finish_reason=reader.finish_reason)
            answer.last_ns = at_ns
            self._loop.call_later(_MESSAGE_END_S, self._tell_end, answer)

    def _tell_end(self, answer: _Answer) -> None:
        """Once: when the message has ended, or soon. Who sends again then finds this connection free."""
        if answer.end is not None:
            self._tell(answer.ask, answer.end, answer.last_ns or 0)
            answer.end = None
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
    kind, coding = response.headers.get("content-type", ""), response.headers.get("content-encoding", "identity")
    if response.status_code != 200:
        raise SourceError(f"status {response.status_code}: {quote((await response.aread()).decode(errors='replace'))}")
    if kind.partition(";")[0].strip().lower() != "text/event-stream":
        said = quote((await response.aread()).decode(errors="replace"))
        raise SourceError(f"content type {kind!r} is not text/event-stream: {said}")
    if coding.lower() != "identity":
        raise SourceError(f"content encoding {coding!r}, though none was asked for: bytes are timed as they come")
