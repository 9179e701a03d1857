import json
import os
import warnings
import zipfile
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from blockshock_lib import catalogue, manifest, records, share, workbook
from blockshock_lib.errors import RecordError, ShareError
from tests.faults import hostile

KNOWN = json.loads((hostile.REFERENCE / manifest.FILE).read_text())


@pytest.fixture
def run(tmp_path):
    return hostile.small_run(tmp_path / "run")


def noted(folder, **facts):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / manifest.FILE).write_text(json.dumps(KNOWN | facts))
    return folder


def listed(out, cache=None):
    """The runs of the list, a (heading, text, tag) each."""
    text = share.write_index(out, cache or out.parent / "cache").read_text(encoding="utf-8")
    runs = BeautifulSoup(text, "html.parser").find_all(class_="run")
    return [(run.h2.get_text(), " ".join(run.get_text().split()), run) for run in runs]


def test_a_packed_run_holds_what_a_colleague_needs_and_no_log(run):
    (run / "notes.txt").write_text("x")
    noted(run / "redrawn")
    path = share.pack(run)
    assert path == run.with_name("run.zip")
    kinds = sorted(name if "/" not in name else name.split("/")[0] for name in hostile.contents(path))
    assert kinds == ["manifest.json", "phase1_forward.html", "phase1_forward.ipynb", "records", "traces"]
    assert sorted(one.name for one in run.parent.iterdir()) == ["run", "run.zip"]


def test_the_same_run_gives_the_same_bytes(run, tmp_path):
    first = share.pack(run, tmp_path / "a.zip").read_bytes()
    for path in sorted(run.rglob("*"), reverse=True):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    assert share.pack(run, tmp_path / "b.zip").read_bytes() == first


def test_a_run_under_outputs_is_packed_there_with_its_date(run, tmp_path, monkeypatch):
    monkeypatch.setattr(share, "OUTPUTS", tmp_path / "outputs")
    place = tmp_path / "outputs" / "2026-11-21" / "101500-phase1-cpu"
    place.parent.mkdir(parents=True)
    run.rename(place)
    assert share.pack(place) == tmp_path / "outputs" / "2026-11-21-101500-phase1-cpu.zip"


def test_packing_leaves_the_run_as_it_is(run, tmp_path):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    share.pack(run, tmp_path / "a.zip")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_notebook_or_page_edited_after_the_run_is_packed_as_it_is(run, tmp_path):
    (run / "phase1_forward.html").write_text("made again")
    assert share.unpack(share.pack(run), tmp_path / "into").is_dir()


@pytest.mark.parametrize("kind", ["records", "traces"])
def test_a_run_with_a_changed_or_lost_measurement_is_not_packed(run, kind):
    one = min((run / kind).iterdir())
    one.write_bytes(one.read_bytes() + b" ")
    with pytest.raises(ShareError, match=f"{one.name} has changed"):
        share.pack(run)
    one.unlink()
    with pytest.raises(ShareError, match=f"{one.name} is gone"):
        share.pack(run)


