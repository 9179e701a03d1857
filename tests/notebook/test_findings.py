import dataclasses

import nbformat
import pytest

from blockshock_lib import files, studies
from blockshock_lib.__main__ import main
from blockshock_lib.errors import RecordError
from blockshock_lib.notebook import findings, sources, workbook
from blockshock_lib.notebook.sources import COUNTS
from blockshock_lib.runs import manifest
from blockshock_lib.runs.manifest import REFERENCE
from blockshock_lib.studies.linear import STUDY
from tests.notebook.test_sources import CPU, copied, uses
from tests.report import frames


@pytest.fixture(scope="module")
def shipped():
    return findings.Findings(None, "reference", None, STUDY)


def test_every_shipped_run_counts_machines_are_never_put_together_and_gpus_come_first(shipped):
    found = {source.folder.relative_to(REFERENCE).as_posix(): source.use for source in shipped.sources}
    assert all(found[f"phase{n}-{kind}"] == COUNTS for n in range(4) for kind in ("cpu", "cuda"))
    assert found["phase3-cuda-before"].endswith("reference/phase3-cuda has taken its place"), "it has more cases"
    first, *others = shipped.frames
    assert first.startswith("2x NVIDIA H200") and others and all("CPU" in name for name in others)
    assert set(shipped.main["device"]) == {"cuda"}
    for frame in shipped.frames.values():
        assert frame["device"].nunique() == 1


def read(**settings):
    """Findings of these frames."""
    made = findings.Findings(None, "all", None, STUDY)
    made.frames, made.sources = settings, []
    return made


def test_the_line_holds_every_check_and_what_real_gpus_say():
    gpu, cpu = (frames.make((256,), (16,), device=device, groups=2, repeats=2) for device in ("cuda", "cpu"))
    line = read(gpu=gpu, cpu=cpu).line()
    assert "PASS" in line and "on gpu · H1" in line and line.count("H1") == 1 and "no claim about speed: cpu" in line
    assert "H2 no record of phase3 yet: make phase3" in line
    assert "FAIL" in read(gpu=frames.fail(gpu, "dense")).line()
    assert "NOTHING READ" in read().line() and read().numbers().empty


def test_each_study_with_a_notebook_of_findings_is_weighed_alone(tmp_path, monkeypatch, capsys):
    weighed = dataclasses.replace(STUDY, name="other", phases={})
    loaded = {"linear": STUDY, "other": weighed, "bare": dataclasses.replace(STUDY, findings="")}
    monkeypatch.setattr(studies, "names", lambda: tuple(loaded))
    monkeypatch.setattr(studies, "load", loaded.get)
    copied(tmp_path / "out", "theirs", study="other")
    assert uses(tmp_path) == {}
    assert findings.open_findings(study="other", out=tmp_path).folder.name.endswith("-other-findings")
    for words, said in (([], "allowed: linear, other"), (["--study", "bare"], "'bare' has no notebook of findings")):
        assert main(["findings", "--out", str(tmp_path), *words]) == 2 and said in capsys.readouterr().err
    del loaded["other"]
    found = findings.open_findings(out=tmp_path)
    assert found.study is STUDY and manifest.read(found.folder)["study"] == "linear"


def test_without_a_run_it_says_what_to_make(tmp_path, monkeypatch):
    monkeypatch.setattr(findings, "REFERENCE", tmp_path)
    with pytest.raises(RecordError, match="make phase1"):
        findings.open_findings("all", out=tmp_path / "empty").main  # noqa: B018


@pytest.mark.long
def test_the_manifest_holds_the_verdict_and_digests_of_what_it_rests_on(tmp_path, monkeypatch):
    left = sources.Source(tmp_path / "redrawn", {}, "left out: it only redraws another")
    monkeypatch.setattr(findings, "weigh", lambda *asked: [*sources.weigh(*asked), left])
    found = findings.open_findings("reference", out=tmp_path)
    assert found.folder.name.endswith("-findings") and manifest.read(found.folder)["status"] == "running"
    page = found.answer().data
    assert found.sentence.startswith("Never surely faster here") and page.index(found.sentence) < page.index("<img")
    line = found.conclude()
    facts = manifest.read(found.folder)
    assert facts["answer"] == found.sentence and manifest.figures(found.folder)[0].name == "which to use"
    assert facts["status"] == "completed" and facts["verdict"] == line and "H1 undecided" in line
    rests_on = {one["run"]: one["manifest"] for one in facts["rests_on"]}
    assert rests_on["outputs/reference/phase1-cpu"] == files.sha256(CPU / manifest.FILE)
    assert "outputs/reference/phase1-cuda" in rests_on
    assert left.use in facts["left_out"].values()
    table = found.numbers().loc[found.setting]
    assert table.loc["H1", "verdict"] == "undecided" and table.loc["H3", "verdict"] == "supported"


@pytest.mark.parametrize(
    ("status", "concludes", "code", "verdict"),
    [
        ("completed", True, 0, "findings: PASS"),
        ("completed", False, 1, "findings failed: the notebook did not conclude"),
        ("failed", True, 1, "findings failed: planted"),
        ("interrupted", True, 130, "findings interrupted: planted"),
    ],
)
def test_the_command_writes_notebook_page_and_manifest(tmp_path, monkeypatch, capsys, status, concludes, code, verdict):
    def run(folder, name, target, given):  # in place of the notebook's kernel
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Findings")]), target)
        if concludes:
            manifest.note(folder, verdict="findings: PASS")
        return status, "" if status == "completed" else "planted"

    monkeypatch.setattr(workbook, "run_notebook", run)
    assert main(["findings", "--out", str(tmp_path)]) == code
    (folder,) = tmp_path.glob("*/*-findings")
    facts = manifest.read(folder)
    assert facts["status"] == (status if concludes else "failed") and facts["verdict"] == verdict
    assert set(facts["files"]) == {"findings.ipynb", "findings.html"} and facts["files"] == manifest.digests(folder)
    assert "findings.html" in capsys.readouterr().out
