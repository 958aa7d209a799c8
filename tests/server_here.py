"""A server in this process, on a real socket, with an engine that a test can look into."""

import contextlib
import json
import socket
import threading
import time

import httpx2
import torch
import uvicorn

from conftest import ScriptedModel, config_like_tiny
from nanoserve import Engine
from nanoserve.server.app import Server
from nanoserve.server.connection import Connection
from nanoserve.server.settings import ServerConfig
from nanoserve.tokenizer import ByteTokenizer
from nanoserve.weights import LoadedModel


class ChattyTokenizer(ByteTokenizer):
    """Bytes, with the smallest chat template there could be."""

    def render_chat(self, messages):
        return self.encode("".join(f"{each['role']}:{each['content']}\n" for each in messages))


class SureModel(ScriptedModel):
    """It says what is in its script at any temperature. `before` is called at every forward."""

    def before(self):
        pass

    def __call__(self, *args):
        self.before()
        return super().__call__(*args)

    def compute_logits(self, hidden):
        return 1000 * super().compute_logits(hidden)


def scripted_engine(said="Ho! 🌍 é\n", num_prompt_tokens=5, tokenizer=ChattyTokenizer, **options):
    """An engine that answers every prompt of so many bytes with these, over and over."""
    config = config_like_tiny(max_context_tokens=512)
    model = SureModel(list(said.encode()), num_prompt_tokens)
    loaded = LoadedModel(model, tokenizer(300), config, "scripted", torch.device("cpu"), torch.float32)
    return Engine(loaded, **{"num_blocks": 64, "block_size": 8} | options)


def held_engine(**options):
    """An engine whose forwards wait for a test: `gate` lets them through, one for each release."""
    engine = scripted_engine(**options)
    gate = threading.Semaphore(0)
    engine._model.before, engine.gate = gate.acquire, gate
    return engine, gate


def wait_until(holds, what="it never came", at_most_s=20):
    """For what another thread or process does; a test that waits in vain says `what`."""
    end = time.monotonic() + at_most_s
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def in_background(call, **body):
    """Its answer, in a list, once there is one."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call(**body)), daemon=True)
    thread.start()
    return thread, answers


class Running:
    """What a test asks of a server that runs."""

    def __init__(self, server, url):
        self.server, self.url = server, url
        self.client = httpx2.Client(base_url=url, timeout=30)

    def post(self, path="/v1/completions", headers=None, **body):
        return self.client.post(path, json=body, headers=headers)

    def complete(self, **body):
        answer = self.post(**body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path="/v1/completions", **body):
        """All chunks, once [DONE] has come."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream"), answer.read()
            data = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert data[-1] == "[DONE]"
        return [json.loads(each) for each in data[:-1]]

    def number(self, name):
        """A sample of /metrics, by its whole name."""
        lines = self.client.get("/metrics").text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name)


@contextlib.contextmanager
def serving(engine, **settings):
    """A Running; the server has ended when this ends."""
    server = Server(engine, ServerConfig(**{"model_name": "tiny"} | settings))
    config = uvicorn.Config(
        server.app, http=Connection, log_level="warning", access_log=False, timeout_graceful_shutdown=5
    )
    runner = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [listener]})
        thread.start()
        running = Running(server, f"http://127.0.0.1:{listener.getsockname()[1]}")
        try:
            yield running
        finally:
            running.client.close()
            getattr(engine, "gate", threading.Semaphore()).release(100_000)  # one that is held could not end
            runner.should_exit = True
            thread.join()
