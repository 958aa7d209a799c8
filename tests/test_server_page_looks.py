"""The chat page looked at: nothing overlaps, is cut off or hard to read at any width; who scrolled up stays there."""

import os
import threading
from pathlib import Path

import pytest
from chromium import chromium
from scripted_chat import DONE, piece, refused, scripted_chat, send, streamed, usage, whole

pytestmark = [pytest.mark.slow, pytest.mark.simulated]

INSPECT = Path(__file__).with_name("inspect_page.js").read_text("utf-8")
LOOKS = [(width, scheme) for width in (320, 400, 1280) for scheme in ("light", "dark")]
PROSE = (
    "A KV block holds the keys and values of a fixed number of tokens. 🌍 مرحبا بالعالم\n\n"
    "  def step(self):\n      return self.scheduler.schedule()\n\n" + "unbroken" * 40 + "\n\nThat is all."
)


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def server():
    with scripted_chat() as server:
        yield server


def opened(browser, server, width=1280, scheme="light", height=760):
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(server.url)
    return page


def say(page, text):
    page.get_by_label("Message", exact=False).first.fill(text)
    page.keyboard.press("Enter")


def converse(page, server):
    """All that the page can show, at once: a short turn, a long one, a failure, the settings and the key field."""
    server.will(whole("Blocks."), streamed(piece(PROSE, "length"), usage(1200, 340, 1024), DONE))
    server.will(refused(429, "full", Retry_After="3"))
    for number, text in enumerate(("What is paged?", "What is a KV block, " + "really, " * 30 + "and why?", "More"), 1):
        say(page, text)
        page.locator(".small, .wrong").nth(number - 1).wait_for()
    page.get_by_text("Settings").click()
    page.evaluate("document.getElementById('key-form').hidden = false")


def until(page, expression):
    """Wait for it, by asking: the page allows no code that is made of text."""
    while not page.evaluate(expression):
        page.wait_for_timeout(20)


def keep(page, name):
    """Screenshots are kept where NANOSERVE_SCREENSHOTS says."""
    if folder := os.environ.get("NANOSERVE_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_page_is_whole_and_readable(browser, server, width, scheme):
    page = opened(browser, server, width, scheme)
    keep(page, f"empty-{width}-{scheme}")
    converse(page, server)
    keep(page, f"full-{width}-{scheme}")
    page.add_style_tag(content="#log { overflow: visible !important; flex: none !important }")
    page.evaluate("document.querySelector('.unseen').remove()")  # it is read aloud
    found = page.evaluate(INSPECT)
    assert found["found"] == []
    assert found["num_texts"] > 20
    page.close()


FAULTS = {
    "grey on white": (":root { --muted: #aaaaaa }", "contrast"),
    "unbroken words": (".text { overflow-wrap: normal }", "sideways"),
    "a heading over its text": ("h2 { margin-bottom: -24px }", "overlap"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_inspection_sees_a_planted_fault(browser, server, fault):
    css, kind = FAULTS[fault]
    page = opened(browser, server, 400)
    converse(page, server)
    page.add_style_tag(content=f"#log {{ overflow: visible !important; flex: none !important }} {css}")
    found = page.evaluate(INSPECT)["found"]
    assert [each for each in found if each.startswith(kind)], found
    page.close()


def bottom_gap(page):
    return page.evaluate("(e => e.scrollHeight - e.clientHeight - e.scrollTop)(document.getElementById('log'))")


def top(page):
    return page.evaluate("document.getElementById('log').scrollTop")


def test_the_end_is_followed_until_the_reader_scrolls_up_and_again_at_the_end(browser, server):
    page = opened(browser, server, 400, height=500)
    gates = [threading.Event() for _ in range(3)]
    lines = piece("a line\n" * 60)
    server.will(
        streamed(lines, gates[0], lines, piece("second"), gates[1], lines, piece("third"), gates[2], lines, DONE)
    )
    say(page, "Go on")
    text = page.locator(".answered .text")
    until(page, "document.querySelector('.answered .text').textContent.length >= 420")
    assert bottom_gap(page) < 2
    page.get_by_role("log").focus()
    page.keyboard.press("PageUp")
    page.get_by_role("button", name="To the end").wait_for()
    page.wait_for_timeout(400)  # a browser scrolls smoothly
    before = top(page)
    keep(page, "scrolled-up")
    gates[0].set()
    text.get_by_text("second").wait_for()
    assert top(page) == before
    page.get_by_role("button", name="To the end").click()
    assert bottom_gap(page) < 2
    gates[1].set()
    text.get_by_text("third").wait_for()
    assert bottom_gap(page) < 2
    gates[2].set()
    page.get_by_role("button", name="Send").wait_for()
    assert bottom_gap(page) < 2
    page.close()


def test_the_wheel_leaves_the_end_while_text_comes_without_pause(browser, server):
    page = opened(browser, server, 400, height=500)
    stop = threading.Event()

    def flow(handler):
        def parts():
            yield piece("a line\n" * 60)
            while not stop.wait(0.005):
                yield piece("a line\n")
            yield DONE

        send(handler, parts())

    server.will(flow)
    say(page, "Go on")
    until(page, "document.getElementById('log').scrollTop > 500")
    page.mouse.move(200, 200)
    page.mouse.wheel(0, -300)
    page.get_by_role("button", name="To the end").wait_for()
    page.wait_for_timeout(400)
    before = top(page)
    page.wait_for_timeout(300)
    assert top(page) == before
    assert bottom_gap(page) > 250
    stop.set()
    page.close()


def test_a_screen_reader_finds_each_control_by_name_and_hears_what_happens(browser, server):
    page = opened(browser, server)
    for role, name in [
        ("log", "Conversation"),
        ("textbox", "Message"),
        ("button", "Send"),
        ("button", "New chat"),
        ("heading", "nanoserve"),
    ]:
        assert page.get_by_role(role, name=name).first.is_visible(), name
    assert page.get_by_role("log").get_attribute("aria-live") == "polite"
    gate = threading.Event()
    server.will(streamed(piece("hello"), gate, DONE))
    say(page, "hi")
    status = page.locator("[role=status]")
    until(page, "document.querySelector('[role=status]').textContent === 'The answer is coming.'")
    gate.set()
    page.get_by_role("button", name="Send").wait_for()
    assert status.text_content() == "The answer is complete."
    page.close()


def test_everything_is_reached_by_keyboard(browser, server):
    page = opened(browser, server)
    page.get_by_text("scripted-1b").wait_for()
    seen = []
    for _ in range(12):
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        page.keyboard.press("Tab")
    assert {"message", "send", "new", "log", "SUMMARY"} <= set(seen)
    page.close()
