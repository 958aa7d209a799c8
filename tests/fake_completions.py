"""A tiny server of `/v1/completions` on a real socket: deterministic tokens, bytes cut anywhere, fields refused."""

import http.server
import itertools
import json
import threading
import time

from scripted_http import ended, token


class Completions:
    """Token i of an answer is the sum of its prompt plus i.

    Bytes are sent in pieces of the lengths `cuts`, with a pause after each; a length of 0 is a whole event.
    """

    def __init__(self):
        self.cuts, self.refuses, self.names_fields, self.num_connections = [1000], (), True, 0
        self.pause_s, self.asked = 0.0, []

    @staticmethod
    def ids(prompt, num):
        return tuple(sum(prompt) + place for place in range(num))

    def __enter__(self):
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # who hangs up need not say why
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def answer(self, body):
        prompt = body["prompt"] if isinstance(body["prompt"], list) else [len(body["prompt"].split())]
        ids = self.ids(prompt, body["max_tokens"])
        return b"".join(map(token, ids)) + ended(len(ids), num_prompt=len(prompt))

    def _handler(self):
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # or small writes wait for each other

            def setup(self):
                super().setup()
                owner.num_connections += 1

            def log_message(self, *_):
                pass

            def do_GET(self):
                self._say(200, json.dumps({"data": [{"id": "fake-model"}]}).encode())

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                owner.asked.append(body)
                wrong = [name for name in owner.refuses if self._has(body, name)]
                if wrong:
                    said = f"unknown field {wrong[0]}" if owner.names_fields else "bad request"
                    self._say(400, json.dumps({"error": {"message": said}}).encode())
                else:
                    self._stream(owner.answer(body))

            def _has(self, body, name):
                return isinstance(body["prompt"], list) if name == "prompt" else name in body

            def _say(self, status, content):
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def _stream(self, content):
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                lengths = itertools.cycle(owner.cuts)
                while content:
                    num = next(lengths) or content.index(b"\n\n") + 2
                    piece, content = content[:num], content[num:]
                    time.sleep(owner.pause_s)
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")

        return Handler
