"""The explore notebook in JupyterLab, as a user has it: Run All, move a slider, start a run."""

import re
import shutil
import sys

from blockshock_lib.files import ROOT
from tests.browser.conftest import keep
from tests.browser.lab import jupyterlab

RUN_SECONDS = 120


def test_explore_redraws_on_a_slider_and_shows_the_rows_of_a_live_run(tab, tmp_path):
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    asked = ["--ip=127.0.0.1", "--port=0", "--no-browser", "--allow-root", f"--notebook-dir={tmp_path / 'notebooks'}"]
    with jupyterlab(tmp_path, sys.executable, "-m", "jupyterlab", *asked) as (_, url):
        page = tab(viewport={"width": 1500, "height": 1100})
        page.goto(url.replace("/lab?", "/lab/tree/explore.ipynb?reset&"))
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()

        figure = page.locator(".bs-floors-figure img")
        figure.wait_for(timeout=60_000)
        before = figure.get_attribute("src")
        handle = page.locator(".bs-floors .bs-n .noUi-handle")
        handle.scroll_into_view_if_needed()
        handle.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function(
            "old => document.querySelector('.bs-floors-figure img')?.src !== old", arg=before, timeout=20_000
        )
        assert figure.get_attribute("alt")
        # The static figure gives way to the view where there is a kernel.
        assert not page.locator(".bs-floors-static").is_visible()

        runs = page.locator(".bs-runs-figure .bs-run")
        runs.nth(1).scroll_into_view_if_needed()
        first, second = runs.nth(0).bounding_box(), runs.nth(1).bounding_box()
        assert first["y"] == second["y"] and first["x"] < second["x"], "two runs are not side by side"
        keep(page, "side-by-side")

        page.locator(".bs-live-start").scroll_into_view_if_needed()
        page.locator(".bs-live-start").click()
        page.locator(".bs-live-rows tbody tr").first.wait_for(timeout=RUN_SECONDS * 1000)
        page.wait_for_function(
            "() => /PASS/.test(document.querySelector('.bs-live-status')?.innerText)", timeout=RUN_SECONDS * 1000
        )
        rows = page.locator(".bs-live-rows tbody tr").all_inner_texts()
        assert any("Block-Shock" in row and "pass" in row for row in rows)
        assert not [row for row in rows if re.search(r"failed|no check", row)]
        assert list((tmp_path / "outputs").rglob("records.parquet"))
        page.locator(".bs-floors").scroll_into_view_if_needed()
        keep(page, "explore")
        page.close()  # before its server goes, which it would complain of
