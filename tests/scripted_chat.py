"""A server of the chat page that answers by script: what it is to say is put into `answers`, what it heard is kept."""

import contextlib
import itertools
import json
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAGE = Path(__file__).parents[1] / "nanoserve" / "server" / "page.html"
PATIENCE_S = 30
DONE = b"data: [DONE]\n\n"


def event(value):
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def piece(text, finish_reason=None):
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]})


def usage(prompt, completion, cached=0):
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return event({"choices": [], "usage": counts | {"prompt_tokens_details": {"cached_tokens": cached}}})


def whole(text):
    return streamed(piece(text, "stop"), usage(3, 2), DONE)


def send(handler, parts, breaks=False):
    """Send an event stream: bytes are sent at once, a `threading.Event` is waited for. `breaks`: its end is missing."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for part in parts:
        if isinstance(part, threading.Event):
            part.wait(PATIENCE_S)
        else:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
    if not breaks:
        handler.wfile.write(b"0\r\n\r\n")
    handler.close_connection = True


def streamed(*parts, breaks=False):
    return lambda handler: send(handler, parts, breaks)


def endless(text, hung_up):
    """An answer that goes on until the reader has left, which sets the event."""

    def answer(handler):
        try:
            send(handler, (time.sleep(0.002) or piece(text) for _ in itertools.count()))
        except OSError:
            hung_up.set()

    return answer


def refused(status, message, **headers):
    def answer(handler):
        handler.reply(status, json.dumps({"error": {"message": message}}).encode(), **headers)

    return answer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status, body, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/":
            self.reply(200, PAGE.read_bytes(), Content_Type="text/html; charset=utf-8")
        elif self.path != "/v1/models":
            self.reply(404, b"{}")
        elif self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            refused(401, "no key")(self)
        else:
            self.reply(200, b'{"data": [{"id": "scripted-1b"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.heard.append((self.path, dict(self.headers), body))
        self.server.answers.get(timeout=PATIENCE_S)(self)


class ScriptedChat(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.heard, self.key = queue.Queue(), [], None
        self.url = f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request, client_address):
        pass  # a reader that leaves is part of the script

    def will(self, *answers):
        for answer in answers:
            self.answers.put(answer)


@contextlib.contextmanager
def scripted_chat():
    with ScriptedChat() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()
