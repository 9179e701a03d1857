"""The list of runs and a run's page, opened from disk without a network."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from blockshock_lib import share
from blockshock_lib.report.pages import page as pages
from tests.browser.conftest import keep
from tests.faults import hostile

ROOT = Path(__file__).resolve().parents[2]
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
REFERENCE = ("phase0-cpu", "phase1-cpu", "phase0-cuda", "phase1-cuda")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The reference runs, their pages made by the present code, and the list of them."""
    out = tmp_path_factory.mktemp("outputs")
    for name in REFERENCE:
        shutil.copytree(ROOT / "outputs" / "reference" / name, out / name, ignore=shutil.ignore_patterns("redrawn"))
        (notebook,) = (out / name).glob("*.ipynb")
        pages.write_html(notebook)
    share.write_index(out)
    return out


def pages_of(out):
    return {path.stem: path for path in [out / "index.html", *sorted(out.glob("*/*.html"))]}


def offline(tab, **options):
    """An empty tab without a network, and the list of what it asks of one."""
    asked = []
    page = tab(offline=True, **options)
    page.on("request", lambda r: asked.append(r.url) if not r.url.startswith(("file:", "data:", "about:")) else None)
    return page, asked


def test_the_list_filters_by_phase_machine_and_text_and_leads_to_a_page(tab, outputs):
    page, asked = offline(tab)
    page.goto((outputs / "index.html").as_uri())
    runs = page.locator(".run:visible")
    assert runs.count() == len(REFERENCE)
    keep(page, "runs")
    page.get_by_label("Phase").select_option("phase1")
    assert runs.count() == 2
    (gpu,) = (m for m in page.get_by_label("Machine").locator("option").all_inner_texts() if "H200" in m)
    page.get_by_label("Machine").select_option(gpu)
    assert runs.count() == 1 and "H1" in runs.inner_text()
    page.get_by_label("Text").fill("nothing says this")
    assert runs.count() == 0 and page.get_by_text("No run fits").is_visible()
    page.get_by_label("Text").fill("")
    runs.get_by_role("heading").get_by_role("link").click()
    page.wait_for_url("**/phase1-cuda/phase1_forward.html")
    assert "Phase 1" in page.get_by_role("heading", level=1).inner_text()
    keep(page, "page")
    assert not asked


def test_code_is_folded_and_unfolds_one_by_one_and_all_at_once(tab, outputs):
    page, asked = offline(tab)
    page.goto(pages_of(outputs)["phase1_forward"].as_uri())
    code = page.locator("details.code pre")
    assert code.count() > 10 and not any(one.is_visible() for one in code.all())
    page.locator("details.code summary").first.click()
    assert [one.is_visible() for one in code.all()].count(True) == 1
    page.get_by_role("button", name="Show all code").click()
    assert all(one.is_visible() for one in code.all())
    assert not asked


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "phase0_correctness", "phase1_forward"])
def test_every_text_has_contrast_and_every_figure_a_text(tab, outputs, name, scheme):
    page, asked = offline(tab, color_scheme=scheme)
    page.goto(pages_of(outputs)[name].as_uri())
    if name != "index":
        page.get_by_role("button", name="Show all code").click()
    texts = page.evaluate(CONTRAST)
    assert len(texts) > 20
    assert not [text for text in texts if text[0] < text[1]]
    images = page.locator("img").all()
    assert images and all(len(image.get_attribute("alt") or "") > 20 for image in images)
    assert page.evaluate("() => [...document.images].every(i => i.complete && i.naturalWidth > 0)")
    ground = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground.strip("rgb()").split(",")[:3])) < 384) == (scheme == "dark")
    assert not asked


def test_the_switch_goes_from_the_systems_scheme_to_light_and_dark(tab, outputs):
    page, _ = offline(tab, color_scheme="light")
    page.goto((outputs / "index.html").as_uri())
    grounds = {}
    for _ in range(3):
        switch = page.get_by_role("button", name="Theme")
        grounds[switch.inner_text()] = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        switch.click()
    assert grounds["Theme: system"] == grounds["Theme: light"] != grounds["Theme: dark"]


@pytest.mark.parametrize("name", ["index", "phase1_forward"])
def test_nothing_but_tables_scrolls_sideways_on_a_phone(tab, outputs, name):
    page, _ = offline(tab, viewport={"width": 390, "height": 800})
    page.goto(pages_of(outputs)[name].as_uri())
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390


def test_a_hostile_notebook_runs_nothing_and_asks_for_nothing(tab, tmp_path):
    notebook = hostile.write_notebook(tmp_path / "hostile.ipynb")
    page, asked = offline(tab)
    page.on("dialog", lambda dialog: pytest.fail(f"a dialog opened: {dialog.message}"))
    page.goto(pages.write_html(notebook).as_uri())
    page.get_by_role("button", name="Show all code").click()
    page.wait_for_timeout(500)
    assert page.evaluate("() => window.owned === undefined && document.title !== 'owned'")
    assert not asked
