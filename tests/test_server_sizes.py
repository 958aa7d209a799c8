"""Prompts and bodies that are too large: refused before their end, kept by nobody, while the others are served."""

import asyncio

import pytest
from server_process import Call, head_bytes, request_bytes, server_process, within

pytestmark = pytest.mark.slow

NUM_TOKENS = 100_000
PROMPTS = {"text": "x" * NUM_TOKENS, "ids": [120] * NUM_TOKENS}
MOST_BYTES = 2**20
PIECE = b"x" * 2**16
TOO_LARGE = {
    "declared": (head_bytes(f"content-length: {1000 * MOST_BYTES}"), PIECE),
    "chunked": (head_bytes("transfer-encoding: chunked"), b"10000\r\n" + PIECE + b"\r\n"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with server_process(tmp_path_factory.mktemp("server"), "--max-body-bytes", MOST_BYTES) as server:
        yield server


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_prompt_far_beyond_the_context_is_refused(server, kind, record_testsuite_property):
    async def ask():
        calls = [await Call.open(server.url, stream=True, prompt=PROMPTS[kind]) for _ in range(4)]
        answers = asyncio.gather(*(call.whole() for call in calls))
        num_healthy = 0
        while not answers.done():
            num_healthy += await _health(server)
        for call in calls:
            call.hang_up()
        return answers.result(), num_healthy

    answers, num_healthy = asyncio.run(ask())
    for status, _, answer in answers:
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), answer
        assert len(answer["error"]["message"]) < 200
    assert num_healthy > 0
    assert server.number("steps_total") == 0
    record_testsuite_property(
        f"longest lag with a prompt of {kind}, ms", 1000 * server.number("event_loop_lag_longest_seconds")
    )


async def _health(server):
    call = Call(*await asyncio.open_connection("127.0.0.1", server.port))
    call.writer.write(request_bytes("/health").replace(b"POST", b"GET", 1))
    status, _, _ = await call.whole()
    call.hang_up()
    return status == 200


@pytest.mark.parametrize("kind", TOO_LARGE)
def test_a_body_that_is_too_large_is_refused_before_its_end(server, kind):
    """Its client gets the answer although it has not sent a tenth of what it said it would."""
    head, piece = TOO_LARGE[kind]

    async def send():
        call = Call(*await asyncio.open_connection("127.0.0.1", server.port))
        # What is on its way when the connection ends resets it: who has said how much is coming says no more.
        call.writer.write(head if kind == "declared" else head + piece * (MOST_BYTES // len(PIECE) + 2))
        answer = await call.whole()
        call.hang_up()
        return answer

    status, _, answer = asyncio.run(send())
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("kind", TOO_LARGE)
def test_who_goes_on_sending_does_not_hang(server, kind):
    """It sends a hundred times the limit before it reads. It gets the answer, or an end; the server keeps nothing."""
    head, piece = TOO_LARGE[kind]

    async def send():
        call = Call(*await asyncio.open_connection("127.0.0.1", server.port))
        try:
            call.writer.write(head)
            for _ in range(100 * MOST_BYTES // len(PIECE)):
                call.writer.write(piece)
                await within(call.writer.drain())
            return (await call.whole())[0]
        except (ConnectionError, asyncio.IncompleteReadError):
            return None
        finally:
            call.hang_up()

    before = server.num_bytes
    assert asyncio.run(send()) in (413, None)
    assert server.num_bytes - before < 32 * MOST_BYTES
    server.wait_until_connections(1)  # of who asks for numbers
    assert "Traceback" not in server.log.read_text()
