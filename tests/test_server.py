"""What clients get from the server: OpenAI's shapes, around exactly what the engine says."""

import pytest
from server_here import ChattyTokenizer, scripted_engine, serving

SAID = "Ho! 🌍 é\n"


@pytest.fixture(scope="module")
def running():
    with serving(scripted_engine(SAID)) as running:
        yield running


def test_a_completion_is_what_the_engine_says(running):
    answer = running.complete(prompt="Hello", max_tokens=14, model="tiny")
    (choice,) = answer["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, (SAID * 2)[:10], "length")
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 5, "completion_tokens": 14, "total_tokens": 19, "prompt_tokens_details": None,
    }  # fmt: skip


@pytest.mark.parametrize("max_tokens", range(1, 15))
def test_a_stream_joins_to_the_whole_and_never_holds_half_a_character(running, max_tokens):
    whole = running.complete(prompt="Hello", max_tokens=max_tokens)["choices"][0]["text"]
    chunks = running.stream(prompt="Hello", max_tokens=max_tokens)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == whole
    assert all("\ufffd" not in text for text in texts[:-1])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_no_line_end_of_any_kind_stands_in_an_event():
    said = "a\u2028b\u0085c\u2029d\n"
    with serving(scripted_engine(said)) as running:
        chunks = running.stream(prompt="Hello", max_tokens=len(said.encode()))  # its lines are those of `splitlines`
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == said


def test_a_stream_tells_its_usage_where_it_is_asked(running):
    *chunks, last = running.stream(prompt="Hello", max_tokens=4, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks] == [None] * 4
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert all("usage" not in chunk for chunk in running.stream(prompt="Hello", max_tokens=4))


def test_usage_runs_along_where_it_is_asked(running):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = running.stream(prompt="Hello", max_tokens=6, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 6, 6]


def test_what_was_stored_counts_as_cached():
    with serving(scripted_engine(num_prompt_tokens=20)) as running:
        usages = [running.complete(prompt="x" * 20, max_tokens=2)["usage"] for _ in range(2)]
        assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 16]
        assert running.number("nanoserve_cached_tokens_total") == 16
        assert running.number("nanoserve_prefix_hit_ratio") == 16 / 40


