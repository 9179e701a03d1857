import datetime as dt
import hashlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest

from blockshock_lib import launch, machine, manifest, records, workbook
from blockshock_lib import run as run_module
from blockshock_lib.errors import ParamsError, RecordError
from tests.runs import TINY, written


@pytest.fixture(scope="module")
def done(outputs):
    """A tiny phase 0 that really ran: notebook, kernel, two ranks."""
    return workbook.execute("phase0", hardware="cpu", settings=TINY, out=outputs)


def noted_by(outcome):
    return manifest.read(outcome.notebook.parent)


def printed(notebook):
    """Source of each cell -> the text of its outputs."""
    cells = nbformat.read(notebook, as_version=4).cells
    return {
        cell.source: [output.get("data", output).get("text/plain", output.get("text")) for output in cell.outputs]
        for cell in cells
        if cell.cell_type == "code"
    }


def notebook_of(tmp_path, monkeypatch, *cells):
    """Makes these cells, after a parameters cell, the notebook of phase 0."""
    path, names = tmp_path / "planted.ipynb", "hardware = settings = run_dir = redraw = resume = None"
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in (names, *cells)],
        metadata={"kernelspec": {"name": "python3", "display_name": "", "language": "python"}},
    )
    notebook.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, path)
    monkeypatch.setitem(workbook.NOTEBOOKS, "phase0", str(path))


def run_planted(outputs):
    return workbook.execute("phase0", hardware="cpu", settings=TINY, out=outputs)


def test_an_opened_run_is_noted_as_running(outputs):
    run = workbook.open_run("phase0", hardware="cpu", settings=TINY, out=outputs)
    noted = json.loads((run.folder / "manifest.json").read_text())
    assert noted["status"] == "running" and noted["run"] == run.name and noted["cases"] == 1 and "ended" not in noted
    assert run.folder.parent.parent == outputs


def test_two_runs_of_the_same_second_get_folders_of_their_own(outputs, monkeypatch):
    clock = SimpleNamespace(now=lambda tz=None: dt.datetime(2030, 1, 2, 3, 4, 5, tzinfo=tz))
    monkeypatch.setattr(run_module, "dt", SimpleNamespace(datetime=clock, UTC=dt.UTC))
    first, second = (workbook.open_run("phase0", hardware="cpu", settings=TINY, out=outputs) for _ in range(2))
    assert first.folder == outputs / "2030-01-02" / "030405-phase0-cpu"
    assert second.folder == outputs / "2030-01-02" / "030405-phase0-cpu-2"


def test_a_run_that_completes_leaves_notebook_page_records_and_its_verdict(done):
    noted, folder = noted_by(done), done.notebook.parent
    assert (done.status, done.ok, noted["status"], noted["reason"]) == ("completed", True, "completed", "")
    assert done.notebook == folder / "phase0_correctness.ipynb" and done.html == done.notebook.with_suffix(".html")
    assert "PASS" in done.verdict and noted["verdict"] == done.verdict
    assert done.verdict in "".join(map(str, printed(done.notebook).values()))
    frame = records.load(folder, strict=True)
    assert set(frame["run"]) == {noted["run"]} and set(frame["shape"]) == {"128x128"}
    assert noted["started"] <= noted["ended"]


def test_the_digests_are_those_of_every_file_but_the_manifest(done):
    folder = done.notebook.parent
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    del files["manifest.json"]
    assert any(name.startswith("records/") for name in files)
    assert noted_by(done)["files"] == {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in files.items()}


def test_the_manifest_says_what_ran_where_and_with_which_seed(done):
    noted, card = noted_by(done), machine.probe()
    assert noted["machine"] == card and noted["machine"]["libraries"]["torch"]
    assert noted["params"]["seed"] == 0 and noted["params"]["sweep"]["n"] == [128]
    assert noted["code"].keys() == {"commit", "dirty", "sources", "imported"}
    assert re.fullmatch("[0-9a-f]{12}", noted["code"]["sources"]) and noted["code"]["imported"]


def test_nothing_of_a_shared_run_names_a_path_of_this_machine(done):
    folder = done.notebook.parent
    places = [
        p for p in (workbook.ROOT, Path.home(), Path(tempfile.gettempdir()), Path(sys.prefix)) if len(p.parts) > 1
    ]
    for file in [*folder.glob("*.*"), *folder.rglob("records/*.json")]:
        text = re.sub(r"base64,[A-Za-z0-9+/=\\n]+", "", file.read_text())
        for place in places:
            assert f"{place}/" not in text and f'{place}"' not in text, f"{file.name} names {place}"
    assert noted_by(done)["run"] == folder.relative_to(workbook.ROOT).as_posix()


