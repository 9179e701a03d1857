"""The list of runs and a run's page, opened from disk without a network."""

import shutil
from pathlib import Path

import pytest

from blockshock_lib.notebook import share
from blockshock_lib.notebook.pages import page as pages
from tests.browser.conftest import keep
from tests.faults import hostile

CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
GROUND = "() => getComputedStyle(document.body).backgroundColor"
REFERENCE = ("phase0-cpu", "phase1-cpu", "phase0-cuda", "phase1-cuda")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The reference runs, their pages made by the present code, and the list of them."""
    out = tmp_path_factory.mktemp("outputs")
    for name in REFERENCE:
        shutil.copytree(hostile.REFERENCE.parent / name, out / name, ignore=shutil.ignore_patterns("redrawn"))
        (notebook,) = (out / name).glob("*.ipynb")
        pages.write_html(notebook)
    share.write_index(out)
    return out


@pytest.fixture
def show(tab, outputs):
    """A function that shows the page of this name in a tab without a network; nothing may have been asked of one."""
    asked = []

    def opened(name, **options):
        page = tab(offline=True, **options)
        page.on("request", lambda r: asked.append(r.url))
        path = name if isinstance(name, Path) else min(path for path in outputs.rglob("*.html") if path.stem == name)
        page.goto(path.as_uri())
        return page

    yield opened
    assert not [url for url in asked if not url.startswith(("file:", "data:", "about:"))]


def test_the_list_filters_by_phase_machine_and_text_and_leads_to_a_page(show):
    page = show("index")
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


def test_code_is_folded_and_unfolds_one_by_one_and_all_at_once(show):
    page = show("phase1_forward")
    code = page.locator("details.code pre")
    assert code.count() > 10 and not any(one.is_visible() for one in code.all())
    page.locator("details.code summary").first.click()
    assert [one.is_visible() for one in code.all()].count(True) == 1
    page.get_by_role("button", name="Show all code").click()
    assert all(one.is_visible() for one in code.all())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "phase0_correctness", "phase1_forward"])
def test_every_text_has_contrast_and_every_figure_a_text(show, name, scheme):
    page = show(name, color_scheme=scheme)
    if name != "index":
        page.get_by_role("button", name="Show all code").click()
    texts = page.evaluate(CONTRAST)
    assert len(texts) > 20
    assert not [text for text in texts if text[0] < text[1]]
    images = page.locator("img").all()
    assert images and all(len(image.get_attribute("alt") or "") > 20 for image in images)
    assert page.evaluate("() => [...document.images].every(i => i.complete && i.naturalWidth > 0)")
    ground = page.evaluate(GROUND)
    assert (sum(map(int, ground.strip("rgb()").split(",")[:3])) < 384) == (scheme == "dark")


def test_the_switch_goes_from_the_systems_scheme_to_light_and_dark(show):
    page = show("index", color_scheme="light")
    grounds = {}
    for _ in range(3):
        switch = page.get_by_role("button", name="Theme")
        grounds[switch.inner_text()] = page.evaluate(GROUND)
        switch.click()
    assert grounds["Theme: system"] == grounds["Theme: light"] != grounds["Theme: dark"]


@pytest.mark.parametrize("name", ["index", "phase1_forward"])
def test_nothing_but_tables_scrolls_sideways_on_a_phone(show, name):
    page = show(name, viewport={"width": 390, "height": 800})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390


def test_a_hostile_notebook_runs_nothing_and_asks_for_nothing(show, tmp_path):
    page = show(pages.write_html(hostile.write_notebook(tmp_path / "hostile.ipynb")))
    page.get_by_role("button", name="Show all code").click()
    page.wait_for_timeout(500)
    assert page.evaluate("() => window.owned === undefined && document.title !== 'owned'")