def test_answers_come_prompt_by_prompt_and_a_prompt_counts_once(running):
    answer = running.complete(prompt=["Hello", "you??"], n=2, max_tokens=3, echo=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["HelloHo!", "HelloHo!", "you??Ho!", "you??Ho!"]
    assert answer["usage"]["prompt_tokens"] == 10
    assert answer["usage"]["completion_tokens"] == 12


def test_token_ids_go_in_and_out(running):
    answer = running.complete(prompt=list(b"Hello"), max_tokens=3, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == list(b"Ho!")
    chunks = running.stream(prompt=[list(b"Hello")], max_tokens=8, return_token_ids=True)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[byte] for byte in SAID.encode()[:8]]


def test_events_hold_no_line_end_that_any_client_might_see():
    with serving(scripted_engine("a\u2028b\x85c\u2029d\n")) as running:
        assert "".join(chunk["choices"][0]["text"] for chunk in running.stream(prompt="Hello", max_tokens=13)) == (
            "a\u2028b\x85c\u2029d\n"
        )
        answer = running.post(prompt="Hello", max_tokens=13)
        assert b"\\u2028b\\u0085c\\u2029d\\n" in answer.content


def test_stop_strings_end_the_text_and_are_no_part_of_it(running):
    (choice,) = running.complete(prompt="Hello", max_tokens=20, stop=["never", "🌍 é"])["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Ho! ", "stop")
    chunks = running.stream(prompt="Hello", max_tokens=20, stop="🌍 é")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Ho! "


def test_echo_of_nothing_new(running):
    answer = running.complete(prompt="Hello", max_tokens=0, echo=True)
    assert answer["choices"][0]["text"] == "Hello"
    assert answer["usage"]["completion_tokens"] == 0


def test_a_chat_is_rendered_and_answered(running):
    messages = [{"role": "developer", "content": ""}, {"role": "user", "content": [{"type": "text", "text": "abc"}]}]
    num_prompt = len("system:\nuser:abc\n")
    with serving(scripted_engine(SAID, num_prompt)) as other:
        answer = other.post("/v1/chat/completions", messages=messages, max_completion_tokens=3).json()
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Ho!", "refusal": None}
        assert answer["object"] == "chat.completion"
        first, *rest = other.stream("/v1/chat/completions", messages=messages, max_tokens=3)
        assert first["object"] == "chat.completion.chunk"
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": "H"}
        assert [chunk["choices"][0]["delta"] for chunk in rest] == [{"content": "o"}, {"content": "!"}]
        everything = other.post("/v1/chat/completions", messages=messages).json()
        assert everything["usage"]["total_tokens"] == 512  # all that the context has left


def test_a_completion_tells_logprobs(running):
    (choice,) = running.complete(prompt="Hello", max_tokens=5, logprobs=2)["choices"]
    told = choice["logprobs"]
    assert told["tokens"] == ["H", "o", "!", " ", "bytes:\\xf0"]
    assert told["text_offset"] == [0, 1, 2, 3, 4]
    assert [max(top, key=top.get) for top in told["top_logprobs"]] == told["tokens"]
    assert all(len(top) == 2 for top in told["top_logprobs"])
    pairs = zip(told["token_logprobs"], told["top_logprobs"], strict=True)
    assert all(logprob == max(top.values()) for logprob, top in pairs)
    chunks = running.stream(prompt="Hello", max_tokens=5, logprobs=2)
    assert [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]] == told["tokens"]
    assert [at for chunk in chunks for at in chunk["choices"][0]["logprobs"]["text_offset"]] == told["text_offset"]


class QuietTokenizer(ChattyTokenizer):
    """One of its tokens is a special one."""

    def is_silent(self, token_id):
        return token_id == ord("!")

    def decode(self, ids):
        return super().decode([each for each in ids if not self.is_silent(each)])


def test_offsets_are_places_in_the_text():
    """A character of four tokens is one character; what is not shown takes no room, unless its client wrote it."""
    with serving(scripted_engine(SAID, tokenizer=QuietTokenizer)) as other:
        asked = {"prompt": "a!é!", "max_tokens": len(SAID.encode()), "temperature": 0, "logprobs": 0, "echo": True}
        (choice,) = other.complete(**asked)["choices"]
        ids = {**asked, "prompt": [*b"a!\xc3\xa9!"]}
        (of_ids,) = other.complete(**ids)["choices"]
    assert choice["text"] == "a!é!Ho 🌍 é\n"
    said = [0, 1, 2, 2, 3, 3, 3, 3, 4, 5, 5, 6]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 3, *(4 + at for at in said)]
    assert of_ids["text"] == "aéHo 🌍 é\n"
    assert of_ids["logprobs"]["text_offset"][:6] == [0, 1, 1, 1, 2, 2]


def test_echo_tells_the_prompts_logprobs_too(running):
    (choice,) = running.complete(prompt="Hello", max_tokens=1, logprobs=1, echo=True)["choices"]
    told = choice["logprobs"]
    assert told["tokens"] == [*"Hello", "H"]
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    assert sum(told["token_logprobs"][1:-1]) < -1000  # nothing of its script
    assert told["token_logprobs"][-1] == 0
    only = running.complete(prompt="Hello", max_tokens=0, logprobs=0, echo=True)["choices"][0]["logprobs"]
    assert only["tokens"] == [*"Hello"]
    assert only["top_logprobs"] is None