def test_a_link_in_a_run_is_not_followed(run, tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    (run / "records" / "a.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ShareError, match="a link"):
        share.pack(run)
    (run / "records" / "a.json").unlink()
    (run / "more").symlink_to(tmp_path)
    with pytest.raises(ShareError, match="a link"):
        share.pack(run)


@pytest.mark.parametrize(
    "facts, words",
    [
        ({"status": "running"}, "still running"),
        ({"redrawn_from": "outputs/x"}, "share that run"),
        ({"params": "none"}, "cannot be shared: params"),
    ],
)
def test_a_run_that_a_colleague_could_not_open_is_not_packed(run, facts, words):
    noted(run, files=manifest.digests(run), **facts)
    with pytest.raises(ShareError, match=words):
        share.pack(run)
    assert not run.with_name("run.zip").exists()


def test_a_folder_without_a_run_is_not_packed(tmp_path):
    with pytest.raises(RecordError, match="manifest"):
        share.pack(tmp_path)


def test_an_interrupted_run_without_digests_travels_too(run, tmp_path):
    known = {key: value for key, value in KNOWN.items() if key != "files"} | {"status": "interrupted"}
    (run / manifest.FILE).write_text(json.dumps(known))
    assert manifest.read(share.unpack(share.pack(run), tmp_path / "into"))["status"] == "interrupted"


def test_what_is_unpacked_is_what_was_packed(run, tmp_path):
    folder = share.unpack(share.pack(run), tmp_path / "received" / "theirs")
    assert folder == tmp_path / "received" / "theirs" and folder.stat().st_mode & 0o777 == 0o755
    for kind in ("records/*", "traces/*", "*.ipynb"):
        assert [(p.name, p.read_bytes()) for p in sorted(folder.glob(kind))] == [
            (p.name, p.read_bytes()) for p in sorted(run.glob(kind))
        ]
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


def test_a_run_that_was_received_can_be_passed_on(run, tmp_path):
    first = share.unpack(share.pack(run), tmp_path / "first")
    second = share.unpack(share.pack(first), tmp_path / "second")
    assert manifest.read(second)["received"]["zip"] == "first.zip"


def test_a_zip_made_again_by_hand_with_folders_is_taken(run, tmp_path):
    files = hostile.contents(share.pack(run))
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.mkdir("records")
        for name, data in files.items():
            archive.writestr(name, data)
    assert share.unpack(tmp_path / "b.zip", tmp_path / "into").is_dir()


def test_a_zip_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ShareError, match=r"no\.zip could not be unpacked: No such file"):
        share.unpack(tmp_path / "no.zip", tmp_path / "into")


def test_a_received_run_is_drawn_again(outputs):
    path = share.pack(hostile.REFERENCE.with_name("phase0-cpu"), outputs / "theirs.zip")
    folder = share.unpack(path, outputs / "received" / "theirs")
    outcome = workbook.execute("phase0", redraw=manifest.shown(folder), out=outputs)
    assert outcome.ok and "checks: 195 passed, 0 failed" in outcome.verdict
    assert share.unpack(path, outputs / "received" / "theirs") == folder, "drawing has changed it"
    again = next(run for _, text, run in listed(outputs, outputs / "cache") if "redrawn from" in text)
    assert "195 of 245 checks passed" in again.img["alt"]


def test_the_list_has_every_run_newest_first(tmp_path):
    out = tmp_path / "out"
    noted(
        out / "2026-11-21" / "b", started="2026-11-21T10:00:00+02:00", status="interrupted", verdict="x interrupted: y"
    )
    noted(out / "2026-11-21" / "a", started="2026-11-21T08:30:00+00:00", status="failed", verdict="x failed: y")
    noted(out / "reference" / "c", started="2026-11-20T10:00:00+00:00", machine={"title": "2x NVIDIA H200"})
    noted(out / "2026-11-22" / "d", started="2026-11-22T10:00:00+00:00", status="running", verdict="")
    noted(out / ".half.zip")
    (out / "e").mkdir()
    (out / "e" / manifest.FILE).write_text("{")
    found = listed(out)
    assert [run.find(class_="state").get_text() for _, _, run in found] == [
        *("running", "failed", "interrupted", "completed", "damaged")
    ]
    assert [run.find(class_="state")["class"][1:] for _, _, run in found] == [[], ["bad"], ["warn"], ["good"], ["bad"]]
    assert found[3][0] == "phase1 · 2x NVIDIA H200" and "H1 undecided" in found[3][1]
    assert "manifest cannot be read" in found[4][1]


def test_the_list_leads_to_page_notebook_and_folder_by_relative_links(tmp_path):
    out = tmp_path / "out"
    hostile.small_run(out / "a b%")
    ((_, _, run),) = listed(out)
    links = {link.get_text(): link["href"] for link in run.find(class_="links").find_all("a")}
    assert links == {
        "page": "a%20b%25/phase1_forward.html",
        "notebook": "a%20b%25/phase1_forward.ipynb",
        "folder": "a%20b%25/",
    }


def test_the_small_figure_is_drawn_once_and_again_when_the_manifest_changes(tmp_path, monkeypatch):
    drawn, real = [], catalogue._drawn
    monkeypatch.setattr(catalogue, "_drawn", lambda *given: drawn.append(given) or real(*given))
    out = tmp_path / "out"
    run = hostile.small_run(out / "a")
    first = listed(out)[0][2].img
    assert first["alt"] and first["src"].startswith("data:image/png;base64,")
    assert listed(out)[0][2].img == first and len(drawn) == 1
    manifest.note(run, verdict="another")
    assert listed(out) and len(drawn) == 2
    for kept in (tmp_path / "cache").iterdir():
        kept.write_text("{")
    assert listed(out)[0][2].img == first and len(drawn) == 3


def test_a_run_without_records_has_words_for_its_figure(tmp_path):
    noted(tmp_path / "out" / "a")
    ((_, text, run),) = listed(tmp_path / "out")
    assert run.img is None and "no figure" in text


@pytest.mark.parametrize("place", ["/etc", "..", "elsewhere"])
def test_a_redrawn_run_takes_no_figure_from_outside(tmp_path, monkeypatch, place):
    monkeypatch.setattr(catalogue, "_drawn", lambda *_: pytest.fail("it was read"))
    hostile.small_run(tmp_path / "elsewhere")
    monkeypatch.setattr(manifest, "ROOT", tmp_path)
    noted(tmp_path / "out" / "a", redrawn_from=place)
    assert "is not here" in listed(tmp_path / "out")[0][1]


def test_a_list_of_nothing_says_how_to_begin(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    assert listed(out) == []
    assert "make phase0" in (out / "index.html").read_text()


def test_a_list_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    noted(tmp_path / "out" / "a")
    target = share.write_index(tmp_path / "out", tmp_path / "cache")
    before = target.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(records.os, "replace", fail)
    with pytest.raises(RecordError, match="disk full"):
        share.write_index(tmp_path / "out", tmp_path / "cache")
    assert target.read_bytes() == before
    assert sorted(p.name for p in Path(target).parent.iterdir()) == ["a", "index.html"]
