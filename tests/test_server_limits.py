"""What the server refuses, gives up, and gives back: keys, sizes, places, time, hang-ups, its end."""

import json

import pytest
from server_here import held_engine, in_background, scripted_engine, serving, wait_until

from nanoserve import SamplingParams
from nanoserve.server.metrics import Numbers
from nanoserve.server.thread import Ask, EngineThread

KEY = {"authorization": "Bearer secret"}


def test_a_key_is_wanted_where_there_is_one():
    with serving(scripted_engine(), api_key="secret") as running:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"authorization": "Basic secret"},
        ):
            answer = running.post(prompt="Hello", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["connection"] == "close"
        assert running.client.get("/v1/models").status_code == 401
        assert running.post(prompt="Hello", headers=KEY).status_code == 200
        assert {running.client.get(path).status_code for path in ("/health", "/metrics", "/")} == {200}


def test_a_large_body_is_refused_however_it_comes():
    with serving(scripted_engine(), max_body_bytes=100) as running:
        declared = running.post(prompt="x" * 100)
        pieces = (piece for piece in [b'{"prompt": "', b"x" * 100, b'"}'])
        chunked = running.client.post("/v1/completions", content=pieces, headers={"content-type": "application/json"})
        for answer in (declared, chunked):
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
            assert answer.headers["connection"] == "close"
        assert running.post(prompt="Hello", max_tokens=1).status_code == 200


def test_a_long_prompt_is_refused_before_it_runs():
    with serving(scripted_engine(), max_prompt_tokens=5) as running:
        error = running.post(prompt="Hello!").json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert running.number("nanoserve_steps_total") == 0


def test_a_queue_that_is_full_says_when_to_come_back():
    engine, gate = held_engine(max_running=1)
    with serving(engine, max_queued=1) as running:
        threads = [in_background(running.post, prompt="Hello", max_tokens=2) for _ in range(2)]
        wait_until(lambda: running.server._desk.num_open == 2)
        refused = running.post(prompt="Hello")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert running.post(prompt="Hello", n=3).status_code == 400  # they would never fit
        assert running.post(prompt=["Hello", "there"]).status_code == 429
        gate.release(100)
        for thread, answers in threads:
            thread.join(20)
            assert answers[0].status_code == 200
        assert running.post(prompt="Hello", max_tokens=1).status_code == 200
        assert running.number('nanoserve_requests_total{outcome="refused"}') == 1 + 2


@pytest.mark.parametrize("streams", [False, True])
def test_who_hangs_up_frees_everything_before_the_next_step(streams):
    engine, gate = held_engine()
    with serving(engine) as running:
        body = json.dumps({"prompt": "Hello", "max_tokens": 400, "n": 3, "stream": streams})
        raw = _raw_call(running.url, body)
        wait_until(lambda: engine.num_running == 3)  # inside the first step
        raw.close()
        wait_until(lambda: running.server._desk.num_open == 0)
        gate.release()
        wait_until(lambda: engine.num_running == 0)
        gate.release(100)
        assert engine.num_kv_blocks == 0
        assert engine.counts.num_steps == 1
        wait_until(lambda: running.number('nanoserve_requests_total{outcome="abort"}') == 3)


def _raw_call(url, body):
    """A connection that has asked, and can be dropped."""
    import socket

    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    return connection


def test_a_call_that_takes_too_long_is_given_up():
    engine, gate = held_engine()
    with serving(engine, request_timeout_s=0.2) as running:
        answer = running.post(prompt="Hello", max_tokens=400)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        with running.client.stream("POST", "/v1/completions", json={"prompt": "Hello", "stream": True}) as stream:
            assert stream.status_code == 200
            (line,) = [line for line in stream.iter_lines() if line]
        assert json.loads(line.removeprefix("data: "))["error"]["code"] == "timeout"
        gate.release(1000)
        wait_until(lambda: not engine.has_work)
        assert engine.num_kv_blocks == 0
        assert running.number('nanoserve_requests_total{outcome="timeout"}') == 2


def test_a_request_that_cannot_go_on_is_told_so_and_the_others_go_on():
    engine = scripted_engine()
    with serving(engine) as running:
        wanted = running.complete(prompt="Hello", max_tokens=5)["choices"]
        engine._model.before = lambda: 1 / 0
        answer = running.post(prompt="Hello", max_tokens=5)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "division" not in answer.text  # what broke is nobody's business
        with running.client.stream("POST", "/v1/completions", json={"prompt": "Hello", "stream": True}) as stream:
            (line,) = [line for line in stream.iter_lines() if line]
        assert json.loads(line.removeprefix("data: "))["error"]["type"] == "server_error"
        engine._model.before = lambda: None
        assert running.complete(prompt="Hello", max_tokens=5)["choices"] == wanted
        assert running.client.get("/health").status_code == 200
        assert running.number('nanoserve_requests_total{outcome="error"}') == 2


def test_a_server_that_ends_answers_what_it_has_taken():
    engine, gate = held_engine()
    with serving(engine) as running:
        thread, answers = in_background(running.post, prompt="Hello", max_tokens=3)
        wait_until(lambda: engine.num_running == 1)
        running.server.drain()
        assert running.client.get("/health").status_code == 503
        refused = running.post(prompt="Hello")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        gate.release(100)
        thread.join(20)
    assert answers[0].json()["choices"][0]["text"] == "Ho!"


def test_a_server_whose_time_is_up_says_so():
    engine, gate = held_engine()
    with serving(engine) as running:
        thread, answers = in_background(running.post, prompt="Hello", max_tokens=3)
        wait_until(lambda: engine.num_running == 1)
        running.server._desk._loop.call_soon_threadsafe(running.server.break_off)
        thread.join(20)
        assert answers[0].json()["error"]["code"] == "shutting_down"
        gate.release(100)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_thread_has_died_is_not_healthy():
    engine = scripted_engine()
    with serving(engine) as running:
        running.server._numbers.look = lambda _: 1 / 0
        assert running.post(prompt="Hello", max_tokens=400).status_code == 500
        wait_until(lambda: not running.server._desk.is_working)
        assert running.client.get("/health").json() == {"status": "dead"}
        assert running.post(prompt="Hello").status_code == 503


def test_who_lies_in_the_inbox_of_a_thread_that_dies_is_told():
    def die(_):
        thread.submit(Ask("late", [1], SamplingParams(), 0.0))
        raise ZeroDivisionError

    told, numbers = [], Numbers(lambda: 0.0)
    thread = EngineThread(scripted_engine(), numbers, told.extend)
    thread.submit(Ask("early", [1], SamplingParams(max_new_tokens=9), 0.0))
    numbers.look = die
    with pytest.raises(ZeroDivisionError):
        thread._run()
    assert [request_id for request_id, what in told if isinstance(what, RuntimeError)] == ["early", "late"]


def test_the_numbers_are_those_of_the_engine():
    with serving(scripted_engine()) as running:
        running.complete(prompt="Hello", max_tokens=7, n=2)
        wait_until(lambda: running.number("nanoserve_requests_running") == 0)
        assert running.number("nanoserve_generated_tokens_total") == 14
        assert running.number("nanoserve_prompt_tokens_total") == 10
        assert running.number("nanoserve_ttft_seconds_count") == 2
        assert running.number("nanoserve_itl_seconds_count") == 12
        assert running.number("nanoserve_e2e_seconds_count") == 2
        assert running.number("nanoserve_queue_seconds_count") == 2
        assert running.number("nanoserve_e2e_seconds_sum") == pytest.approx(
            running.number("nanoserve_ttft_seconds_sum") + running.number("nanoserve_itl_seconds_sum")
        )
        assert running.number('nanoserve_requests_total{outcome="length"}') == 2
        assert running.number("nanoserve_kv_blocks_used") == 0
        assert running.number("nanoserve_kv_blocks") == 64
