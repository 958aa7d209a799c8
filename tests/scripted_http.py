"""A server and a client whose clocks are one: a wait moves the clock, and nothing else does."""

import asyncio
import contextlib
import json

import httpx2

from benchmarks.harness.sources.client_loop import Arrivals
from benchmarks.harness.sources.endpoint import Endpoint
from benchmarks.harness.sources.streams import HttpStreams

MS = 1_000_000
START = 54_321 * MS
HERE = Endpoint(base_url="http://scripted/v1", model="m")


class ScriptedClock:
    def __init__(self):
        self.ns = START

    def now_ns(self):
        return self.ns

    def nap(self, seconds):
        self.ns += round(seconds * 1e9)


class ScriptedArrivals(Arrivals):
    """Waits for no kernel: the clock jumps to when the wait would have ended."""

    def wait(self, timeout):
        assert timeout is not None, "would wait for ever"
        self.clock.nap(timeout)
        return []


class ScriptedServer(httpx2.AsyncBaseTransport):
    """Answers each request by its script: (ms since it was sent, bytes). After each read the client works `busy_ms`."""

    def __init__(self, clock, scripts, *, send_ms=0.0, busy_ms=0.0):
        self.clock, self.scripts, self.send_ms, self.busy_ms = clock, list(scripts), send_ms, busy_ms
        self.asked, self.arrivals = [], None

    async def handle_async_request(self, request):
        self.asked.append(json.loads(request.content))
        script = self.scripts.pop(0)
        await self._until(self.clock.ns + round(self.send_ms * MS))
        with contextlib.suppress(KeyError):
            await request.extensions["trace"]("http11.send_request_body.complete", {})
        headers = {"content-type": "text/event-stream"}
        body, number = _Body(self, self.clock.ns, script), len(self.asked)
        return httpx2.Response(200, headers=headers, stream=body, extensions={"network_stream": Socket(number)})

    async def _until(self, at_ns):
        come = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_at(at_ns / 1e9, come.set_result, None)
        await come


class Socket:
    """Of so many; the kernel says when something came only where the server is given the client's `arrivals`."""

    def __init__(self, number):
        self.number = number

    def get_extra_info(self, name):
        return self

    def fileno(self):
        return self.number


class _Body(httpx2.AsyncByteStream):
    def __init__(self, server, since_ns, script):
        self.server, self.since_ns, self.script = server, since_ns, script
        self.number = len(server.asked)

    async def __aiter__(self):
        for at_ms, data in self.script:
            there_ns = self.since_ns + round(at_ms * MS)
            await self.server._until(there_ns)
            if self.server.arrivals is not None:
                self.server.arrivals._seen_ns[self.number] = there_ns
            yield data
            self.server.clock.ns += round(self.server.busy_ms * MS)


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(*ids):
    return event(choices=[{"index": 0, "text": "x" * len(ids), "token_ids": list(ids), "finish_reason": None}])


def ended(num_tokens, *, num_prompt=3, num_cached=0, reason="length"):
    """The finish reason, the usage and the end."""
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
    usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
    last = event(choices=[{"index": 0, "text": "", "finish_reason": reason}])
    return last + event(choices=[], usage=usage) + b"data: [DONE]\n\n"


def answer(*at_ms, first_id=0, num_prompt=3, end_ms=None, reason="length"):
    """A token at each of these times, its id counted from the first; the end with the last one, or later."""
    said = [(at, token(first_id + place)) for place, at in enumerate(at_ms)]
    last_ms = at_ms[-1] if end_ms is None else end_ms
    return [*said, (last_ms, ended(len(at_ms), num_prompt=num_prompt, reason=reason))]


def connect(clock, transport, endpoint=HERE):
    return HttpStreams(endpoint, ScriptedArrivals(clock), transport)
