import json
import os
import subprocess
import warnings

import pytest
from bs4 import BeautifulSoup
from PIL import Image

from blockshock_lib import files
from blockshock_lib.errors import ShareError
from blockshock_lib.notebook import share
from blockshock_lib.notebook.pages import page
from blockshock_lib.runs import lock, manifest, records
from tests.faults import hostile
from tests.faults.hostile import noted


@pytest.fixture
def run(tmp_path):
    return hostile.small_run(tmp_path / "run")


def listed(out):
    """The runs of the list, a (heading, text, tag) each."""
    text = share.write_index(out).read_text(encoding="utf-8")
    runs = BeautifulSoup(text, "html.parser").find_all(class_="run")
    return [(run.h3.get_text(), " ".join(run.get_text().split()), run) for run in runs]


def test_a_packed_run_holds_what_a_colleague_needs_in_the_same_bytes_and_its_page_leads_to_nothing_outside(outputs):
    run = hostile.small_run(outputs / "reference" / "a")
    (run / "notes.txt").write_text("x")
    noted(run / "redrawn")
    share.write_index(outputs)
    (notebook,) = run.glob("*.ipynb")
    assert "index.html" in page.write_html(notebook).read_text()
    manifest.note(run, files=manifest.digests(run))
    path = share.pack(run)
    inside, first = hostile.contents(path), path.read_bytes()
    assert path == run.with_name("a.zip") and sorted(one.name for one in run.parent.iterdir()) == ["a", "a.zip"]
    kinds = sorted(name if "/" not in name else name.split("/")[0] for name in inside)
    assert kinds == ["manifest.json", "phase1_forward.html", "phase1_forward.ipynb", "records", "traces"]
    text, name = inside["phase1_forward.html"], "phase1_forward.html"
    assert b"index.html" not in text and b"manifest.json" in text
    assert json.loads(inside[manifest.FILE])["files"][name] == files.sha256(text)
    for changed in sorted(run.rglob("*"), reverse=True):
        os.utime(changed, (1, 1))
        changed.chmod(0o700)
    assert share.pack(run, outputs / "b.zip").read_bytes() == first


def spoilt(kind, change):
    return lambda run: change(min((run / kind).iterdir()))


def fact(**facts):
    return lambda run: noted(run, files=manifest.digests(run), **facts)


@pytest.mark.parametrize(
    "change, words",
    [
        *((spoilt(kind, lambda path: path.write_bytes(b" ")), "has changed") for kind in ("records", "traces")),
        *((spoilt(kind, lambda path: path.unlink()), "is gone") for kind in ("records", "traces")),
        (lambda run: (run / "records" / "a.json").symlink_to(run.parent), "a link"),
        (lambda run: (run / "more").symlink_to(run.parent), "a link"),
        (fact(status="running"), "still running"),
        (fact(redrawn_from="outputs/x"), "share that run"),
        (fact(params="none"), "is refused: params"),
    ],
)
def test_a_run_that_is_not_whole_or_that_a_colleague_could_not_open_is_not_packed(run, change, words):
    change(run)
    lock.hold(run)  # or a run that says it is running is read as interrupted
    with pytest.raises(ShareError, match=words):
        share.pack(run)
    lock.release(run)
    assert not run.with_name("run.zip").exists()


