"""Clients that read slowly or not at all: the others get theirs meanwhile, and the server lets go of everything."""

import asyncio
import contextlib
import json
import signal
import socket
import threading

import pytest
from server_process import Told, request_bytes, server_process, stream

pytestmark = [pytest.mark.slow, pytest.mark.simulated]

SHORT = {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True, "seed": 1}
LARGE = {"prompt": [place % 256 for place in range(1500)], "echo": True, "logprobs": 20, "n": 4, "max_tokens": 4}
"""Some ten MB, which no kernel keeps for a reader; the engine has computed them in a moment."""

MOST_GROWN_BYTES = 150e6
SECONDS = 12
"""In which everything else here has long been done, on a busy machine as well."""


def _unread(server, **body):
    """A connection with a call that nobody reads the answer of."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(request_bytes(**body))
    return connection


def _read_bytewise(connection, data, done):
    with contextlib.suppress(OSError):  # it is dropped
        while not done.wait(0.001) and (byte := connection.recv(1)):
            data += byte


@pytest.mark.parametrize("streams", [True, False])
def test_who_does_not_read_holds_up_nobody_and_is_dropped(tmp_path, streams):
    data, done = bytearray(), threading.Event()
    with server_process(tmp_path, "--request-timeout-s", SECONDS) as server:
        wanted = asyncio.run(stream(server.url, **SHORT))
        before, num_tokens = server.num_bytes, server.number("generated_tokens_total")
        with _unread(server, stream=streams, **LARGE) as slow, _unread(server, stream=streams, **LARGE):
            reader = threading.Thread(target=_read_bytewise, args=(slow, data, done))
            reader.start()
            server.wait_until("generated_tokens_total", num_tokens + 2 * LARGE["n"] * LARGE["max_tokens"])
            server.wait_until_empty()
            assert all(told == wanted for told in asyncio.run(_all_of(server, 4)))
            assert server.num_bytes - before < MOST_GROWN_BYTES
            assert server.number('requests_total{outcome="timeout"}') == 0  # what was freed was done
            server.wait_until_connections(1)  # of who asks for numbers
            done.set()
            reader.join()
        assert data.startswith(b"HTTP/1.1 200 OK\r\n")
        assert asyncio.run(stream(server.url, **SHORT)) == wanted
        assert "Traceback" not in server.log.read_text()


async def _all_of(server, num):
    return await asyncio.gather(*(stream(server.url, **SHORT) for _ in range(num)))


def test_byte_by_byte_it_is_the_same_answer(tmp_path):
    data = bytearray()
    with server_process(tmp_path) as server:
        wanted = asyncio.run(stream(server.url, **SHORT))
        with _unread(server, stream=True, return_token_ids=True, **SHORT) as connection:
            while not data.endswith(b"data: [DONE]\n\n"):
                data += connection.recv(1)
    assert _told(data) == wanted


def _told(data):
    told = Told()
    for line in data.splitlines():
        if line.startswith(b"data: {"):
            told.add(json.loads(line[6:]))
    return told


def test_who_does_not_read_keeps_no_server_from_its_end(tmp_path):
    with server_process(tmp_path, "--drain-timeout-s", 0.5) as server:
        with _unread(server, stream=True, **LARGE), _unread(server, stream=False, **LARGE):
            server.wait_until("generated_tokens_total", 2 * LARGE["n"] * LARGE["max_tokens"])
            server.popen.send_signal(signal.SIGTERM)
            assert server.wait() == 0
        assert "Traceback" not in server.log.read_text()
