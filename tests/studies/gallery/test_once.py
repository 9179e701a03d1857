"""What a command of several phases would do again and again, and does once."""

from PIL import Image

from blockshock_lib import files
from blockshock_lib.notebook import share
from blockshock_lib.report import late, verdicts
from blockshock_lib.runs import lock, manifest
from tests.faults.hostile import noted
from tests.report import frames
from tests.small_runs import written


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


def test_what_is_asked_once_is_asked_anew_of_another_frame(monkeypatch):
    asked = []
    monkeypatch.setattr(verdicts, "phases", lambda frame: asked.append(frame) or len(asked))
    rule, table = (late("report.verdicts:phases", once=once) for once in (True, False))
    one, other = (frames.make(ns=(4096,), bs=(16,)) for _ in range(2))
    assert [rule(frame) for frame in (one, one, other, other, one)] == [1, 1, 2, 2, 3]
    assert [table(one), table(one)] == [4, 5]


def test_a_command_takes_the_verdict_of_its_kernel_which_has_weighed_the_records(outputs, monkeypatch):
    run = written(outputs)
    with files.environment(**{lock.RUN: str(run.folder.resolve())}):
        line = run.conclude()
    lock.hold(run.folder)  # which the kernel, another process, has not released
    first = manifest.read(run.folder)
    assert first["status"] == "running" and first["verdict"] == line
    monkeypatch.setattr(verdicts, "one_line", None)
    assert run.conclude() == line
    noted = manifest.read(run.folder)
    assert noted["status"] == "completed" and noted["ended"] >= first["ended"]
    assert all(noted[name] == first[name] for name in ("answer", "verdicts", "seconds", "figures"))
