import contextlib
import gzip
import hashlib
import json
import random
import re
import shutil
import zipfile
from base64 import b64encode

import pytest
from bs4 import BeautifulSoup

from blockshock_lib import archive, manifest, share
from blockshock_lib.errors import ShareError
from blockshock_lib.report.pages import page, sanitise
from tests.faults import hostile

SHELL = {"html", "head", "meta", "title", "style", "script", "body", "header", "nav", "main", "button"}
META = {"charset", "Content-Security-Policy", "viewport", "referrer"}
HREF = re.compile(r"#[\w-]+|https?://[^\s\\]+|mailto:[^\s\\]+|[\w./%-]*")
IMAGE = re.compile(r"data:image/(png|jpeg|gif);base64,[A-Za-z0-9+/=]+")
OURS = {"main", "theme", "code", "contents"}


def active(text):
    """Everything in a page that could act, hide or fetch, and is not ours."""
    soup = BeautifulSoup(text, "html.parser")
    found = []
    for tag in soup.find_all(True):
        if tag.name not in sanitise.TAGS | SHELL:
            found.append(f"<{tag.name}>")
        for name, value in tag.attrs.items():
            value = " ".join(value) if isinstance(value, list) else value
            if name.startswith("on") or name in {
                "style",
                "srcdoc",
                "srcset",
                "action",
                "formaction",
                "data",
                "background",
            }:
                found.append(f"{tag.name} {name}")
            if name == "href" and not HREF.fullmatch(value):
                found.append(f"{tag.name} href={value[:40]}")
            if name == "src" and not (tag.name == "img" and IMAGE.fullmatch(value)):
                found.append(f"{tag.name} src={value[:40]}")
            if name in ("id", "name") and not (value in OURS or re.fullmatch(r"part-\d+", value) or tag.name == "meta"):
                found.append(f"{tag.name} {name}={value[:40]}")
    names = [tag["id"] for tag in soup.find_all(id=True)]
    found += [f"id={name} twice" for name in names if names.count(name) > 1]
    metas = [tag.get("http-equiv") or tag.get("name") or "charset" for tag in soup.find_all("meta")]
    found += [f"meta {name}" for name in metas if name not in META]
    policy = soup.find("meta", attrs={"http-equiv": "Content-Security-Policy"})["content"]
    for kind in ("script", "style"):
        (only,) = soup.find_all(kind)
        digest = b64encode(hashlib.sha256(only.string.encode()).digest()).decode()
        if f"{kind}-src 'sha256-{digest}'" not in policy:
            found.append(f"{kind} that the policy does not name")
    if "unsafe" in policy or "default-src 'none'" not in policy:
        found.append("a policy that lets others in")
    return found


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.lstat().st_size for path in folder.rglob("*")}


def test_hostile_notebook_output(tmp_path):
    (tmp_path / "secret.png").write_bytes(b"a secret")
    place = tmp_path / "a" / "b"
    place.mkdir(parents=True)
    text = page.write_html(hostile.write_notebook(place / "hostile.ipynb")).read_text(encoding="utf-8")
    assert active(text) == []
    soup = BeautifulSoup(text, "html.parser")
    assert len(soup.find_all("main")) == len(soup.find_all("h1")) == len(soup.find_all(id="main")) == 1
    # All of it is inside the frame that is ours, to the end; and what was hidden is seen.
    assert soup.main.get_text().rstrip().endswith("The last words.")
    assert "hidden words" in soup.main.get_text() and "more hidden words" in soup.main.get_text()
    assert b64encode(b"a secret").decode() not in text


@pytest.mark.parametrize("name", hostile.HTML)
def test_hostile_notebook_output_one_by_one(name):
    kept = BeautifulSoup(sanitise.clean(hostile.HTML[name], cell="cell 1"), "html.parser")
    for tag in kept.find_all(True):
        assert tag.name in sanitise.TAGS and tag.name not in SHELL
        assert set(tag.attrs) <= {
            "class",
            "href",
            "title",
            "src",
            "alt",
            "open",
            "role",
            "tabindex",
            "aria-label",
            "scope",
        }
        assert HREF.fullmatch(tag.get("href", ""))
        assert IMAGE.fullmatch(tag["src"]) if tag.name == "img" else "src" not in tag.attrs


def test_the_check_of_pages_sees_what_acts():
    # The page as it would be, had nothing been taken out of it.
    clean = page.web.document("t", page.Markup(""), style="", script="")
    for name, html in hostile.HTML.items():
        if name in ("comments", "declarations", "unclosed"):
            continue  # what they hide, only some parsers see
        with contextlib.suppress(ValueError):  # two scripts, or two styles
            assert active(clean.replace("</body>", f'<p id="main"></p>{html}</body>')), name


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return hostile.write_good_zip(tmp_path_factory.mktemp("good"))


@pytest.fixture
def canary(tmp_path):
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "something was executed"


def refused(path, into):
    """The words of the refusal; nothing at all was written."""
    before = tree(path.parent)
    with pytest.raises(ShareError) as caught:
        share.unpack(path, into)
    assert tree(path.parent) == before
    return str(caught.value)


