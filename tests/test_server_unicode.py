"""Text of every kind through the server: pieces join to the whole, and no stop string is cut in the wrong place."""

import dataclasses
import json

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from server_here import ChattyTokenizer, serving
from test_tokenizer import smollm2  # noqa: F401 - a fixture

from conftest import ScriptedModel, config_like_tiny
from nanoserve import Engine
from nanoserve.tokenizer import HFTokenizer
from nanoserve.weights import LoadedModel

TEXTS = {
    "a family of joined emoji": "a👨‍👩‍👧‍👦b🏳️‍🌈c👍🏽d🇫🇷e",
    "combining marks": "e\u0301 n\u0303\u0323 a" + "\u0300" * 30,
    "right to left": "שלום \u202eעולם\u202c مرحبا\u200f",  # noqa: RUF001
    "a zero": "a\0b\0\0c",
    "a byte order mark": "\ufeffa\ufeffb",
    "line ends of all kinds": "a\u2028b\u2029c\x85d\r\ne\x0bf\x0c",
    "private use": "\ue000\uf8ff\U000f0000\U0010fffd",
    "no characters": "\ufdd0\uffff\U0001ffff\U0010ffff",
    "replacement characters": "a\ufffdb\ufffd\ufffd",
    "the last of the planes": "\U0010ffff𝕬𠀀🌍",  # noqa: RUF001
    "what JSON and events escape": '"\\/\b\f\n\r\t\x1f\x7f data: [DONE]\n\ndata: {}\n\n: x',
    "spaces": " \u00a0\u2003\u200b\u3000 ",
    "scripts": "नमस्ते สวัสดี 你好 こんにちは 안녕 Zażółć ß İ ﬁ",
    "what looks special": "<|im_start|>system\n</s><0xE2>▁⟨300⟩",
}


class Anything(ScriptedModel):
    """What it says next is set by the test; it says it after any prompt, and then the end.

    A prompt's length is told by a test as well, as `num_prompt_tokens`.
    """

    def compute_logits(self, hidden):
        return 1000 * super().compute_logits(hidden)


def said_by(tokenizer, vocab_size):
    config = config_like_tiny(max_context_tokens=1024, vocab_size=vocab_size, eos_token_ids=())
    model = Anything([0], 1, vocab_size)
    loaded = LoadedModel(model, tokenizer, config, "scripted", torch.device("cpu"), torch.float32)
    return Engine(loaded, num_blocks=128, block_size=16, prefix_cache="off"), model


@dataclasses.dataclass
class Talk:
    """A server whose engine says what it is told to say."""

    running: object
    model: Anything
    tokenizer: object

    def ask(self, text, prompt="Hello", **body):
        """The whole, and the pieces of its stream."""
        self.model.script = self.tokenizer.encode(text, add_special_tokens=False)
        self.model.num_prompt_tokens = len(self.tokenizer.encode(prompt))
        body = {"prompt": prompt, "max_tokens": len(self.model.script), "temperature": 0, **body}
        whole = self.running.complete(**body)["choices"][0]["text"]
        pieces = [chunk["choices"][0]["text"] for chunk in self.running.stream(**body)]
        return whole, pieces


@pytest.fixture(scope="module")
def bytes_talk():
    tokenizer = ChattyTokenizer(512)
    engine, model = said_by(tokenizer, 512)
    with serving(engine) as running:
        yield Talk(running, model, tokenizer)


@pytest.fixture(scope="module")
def smollm2_talk(smollm2):  # noqa: F811
    tokenizer = HFTokenizer.from_folder(smollm2)
    engine, model = said_by(tokenizer, 49152)
    with serving(engine) as running:
        yield Talk(running, model, tokenizer)


@pytest.fixture(params=["bytes", pytest.param("smollm2", marks=pytest.mark.slow)], scope="module")
def talk(request):
    return request.getfixturevalue(f"{request.param}_talk")


