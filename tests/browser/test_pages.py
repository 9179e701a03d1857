"""The list of runs and a run's page, opened from disk without a network."""

import base64
import csv
import io
import re
import shutil
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from PIL import Image

from blockshock_lib.notebook import share
from blockshock_lib.notebook.pages import page as pages
from blockshock_lib.runs import manifest
from tests.browser.conftest import keep
from tests.faults import hostile
from tools import refresh_reference

CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
ANSWER = "Never here: slower than tensor parallelism (B1) in all 20 cases, by 2 to 35%."
FONT = "getComputedStyle(e).fontSize"
GROUND = "() => getComputedStyle(document.body).backgroundColor"
WIDTH = "() => document.documentElement.scrollWidth"
REFERENCE = ("phase0-cpu", "phase1-cpu", "phase0-cuda", "phase1-cuda-before", "phase2-cuda", "phase3-cuda-before")
REFERENCE += ("findings",)
PAGES = ("phase0_correctness", "phase1_forward", "phase2_backward", "phase3_training", "findings")
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The reference runs, phase 1 of GPUs drawn anew and the other pages made by the present code, a run of one's own,
    and the list of them.
    """
    out = tmp_path_factory.mktemp("outputs")
    for name in REFERENCE:
        shutil.copytree(hostile.REFERENCE.parent / name, out / "reference" / name)
    share.write_index(out)
    for name in REFERENCE:
        (notebook,) = (out / "reference" / name).glob("*.ipynb")
        pages.write_html(notebook)
    refresh_reference.refresh(out / "reference" / "phase1-cuda-before", tmp_path_factory.mktemp("scratch"))
    mine = hostile.small_run(out / "2026-11-22" / "mine")
    manifest.note(mine, started="2026-11-22T10:00:00+00:00")
    share.write_index(out)
    return out


@pytest.fixture
def show(tab, outputs):
    """A function that shows the page of this name in a tab without a network; nothing may have been asked of one."""
    asked = []

    def opened(name, **options):
        page = tab(offline=True, **options)
        page.on("request", lambda r: asked.append(r.url))
        name, _, part = (name, "", "") if isinstance(name, Path) else name.partition("#")
        found = [name] if isinstance(name, Path) else [path for path in outputs.rglob("*.html") if path.stem == name]
        path = next((path for path in found if "cuda" in str(path)), found[0])
        page.goto(path.as_uri() + f"#{part}" * bool(part))
        return page

    yield opened
    assert not [url for url in asked if not url.startswith(("file:", "data:", "about:"))]


def test_the_list_pins_the_shipped_answers_and_filters_sorts_and_keeps_it_in_its_address(show):
    page = show("index")
    runs = page.locator(".run:visible")
    assert runs.count() == len(REFERENCE) + 1
    keep(page, "runs")
    assert page.locator(".group h2").all_inner_texts() == ["The shipped answers: linear", "Yours"]
    assert page.get_by_text("Never surely faster here than tensor parallelism (B1): of 20").first.is_visible()
    assert page.get_by_role("link", name="All numbers").get_attribute("href").endswith("docs/results/linear.md")
    titles = [title.split(" · ")[0] for title in page.locator(".run h3").all_inner_texts()]
    assert titles[:6] == ["findings", "phase0", "phase1", "phase2", "phase3", "phase0"]
    assert runs.nth(2).locator(".line").inner_text() == ANSWER
    assert page.locator(".run .line").count() == runs.count(), "a line a run"
    page.locator("#sort").select_option("oldest")
    about = page.locator(".group:first-of-type .run").locator("p.links >> nth=0").all_inner_texts()
    days = [text.split(" · ")[1] for text in about]
    assert days == sorted(days)
    page.locator("#phase").select_option("phase1")
    assert runs.count() == 3
    (gpu,) = (m for m in page.locator("#machine option").all_inner_texts() if m == "2x NVIDIA H200")
    page.locator("#machine").select_option(gpu)
    assert runs.count() == 1 and not page.get_by_text("Yours").is_visible()
    page.locator("#text").fill("nothing says this")
    assert runs.count() == 0 and page.get_by_text("No run fits").is_visible()
    page.locator("#text").fill("slower")
    page.reload()
    assert runs.count() == 1 and page.locator("#machine").input_value() == gpu
    runs.get_by_role("heading").get_by_role("link").click()
    page.wait_for_url("**/phase1-cuda-before/phase1_forward.html")
    assert "Phase 1" in page.get_by_role("heading", level=1).inner_text()


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_the_answer_of_phase_1_stands_on_the_first_screen_large_with_its_figure_and_checks(show, size, outputs):
    page = show("phase1_forward", viewport=size)
    keep(page, f"phase1-{size['width']}")
    said, picture = page.locator(".sentence"), page.locator("main img").first
    assert said.inner_text() == ANSWER
    box = said.bounding_box()
    assert box["y"] + box["height"] < size["height"] and box["x"] + box["width"] <= size["width"]
    large, plain = (
        float(page.evaluate(f"e => parseFloat({FONT})", one.element_handle())) for one in (said, page.locator("body"))
    )
    assert large == 1.5 * plain
    assert picture.bounding_box()["y"] < size["height"] - 100 and "4096x4096, B=256: " in picture.get_attribute("alt")
    assert page.locator(".chip").inner_text() == "Checks 700/700"
    kinds = (".chip", ".refuted", ".supported")
    colours = [page.locator(one).first.evaluate("e => getComputedStyle(e).color") for one in kinds]
    assert len(set(colours)) == 3, "a check that passed looks like a hypothesis that holds"
    assert all(":" in claim for claim in page.locator(".answer li").all_inner_texts()), "a code without its sentence"
    assert min(outputs.rglob("phase1-cuda-before/*.html")).stat().st_size < 1_500_000


def test_a_table_sorts_filters_folds_and_is_copied_with_its_numbers(show):
    page = show("phase1_forward", permissions=["clipboard-read", "clipboard-write"])
    table = page.locator("table").filter(has_text="exposed communication").first
    bar = table.locator("xpath=../preceding-sibling::*[1]")
    rows = table.locator("tbody tr:visible")
    largest = {row[:11] for row in rows.all_inner_texts()}
    assert rows.count() == 7 and largest == {"40960x40960"}, "not the largest case alone"
    bar.get_by_role("button", name="Show all 140").click()
    assert rows.count() == 140
    table.get_by_role("button", name=re.compile("^kernel \\(")).click()
    place = table.locator("thead th").all_inner_texts().index("kernel (µs)")
    times = [float(row.split("\t")[place].replace(",", "")) for row in rows.all_inner_texts()]
    assert times == sorted(times) and times[-1] > 10_000
    bar.get_by_label("Filter rows").fill("block-shock 4096x4096 256")
    assert 0 < rows.count() < 20 and all("4096x4096" in row for row in rows.all_inner_texts())
    bar.get_by_role("button", name="Copy CSV").click()
    bar.get_by_role("button", name="Copied").wait_for()
    copied = list(csv.reader(io.StringIO(page.evaluate("() => navigator.clipboard.readText()"))))
    assert len(copied) == rows.count() + 1 and "kernel (µs)" in copied[0]
    assert all(float(row[place]) > 0 for row in copied[1:])
    with page.expect_download() as saved:
        page.get_by_role("button", name="CSV", exact=True).click()
    assert Path(saved.value.path()).read_text().count("exposed communication") >= 1


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_a_tables_head_and_first_column_stay(show, size):
    page = show("phase1_forward", viewport=size)
    table = page.locator("table").filter(has_text="exposed communication").first
    table.locator("xpath=../preceding-sibling::*[1]").get_by_role("button", name="Show all").click()
    box = table.locator("xpath=..")
    assert box.bounding_box()["height"] <= 0.71 * size["height"]
    box.evaluate("e => e.scrollTo(300, 2000)")
    frame, head = box.bounding_box(), table.locator("thead th").first.bounding_box()
    assert abs(head["y"] - frame["y"]) < 2 and abs(head["x"] - frame["x"]) < 2
    first = table.locator("tbody tr").nth(100).locator("td,th").first.bounding_box()
    assert abs(first["x"] - frame["x"]) < 2 and first["width"] < 0.5 * size["width"]


@pytest.mark.parametrize("name", ["phase1-cuda", "phase3-cuda", "gallery_speed-cuda", "attention_speed-cuda"])
def test_words_of_figures_stay_readable_on_a_phone_and_no_figure_is_blown_up(show, name, tmp_path):
    (notebook,) = (hostile.REFERENCE.parent / name).glob("*.ipynb")
    page = show(pages.write_html(Path(shutil.copy(notebook, tmp_path))), viewport=PHONE)
    for image in page.locator(".figure img").all():
        width, own = image.bounding_box()["width"], int(image.get_attribute("width"))
        assert width < 1.2 * own and (own < 600 or width >= 700)  # a narrow one was drawn for a phone: shown whole
        kind, _, data = image.get_attribute("src").partition(";base64,")
        if "svg" in kind:
            svg = base64.b64decode(data).decode()
            smallest = min(map(float, re.findall(r"font(?:-size)?: ?(?:[a-z]+ )?(\d[\d.]*)px", svg)))
            assert smallest * width / float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1]) > 7.5


def test_figures_lie_dark_on_dark_and_none_scrolls_a_phone_sideways(show):
    page = show("phase1_forward", viewport=PHONE, color_scheme="dark")
    assert page.evaluate(WIDTH) <= PHONE["width"]
    shot = Image.open(io.BytesIO(page.locator(".figure").first.screenshot())).convert("L")
    counts = shot.histogram()
    assert sum(counts[:64]) > 0.5 * sum(counts) and sum(counts[170:]) > 0.005 * sum(counts), "no light words on dark"


def test_the_contents_stay_beside_the_text_or_open_from_a_button_and_headings_have_names(show):
    page = show("phase1_forward", viewport=DESK)
    contents = page.locator("#contents")
    page.locator("#the-law").scroll_into_view_if_needed()
    assert contents.is_visible() and 0 <= contents.bounding_box()["y"] < 100
    phone = show("phase1_forward#the-law", viewport=PHONE)
    assert 0 <= phone.locator("#the-law").bounding_box()["y"] < 100
    assert not phone.locator("#contents").is_visible()
    phone.get_by_role("link", name="Contents", exact=True).click()
    phone.locator("#contents").get_by_role("link", name="Memory").click()
    assert phone.url.endswith("#memory") and not phone.locator("#contents").is_visible()


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_to_a_file_no_table_says_nan_code_is_folded_and_nothing_scrolls_sideways(show, name):
    page = show(name)
    links = page.locator("a").evaluate_all("all => all.map(a => a.href)")
    assert not [url for url in links if url.startswith("file:") and not Path(unquote(urlparse(url).path)).exists()]
    words = page.locator(".bar .links a").all_inner_texts()
    assert {"Runs", "Notebook", "Manifest"} <= set(words)
    assert ({"Findings", "Records"} <= set(words)) == (name != "findings")
    code = page.locator("details.code pre").all()
    assert len(code) > 5 and sum(one.is_visible() for one in code) <= 1, "code is not folded"
    page.get_by_role("button", name="Show all code").click()
    assert all(one.is_visible() for one in code)
    cells = page.locator("td").all_inner_texts()
    assert not [cell for cell in cells if re.search(r"\b(nan|NaN|None|NaT)\b", cell)]
    assert not page.locator("tbody:not(:has(tr))").count()
    page.reload()
    assert all(
        bar["width"] < 60 for bar in (one.bounding_box() for one in page.locator("details.code summary:visible").all())
    )
    page.set_viewport_size(PHONE)
    page.reload()
    assert page.evaluate(WIDTH) <= PHONE["width"], "more than tables and figures scrolls sideways"


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
    page.set_viewport_size(PHONE)
    assert page.evaluate(WIDTH) <= PHONE["width"]


def test_a_hostile_notebook_runs_nothing_and_asks_for_nothing(show, tmp_path):
    page = show(pages.write_html(hostile.write_notebook(tmp_path / "hostile.ipynb")))
    page.get_by_role("button", name="Show all code").click()
    page.wait_for_timeout(500)
    assert page.evaluate("() => window.owned === undefined && document.title !== 'owned'")


@pytest.mark.parametrize("name", ["phase1-cuda", "phase3-cuda", "findings", "gpt_latency-cuda", "attention_speed-cuda"])
def test_a_shipped_answer_and_its_figure_begin_on_the_first_screen(show, name):
    (path,) = (hostile.REFERENCE.parent / name).glob("*.html")
    for size in (DESK, PHONE):
        page = show(path, viewport=size)
        box = page.locator(".sentence").bounding_box()
        assert box["y"] + box["height"] < size["height"] and box["x"] + box["width"] <= size["width"]
        assert page.locator("main img").first.bounding_box()["y"] < size["height"] - 100