def test_a_redrawn_run_makes_the_same_tables_and_measures_nothing(done, outputs):
    # Given as an absolute path, as a shell completes it.
    again = workbook.execute("phase0", redraw=str(done.notebook.parent), out=outputs)
    folder = again.notebook.parent
    assert (again.status, again.ok, again.verdict) == ("completed", True, done.verdict)
    assert not (folder / "records").exists() and not (folder / "logs").exists()
    before, after = printed(done.notebook), printed(again.notebook)
    compared = [cell for cell in before if re.search(r"_table\(|proofs\(|reasons\(|weights\(|conclude\(", cell)]
    assert len(compared) == 8
    for cell in compared:
        assert before[cell] and before[cell] == after[cell], cell
    assert noted_by(again)["redrawn_from"] == noted_by(done)["run"]
    assert str(workbook.ROOT) not in again.notebook.read_text()


def test_a_redrawn_run_never_reaches_the_launcher(done, outputs, monkeypatch):
    monkeypatch.setattr(launch, "run", lambda *_, **__: pytest.fail("measured"))
    run = workbook.open_run("phase0", redraw=str(done.notebook.parent), out=outputs)
    assert run.redrawn and run.measure(progress=False) is run and len(run.frame)
    fresh = workbook.open_run("phase0", hardware="cpu", settings=TINY, out=outputs)
    with pytest.raises(pytest.fail.Exception, match="measured"):
        fresh.measure(progress=False)


def test_one_failed_check_makes_the_outcome_bad_though_every_cell_ran(outputs):
    source = written(outputs, failed="block_shock")
    outcome = workbook.execute("phase0", redraw=source.name, out=outputs)
    assert outcome.status == "completed" and not outcome.ok
    assert "FAIL" in outcome.verdict and "1 failed" in outcome.verdict


def test_run_all_in_jupyterlab_ends_completed_with_its_verdict_and_digests(outputs):
    run = written(outputs)
    assert manifest.read(run.folder)["status"] == "running"
    line = run.conclude()
    noted = manifest.read(run.folder)
    assert (noted["status"], noted["verdict"]) == ("completed", line) and "ended" in noted
    assert noted["files"] == manifest.digests(run.folder) and len(noted["files"]) == 1


def test_a_record_that_is_lost_is_said_and_makes_the_outcome_bad(outputs):
    source = written(outputs)
    (record,) = source.folder.glob("records/*.json")
    record.write_bytes(record.read_bytes()[:-40])
    with pytest.warns(UserWarning, match="damaged|cut|record"):
        outcome = workbook.execute("phase0", redraw=source.name, out=outputs)
    assert not outcome.ok and "1 of 1 records damaged or missing" in outcome.verdict


def test_a_folder_that_holds_records_takes_no_second_run(outputs):
    used = written(outputs)
    with pytest.raises(ParamsError, match="holds the records of a run"):
        workbook.open_run("phase0", hardware="cpu", settings=TINY, run_dir=used.name)


def test_a_redraw_takes_no_settings_and_no_hardware(outputs):
    source = written(outputs)
    before = sorted(outputs.rglob("manifest.json"))
    for asked in ({"settings": {"seed": 1}}, {"hardware": "cpu"}):
        with pytest.raises(ParamsError, match="leave hardware and settings out"):
            workbook.execute("phase0", redraw=source.name, out=outputs, **asked)
    assert sorted(outputs.rglob("manifest.json")) == before


def test_a_redraw_of_parameters_from_another_version_is_one_clear_error(outputs):
    source = written(outputs)
    manifest.note(source.folder, params=manifest.read(source.folder)["params"] | {"novel": 1})
    with pytest.raises(RecordError, match="parameters that this version does not know"):
        workbook.open_run("phase0", redraw=source.name, out=outputs)


def test_settings_that_are_no_mapping_are_refused(outputs):
    with pytest.raises(ParamsError, match="a mapping of dotted keys"):
        workbook.open_run("phase0", settings="sweep.n=[64]", out=outputs)


def test_a_page_that_cannot_be_made_costs_the_page_only(outputs, monkeypatch):
    def fail(path):
        raise ValueError("no template called 'lab'")

    monkeypatch.setattr("blockshock_lib.report.pages.page.write_html", fail)
    with pytest.warns(UserWarning, match="no HTML page.*no template called 'lab'"):
        outcome = workbook.execute("phase0", redraw=written(outputs).name, out=outputs)
    assert outcome.ok and outcome.html is None and outcome.line().endswith(".ipynb")


def test_a_notebook_that_raises_makes_a_failed_run_with_reason_and_page(outputs, tmp_path, monkeypatch):
    notebook_of(tmp_path, monkeypatch, "1 / 0", "print('never')")
    outcome = run_planted(outputs)
    noted = noted_by(outcome)
    assert (outcome.status, outcome.ok, noted["status"]) == ("failed", False, "failed")
    assert "ZeroDivisionError: division by zero" in noted["reason"] and noted["reason"] in outcome.verdict
    assert "ZeroDivisionError" in outcome.html.read_text() and "ended" in noted


