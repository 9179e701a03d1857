import json
import shutil

import nbformat
import pytest

from blockshock_lib import findings, manifest, records, workbook
from blockshock_lib.__main__ import main
from blockshock_lib.errors import ParamsError, RecordError
from blockshock_lib.findings import COUNTS, POOLED, weigh
from blockshock_lib.report.findings import tables
from tests import runs

REFERENCE = manifest.ROOT / "outputs" / "reference"
CPU = REFERENCE / "phase1-cpu"


def copied(tmp_path, name="run", records_kept=None, **facts):
    """A copy of the shipped phase 1 run on a CPU, its manifest with other facts."""
    folder = tmp_path / name
    shutil.copytree(CPU, folder)
    path = folder / manifest.FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    if records_kept:
        for record in sorted((folder / "records").glob("*.json"))[records_kept:]:
            record.unlink()
        manifest.note(folder, files=manifest.digests(folder))
    return folder


def rename(folder, run):
    """The records' own name of their run, as a second run has another."""
    for path in (folder / "records").glob("*.json"):
        found = records.read(path)
        found.pop("digest")
        found["run"] = run
        path.write_bytes(records._encode(found | {"digest": records._digest(found)}))
    manifest.note(folder, files=manifest.digests(folder))


def uses(*places):
    return {source.folder.name: source.use for source in weigh(places)}


@pytest.fixture(scope="module")
def shipped():
    return findings.Findings(None, "reference", None)


def test_every_shipped_run_counts(shipped):
    found = {source.folder.relative_to(REFERENCE).as_posix(): source for source in shipped.sources}
    names = [f"phase{n}-{kind}" for n in range(4) for kind in ("cpu", "cuda")]
    assert all(found[name].use == COUNTS for name in names)


def test_machines_are_never_put_together_and_gpus_come_first(shipped):
    first, *others = shipped.frames
    assert first.startswith("2x NVIDIA H200") and others and all("CPU" in name for name in others)
    assert set(shipped.main["device"]) == {"cuda"}
    for frame in shipped.frames.values():
        assert frame["device"].nunique() == 1


def test_what_was_measured_on_the_shipped_gpus_is_the_answer(shipped):
    table = tables.numbers(shipped.frames).loc[shipped.setting]
    assert table.loc["H1", "verdict"] == "refuted" and table.loc["H3", "verdict"] == "supported"


@pytest.mark.parametrize(
    "other",
    [{"driver": "1"}, {"cpu": {"model": "other", "cores": 2}}, {"gpus": [{"name": "G", "power_limit_w": 350.0}]}],
)
def test_hosts_with_the_same_gpus_but_other_cards_are_not_put_together(tmp_path, other):
    gpu = {"name": "G", "power_limit_w": 700.0}
    card = manifest.read(CPU)["machine"] | {"title": "1x G", "gpus": [gpu], "driver": "0"}
    copied(tmp_path, "here", machine=card)
    copied(tmp_path, "there", machine=card | other)
    assert uses(tmp_path) == {"here": COUNTS, "there": COUNTS}


def test_the_newest_of_equal_runs_counts(tmp_path):
    copied(tmp_path, "old", started="2026-01-01T00:00:00+00:00", code={"sources": "aaa"})
    copied(tmp_path, "new", started="2026-01-02T00:00:00+00:00", code={"sources": "bbb"})
    found = uses(tmp_path)
    assert found["new"] == COUNTS and found["old"].startswith("left out: other code than")


def test_runs_of_the_same_cases_code_and_libraries_are_put_together(tmp_path):
    for name, day in (("old", 1), ("new", 2)):
        rename(copied(tmp_path, name, started=f"2026-01-0{day}T00:00:00+00:00"), name)
    assert uses(tmp_path) == {"new": COUNTS, "old": POOLED}
    pooled = findings.Findings(None, "all", tmp_path)
    pooled.sources = weigh((tmp_path,))
    (frame,) = pooled.frames.values()
    assert frame.groupby("case")["run"].nunique().eq(2).all(), "four groups stand behind each case"


def test_a_run_with_other_libraries_is_not_put_together(tmp_path):
    card = manifest.read(CPU)["machine"]
    copied(tmp_path, "old", started="2026-01-01T00:00:00+00:00")
    copied(tmp_path, "new", started="2026-01-02T00:00:00+00:00", machine=card | {"libraries": {"torch": "9"}})
    assert uses(tmp_path)["old"].startswith("left out: other libraries than")


def test_a_smaller_newer_run_does_not_displace_a_larger_one(tmp_path):
    copied(tmp_path, "old", started="2026-01-01T00:00:00+00:00")
    copied(tmp_path, "new", records_kept=2, started="2026-01-02T00:00:00+00:00")
    found = uses(tmp_path)
    assert found["old"] == COUNTS and found["new"].startswith("left out: ") and "has 6" in found["new"]


def test_other_settings_are_not_rivals(tmp_path):
    asked = manifest.read(CPU)["params"]
    copied(tmp_path, "bf16", started="2026-01-01T00:00:00+00:00")
    copied(tmp_path, "fp32", started="2026-01-02T00:00:00+00:00", params=asked | {"dtype": "fp32"})
    assert uses(tmp_path) == {"bf16": COUNTS, "fp32": COUNTS}