def test_a_chat_tells_logprobs(running):
    body = {"messages": [{"role": "user", "content": ""}], "max_tokens": 5, "logprobs": True, "top_logprobs": 1}
    content = running.post("/v1/chat/completions", **body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    assert all(each["bytes"] == [*each["token"].encode()] or each["token"] == "\ufffd" for each in content)
    assert all(each["top_logprobs"][0]["bytes"] == each["bytes"] for each in content)


def test_the_model_is_listed(running):
    (model,) = running.client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert running.client.get("/v1/models/tiny").json() == model
    assert running.client.get("/v1/models/other").status_code == 404
    assert running.client.get("/health").json() == {"status": "ok"}
    assert running.client.head("/health").status_code == 200
    assert "nanoserve" in running.client.get("/").text


BAD = {
    "an unknown field": ({"prompt": "a", "temprature": 1}, "temprature", "not known"),
    "another model": ({"prompt": "a", "model": "gpt"}, "model", "choose 'tiny'"),
    "no prompt": ({}, "prompt", "required"),
    "an empty prompt": ({"prompt": ""}, "prompt", "empty"),
    "an empty list": ({"prompt": []}, "prompt", "empty"),
    "mixed prompts": ({"prompt": ["a", 1]}, "prompt", "valid"),
    "a token that is biased twice": ({"prompt": "a", "logit_bias": {"1": 1, "01": 2}}, "logit_bias", "twice"),
    "a token outside the vocabulary": ({"prompt": [300]}, None, "0 to 299"),
    "no token, told again": ({"prompt": [-1], "echo": True}, None, "0 to 299"),
    "a number in words": ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "integer"),
    "true for a number": ({"prompt": "a", "max_tokens": True}, "max_tokens", "integer"),
    "no tokens": ({"prompt": "a", "max_tokens": 0}, "max_tokens", "echo"),
    "more than the context": ({"prompt": "a", "max_tokens": 512}, None, "shorten"),
    "too hot": ({"prompt": "a", "temperature": -1}, "temperature", "greater"),
    "five stops": ({"prompt": "a", "stop": list("abcde")}, "stop", "4"),
    "an empty stop": ({"prompt": "a", "stop": ""}, "stop", "at least 1"),
    "best of more": ({"prompt": "a", "best_of": 3}, "best_of", "n"),
    "a suffix": ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    "a bias for a word": ({"prompt": "a", "logit_bias": {"hello": 1}}, "logit_bias", "pattern"),
    "a bias for no token": ({"prompt": "a", "logit_bias": {"300": 1}}, None, "300"),
    "too many answers": ({"prompt": "a", "n": 129}, "n", "128"),
}


@pytest.mark.parametrize(("body", "param", "words"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("streams", [False, True])
def test_what_is_refused_is_named(running, body, param, words, streams):
    answer = running.post(**body, stream=streams)
    assert answer.status_code == (404 if param == "model" else 400)
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == param
    assert error["type"] in ("invalid_request_error", "not_found_error")


CHATS = {
    "no messages": ({"messages": []}, "messages"),
    "a tool's message": ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    "tools": ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools"),
    "top without logprobs": ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
}


@pytest.mark.parametrize(("body", "param"), CHATS.values(), ids=CHATS)
def test_chats_that_are_refused(running, body, param):
    answer = running.post("/v1/chat/completions", **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_only_a_stream_has_options(running):
    answer = running.post(prompt="a", stream_options={"include_usage": True})
    assert answer.json()["error"]["param"] == "stream_options"


def test_what_asks_for_nothing_is_taken(running):
    inert = {"user": "me", "metadata": {"a": "b"}, "store": False, "suffix": None, "best_of": 1, "logit_bias": {}}
    running.complete(prompt="Hello", max_tokens=1, **inert)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[]", b"null", b"[" * 10_000, b'{"prompt": NaN}', b'{"prompt": "\\ud800"}']
)
def test_what_is_no_body_is_told_as_such(running, body):
    answer = running.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_paths_and_methods_that_are_not_there(running):
    assert running.client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    answer = running.client.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
