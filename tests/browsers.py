"""A browser for tests of the page."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start Chromium. Skips where it is missing, and fails in continuous integration."""
    if CHROMIUM is None:
        assert "CI" not in os.environ, "there is no Chromium on this machine"
        pytest.skip("there is no Chromium on this machine")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
