"""A headless Chromium for the tests of this folder, which are skipped where it or playwright is missing."""

import os
import shutil
from pathlib import Path

import pytest

# No sandbox inside a sandbox; and nothing of the browser's own goes to a network while it runs.
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="session")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium):
    """A function that opens an empty tab, given keywords of playwright's `new_context`; at the end, none may have
    complained in its console.
    """
    complaints = []

    def open_tab(**options):
        page = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}} | options).new_page()
        page.on("console", lambda m: complaints.append(f"{m.type}: {m.text}") if m.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(f"uncaught: {error}"))
        return page

    yield open_tab
    for context in list(chromium.contexts):
        context.close()
    assert not complaints


def keep(page, name: str) -> None:
    """A screenshot of what the tab shows, where BLOCKSHOCK_SCREENSHOTS names a folder for them."""
    if folder := os.environ.get("BLOCKSHOCK_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")