@pytest.mark.parametrize("name", hostile.ZIPS)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_hostile_zip(name, good, tmp_path, canary):
    write, words = hostile.ZIPS[name]
    path = tmp_path / "theirs.zip"
    write(path, hostile.contents(good), canary)
    said = refused(path, tmp_path / "received" / "run")
    assert "theirs.zip" in said and words in said and "\n" not in said


def test_hostile_zip_bomb_of_one_file(good, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_BYTES", 2**20)
    path = hostile.write_zip(tmp_path / "theirs.zip", hostile.contents(good) | {"records/a.json": bytes(2**21)})
    assert path.stat().st_size < 2**18
    assert "records/a.json is too large" in refused(path, tmp_path / "run")


def test_hostile_zip_bomb_of_many_bytes_in_all(good, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_BYTES", 2**20)
    many = {f"records/a{number}.json": bytes(2**18) for number in range(5)}
    path = hostile.write_zip(tmp_path / "theirs.zip", hostile.contents(good) | many)
    assert "too large" in refused(path, tmp_path / "run")


def test_hostile_zip_bomb_of_many_files(good, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_FILES", 20)
    path = hostile.write_zip(
        tmp_path / "theirs.zip", hostile.contents(good) | {f"records/{n}.json": b"" for n in range(20)}
    )
    assert "more than 20 files" in refused(path, tmp_path / "run")


def test_hostile_zip_bomb_of_a_directory_that_zipfile_would_hold_in_memory(good, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_FILES", 1)
    path = shutil.copy(good, tmp_path / "theirs.zip")
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("it was read"))
    monkeypatch.setattr(archive, "_DIRECTORY", 100)
    assert "too many files" in refused(path, tmp_path / "run")


def test_hostile_zip_bomb_inside_a_trace(good, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_BYTES", 2**20)
    path = hostile.write_zip(
        tmp_path / "theirs.zip", hostile.contents(good) | {"traces/a.json.gz": gzip.compress(bytes(2**21))}
    )
    assert "traces/a.json.gz is too large" in refused(path, tmp_path / "run")


def test_hostile_zip_with_a_bit_flipped_is_refused_or_holds_the_same(good, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "write_html", lambda notebook: None)  # the same each time, and slow
    whole, chance = good.read_bytes(), random.Random(0)
    wanted = {name: data for name, data in hostile.contents(good).items() if not name.endswith(("html", manifest.FILE))}
    path, into, accepted = tmp_path / "theirs.zip", tmp_path / "run", 0
    for bit in chance.sample(range(8 * len(whole)), 150) + list(range(8 * (len(whole) - 900), 8 * len(whole), 29)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            share.unpack(path, into)
        except ShareError:
            assert not into.exists()
            continue
        accepted += 1  # in a date, say
        assert all((into / name).read_bytes() == content for name, content in wanted.items())
        assert {one.relative_to(into).as_posix() for one in into.rglob("*") if one.is_file()} == {
            *wanted,
            manifest.FILE,
        }
        shutil.rmtree(into)
    assert accepted < 100


def test_hostile_page_of_a_zip_is_made_anew(good, tmp_path):
    files = hostile.contents(good)
    assert hostile.ACT.encode() in files["phase1_forward.html"]
    folder = share.unpack(good, tmp_path / "run")
    text = (folder / "phase1_forward.html").read_text(encoding="utf-8")
    assert hostile.ACT not in text and active(text) == []


def test_hostile_page_without_a_notebook_is_dropped(good, tmp_path):
    path = hostile.write_zip(tmp_path / "theirs.zip", hostile.contents(good) | {"other.html": b"<script>"})
    assert [one.name for one in share.unpack(path, tmp_path / "run").glob("*.html")] == ["phase1_forward.html"]


def test_hostile_manifest_in_the_list_of_runs(tmp_path):
    evil = f"\"'></option></script><script>{hostile.ACT}</script><img src=x onerror={hostile.ACT}>"
    known = json.loads((hostile.REFERENCE / manifest.FILE).read_text())
    facts = dict(
        phase=evil,
        status=evil,
        verdict=f"{evil} · {evil}",
        started=evil,
        received={"zip": evil},
        machine={"title": evil},
    )
    for name, found in {
        "a'\"><b>": known | facts,
        "lists": known | {key: [evil] for key in facts},
        "redraws": known | facts | {"redrawn_from": f"../../{evil}"},
        "numbers": known | {key: 10**30 for key in facts},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / manifest.FILE).write_text(json.dumps(found))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / manifest.FILE).write_text(evil)
    text = share.write_index(tmp_path, tmp_path / "cache").read_text(encoding="utf-8")
    soup = BeautifulSoup(text, "html.parser")
    form = {"select", "option", "input", "label"}
    assert [fault for fault in active(text) if fault.strip("<>") not in form and " id=" not in fault] == []
    assert len(soup.find_all(class_="run")) == 5 and len(soup.find_all("main")) == 1
    assert soup.find(string=re.compile(re.escape(evil[:30])))