def test_what_is_unpacked_is_what_was_packed(run, tmp_path):
    folder = share.unpack(share.pack(run), tmp_path / "received" / "theirs")
    assert folder == tmp_path / "received" / "theirs" and folder.stat().st_mode & 0o777 == 0o755
    for kind in ("records/*", "traces/*", "*.ipynb"):
        there, here = ({p.name: p.read_bytes() for p in place.glob(kind)} for place in (folder, run))
        assert there == here
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(records.load(folder, strict=True)) == len(records.load(run, strict=True)) > 0
    found = manifest.read(folder)
    assert found["received"]["zip"] == "run.zip" and found["files"] == manifest.digests(folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["received", "run", "run.zip"]


def test_a_zip_is_unpacked_once_and_never_over_something_else(run, tmp_path):
    path, into = share.pack(run), tmp_path / "into"
    assert share.unpack(path, into) == share.unpack(path, into) == into
    (into / "phase1_forward.ipynb").write_text("edited")
    assert share.unpack(path, into) == tmp_path / "into-2"
    assert (into / "phase1_forward.ipynb").read_text() == "edited"
    (tmp_path / "taken").write_text("a file")
    assert share.unpack(path, tmp_path / "taken") == tmp_path / "taken-2"


def test_the_list_has_the_shipped_answers_first_and_then_every_run_newest_first(tmp_path, monkeypatch):
    out = tmp_path / "out"
    noted(out / "21" / "b", started="2026-11-21T10:00:00+02:00", status="interrupted", verdict="x interrupted: y")
    noted(out / "21" / "a", started="2026-11-21T08:30:00+00:00", status="failed", verdict="x failed: y", answer="Yes.")
    gpu = {"title": "2x NVIDIA H200"}
    said = dict(answer="Never here: slower.", reason="at night")
    noted(out / "reference" / "c", started="2026-11-20T10:00:00+00:00", machine=gpu, **said)
    noted(out / "reference" / "b", started="2026-11-20T12:00:00+00:00")
    noted(out / "reference" / "f", started="2026-11-19T10:00:00+00:00", phase="findings")
    noted(out / "22" / "d", started="2026-11-22T10:00:00+00:00", status="running", verdict="")
    noted(out / ".half.zip")
    (noted(out / "e") / manifest.FILE).write_text("{")
    found = listed(out)
    states = [run.find(class_="state") for _, _, run in found]
    assert [(state.get_text(), *state["class"][1:]) for state in states] == [
        *[("completed", "good")] * 3,
        *(("interrupted", "warn"), ("failed", "bad"), ("interrupted", "warn")),
        ("damaged", "bad"),
    ]
    titles = [title.partition(" · ")[0::2] for title, _, _ in found[:3]]
    assert titles == [("findings", titles[0][1]), ("phase1", "2x NVIDIA H200"), ("phase1", "CPU, 2 cores: AMD EPYC")]
    lines = [run.find(class_="line").get_text() for _, _, run in found]
    assert lines[1] == "Never here: slower." and "H1 undecided" in found[1][1], "an answer, and the verdict behind it"
    assert lines[4] == "x failed: y", "an answer of a run that failed"
    assert "2026-11-20 10:00 UTC · at night" in found[1][1], "how it was measured"
    assert "manifest cannot be read" in lines[6]
    monkeypatch.setattr(share, "_picture", lambda folder, found: ("AA", "It rises."))
    for name, answer in {"c-2": said["answer"], "c-before": "Other.", "c-before-2": "Other."}.items():
        noted(out / "reference" / name, machine=gpu, answer=answer)
    told = [[bool(run.find(class_=name)) for name in ("picture", "line")] for _, _, run in listed(out)[:6]]
    assert told == [[True, True]] * 2 + [[False, False], [False, True], [False, False], [True, True]], "nothing twice"


@pytest.mark.parametrize("file", ["figures/none.png", "../../other.png", "/etc/passwd", "figures/broken.png"])
def test_a_run_without_a_figure_has_words_for_it(tmp_path, file):
    Image.new("RGB", (9, 9)).save(tmp_path / "other.png")
    run = noted(tmp_path / "out" / "a", figures=[{"name": "b", "file": file, "alt": "b"}, "nonsense"])
    (run / "figures").mkdir()
    (run / "figures" / "broken.png").write_bytes(b"PNG")
    ((_, text, run),) = listed(tmp_path / "out")
    assert run.img is None and ("cannot be read" if "broken" in file else "no figure is saved") in text


def test_a_picture_of_the_list_is_made_small_once(outputs, tmp_path, monkeypatch):
    monkeypatch.setattr(share, "CACHE", tmp_path)
    run = noted(outputs / "a", figures=[{"name": "a", "file": "figures/a.png", "alt": "It rises."}])
    (run / "figures").mkdir()
    Image.new("RGB", (1200, 600), "red").save(run / "figures" / "a.png")
    first = share.write_index(outputs).read_text()
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", None)
        assert share.write_index(outputs).read_text() == first and "data:image" in first
    Image.new("RGB", (1200, 600), "blue").save(run / "figures" / "a.png")
    assert share.write_index(outputs).read_text() != first, "another figure is another picture"


def test_a_packed_table_of_records_is_shared_and_one_that_ends_its_reader_is_refused(run, tmp_path, monkeypatch):
    records.pack(run)
    path = share.pack(run, tmp_path / "a.zip")
    assert (share.unpack(path, tmp_path / "received") / records.PARQUET).is_file()
    dead = subprocess.CompletedProcess([], -11)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: dead)
    with pytest.raises(ShareError, match="table of records cannot be opened"):
        share.unpack(path, tmp_path / "other")
    assert not (tmp_path / "other").exists()