@pytest.mark.parametrize(
    "facts, said",
    [
        ({"status": "interrupted", "reason": "by the user"}, "its status is interrupted: by the user"),
        ({"status": "running"}, "its status is running"),
        ({"redrawn_from": "outputs/x"}, "it only redraws outputs/x"),
        ({"received": {"zip": "a.zip"}}, "a colleague's"),
        ({"phase": "phase9"}, "phase9 is no phase"),
        ({"params": {}}, "does not say what was asked"),
        ({"params": []}, "does not say what was asked"),
    ],
)
def test_a_run_that_cannot_count_says_why(tmp_path, facts, said):
    copied(tmp_path, **facts)
    (use,) = uses(tmp_path).values()
    assert use.startswith("left out: ") and said in use


def test_a_damaged_record_leaves_its_run_out_by_name(tmp_path):
    record = min((copied(tmp_path) / "records").glob("*.json"))
    record.write_text(record.read_text().replace("8", "9", 1))
    assert uses(tmp_path) == {"run": f"left out: 1 records are damaged, {record.name} first"}


def test_a_missing_record_leaves_its_run_out_by_name(tmp_path):
    min((copied(tmp_path) / "records").glob("*.json")).unlink()
    (use,) = uses(tmp_path).values()
    assert use.startswith("left out: ") and ".json is missing" in use


def test_a_record_that_was_written_anew_is_not_believed(tmp_path):
    folder = copied(tmp_path)
    known = manifest.read(folder)["files"]
    rename(folder, "other")
    manifest.note(folder, files=known)
    (use,) = uses(tmp_path).values()
    assert use.endswith("is not as the run left it")


def test_a_run_without_records_is_left_out(tmp_path):
    shutil.rmtree(copied(tmp_path, files={}) / "records")
    (tmp_path / "run" / "records").mkdir()
    assert uses(tmp_path) == {"run": "left out: it holds no records"}


def test_a_damaged_manifest_is_a_line_and_no_end(tmp_path):
    (copied(tmp_path) / manifest.FILE).write_text("{")
    (use,) = uses(tmp_path).values()
    assert use.startswith("left out: ") and "holds no readable manifest.json" in use


def test_findings_are_no_run(tmp_path):
    found = findings.open_findings("reference", out=tmp_path)
    found.conclude()
    assert uses(tmp_path) == {}


def test_without_a_run_it_says_what_to_make(tmp_path, monkeypatch):
    monkeypatch.setattr(findings, "REFERENCE", tmp_path)
    with pytest.raises(RecordError, match="make phase1"):
        findings.open_findings("all", out=tmp_path / "empty").main  # noqa: B018


def test_which_runs_is_asked_in_two_words():
    with pytest.raises(ParamsError, match="'all', 'reference'"):
        findings.open_findings("mine")


def test_the_manifest_holds_the_verdict_and_digests_of_what_it_rests_on(tmp_path, monkeypatch):
    left = findings.Source(tmp_path / "redrawn", {}, "left out: it only redraws another")
    monkeypatch.setattr(findings, "weigh", lambda places: [*weigh(places), left])
    found = findings.open_findings("reference", out=tmp_path)
    assert found.folder.name.endswith("-findings") and manifest.read(found.folder)["status"] == "running"
    line = found.conclude()
    facts = manifest.read(found.folder)
    assert facts["status"] == "completed" and facts["verdict"] == line and "H1 refuted" in line
    assert {"outputs/reference/phase1-cuda", "outputs/reference/phase1-cpu"} <= {
        one["run"] for one in facts["rests_on"]
    }
    assert all(len(one["manifest"]) == 64 for one in facts["rests_on"])
    assert left.use in facts["left_out"].values()


def fake(monkeypatch, conclude, status="completed"):
    """In place of the notebook's kernel: it concludes, or not."""

    def run(folder, name, target, given):
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Findings")]), target)
        if conclude:
            manifest.note(folder, verdict="findings: PASS")
        return status, "" if status == "completed" else "planted"

    monkeypatch.setattr(workbook, "run_notebook", run)


def test_the_command_writes_notebook_page_and_manifest(tmp_path, monkeypatch, capsys):
    fake(monkeypatch, conclude=True)
    assert main(["findings", "--out", str(tmp_path)]) == 0
    (folder,) = tmp_path.glob("*/*-findings")
    facts = manifest.read(folder)
    assert facts["status"] == "completed" and set(facts["files"]) == {"findings.ipynb", "findings.html"}
    assert facts["files"] == manifest.digests(folder) and "findings.html" in capsys.readouterr().out


@pytest.mark.parametrize("status, code", [("failed", 1), ("interrupted", 130)])
def test_a_notebook_that_does_not_end_well_is_no_findings(tmp_path, monkeypatch, status, code):
    fake(monkeypatch, conclude=True, status=status)
    assert main(["findings", "--out", str(tmp_path)]) == code
    (folder,) = tmp_path.glob("*/*-findings")
    facts = manifest.read(folder)
    assert facts["status"] == status and facts["verdict"] == f"findings {status}: planted"


def test_a_notebook_that_concludes_nothing_has_failed(tmp_path, monkeypatch):
    fake(monkeypatch, conclude=False)
    assert main(["findings", "--out", str(tmp_path)]) == 1
    (folder,) = tmp_path.glob("*/*-findings")
    assert "did not conclude" in manifest.read(folder)["verdict"]


def test_an_unfinished_run_of_ones_own_is_in_the_table(tmp_path):
    run = runs.written(tmp_path)
    found = findings.Findings(None, "all", tmp_path).runs_table()
    row = found[found["run"].eq(run.name)]
    assert list(row["use"]) == ["left out: its status is running"]
    run.conclude()
    found = findings.Findings(None, "all", tmp_path).runs_table()
    (use,) = found[found["run"].eq(run.name)]["use"]
    assert use.startswith("left out: 1 cases, and outputs/reference/phase0-cpu has 35")
