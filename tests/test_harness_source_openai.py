"""OpenAI-compatible streams as bytes at scripted times, and over real HTTP on the loopback."""

import contextlib
import http.server
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.harness.errors import InstrumentError, SourceError
from benchmarks.harness.sources.answer import read_emissions
from benchmarks.harness.sources.openai import CONTINUOUS_USAGE, openai_stream
from benchmarks.harness.sources.sse import Event, read_events
from benchmarks.harness.timing import Emission, Stamp, measure_stream

DONE = b"data: [DONE]\n\n"


def event(data, end="\n"):
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}{end}{end}".encode()


def said(text, finish_reason=None, *, usage=None, **choice):
    """A chunk of /completions."""
    fields = {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason} | choice]}
    return event(fields | ({} if usage is None else {"usage": counted(usage)}))


def delta(finish_reason=None, **fields):
    """A chunk of /chat/completions."""
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]})


def counted(num_tokens, **more):
    return {"prompt_tokens": 40, "completion_tokens": num_tokens, "total_tokens": 40 + num_tokens} | more


def usage_of(num_tokens, **more):
    return event({"choices": [], "usage": counted(num_tokens, **more)})


def read(*chunks, **options):
    return list(read_emissions(chunks, **options))


def arrivals(emissions):
    return [emission.num_tokens for emission in emissions if emission.num_tokens]


class ScriptedClock:
    at_ms = 0

    def now_ns(self):
        return self.at_ms * 1_000_000


def play(*script, **options):
    """Measure bytes that arrive at times in ms; whoever looks at the clock again afterwards sees a second more."""
    clock = ScriptedClock()

    def chunks():
        for at_ms, data in script:
            clock.at_ms = at_ms
            yield data
        clock.at_ms += 1000

    return measure_stream(read_emissions(chunks(), **options), clock)


ENDED = (160, said("", "length") + usage_of(7) + DONE)
SEVEN_TOKENS = {
    "token ids": [said("a", token_ids=[1]), said("bcd", token_ids=[2, 3, 4]), said("efg", token_ids=[5, 6, 7])],
    "running usage": [said("a", usage=1), said("bcd", usage=4), said("efg", usage=7)],
    "logprobs": [said(text, logprobs={"tokens": list(text)}) for text in ("a", "bcd", "efg")],
    "the caller's count": [said("a"), said("bcd"), said("efg")],
}


@pytest.mark.parametrize("way", SEVEN_TOKENS)
def test_row_7_chunks_of_several_tokens(way):
    script = zip((100, 130, 160), SEVEN_TOKENS[way], strict=True)
    run = play(*script, ENDED, **({"count_tokens": len} if way == "the caller's count" else {}))
    assert [stamp.num_tokens for stamp in run.stamps] == [1, 3, 3]
    assert (run.num_tokens, run.tpot_s, run.itls_s, run.step_gaps_s) == (7, 0.010, None, (0.030, 0.030))
    assert run.token_ids == ((1, 2, 3, 4, 5, 6, 7) if way == "token ids" else ())


@pytest.mark.parametrize(
    "quiet", [delta(role="assistant"), delta(role="assistant", content=""), b": alive\n\n", b"data:\n\n"]
)
def test_row_8_a_role_an_empty_content_or_a_comment_is_no_token(quiet):
    end = delta("stop") + usage_of(2) + DONE
    run = play((5, quiet), (100, delta(content="a")), (110, delta(content="b")), (111, end))
    assert (run.ttft_s, run.itls_s, run.finish_reason) == (0.100, (0.010,), "stop")


def test_row_9_what_comes_after_the_last_token_is_no_arrival():
    tokens = [(at_ms, said("x")) for at_ms in (100, 110, 120)]
    run = play(*tokens, (200, said("", "length")), (500, usage_of(3) + DONE), (900, b": bye\n\n"))
    assert (run.e2e_s, run.tpot_s, run.num_tokens) == (0.120, 0.010, 3)


def test_row_10_the_first_token_is_no_part_of_tpot():
    run = play(*[(1000 + 10 * i, said("x")) for i in range(11)], (1100, said("", "length") + DONE))
    assert (run.num_tokens, run.tpot_s) == (11, 0.010)


