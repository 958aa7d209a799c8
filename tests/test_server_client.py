"""OpenAI's own client against the server, and its types around what the server sends."""

import asyncio
import dataclasses

import httpx2
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from server_here import ChattyTokenizer, held_engine, in_background, scripted_engine, serving, wait_until

from nanoserve import Engine, SamplingParams

SAID = "Ho! 🌍 é\n"
MODEL, PROMPT = "tiny", "Hello"
ASKED = [{"role": "user", "content": "abc"}]
USUAL = {"model": MODEL, "prompt": PROMPT}


@pytest.fixture(scope="module")
def running():
    with serving(scripted_engine(SAID)) as running:
        yield running


@pytest.fixture
def client(running):
    with client_of(running) as client:
        yield client


def client_of(running, **options):
    return openai.OpenAI(
        **{"base_url": f"{running.url}/v1", "api_key": "any", "max_retries": 0, "timeout": 20} | options
    )


@pytest.fixture(scope="module")
def drawing(varied):
    """A server of a model whose answers differ from draw to draw."""
    talking = dataclasses.replace(varied, tokenizer=ChattyTokenizer(varied.config.vocab_size))
    with serving(Engine(talking, num_blocks=64, block_size=16)) as running, client_of(running) as client:
        yield client


def test_a_completion_is_in_openais_shape(client):
    answer = client.completions.create(**USUAL, max_tokens=14)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ((SAID * 2)[:10], "length")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 14, 19)
    assert answer.object == "text_completion"


def test_a_chat_is_in_openais_shape(client):
    answer = client.chat.completions.create(model=MODEL, messages=ASKED, max_completion_tokens=3, stop="never")
    message = answer.choices[0].message
    assert (message.role, message.content is not None, message.refusal) == ("assistant", True, None)
    assert answer.usage.completion_tokens == 3


def test_streams_join_to_the_whole(client):
    options = {"include_usage": True}
    *chunks, last = client.completions.create(**USUAL, max_tokens=20, stream=True, stream_options=options)
    assert (
        "".join(each.choices[0].text for each in chunks)
        == client.completions.create(**USUAL, max_tokens=20).choices[0].text
    )
    assert (last.choices, last.usage.completion_tokens) == ([], 20)
    whole = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=20)
    *chunks, last = client.chat.completions.create(
        model=MODEL, messages=ASKED, max_tokens=20, stream=True, stream_options=options
    )
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == whole.choices[0].message.content
    assert last.usage == whole.usage


def test_the_asynchronous_client_gets_the_same(running, client):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="any", timeout=20) as other:
            calls = (other.completions.create(**USUAL, max_tokens=9) for _ in range(5))
            wholes = [answer.choices[0].text for answer in await asyncio.gather(*calls)]
            stream = await other.completions.create(**USUAL, max_tokens=9, stream=True)
            return wholes, "".join([each.choices[0].text async for each in stream])

    wanted = client.completions.create(**USUAL, max_tokens=9).choices[0].text
    assert asyncio.run(ask()) == ([wanted] * 5, wanted)


def test_several_answers_and_a_stop(client):
    answer = client.completions.create(**USUAL, n=3, stop=["🌍"], max_tokens=20, echo=True)
    assert [(each.index, each.text, each.finish_reason) for each in answer.choices] == [
        (place, "HelloHo! ", "stop") for place in range(3)
    ]


def test_a_seed_gives_the_same_again_and_its_answers_differ(drawing):
    def ask(seed):
        return [each.text for each in drawing.completions.create(**USUAL, n=3, seed=seed, max_tokens=12).choices]

    assert ask(7) == ask(7) != ask(8)
    assert len(set(ask(7))) == 3


