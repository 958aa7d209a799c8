"""The page looked at in a real browser: nothing overlaps, nothing is cut off, nothing is fetched, all of it readable.

Needs Chromium and playwright's Python package (no browser download). Each check is also shown a page that breaks it.
"""

from pathlib import Path

import pytest
from chromium import chromium, unavailable
from sample_results import PROVENANCE, streamed_case, sweep, write

from benchmarks.harness.archive import read_archives
from benchmarks.harness.page import render_page
from benchmarks.harness.results import Flag

pytestmark = pytest.mark.slow

WIDTHS, SCHEMES = (1280, 400), ("light", "dark")
INSPECT = Path(__file__).with_name("inspect_page.js").read_text("utf-8")


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """One page with everything on it: two files, curves, flags, a long name, markup in a name, undefined values."""
    folder = tmp_path_factory.mktemp("page")
    flags = (Flag(kind="drift", arm="naive", what="samples rise by 12 %"), Flag(kind="new", arm="", what="unheard of"))
    odd = streamed_case(
        1, case="<b>" + "x" * 200, num_runs=1, benchmark="bench_y.py::test_" + "long_" * 30, flags=flags
    )
    base = write(folder / "base.json", [*sweep((8, 16, 32)), odd])
    other = PROVENANCE | {"commit": "deadbeef" * 5 + "+dirty"}
    head = write(folder / "head.json", sweep((8, 16, 32), seed=1, provenance=other))
    file = folder / "report.html"
    file.write_text(render_page(read_archives([base, head])), "utf-8")
    return file


class Visit:
    """One look at the page: what it logged, what it asked the network for, and what the inspection found."""

    def __init__(self, browser, file, width, scheme, script="0"):
        self.troubles, self.requests = [], []
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: self.troubles.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("requestfailed", lambda request: self.troubles.append(request.url))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(file.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        page.evaluate(script)
        seen = page.evaluate(INSPECT)
        self.found, self.num_texts, self.num_figures = seen["found"], seen["num_texts"], seen["num_figures"]
        page.close()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_whole_and_readable(browser, page_file, width, scheme):
    visit = Visit(browser, page_file, width, scheme)
    assert visit.found == []
    assert visit.troubles == []
    assert [url for url in visit.requests if not url.startswith("data:")] == [page_file.as_uri()]
    assert visit.num_texts > 500
    assert visit.num_figures > 10


FAULTS = {
    "a heading pulled over the text above it": ("h2 { margin-top: -40px }", "overlap"),
    "a table as wide as it likes, outside its container": (".scroll { overflow: visible }", "sideways"),
    "a wide paragraph": ("p { width: 1500px; max-width: none }", "wide"),
    "a name that is cut": ("th span { height: 4px; overflow: hidden }", "clipped"),
    "a figure whose labels run out of it": ("figure svg text { font-size: 40px !important }", "clipped"),
    "labels that collide in a figure": ("figure svg text { font-size: 17px !important }", "overlap"),
    "grey on white": (":root { --muted: #aaaaaa }", "contrast"),
    "cells drawn over each other": ("td.interval { position: relative; left: -60px }", "overlap"),
    "a floating box": (".doubts { position: absolute; top: 400px; left: 0 }", "overlap"),
}


@pytest.fixture(scope="module")
def narrow_page(browser, page_file):
    page = browser.new_page(viewport={"width": 400, "height": 900}, color_scheme="light")
    page.goto(page_file.as_uri())
    yield page
    page.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_inspection_sees_a_planted_fault(narrow_page, fault):
    css, kind = FAULTS[fault]
    style = narrow_page.add_style_tag(content=css)
    found = narrow_page.evaluate(INSPECT)["found"]
    style.evaluate("style => style.remove()")
    assert [each for each in found if each.startswith(kind)], found


def test_the_inspection_sees_grey_on_black(browser, page_file):
    paint = "document.documentElement.style.setProperty('--ink', '#333333')"
    found = Visit(browser, page_file, 1280, "dark", paint).found
    assert [each for each in found if each.startswith("contrast")]


def test_a_visit_sees_errors_and_requests(browser, page_file):
    script = "new Promise(done => { const i = new Image(); i.onerror = done; i.src = 'http://localhost:9/x.png' })"
    visit = Visit(browser, page_file, 400, "light", f"console.error('oh'); {script}")
    assert "oh" in visit.troubles
    assert "http://localhost:9/x.png" in visit.troubles
    assert "http://localhost:9/x.png" in visit.requests


def test_a_missing_browser_is_a_skip_here_and_a_failure_in_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="pip install playwright"):
        unavailable("none")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="pip install playwright"):
        unavailable("none")
