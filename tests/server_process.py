"""The real server in a process of its own, and clients of it that can hang up, read slowly, or not read at all."""

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import psutil
from server_here import wait_until

SERVING = "nanoserve: serving "
_LONGEST_WAIT_S = 120
"""After which something is said to hang. Nothing that is tested takes a tenth of it."""


class Cut(Exception):  # noqa: N818 - as the client sees it
    """A stream whose connection ended before its [DONE]."""


@dataclasses.dataclass
class ServerProcess:
    """A server that has said that it takes requests."""

    popen: subprocess.Popen
    url: str
    log: Path

    def __post_init__(self):
        self.process = psutil.Process(self.popen.pid)
        self.client = httpx2.Client(base_url=self.url, timeout=_LONGEST_WAIT_S)

    @property
    def port(self):
        return int(self.url.rpartition(":")[2])

    def post(self, path="/v1/completions", **body):
        return self.client.post(path, json=body)

    def complete(self, **body):
        """The choices of an answer in one piece."""
        answer = self.post(**(body | {"return_token_ids": True}))
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    def number(self, name):
        """A sample of /metrics, by its name behind `nanoserve_`."""
        lines = self.client.get("/metrics").text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == f"nanoserve_{name}")

    def wait_until(self, name, wanted):
        """Until this sample is the number that is wanted, or one that `wanted` is true of."""
        holds = wanted if callable(wanted) else lambda number: number == wanted
        wait_until(lambda: holds(self.number(name)), f"{name} is still {self.number(name)}", _LONGEST_WAIT_S)

    def wait_until_empty(self):
        """Until nothing runs, waits or holds a block."""
        for name in ("requests_waiting", "requests_running", "kv_blocks_used"):
            self.wait_until(name, 0)

    def holds(self):
        """File descriptors and threads."""
        return self.process.num_fds(), self.process.num_threads()

    def wait_until_connections(self, num):
        """Until the process has so many, of those that have asked for something at least once."""
        wait_until(lambda: len(self._connections()) == num, f"not {num} connections", _LONGEST_WAIT_S)

    def _connections(self):
        return [each for each in self.process.net_connections("tcp") if each.status != psutil.CONN_LISTEN]

    @property
    def num_bytes(self):
        """Of memory that it has and nobody else."""
        return self.process.memory_full_info().uss

    def wait(self):
        """Its exit status, once it has ended by itself."""
        return self.popen.wait(_LONGEST_WAIT_S)


@contextlib.contextmanager
def server_process(folder, *options, port=0) -> Iterator[ServerProcess]:
    """The smallest model behind HTTP. It is ended when this ends, however that comes about."""
    command = [sys.executable, "-c", "from nanoserve.cli import main; main()", "serve", "--model", "tiny"]
    command += ["--device", "cpu", "--dtype", "float32", "--port", str(port), *map(str, options)]
    log = folder / "server.log"
    with (
        log.open("w") as err,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=err, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        ) as popen,
    ):
        try:
            line = next((line for line in popen.stdout if line.startswith(SERVING)), None)
            assert line is not None, log.read_text()
            server = ServerProcess(popen, line.split()[-1], log)
            with server.client:
                yield server
        finally:
            popen.kill()


class Call:
    """One call on a connection of its own, by hand."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, url, *, limit=2**16, **body):
        host, _, port = url.removeprefix("http://").partition(":")
        call = cls(*await asyncio.open_connection(host, int(port), limit=limit))
        call.writer.write(request_bytes(**body))
        return call

    async def status(self):
        """Of the answer; the headers are left behind."""
        first = await within(self.reader.readline())
        while (await within(self.reader.readline())).strip():
            pass
        return int(first.split()[1]) if first else 0

    async def whole(self):
        """Status, headers, and the JSON of an answer in one piece."""
        head = (await within(self.reader.readuntil(b"\r\n\r\n"))).decode().lower().splitlines()
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        data = await within(self.reader.readexactly(int(headers["content-length"])))
        return int(head[0].split()[1]), headers, json.loads(data)

    async def chunks(self) -> AsyncIterator[dict]:
        """Of a stream, up to its [DONE]. Raises Cut."""
        with contextlib.suppress(ConnectionError):
            while line := await within(self.reader.readline()):
                if line == b"data: [DONE]\n":
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
        raise Cut

    def hang_up(self):
        self.writer.transport.abort()


async def until_cut(chunks):
    """All chunks of a stream that does not end as it should."""
    told = []
    try:
        async with asyncio.timeout(_LONGEST_WAIT_S):
            async for chunk in chunks:
                told.append(chunk)
    except Cut:
        return told
    raise AssertionError("it came to its [DONE]")


async def within(awaited):
    """Its result; TimeoutError where it hangs."""
    return await asyncio.wait_for(awaited, _LONGEST_WAIT_S)


def request_bytes(path="/v1/completions", **body):
    """A whole HTTP request."""
    data = json.dumps(body).encode()
    return head_bytes(f"content-length: {len(data)}", path) + data


def head_bytes(header, path="/v1/completions"):
    """The head of one, with one header that says how long the body is."""
    return f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n{header}\r\n\r\n".encode()


@dataclasses.dataclass
class Told:
    """What a stream has told of one answer."""

    ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""

    def add(self, chunk):
        for choice in chunk["choices"]:
            self.ids += choice["token_ids"]
            self.text += choice["text"]


async def stream(url, **body):
    """All that a stream tells, once it has ended as it should."""
    call, told = await Call.open(url, stream=True, return_token_ids=True, **body), Told()
    assert await call.status() == 200
    async for chunk in call.chunks():
        assert "error" not in chunk, chunk
        told.add(chunk)
    call.hang_up()
    return told