def test_a_kernel_that_dies_makes_an_interrupted_run(outputs, tmp_path, monkeypatch):
    notebook_of(tmp_path, monkeypatch, "import os\nos._exit(0)", "print('never')")
    outcome = run_planted(outputs)
    assert (outcome.status, outcome.ok, noted_by(outcome)["status"]) == ("interrupted", False, "interrupted")
    assert noted_by(outcome)["reason"] == "the notebook's kernel died"


def test_an_interrupt_outside_the_measuring_makes_an_interrupted_run(outputs, tmp_path, monkeypatch):
    notebook_of(tmp_path, monkeypatch, "raise KeyboardInterrupt", "print('never')")
    outcome = run_planted(outputs)
    assert (outcome.status, noted_by(outcome)["status"]) == ("interrupted", "interrupted")
    assert noted_by(outcome)["reason"] == "KeyboardInterrupt"


def test_a_notebook_that_checks_nothing_is_not_well(outputs, tmp_path, monkeypatch):
    notebook_of(tmp_path, monkeypatch, "1 + 1")
    outcome = run_planted(outputs)
    assert outcome.status == "completed" and not outcome.ok


def test_ctrl_c_ends_every_process_and_is_noted_as_interrupted(outputs):
    out = outputs / "interrupted"
    command = [sys.executable, "-m", "blockshock_lib", "run", "phase0", "--hardware", "cpu", "--out", str(out)]
    with subprocess.Popen(command, cwd=workbook.ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + 90
            while not list(out.rglob("records/*.json")) and process.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=60)[0].decode()
        finally:
            process.kill()
    assert len(family) >= 3, "a kernel and two ranks were at work"
    assert not psutil.wait_procs(family, timeout=10)[1]
    (noted,) = (manifest.read(path.parent) for path in out.rglob("manifest.json"))
    assert noted["status"] == "interrupted" and noted["reason"] == "interrupted by the user" and noted["ended"]
    assert process.returncode == 130 and "phase0 interrupted" in said


def test_runs_come_newest_first_and_a_damaged_manifest_is_skipped_with_a_warning(tmp_path):
    known = {"run": "x", "phase": "phase0", "status": "completed", "params": {}, "machine": {"title": "CPU"}}
    for day in (2, 3, 1):
        (tmp_path / f"d{day}" / "x").mkdir(parents=True)
        facts = known | {"started": f"2030-01-0{day}T00:00:00+00:00"}
        (tmp_path / f"d{day}" / "x" / "manifest.json").write_text(json.dumps(facts))
    for name, text in (("cut", '{"run": "x", "pha'), ("empty", "{}"), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(text)
    with pytest.warns(UserWarning, match="holds no readable manifest") as warned:
        found = workbook.runs(tmp_path)
    assert [Path(folder).parent.name for folder in found["folder"]] == ["d3", "d2", "d1"]
    assert {Path(str(w.message).split(" holds")[0]).name for w in warned} == {"cut", "empty", "list"}


@pytest.mark.parametrize(
    "asked",
    [
        {"settings": {"sweep.n": [100]}},
        {"settings": {"swep.n": [128]}},
        {"settings": {"sweep.b": [0]}},
        {"hardware": "cudaa"},
    ],
)
@pytest.mark.parametrize("verb", [workbook.open_run, workbook.execute])
def test_bad_parameters_make_no_folder_and_start_no_process(tmp_path, nothing_starts, asked, verb):
    with pytest.raises(ParamsError):
        verb("phase0", **{"hardware": "cpu", "settings": TINY, "out": tmp_path, **asked})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", [workbook.open_run, workbook.execute])
def test_hardware_that_is_not_there_makes_no_folder(tmp_path, nothing_starts, monkeypatch, verb):
    card = machine.probe() | {"gpus": [], "unsupported": {"cuda": "no NVIDIA GPU is visible"}}
    monkeypatch.setattr(machine, "probe", lambda: card)
    with pytest.raises(ParamsError, match="no NVIDIA GPU is visible"):
        verb("phase0", hardware="cuda", out=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", [workbook.open_run, workbook.execute])
def test_a_redraw_of_nothing_or_of_another_phase_makes_no_folder(outputs, tmp_path, verb):
    source = written(outputs)
    with pytest.raises(RecordError, match="is a run of phase0, not of phase1"):
        verb("phase1", redraw=source.name, out=tmp_path)
    with pytest.raises(RecordError, match="holds no readable manifest"):
        verb("phase0", redraw=str(outputs / "nowhere"), out=tmp_path)
    assert not list(tmp_path.iterdir())