def test_an_event_counts_when_its_last_byte_is_here_and_no_later():
    first, last = said("a"), said("b", "length")
    run = play((10, first[:9]), (20, first[9:-1]), (30, first[-1:] + last[:-1]), (40, last[-1:]), (50, DONE))
    assert run.stamps == (Stamp(30_000_000, 1), Stamp(40_000_000, 1))


@pytest.mark.parametrize(
    "written",
    [
        {"content": "a"},
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]},
    ],
    ids=str,
)
def test_everything_that_the_model_writes_is_a_token(written):
    assert arrivals(read(delta(role="assistant"), delta(**written), delta("tool_calls"), usage_of(1), DONE)) == [1]


def test_the_text_that_is_counted_is_all_of_the_piece():
    seen = []
    call = {"function": {"name": "f", "arguments": "{}"}}
    piece = delta("stop", reasoning_content="r", content="c", tool_calls=[call])
    read(piece, DONE, count_tokens=lambda text: seen.append(text) or 1)
    assert seen == ["rcf{}"]


KNOWLEDGE = {"token_ids": [1, 2, 3], "usage": 4, "logprobs": {"content": [{}] * 5}}


@pytest.mark.parametrize(
    ("known", "num_tokens"),
    [(("token_ids", "usage", "logprobs"), 3), (("usage", "logprobs"), 4), (("logprobs",), 5), ((), 6)],
)
def test_better_knowledge_is_preferred(known, num_tokens):
    chunk = said("x", **{name: KNOWLEDGE[name] for name in known})
    assert arrivals(read(chunk, said("", "length"), usage_of(num_tokens), DONE, count_tokens=lambda text: 6)) == [
        num_tokens
    ]


@pytest.mark.parametrize(
    "nothing", [{"token_ids": None}, {"logprobs": None}, {"logprobs": {"tokens": []}}, {"usage": 0}]
)
def test_a_field_that_says_nothing_leaves_one_token_for_a_text(nothing):
    assert arrivals(read(said("x", **nothing), said("", "length"), usage_of(1), DONE)) == [1]


def test_a_token_without_text_has_arrived_when_the_server_says_so():
    half = said("", token_ids=[200]), said("é", "length", token_ids=[201])
    assert [emission.token_ids for emission in read(*half, DONE)] == [(200,), (201,), ()]
    assert arrivals(read(said("", usage=1), said("é", usage=2), said("", "stop", usage=3), DONE)) == [1, 1, 1]


def test_usage_that_comes_only_with_the_finish_reason_hides_no_miscount():
    """Taken for a running total it would say that all that was missed had arrived at the very end."""
    with pytest.raises(SourceError, match="counts 6 tokens where 2 were"):
        read(said("ab"), said("cdef"), said("", "length", usage=6), DONE)
    with pytest.raises(SourceError, match="counts 6 tokens where 2 were"):
        read(said("", usage=0), said("ab"), said("cdef", "length"), usage_of(6), DONE)


def test_usage_with_the_only_chunk_says_how_many_tokens_it_holds():
    assert arrivals(read(said("abc", "length", usage=3), DONE)) == [3]


@pytest.mark.parametrize(
    ("finish_reason", "num_shown", "num_counted", "agrees"),
    [
        ("stop", 2, 2, True),
        ("stop", 2, 3, True),
        ("tool_calls", 2, 3, True),
        ("length", 2, 3, False),
        ("stop", 2, 4, False),
        ("stop", 2, 1, False),
        ("length", 2, 2, True),
        ("stop", 2, 0, False),
    ],
)
def test_the_count_is_held_against_the_servers_which_may_hide_one_eos(finish_reason, num_shown, num_counted, agrees):
    stream = [*[said("x")] * num_shown, said("", finish_reason), usage_of(num_counted), DONE]
    if agrees:
        assert arrivals(read(*stream)) == [1] * num_shown
    else:
        numbers = f"counts {num_counted} tokens where {num_shown} were .* count_tokens=.*return_token_ids"
        with pytest.raises(SourceError, match=numbers):
            read(*stream)


def test_a_hidden_eos_has_no_arrival():
    run = play((10, said("x")), (20, said("y")), (30, said("", "stop")), (30, usage_of(3) + DONE))
    assert (run.num_tokens, run.e2e_s, run.finish_reason) == (2, 0.020, "stop")


