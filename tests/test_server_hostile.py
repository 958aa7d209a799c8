"""What no client should send: the server says 4xx in OpenAI's format or hangs up, and answers whoever comes next."""

import contextlib
import json
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_here import scripted_engine, serving

MOST_SECONDS = 20
"""Nobody is measured: whoever hears nothing for that long takes the server to hang."""

HUGE = "1" + "0" * 400
COMPLETION = {"prompt": "Hello", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


@pytest.fixture(scope="module")
def running():
    with serving(scripted_engine(), max_body_bytes=2**16) as running:
        yield running


def said_to(running, sent, hangs_up=False):
    """All that the server says to these bytes until it ends the connection."""
    host, port = running.url.removeprefix("http://").split(":")
    heard = b""
    connection = socket.create_connection((host, int(port)), timeout=MOST_SECONDS)
    with connection, contextlib.suppress(ConnectionError):
        connection.sendall(sent)
        if hangs_up:
            connection.shutdown(socket.SHUT_WR)
        while some := connection.recv(2**16):
            heard += some
    return heard


def statuses(heard):
    """Of all answers that lie behind each other."""
    lines = heard.split(b"HTTP/1.1 ")[1:]
    return [int(each[:3]) for each in lines]


def post(body, path="/v1/completions", headers=(), length=None, kind="content-type: application/json"):
    size = len(body) if length is None else length
    lines = [f"POST {path} HTTP/1.1", "host: here", "connection: close", *filter(None, [kind]), *headers]
    lines += [] if length == "" else [f"content-length: {size}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def check_alive(running):
    assert running.complete(**COMPLETION)["choices"][0]["text"] == "H"


def check_refusal(answer):
    """4xx, and in OpenAI's format."""
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]


def ask(running, path, body):
    return running.client.post(path, content=body, headers={"content-type": "application/json"})


def with_field(body, name, literal):
    """The body, with JSON as it is written in place of a field."""
    rest = json.dumps({key: value for key, value in body.items() if key != name})[1:-1]
    return f"{{{rest}{', ' if rest else ''}{json.dumps(name)}: {literal}}}".encode()


FIELDS = [
    "model", "prompt", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "stream_options",
    "presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p", "repetition_penalty", "ignore_eos",
    "return_token_ids", "user", "metadata", "logprobs", "echo", "best_of", "suffix", "messages", "tools",
    "max_completion_tokens", "top_logprobs", "response_format",
]  # fmt: skip
OF_CHATS = ("messages", "tools", "max_completion_tokens", "top_logprobs", "response_format")
LITERALS = [
    "null", "true", "-1", "0", HUGE, "-" + HUGE, "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1" * 5000,
    "1e-400", "1.5", '""', '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', "[]", "{}", "[[]]",
    "[null]", "[-1]", '["\\ud800"]',
    f"[{HUGE}]", "[1.0]", "[true]", '[1, "a"]', "[[1], 2]",
    '{"\\ud800": 1}', '{"1": 1e400}', '{"1": NaN}', f'{{"{HUGE}": 1}}',
    '{"include_usage": "yes"}', '[{"role": "user"}]', '[{"role": "\\ud800", "content": "x"}]',
    '[{"role": "user", "content": "\\ud800"}]', '[{"role": "user", "content": [{"type": "text", "text": "\\udfff"}]}]',
    '[{"role": "user", "name": "\\ud800", "content": "x"}]', "[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500,
]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_no_value_of_a_field_is_the_servers_fault(running, field):
    path = "/v1/chat/completions" if field in OF_CHATS else "/v1/completions"
    for literal in LITERALS:
        answer = ask(running, path, with_field(PATHS[path], field, literal))
        if answer.status_code != 200:
            check_refusal(answer)
    check_alive(running)


@pytest.mark.parametrize("half", ["\\ud800", "\\udc00", "x\\udbff", "\\ude00\\ud83d"])
@pytest.mark.parametrize("field", ["prompt", "stop", "model"])
def test_half_a_pair_is_refused_wherever_it_is_text(running, field, half):
    for literal in (f'"{half}"', f'["{half}"]'):
        check_refusal(ask(running, "/v1/completions", with_field(COMPLETION, field, literal)))


BODIES = {
    "nothing": b"",
    "a space": b" ",
    "a word": b"hello",
    "a form": b"prompt=Hello&max_tokens=1",
    "a list": b"[]",
    "a number": b"1",
    "half": b'{"prompt": "Hel',
    "two": b"{}{}",
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "too long an encoding": b'{"prompt": "\xc0\x80"}',
    "an encoded surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "another encoding": '{"prompt": "é"}'.encode("latin-1"),
    "deep lists": b"[" * 30_000,
    "deep lists that end": b'{"prompt": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "deep objects": b'{"a":' * 10_000,
    "a raw line break": b'{"prompt": "a\nb"}',
    "a raw zero": b'{"prompt": "a\0b"}',
    "half a pair for a name": b'{"prompt": "a", "\\ud800": 1}',
    "many fields": b"{%s}" % b", ".join(b'"field%d": 1' % place for place in range(3000)),
    "many bad ids": b'{"prompt": [' + b"-1, " * 15_000 + b"-1]}",
    "many bad messages": b'{"messages": [' + b"{}, " * 15_000 + b"{}]}",
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_what_is_no_body_of_ours_is_refused(running, path, body):
    answer = ask(running, path, body)
    check_refusal(answer)
    assert len(answer.text) < 2000  # nor is it told again
    check_alive(running)


def test_the_last_of_two_fields_of_one_name_counts(running):
    body = b'{"prompt": "Hello", "max_tokens": 1, "max_tokens": 2, "max_tokens": 3}'
    assert ask(running, "/v1/completions", body).json()["choices"][0]["text"] == "Ho!"


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "content-type: text/plain",
        "content-type: ",
        "content-type: \xff/json;;;=",
        "content-type: multipart/form-data",
    ],
)
def test_a_body_of_another_kind_is_refused_or_read(running, kind):
    body = json.dumps(COMPLETION).encode()
    (status,) = statuses(said_to(running, post(body, kind=kind)))
    assert status in (200, 400)
    check_alive(running)


BODY = json.dumps(COMPLETION).encode()
GET = b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n"
CHUNKED = {"length": "", "headers": ["transfer-encoding: chunked"]}
UPGRADE = b"GET /health HTTP/1.1\r\nhost: here\r\nupgrade: websocket\r\nconnection: upgrade, close\r\n\r\n"

EXCHANGES = {
    "too short a length": (post(BODY, length=5), [400]),
    "too long a length": (post(BODY, length=len(BODY) + 9), []),
    "a negative length": (post(BODY, length=-1), [400]),
    "a length in words": (post(BODY, length="many"), [400]),
    "a huge length": (post(BODY, length=HUGE), [400]),
    "a length beyond the limit": (post(BODY, length=2**40), [413]),
    "two lengths": (post(BODY, headers=["content-length: 3"]), [400]),
    "a length and chunks": (post(BODY, headers=["transfer-encoding: chunked"]), [400]),
    "no length": (post(BODY, length=""), [400]),
    "chunks": (post(b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), **CHUNKED), [200]),
    "chunks of a byte": (post(b"".join(b"1\r\n%c\r\n" % each for each in BODY) + b"0\r\n\r\n", **CHUNKED), [200]),
    "a chunk of a negative size": (post(b"-1\r\n" + BODY, **CHUNKED), [400]),
    "a chunk of a huge size": (post(b"f" * 40 + b"\r\n" + BODY, **CHUNKED), [400]),
    "chunks that do not end": (post(b"5\r\nhello\r\n", **CHUNKED), []),
    "requests in a row": (GET * 20 + LAST, [200] * 21),
    "answers in a row": (post(BODY).replace(b"connection: close\r\n", b"") * 3 + LAST, [200] * 4),
    "one that asks for another protocol": (UPGRADE, [200]),
    "the oldest of protocols": (b"GET /health HTTP/1.0\r\n\r\n", [200]),
    "one that is older": (b"GET /health\r\nconnection: close\r\n\r\n", [200]),
    "one that is to come": (b"GET /health HTTP/9.9\r\n\r\n", [400]),
    "the start of the second": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [400]),
    "a handshake": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64, [400]),
    "garbage": (bytes(range(256)) * 8, [400]),
    "line breaks only": (b"\r\n" * 50, []),
    "nothing": (b"", []),
    "half a line": (b"POST /v1/comp", []),
    "a header without a name": (b"GET /health HTTP/1.1\r\n: x\r\n\r\n", [400]),
    "a header with a zero": (b"GET /health HTTP/1.1\r\nx: a\0b\r\n\r\n", [400]),
    "no host": (b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n", [200]),
    "a path that is no path": (b"GET nothing HTTP/1.1\r\nhost: here\r\n\r\n", [400]),
    "a path of half characters": (LAST.replace(b"/health", b"/v1/models/%ff%ed%a0%80"), [404]),
    "a path of other bytes": (LAST.replace(b"/health", b"/v1/models/\xff\xfe"), [400]),
    "a path above all": (LAST.replace(b"/health", b"/../../etc/passwd"), [404]),
    "a star": (b"OPTIONS * HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n", [404]),
    "a name of another": (b"CONNECT here:80 HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n", [400]),
    "a method that is none": (b"GRAB /health HTTP/1.1\r\nhost: here\r\n\r\n", [400]),
    "an expectation": (post(BODY, headers=["expect: 100-continue"]), [100, 200]),
}  # fmt: skip