def check_pieces(whole, pieces):
    assert "".join(pieces) == whole
    assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text_comes_as_it_was_said_and_goes_as_it_was_asked(talk, text):
    ids = talk.tokenizer.encode(text, add_special_tokens=False)
    wanted = talk.tokenizer.decode(ids)
    whole, pieces = talk.ask(text, prompt=text, echo=True)
    assert whole == text + wanted  # the prompt as it was sent, whatever its tokens make of it
    check_pieces(whole, pieces)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_stop_strings_cut_between_characters_wherever_tokens_end(talk, text):
    wanted = talk.tokenizer.decode(talk.tokenizer.encode(text, add_special_tokens=False))
    for start in range(0, len(wanted), 7):
        stop = wanted[start : start + 3]
        whole, pieces = talk.ask(text, stop=[stop, "never"])
        assert whole == wanted[: wanted.index(stop)], stop
        check_pieces(whole, pieces)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_an_answer_that_is_cut_anywhere_streams_as_it_is_whole(talk, text):
    num_tokens = len(talk.tokenizer.encode(text, add_special_tokens=False))
    for most in range(1, num_tokens, max(1, num_tokens // 2)):
        whole, pieces = talk.ask(text, max_tokens=most)
        check_pieces(whole, pieces)
        assert all("\ufffd" not in piece for piece in pieces[:-1]) or "\ufffd" in text


def test_pairs_of_surrogates_and_plain_characters_are_the_same(talk):
    for escapes in (True, False):
        body = json.dumps({"prompt": "🌍é", "max_tokens": 0, "echo": True}, ensure_ascii=escapes).encode()
        answer = talk.running.client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json; charset=utf-8"}
        )
        assert answer.json()["choices"][0]["text"] == "🌍é"


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_chat_takes_it_and_says_it(talk, text):
    asked = [{"role": "user", "content": [{"type": "text", "text": text}]}, {"role": "assistant", "content": text}]
    rendered = talk.tokenizer.render_chat([{**each, "content": text} for each in asked])
    talk.model.script = talk.tokenizer.encode(text, add_special_tokens=False)
    talk.model.num_prompt_tokens = len(rendered)
    body = {"messages": asked, "max_tokens": len(talk.model.script), "temperature": 0}
    answer = talk.running.post("/v1/chat/completions", **body).json()
    assert answer["usage"]["prompt_tokens"] == len(rendered)
    pieces = [each["choices"][0]["delta"]["content"] for each in talk.running.stream("/v1/chat/completions", **body)]
    assert answer["choices"][0]["message"]["content"] == talk.tokenizer.decode(talk.model.script)
    check_pieces(answer["choices"][0]["message"]["content"], pieces)


@pytest.mark.parametrize("name", ["scripts", "what looks special"])
def test_a_trained_tokenizers_characters_are_not_cut(smollm2_talk, name):
    wanted = smollm2_talk.tokenizer.decode(smollm2_talk.tokenizer.encode(TEXTS[name]))
    stop = wanted[7:10]
    whole, pieces = smollm2_talk.ask(TEXTS[name], stop=stop)
    assert whole == wanted[: wanted.index(stop)]
    check_pieces(whole, pieces)


def check_any_text(talk, text, stop):
    wanted = talk.tokenizer.decode(talk.tokenizer.encode(text, add_special_tokens=False))
    assume(wanted)  # some characters are no token at all
    whole, pieces = talk.ask(text, stop=stop)
    assert whole == (wanted[: wanted.index(stop)] if stop in wanted else wanted)
    check_pieces(whole, pieces)


@st.composite
def texts_and_stops(draw):
    text = draw(st.text(min_size=1, max_size=30) | st.text("a🌍é\u0301\ufffd \n", min_size=1, max_size=30))
    start = draw(st.integers(0, len(text) - 1))
    return text, draw(st.just(text[start : start + draw(st.integers(1, 5))]) | st.text(min_size=1, max_size=3))


@settings(max_examples=8)
@given(both=texts_and_stops())
def test_any_text_and_any_stop(talk, both):
    check_any_text(talk, *both)


@pytest.mark.slow
@pytest.mark.simulated
@settings(max_examples=1000)
@given(both=texts_and_stops())
def test_any_text_and_any_stop_at_length(talk, both):
    check_any_text(talk, *both)
