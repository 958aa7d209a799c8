"""The chat page in a real browser, against a scripted server: what it asks for, shows, keeps, and says when it fails.

Needs Chromium and playwright's Python package (no browser download). All but one answer is slow.
"""

import json
import re
import threading

import pytest
from chromium import chromium
from scripted_chat import DONE, PAGE, endless, event, piece, refused, scripted_chat, streamed, usage, whole


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def server():
    with scripted_chat() as server:
        yield server


class Chat:
    """The page as a reader meets it: by labels, roles and keys."""

    def __init__(self, page, url):
        self.page, self.troubles = page, []
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.goto(url)
        self.message, self.log = page.get_by_label("Message", exact=False).first, page.get_by_role("log")
        self.alert = page.get_by_role("alert")

    def say(self, text):
        self.message.fill(text)
        self.message.press("Enter")

    def button(self, name):
        return self.page.get_by_role("button", name=name)

    def see(self, text):
        self.log.get_by_text(text).first.wait_for()

    def wait_for_the_end(self):
        self.button("Send").wait_for()

    def answers(self):
        return self.page.locator("article.answered .text").all_text_contents()


@pytest.fixture
def chat(browser, server):
    context = browser.new_context()
    chat = Chat(context.new_page(), server.url)
    yield chat
    context.close()
    assert chat.troubles == []


def messages(server, turn=-1):
    return [(each["role"], each["content"]) for each in server.heard[turn][2]["messages"]]


def test_the_page_is_one_file_and_writes_no_markup():
    text = PAGE.read_text("utf-8")
    assert re.findall(r"https?://|//\w|\b(?:src|href)=(?!\"data:)|@import|url\(", text.replace("// ", "")) == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert "default-src 'none'" in text


def test_an_answer_is_seen_as_it_comes_and_its_markup_is_text(chat, server):
    go_on = threading.Event()
    markup = "<img src=x onerror=document.title='taken'><b>no</b>"
    parts = piece("Once 🌍"), go_on, piece(f" {markup}", "length"), usage(12, 34, cached=8), DONE
    server.will(streamed(*parts))
    chat.say("<i>Tell</i> me")
    chat.see("Once 🌍")
    assert chat.log.get_attribute("aria-busy") == "true"
    assert chat.button("Stop").is_visible()
    go_on.set()
    chat.wait_for_the_end()
    assert chat.answers() == [f"Once 🌍 {markup}"]
    assert chat.page.locator("#log img, #log b, #log i").count() == 0
    assert chat.page.title() == "scripted-1b · nanoserve"
    assert chat.log.get_attribute("aria-busy") == "false"
    small = chat.page.locator(".small").inner_text()
    assert re.fullmatch(
        r"cut off .* · 12 prompt tokens \(8 cached\), 34 answered · [\d.]+ tokens/s · TTFT [\d.]+ m?s", small
    )