@pytest.mark.parametrize(("sent", "wanted"), EXCHANGES.values(), ids=EXCHANGES)
def test_exchanges_that_are_hardly_http(running, sent, wanted):
    assert statuses(said_to(running, sent, hangs_up=not wanted)) == wanted
    check_alive(running)


@pytest.mark.parametrize("bomb", [b"x: y\r\n" * 20_000, b"x: " + b"y" * 2**20 + b"\r\n", b"y" * 2**20 + b": x\r\n"])
def test_headers_without_end_do_no_harm(running, bomb):
    heard = said_to(running, b"GET /health HTTP/1.1\r\nhost: here\r\nconnection: close\r\n" + bomb + b"\r\n")
    assert all(status < 500 for status in statuses(heard))
    check_alive(running)


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()), max_size=9)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)


def check_any_body(running, path, fields):
    answer = ask(running, path, json.dumps({**PATHS[path], **fields}).encode())
    if answer.status_code != 200:
        check_refusal(answer)


bodies = given(
    path=st.sampled_from(list(PATHS)),
    fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), VALUES, min_size=1, max_size=4),
)


@settings(max_examples=20)
@bodies
def test_bodies_of_any_kind(running, path, fields):
    check_any_body(running, path, fields)


@pytest.mark.slow
@pytest.mark.simulated
@settings(max_examples=5000)
@bodies
def test_bodies_of_any_kind_at_length(running, path, fields):
    check_any_body(running, path, fields)


@pytest.mark.slow
@pytest.mark.simulated
@settings(max_examples=2000)
@given(garbage=st.binary(max_size=200), place=st.integers(0, 200), cut=st.integers(0, 20))
def test_requests_with_garbage_in_them(running, garbage, place, cut):
    request = post(BODY)
    heard = said_to(running, request[:place] + garbage + request[place + cut :], hangs_up=True)
    assert all(status < 500 for status in statuses(heard)), heard


def test_the_server_is_as_it_was(running):
    """The last test here: nothing of all that is still held."""
    assert running.server._desk.num_open == 0
    assert running.number("nanoserve_kv_blocks_used") == 0