def test_the_last_emission_tells_the_prompts_cached_and_computed_tokens():
    details = {"prompt_tokens_details": {"cached_tokens": 32}}
    run = play((10, said("x", "length")), (20, usage_of(1, **details) + DONE))
    assert (run.num_cached, run.num_prefilled) == (32, 8)


@pytest.mark.parametrize("details", [None, {}, {"cached_tokens": None}])
def test_what_the_server_does_not_say_of_its_cache_is_none(details):
    run = play((10, said("x", "length")), (20, usage_of(1, prompt_tokens_details=details) + DONE))
    assert (run.num_cached, run.num_prefilled) == (None, None)


BEFORE = said("a") + said("b")
FAULTS = {
    "no [DONE]": (said("", "length"), "broke off after 2 tokens: .*without .DONE."),
    "no finish reason": (DONE, "broke off after 2 tokens: .*without a finish_reason"),
    "cut event": (said("c", "length")[:-1], "broke off after 2 tokens"),
    "error object": (
        event({"error": {"message": "out of blocks", "code": 500}}),
        "2 tokens: the server says: out of bl",
    ),
    "error text": (event({"error": "worker died"}), "the server says: worker died"),
    "error of an older server": (event({"object": "error", "message": "too long"}), "the server says: too long"),
    "error event": (b'event: error\ndata: {"detail": "overload"}\n\n', "the server says: .*overload"),
    "no JSON": (b"data: {'a': 1}\n\n", "2 tokens: not JSON: {'a': 1}"),
    "long text": (event("x" * 9999), r"not JSON: x{300}\.\.\.$"),
    "two choices": (event({"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]}), "more than one choice"),
    "two without an index": (event({"choices": [{"text": "a"}, {"text": "b"}]}), "more than one choice"),
    "second choice": (event({"choices": [{"index": 1, "text": "b"}]}), "more than one choice"),
    "a list": (event([1]), "not a chunk of a completion: .1."),
    "another API": (event({"response": "a", "done": False}), "not a chunk of a completion: .*response"),
    "no delta": (event({"choices": [{"index": 0, "message": {"content": "a"}}]}), "not a chunk of a completion"),
    "count as text": (event({"choices": [], "usage": {"completion_tokens": "2"}}), "not a chunk of a completion"),
    "falling usage": (said("c", usage=1), "completion_tokens fell from 2 to 1"),
    "cached too many": (
        said("", "length") + usage_of(2, prompt_tokens_details={"cached_tokens": 41}) + DONE,
        "found 41 of 40 prompt tokens",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_stream_that_breaks_off_or_speaks_another_language_is_an_error(fault):
    data, message = FAULTS[fault]
    with pytest.raises(SourceError, match=message):
        read(BEFORE, data)


def test_what_arrived_before_a_fault_is_kept_in_the_log():
    clock = ScriptedClock()
    run = measure_stream(read_emissions([BEFORE]), clock, keep_errors=True)
    assert (run.num_tokens, run.is_finished) == (2, False)
    assert "broke off after 2 tokens" in run.error


def test_what_follows_done_is_ignored():
    assert arrivals(read(said("a", "length"), DONE, said("b"), event("nonsense"))) == [1]


@pytest.mark.parametrize(
    ("data", "events"),
    [
        (b"data: a\ndata: b\n\n", [Event("message", "a\nb")]),
        (b"data:a\r\n\r\ndata:  b\r\n\r\n", [Event("message", "a"), Event("message", " b")]),
        (b"event: e\r\ndata: a\r\ndata: b\r\n\r\n", [Event("e", "a\nb")]),
        (b"data: a\r\rdata: b\r\r", [Event("message", "a"), Event("message", "b")]),
        (b": hello\n\ndata: a\n: in between\nid: 7\nretry: 9\n\n:\n\n", [Event("message", "a")]),
        (b"event: ping\ndata\n\nevent: lost\n\ndata: a\n\n", [Event("ping", ""), Event("message", "a")]),
        (b"\xef\xbb\xbfdata: a\n\ndata: b", [Event("message", "a")]),
        ("data: a\u2028b\x0bc\x85d\n\n".encode(), [Event("message", "a\u2028b\x0bc\x85d")]),
        (b"data: \xff\n\n", [Event("message", "\ufffd")]),
        (b"data: a: b\n\n", [Event("message", "a: b")]),
        (b"\n\n\r\n", []),
    ],
)
def test_event_streams_by_the_standard(data, events):
    assert list(read_events([data])) == events
    assert list(read_events(bytes([byte]) for byte in data)) == events


def cut(data, cuts):
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


@given(
    texts=st.lists(st.text(max_size=4), max_size=6),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    cuts=st.lists(st.integers(0, 2000), max_size=40),
)
@example(texts=["é\n", "", "\U0001f600"], end="\r\n", cuts=list(range(2000)))
def test_however_the_bytes_are_cut_the_emissions_are_the_same(texts, end, cuts):
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    data = f": alive{end}".encode() + b"".join(event(chunk, end) for chunk in [*chunks, last]) + DONE
    lengths = []
    emissions = read(*cut(data, cuts), count_tokens=lambda text: lengths.append(text) or 1)
    assert emissions == [
        *(Emission(num_without_id=int(text != "")) for text in texts),
        Emission(finish_reason="length"),
        Emission(),
    ]
    assert lengths == [text for text in texts if text]


class Server(http.server.ThreadingHTTPServer):
    """Answers each POST by what `answer(handler)` does; keeps what was asked and on how many connections."""

    daemon_threads = True

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.requests, self.connections = answer, [], set()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((self.path, body))
        self.server.connections.add(self.client_address)
        self.server.headers = self.headers
        with contextlib.suppress(OSError):
            self.server.answer(self)

    def head(self, status=200, content_type="text/event-stream; charset=utf-8"):
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def write(self, data):
        """One HTTP chunk; an empty one ends the answer."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    """Start a server that answers as told; returns it and a client of it."""
    with contextlib.ExitStack() as stack:

        def start(answer):
            server = stack.enter_context(Server(answer))
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
            client = httpx2.Client(base_url=f"http://127.0.0.1:{server.server_port}/v1", timeout=30)
            return server, stack.enter_context(client)

        yield start


def saying(*chunks):
    def answer(handler):
        handler.head()
        for chunk in (*chunks, b""):
            handler.write(chunk)

    return answer


class SystemClock:
    def now_ns(self):
        return time.perf_counter_ns()


GREETING = (said("Hel", token_ids=[1]), said("lo", "length", token_ids=[2]), usage_of(2), DONE)


def test_over_http_what_is_asked_and_what_is_measured(serve):
    server, client = serve(saying(*GREETING))
    stream = openai_stream(
        client, model="m", prompt=[5, 6], max_tokens=2, ignore_eos=True, stream_options=CONTINUOUS_USAGE
    )
    assert server.requests == []
    run = measure_stream(stream, SystemClock(), num_prompt_tokens=2)
    assert (run.token_ids, run.finish_reason, len(run.itls_s)) == ((1, 2), "length", 1)
    asked = {
        "model": "m", "prompt": [5, 6], "max_tokens": 2, "stream": True, "temperature": 0, "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    assert server.requests == [("/v1/completions", asked)]
    assert server.headers["accept-encoding"] == "identity"  # compression would hold tokens back


def test_messages_go_to_the_chat_endpoint_and_none_leaves_a_field_out(serve):
    server, client = serve(saying(delta(role="assistant"), delta(content="a"), delta("stop"), DONE))
    messages = [{"role": "user", "content": "hi"}]
    stream = openai_stream(
        client,
        model="m",
        messages=messages,
        max_tokens=None,
        max_completion_tokens=9,
        temperature=1,
        stream_options=None,
    )
    assert arrivals(stream) == [1]
    asked = {"model": "m", "messages": messages, "max_completion_tokens": 9, "temperature": 1, "stream": True}
    assert server.requests == [("/v1/chat/completions", asked)]


def test_a_token_is_handed_over_before_the_next_one_is_sent(serve):
    pulled = threading.Event()

    def answer(handler):
        handler.head()
        handler.write(said("a"))
        assert pulled.wait(20)
        handler.write(said("b", "length") + DONE)
        handler.write(b"")

    stream = openai_stream(serve(answer)[1], model="m", prompt="p", max_tokens=2)
    assert next(stream).num_tokens == 1
    pulled.set()
    assert arrivals(stream) == [1]


def test_the_next_request_uses_the_connection_of_the_last(serve):
    server, client = serve(saying(*GREETING, b": after the end\n\n"))
    for _ in range(3):
        assert arrivals(openai_stream(client, model="m", prompt="p", max_tokens=2)) == [1, 1]
    assert len(server.connections) == 1


def test_closing_the_iterator_hangs_up(serve):
    hung_up = threading.Event()

    def answer(handler):
        handler.head()
        try:
            while True:
                handler.write(said("a"))
        except OSError:
            hung_up.set()

    stream = openai_stream(serve(answer)[1], model="m", prompt="p", max_tokens=None)
    next(stream)
    stream.close()
    assert hung_up.wait(20)


class FakeClient:
    """The least that a client has to be; it answers with one token and never ends."""

    def __init__(self, status_code):
        self.status_code, self.headers, self.num_closed = status_code, {"content-type": "text/event-stream"}, 0

    def build_request(self, method, url, *, json, headers):
        return SimpleNamespace(url=url)

    def send(self, request, *, stream):
        assert stream
        return self

    def iter_bytes(self):
        return itertools.repeat(said("a"))

    def close(self):
        self.num_closed += 1


@pytest.mark.parametrize("status_code", [200, 500])
def test_a_response_is_closed_once_whatever_happens(status_code):
    client = FakeClient(status_code)
    stream = openai_stream(client, model="m", prompt="p", max_tokens=None)
    with contextlib.suppress(SourceError):
        next(stream)
    stream.close()
    assert client.num_closed == 1


def error_of(client):
    with pytest.raises(SourceError) as caught:
        list(openai_stream(client, model="m", prompt="p", max_tokens=2))
    return str(caught.value)


def test_a_refused_request_is_an_error_with_status_body_and_url(serve):
    def answer(handler):
        handler.head(429, "application/json")
        handler.write(b'{"error": "queue is full"}')
        handler.write(b"")

    server, client = serve(answer)
    url = f"http://127.0.0.1:{server.server_port}/v1/completions"
    assert error_of(client) == f'{url}: status 429: {{"error": "queue is full"}}'


def test_an_answer_that_is_no_event_stream_is_an_error(serve):
    def answer(handler):
        handler.head(200, "application/json")
        handler.write(b'{"choices": []}')
        handler.write(b"")

    assert "content type 'application/json' is not text/event-stream: {\"choices\": []}" in error_of(serve(answer)[1])


def test_a_lost_connection_is_an_error_that_says_how_far_it_came(serve):
    def answer(handler):
        handler.head()
        handler.write(said("a"))
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)

    assert "broke off after 1 tokens: RemoteProtocolError" in error_of(serve(answer)[1])


def test_a_server_that_falls_silent_is_an_error(serve):
    released = threading.Event()

    def answer(handler):
        handler.head()
        handler.write(said("a"))
        released.wait(20)

    _, client = serve(answer)
    client.timeout = 0.2
    message = error_of(client)
    released.set()
    assert "broke off after 1 tokens: ReadTimeout" in message


def test_a_server_that_is_not_there_is_an_error_that_names_the_url():
    with socket.socket() as unheard, httpx2.Client(trust_env=False) as client:
        unheard.bind(("127.0.0.1", 0))
        client.base_url = f"http://127.0.0.1:{unheard.getsockname()[1]}/v1"
        assert error_of(client).startswith(f"{client.base_url}completions: no answer: ConnectError")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either prompt= or messages="),
        ({"prompt": "p", "messages": []}, "either prompt= or messages="),
        ({"prompt": "p", "n": 2}, "n=2 .*can only be 1"),
        ({"prompt": "p", "best_of": 2}, "best_of=2"),
        ({"prompt": "p", "echo": True}, "echo=True"),
        ({"prompt": "p", "stream": False}, "stream=False"),
    ],
)
def test_a_request_that_is_no_single_stream_is_refused_before_it_is_sent(options, message):
    with httpx2.Client() as client, pytest.raises(InstrumentError, match=message):
        openai_stream(client, model="m", max_tokens=2, **options)


def test_importing_the_sources_loads_no_library():
    names = "benchmarks.harness.sources.openai, benchmarks.harness.sources.huggingface"
    code = f"import sys, {names}; print([m for m in ('httpx', 'httpx2', 'torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