CUT_ANYWHERE = """async ([text, end]) => {
  const bytes = new TextEncoder().encode(text.replaceAll("\\n", end)), odd = [];
  const read = async chunks => {
    const found = [];
    const body = new ReadableStream({start(c) { chunks.forEach(each => c.enqueue(each)); c.close(); }});
    for await (const data of eventsOf(body)) found.push(data);
    return JSON.stringify(found);
  };
  const expected = JSON.stringify(["a 👩‍🚀\\u2028é", "two\\nlines", "[DONE]"]);
  if (await read([...bytes].map(each => Uint8Array.of(each))) !== expected) odd.push("single bytes");
  for (let at = 0; at <= bytes.length; at++)
    if (await read([bytes.slice(0, at), bytes.slice(at)]) !== expected) odd.push(at);
  return odd;
}"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_stream_may_be_cut_anywhere_also_inside_a_character(chat, end):
    text = (
        ": a comment\n\ndata: a 👩‍🚀\u2028é\n\nevent: x\ndata:two\ndata: lines\n\n\ndata: [DONE]\n\ndata: unfinished\n"
    )
    assert chat.page.evaluate(CUT_ANYWHERE, [text, end]) == []


@pytest.mark.slow
def test_stop_hangs_up_and_what_was_said_so_far_stays_in_the_conversation(chat, server):
    hung_up = threading.Event()
    server.will(endless("on ", hung_up), whole("second"))
    chat.say("first")
    chat.see("on on")
    chat.button("Stop").click()
    assert hung_up.wait(10)
    chat.see("stopped")
    said = chat.answers()[0]
    assert set(said.split()) == {"on"}
    assert chat.message.evaluate("each => each === document.activeElement")
    chat.say("more")
    chat.see("second")
    assert messages(server) == [("user", "first"), ("assistant", said), ("user", "more")]


@pytest.mark.slow
def test_a_new_chat_hangs_up_and_begins_at_nothing(chat, server):
    hung_up = threading.Event()
    server.will(endless("on ", hung_up), whole("fresh"))
    chat.say("first")
    chat.see("on on")
    chat.button("New chat").click()
    assert hung_up.wait(10)
    chat.say("second")
    chat.see("fresh")
    assert chat.answers() == ["fresh"]
    assert messages(server) == [("user", "second")]


@pytest.mark.slow
def test_what_is_asked_for_is_the_settings(chat, server):
    server.will(whole("yes"), whole("again"))
    chat.page.get_by_text("Settings").click()
    chat.page.get_by_label("System message").fill("Be brief.")
    chat.page.get_by_label("Temperature").fill("0.25")
    chat.page.get_by_label("Max tokens").fill("77")
    chat.message.press("A")
    chat.message.press("Shift+Enter")
    chat.message.press("B")
    chat.message.press("Enter")
    chat.see("yes")
    path, _, body = server.heard[0]
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "scripted-1b",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.25,
        "max_tokens": 77,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A\nB"}],
    }
    chat.wait_for_the_end()
    chat.button("New chat").click()
    assert chat.answers() == []
    chat.page.get_by_label("Max tokens").fill("")
    chat.say("hello")
    chat.see("again")
    assert messages(server) == [("system", "Be brief."), ("user", "hello")]
    assert "max_tokens" not in server.heard[-1][2]


@pytest.mark.slow
def test_settings_that_make_no_sense_are_not_sent(chat, server):
    chat.page.get_by_text("Settings").click()
    chat.page.get_by_label("Temperature").fill("3")
    chat.page.get_by_text("Settings").click()
    chat.say("hello")
    assert chat.page.get_by_label("Temperature").evaluate("each => each === document.activeElement")
    assert (chat.message.input_value(), server.heard) == ("hello", [])


@pytest.mark.slow
def test_a_key_is_asked_for_once_it_is_wanted_and_leaves_with_the_tab(chat, server):
    key = chat.page.get_by_label("API key")
    assert not key.is_visible()
    server.will(refused(401, "no"), whole("welcome"))
    chat.say("hello")
    key.fill("secret")
    key.press("Enter")
    chat.see("welcome")
    assert [heard[1].get("Authorization") for heard in server.heard] == [None, "Bearer secret"]
    assert not key.is_visible()
    assert chat.page.evaluate("[sessionStorage.getItem('api-key'), localStorage.length]") == ["secret", 0]
    assert messages(server) == [("user", "hello")]


@pytest.mark.slow
def test_a_key_is_asked_for_at_the_door(browser, server):
    server.key = "k"
    context = browser.new_context()
    chat = Chat(context.new_page(), server.url)
    chat.page.get_by_label("API key").fill("k")
    chat.button("Use it").click()
    chat.page.get_by_text("scripted-1b").wait_for()
    assert chat.log.inner_text() == ""
    context.close()


TROUBLES = {
    "full": (refused(429, "queue", Retry_After="7"), "The server is full. Try again in 7 seconds."),
    "ending": (refused(503, "draining"), "takes no requests now: it is starting or ending. Try again in a while."),
    "bad": (refused(400, "max_tokens must be less"), "refused (400): max_tokens must be less"),
    "no reason": (lambda handler: handler.reply(500, b"<h1>"), "refused (500): Internal Server Error"),
    "in the stream": (streamed(piece("half"), event({"error": {"message": "gave out"}})), "gave up: gave out"),
    "broken": (streamed(piece("half"), breaks=True), "The answer broke off"),
    "no end": (streamed(piece("half")), "The answer broke off"),
    "nonsense": (streamed(b"data: {\n\n"), "sent what is no answer"),
}


@pytest.mark.slow
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_failure_is_said_in_words_and_can_be_tried_again(chat, server, trouble):
    answer, words = TROUBLES[trouble]
    server.will(answer, whole("better"), whole("next"))
    chat.say("hello")
    chat.alert.wait_for()
    assert words in chat.alert.inner_text()
    chat.button("Try again").click()
    chat.see("better")
    assert chat.answers() == ["better"]
    assert chat.alert.count() == 0
    assert messages(server) == [("user", "hello")]


@pytest.mark.slow
def test_what_failed_is_not_sent_again_with_the_next_message(chat, server):
    server.will(TROUBLES["in the stream"][0], whole("fine"))
    chat.say("lost")
    chat.alert.wait_for()
    chat.say("kept")
    chat.see("fine")
    assert messages(server) == [("user", "kept")]
    assert chat.button("Try again").count() == 0


@pytest.mark.slow
def test_a_network_that_is_gone_is_said(chat, server):
    chat.page.get_by_text("scripted-1b").wait_for()
    chat.page.context.set_offline(True)
    chat.say("hello")
    chat.alert.wait_for()
    assert "cannot be reached" in chat.alert.inner_text()
    assert json.dumps(chat.answers()) == '[""]'
