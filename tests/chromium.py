"""A real browser for the tests that look at a page: Chromium as it is installed, driven by playwright."""

import contextlib
import os
import shutil

import pytest

HOW_TO_GET_IT = "apt-get install chromium && pip install playwright"


def unavailable(reason):
    """Skip, except where a check that does not run must not pass."""
    give_up = pytest.fail if os.environ.get("CI") else pytest.skip
    give_up(f"{reason}; get it with: {HOW_TO_GET_IT}")


@contextlib.contextmanager
def chromium():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("the page is not looked at without playwright")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        unavailable("the page is not looked at without Chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
