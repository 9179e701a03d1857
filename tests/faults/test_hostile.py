import contextlib
import gzip
import hashlib
import re
import shutil
import zipfile
from base64 import b64encode

import pytest
from bs4 import BeautifulSoup

from blockshock_lib.errors import ShareError
from blockshock_lib.notebook import archive, share
from blockshock_lib.notebook.pages import page, sanitise
from blockshock_lib.runs import manifest
from tests.faults import hostile

SHELL = {"html", "head", "meta", "title", "style", "script", "body", "header", "nav", "main", "button"}
META = {"charset", "Content-Security-Policy", "viewport", "referrer"}
LIST = SHELL | {"section", "select", "option", "input", "label"}  # of the list of runs
# Attribute -> what a harmless value of it looks like; no other attribute is in a page.
HARMLESS = {
    "href": r"#[\w-]+|https?://[^\s\\]+|mailto:[^\s\\]+|[\w./%-]*",
    "src": r"data:image/(png|jpeg|gif);base64,[A-Za-z0-9+/=]+",
    "id": r"[a-z0-9][a-z0-9-]*",
    "width": r"\d{1,4}",
    "name": r"viewport|referrer",
    "tabindex": "0",
    **dict.fromkeys(("class", "title", "alt", "open", "hidden", "role", "scope", "lang", "charset", "content"), ".*"),
    **dict.fromkeys(("http-equiv", "type", "value", "placeholder", "autocomplete", "data-phase", "data-machine"), ".*"),
    **dict.fromkeys(("data-when", "data-status"), ".*"),
    **dict.fromkeys(("aria-label", "aria-labelledby", "colspan", "rowspan", "start"), ".*"),
}


def active(text, ours=SHELL):
    """Everything in a page that could act, hide or fetch, and is not ours."""
    soup = BeautifulSoup(text, "html.parser")
    found = [f"<{tag.name}>" for tag in soup.find_all(True) if tag.name not in sanitise.TAGS | ours]
    for tag, name, value in ((one, *item) for one in soup.find_all(True) for item in one.attrs.items()):
        value = " ".join(value) if isinstance(value, list) else value
        if name not in HARMLESS or not re.fullmatch(HARMLESS[name], value, re.DOTALL):
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


def test_the_check_of_pages_sees_what_acts():
    # The page as it would be, had nothing been taken out of it.
    clean = page.document("page.html", "t", verdict=[], about="", links=[], contents=[], cells=[])
    assert not active(clean)
    for name, html in hostile.HTML.items():
        if name in ("comments", "declarations", "unclosed"):
            continue  # what they hide, only some parsers see
        with contextlib.suppress(ValueError):  # two scripts, or two styles
            assert active(clean.replace("</body>", f"{html}</body>")), name


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    return share.pack(hostile.small_run(folder / "run"), folder / "good.zip")


def refused(path, into):
    """The words of the refusal; nothing at all was written."""
    before = tree(path.parent)
    with pytest.raises(ShareError) as caught:
        share.unpack(path, into)
    assert tree(path.parent) == before
    return str(caught.value)


@pytest.mark.parametrize("name", hostile.ZIPS)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_hostile_zip(name, good, tmp_path):
    made, words = hostile.ZIPS[name]
    path = tmp_path / "theirs.zip"
    path.write_bytes(made(hostile.contents(good)))
    said = refused(path, tmp_path / "received" / "run")
    assert "theirs.zip" in said and words in said and "\n" not in said
    assert not hostile.CANARY.exists(), "something was executed"


BOMBS = {
    "one file": ("MAX_BYTES", 2**20, {"records/a.json": bytes(2**21)}, "records/a.json is too large"),
    "many bytes in all": ("MAX_BYTES", 2**20, {f"records/a{n}.json": bytes(2**18) for n in range(5)}, "too large"),
    "many files": ("MAX_FILES", 20, {f"records/{n}.json": b"" for n in range(20)}, "more than 20 files"),
    "inside a trace": ("MAX_BYTES", 2**20, {"traces/a.json.gz": gzip.compress(bytes(2**21))}, "a.json.gz is too large"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_hostile_zip_bomb(kind, good, tmp_path, monkeypatch):
    limit, most, files, said = BOMBS[kind]
    monkeypatch.setattr(archive, limit, most)
    path = tmp_path / "theirs.zip"
    path.write_bytes(hostile.zipped(hostile.contents(good) | files))
    assert path.stat().st_size < 2**18 and said in refused(path, tmp_path / "run")


def test_hostile_zip_bomb_of_a_directory_that_zipfile_would_hold_in_memory(good, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_FILES", 1)
    path = shutil.copy(good, tmp_path / "theirs.zip")
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("it was read"))
    monkeypatch.setattr(archive, "_DIRECTORY", 100)
    assert "too many files" in refused(path, tmp_path / "run")


def test_hostile_page_of_a_zip_is_made_anew_and_one_without_a_notebook_is_dropped(good, tmp_path):
    files = hostile.contents(good)
    script = f"<script>{hostile.ACT}</script>".encode()
    theirs = files | {"phase1_forward.html": script, "other.html": script}
    path = tmp_path / "theirs.zip"
    path.write_bytes(hostile.zipped(theirs))
    (only,) = share.unpack(path, tmp_path / "run").glob("*.html")
    text = only.read_text(encoding="utf-8")
    assert only.name == "phase1_forward.html" and hostile.ACT not in text and active(text) == []


def test_hostile_manifest_in_the_list_of_runs(tmp_path):
    evil = f"\"'></option></script><script>{hostile.ACT}</script><img src=x onerror={hostile.ACT}>"
    facts = dict.fromkeys(("phase", "status", "started"), evil) | {"verdict": f"{evil} · {evil}"}
    facts |= {"received": {"zip": evil}, "machine": {"title": evil}}
    for name, found in {
        "a'\"><b>": facts,
        "lists": {key: [evil] for key in facts},
        "redraws": facts | {"redrawn_from": f"../../{evil}"},
        "numbers": {key: 10**30 for key in facts},
        "damaged": {},
    }.items():
        hostile.noted(tmp_path / name, **found)
    (tmp_path / "damaged" / manifest.FILE).write_text(evil)
    text = share.write_index(tmp_path).read_text(encoding="utf-8")
    soup = BeautifulSoup(text, "html.parser")
    assert active(text, LIST) == []
    assert len(soup.find_all(class_="run")) == 5 and len(soup.find_all("main")) == 1
    assert soup.find(string=re.compile(re.escape(evil[:30])))