def test_logprobs_are_the_engines(drawing, varied):
    params = SamplingParams(max_new_tokens=6, num_logprobs=2, prompt_logprobs=True, temperature=0)
    engine = Engine(varied, num_blocks=64, block_size=16)
    engine.add_request(list(PROMPT.encode()), params, request_id="a")
    events = [event for _ in range(6) for event in engine.step()]
    told = [each.logprob for each in (*events[0].prompt_logprobs[1:], *(event.logprobs for event in events))]
    answer = drawing.completions.create(**USUAL, logprobs=2, echo=True, max_tokens=6, temperature=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(told, abs=1e-4)
    assert sum(told) < -1
    assert logprobs.text_offset[:6] == [0, 1, 2, 3, 4, 5]
    chat = drawing.chat.completions.create(
        model=MODEL, messages=ASKED, logprobs=True, top_logprobs=3, max_tokens=4, temperature=0
    )
    for each in chat.choices[0].logprobs.content:
        assert each.logprob == max(top.logprob for top in each.top_logprobs)
        assert bytes(each.bytes).decode(errors="replace") == each.token


def test_what_was_stored_is_told_as_cached():
    with serving(scripted_engine(num_prompt_tokens=20)) as running, client_of(running) as client:
        usages = [client.completions.create(model=MODEL, prompt="x" * 20, max_tokens=2).usage for _ in range(2)]
        assert [usage.prompt_tokens_details.cached_tokens for usage in usages] == [0, 16]


def test_models_and_raw_answers(client):
    (model,) = client.models.list()
    assert client.models.retrieve(MODEL) == model
    assert (model.id, model.object) == (MODEL, "model")
    raw = client.completions.with_raw_response.create(**USUAL, max_tokens=2)
    assert (raw.status_code, raw.parse().choices[0].text) == (200, "Ho")


def test_refusals_are_its_exceptions(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**USUAL, temperature=-1)
    assert (caught.value.param, caught.value.type, caught.value.status_code) == (
        "temperature",
        "invalid_request_error",
        400,
    )
    for call in (
        lambda: client.completions.create(model="gpt", prompt=PROMPT),
        lambda: client.models.retrieve("gpt"),
        lambda: client.embeddings.create(model=MODEL, input="x"),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=ASKED, stream=True, top_logprobs=1)


def test_a_key_is_its_key():
    with serving(scripted_engine(), api_key="secret") as running:
        with client_of(running) as client, pytest.raises(openai.AuthenticationError) as caught:
            client.completions.create(**USUAL)
        assert caught.value.code == "invalid_api_key"
        with client_of(running, api_key="secret") as client:
            assert client.completions.create(**USUAL, max_tokens=1).choices[0].text == "H"
            assert [model.id for model in client.models.list()] == [MODEL]


def test_a_full_queue_tells_when_to_come_back_and_the_client_does():
    engine, gate = held_engine(max_running=1)
    with serving(engine, max_queued=0) as running, client_of(running) as client:
        thread, answers = in_background(client.completions.create, **USUAL, max_tokens=2)
        wait_until(lambda: running.server._desk.num_open == 1)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**USUAL)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.code == "queue_full"
        gate.release(100)
        thread.join(20)
        assert answers[0].choices[0].text == "Ho"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_errors_in_a_stream_and_after_the_end():
    engine = scripted_engine()
    with serving(engine) as running, client_of(running) as client:
        engine._model.before = lambda: 1 / 0
        with pytest.raises(openai.InternalServerError):
            client.completions.create(**USUAL)
        with pytest.raises(openai.APIError, match="could not go on"):
            list(client.completions.create(**USUAL, stream=True))
    with client_of(running) as client, pytest.raises(openai.APIConnectionError):
        client.completions.create(**USUAL)


def test_a_stream_that_is_closed_early_frees_its_request():
    engine, gate = held_engine()
    with serving(engine) as running, client_of(running) as client:
        stream = client.completions.create(**USUAL, max_tokens=400, stream=True)
        for wanted in "Ho":
            gate.release()  # one by one: tokens that come together are told together
            assert next(stream).choices[0].text == wanted
        stream.close()
        wait_until(lambda: running.server._desk.num_open == 0)
        gate.release(1)
        wait_until(lambda: engine.num_running == 0)
        gate.release(100)
        assert engine.num_kv_blocks == 0
        assert engine.counts.num_steps <= 4


TOLD = {"logprobs": 2, "n": 2}  # with echo, the first token's is null, as OpenAI sends it and its types do not have it
CHAT_TOLD = {"messages": ASKED, "logprobs": True, "top_logprobs": 2, "n": 2}
SHAPES = {
    "completion": ("/v1/completions", {"prompt": PROMPT}, Completion),
    "with all there is": ("/v1/completions", {"prompt": PROMPT, **TOLD}, Completion),
    "chat": ("/v1/chat/completions", {"messages": ASKED}, ChatCompletion),
    "chat with all there is": ("/v1/chat/completions", CHAT_TOLD, ChatCompletion),
}


def check_shape(model, told):
    """Strictly: no number for a word, nothing that is required left out, no field that OpenAI does not know."""
    parsed = model.model_validate(told, strict=True)
    assert not list(extras(parsed)), "fields beyond OpenAI's"


def extras(parsed):
    yield from parsed.model_extra or ()
    for value in vars(parsed).values():
        for each in value if isinstance(value, list) else [value]:
            if hasattr(each, "model_extra"):
                yield from extras(each)


@pytest.mark.parametrize(("path", "body", "model"), SHAPES.values(), ids=SHAPES)
def test_shapes_are_openais(running, path, body, model):
    answer = running.post(path, **body, max_tokens=3)
    check_shape(model, answer.json())
    options = {"include_usage": True}
    for chunk in running.stream(path, **body, max_tokens=3, stream_options=options):
        check_shape(ChatCompletionChunk if model is ChatCompletion else with_open_end(chunk), chunk)


def with_open_end(chunk):
    """OpenAI's type of a completion knows no choice that has not ended, though its streams are of them."""
    for choice in chunk["choices"]:
        assert "finish_reason" in choice
        choice["finish_reason"] = choice["finish_reason"] or "stop"
    return Completion


def test_shapes_of_models_and_errors(running):
    check_shape(openai.types.Model, running.client.get("/v1/models/tiny").json())
    error = httpx2.post(f"{running.url}/v1/completions", json={}).json()["error"]
    assert openai.types.shared.ErrorObject.model_validate(error, strict=True).message
