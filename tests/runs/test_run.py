"""A run that is stopped says so; resumed, it repeats nothing that stands, and everything that does not."""

from dataclasses import replace

import pytest

from blockshock_lib import files
from blockshock_lib.errors import Interrupted, LaunchError, ParamsError, RecordError
from blockshock_lib.notebook import workbook
from blockshock_lib.report import verdicts
from blockshock_lib.runs import code, lock, machine, manifest, measure, record
from blockshock_lib.runs.open import latest
from tests import small_runs
from tests.small_runs import TINY, written

SMALL = TINY | {"sweep.masks": ["checkerboard", "random"], "timing.groups": 2}
OTHER = "0123456789ab"


def opened(out, settings=SMALL):
    return workbook.open_run("phase0", hardware="cpu", settings=settings, out=out)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(measure, "run", small_runs.measured)


@pytest.fixture
def half(outputs, quick):
    """A run of two cases in two groups that was interrupted after two records."""
    run = opened(outputs)

    def heard(event):
        if event["done"] == 2:
            raise Interrupted("enough")

    with pytest.raises(Interrupted, match="enough"):
        run.measure(progress=False, on_event=heard)
    return run


def test_ctrl_c_and_an_error_are_told_apart(outputs, monkeypatch):
    for error, status in ((KeyboardInterrupt(), "interrupted"), (LaunchError("no group\nmore"), "failed")):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(measure, "run", fail)
        run = opened(outputs)
        with pytest.raises(type(error)) as raised:
            run.measure(progress=False)
        noted = manifest.read(run.folder)
        reason = "interrupted by the user" if status == "interrupted" else "no group"
        assert (noted["status"], noted["reason"]) == (status, reason)
        assert status == "failed" or "fail" not in [entry.name for entry in raised.traceback], "a long traceback"
        assert status == "failed" or str(raised.value) == "run this cell again to go on"


def test_a_run_that_its_listener_interrupts_says_so_and_measuring_again_goes_on_where_it_was_stopped(half):
    noted = manifest.read(half.folder)
    assert [noted[key] for key in ("status", "verdict")] == ["interrupted", "phase0 interrupted: enough"]
    assert noted["ended"] >= noted["started"] and half.stopped == "interrupted"
    with files.locked(half.folder, 0):
        pass  # it is free
    before = {path: path.stat().st_mtime_ns for path in half.folder.glob("records/*.json")}
    assert len(before) == 2 and half.lost() == " · 2 of 4 records not measured"
    line = half.conclude()
    assert line.startswith("phase0: INCOMPLETE 2 of 4 · ") and "PASS" not in line
    assert manifest.read(half.folder)["status"] == "interrupted"
    half.measure(progress=False)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert half.lost() == "" and manifest.read(half.folder)["status"] == "running"
    half.conclude()
    noted = manifest.read(half.folder)
    assert (noted["status"], noted["reason"]) == ("completed", "")


def test_a_finished_run_is_never_measured_again_nor_resumed(outputs, quick):
    run = opened(outputs).measure(progress=False)
    for end in (lambda: None, run.conclude):
        end()
        before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}
        with pytest.raises(RecordError, match="measured already: run the cell with open_run again"):
            run.measure(progress=False)
        assert {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")} == before
    for status in ("completed", "interrupted"):  # of a stopped run somebody may have packed the records
        manifest.note(run.folder, status=status)
        with pytest.raises(RecordError, match="is completed: nothing to resume"):
            workbook.open_run("linear/phase0", resume=run.name, out=outputs)
        assert manifest.read(run.folder)["status"] == status
        with files.locked(run.folder, 0):
            pass


def rewritten(path, code=None, **context):
    """The same record, whole, made under other circumstances."""
    found = record.read(path)
    context = found["context"] | context | {"code": found["context"]["code"] | (code or {})}
    path.write_bytes(record.encode(found | {"context": context}))
    assert record.read(path)["context"] == context


KILLED = "rank 1: SIGKILL: the process was ended by SIGKILL"


def killed(path, reason=KILLED):
    """As it is where a rank was killed in the case."""
    found = record.read(path)
    rows = [one | {"status": "failed", "value": None, "reason": reason} for one in found["rows"]]
    path.write_bytes(record.encode(found | {"rows": rows}))


def replaced(path):
    path.write_bytes(next(other for other in path.parent.iterdir() if other != path).read_bytes())


SPOILT = {
    "missing": lambda path: path.unlink(),
    "damaged": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "of another machine": lambda path: rewritten(path, machine=OTHER),
    "of other code": lambda path: rewritten(path, {"sources": OTHER, "imported": OTHER}),
    "of a stale kernel": lambda path: rewritten(path, {"imported": OTHER}),
    "of another case": replaced,
    "of a killed rank": killed,
    "cut off": lambda path: path.with_suffix(".state").touch(),
}


ENDED = {"cut off": "were cut off", "of a killed rank": "are of a killed rank"}


@pytest.mark.parametrize("why", SPOILT)
def test_a_record_that_does_not_stand_is_measured_again(why, outputs, quick):
    run = opened(outputs).measure(progress=False)
    assert len(run.finished()) == 4
    spoilt, *kept = sorted(run.folder.glob("records/*.json"))
    SPOILT[why](spoilt)
    run._stop("interrupted", "planted")
    case, group = spoilt.stem.split("-")
    assert run.finished() == {(c.id, g) for c in run.cases for g in (0, 1)} - {(case, int(group))}

    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in kept}
    lost = workbook.open_run("phase0", redraw=run.name, out=outputs).lost()
    assert lost == {"damaged": " · 1 of 4 records damaged or missing"}.get(why, lost)
    if why in ("cut off", "of a killed rank"):
        run.stopped = ""
        run.conclude()
        noted = manifest.read(run.folder)
        assert noted["status"] == "failed" and f"1 of 4 records {ENDED[why]}: --resume " in noted["reason"]
    again = workbook.open_run("phase0", resume=run.name, out=outputs)
    (noted,) = manifest.read(run.folder)["resumed"]
    assert noted["finished"] == 3 and noted["again"] == {"damaged" if why == "of another case" else why: 1}
    again.measure(progress=False)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in kept} == before
    assert record.read(spoilt)["context"] == again.context and again.lost() == ""
    again.conclude()
    assert manifest.read(run.folder)["status"] == "completed"


def test_a_method_that_is_killed_alone_is_a_result(outputs, quick):
    run = opened(outputs).measure(progress=False)
    killed(min(run.folder.glob("records/*.json")), f"{KILLED}; the case was begun anew without it")
    run.conclude()
    assert manifest.read(run.folder)["status"] == "completed"


@pytest.mark.parametrize("portable", [True, False])
def test_a_phase_that_is_portable_goes_on_on_another_machine_of_its_kind(outputs, quick, portable):
    run = opened(outputs).measure(progress=False)
    phases = run.study.phases | {"phase0": replace(run.study.phases["phase0"], portable=portable)}
    run.study, here = replace(run.study, phases=phases), run.card
    for path in run.folder.glob("records/*.json"):
        rewritten(path, machine=run.context["machine"])
    for change, kept in (({}, True), ({"driver": "another"}, portable), ({"libraries": {"torch": "0"}}, False)):
        run.card = here | change
        assert len(run.finished()) == 4 * kept


def test_the_same_command_resumes_and_one_that_asks_for_something_else_is_refused(half, outputs):
    before = (half.folder / manifest.FILE).read_bytes()
    for more in ({"settings": SMALL | {"seed": 3}}, {"settings": SMALL, "hardware": "cuda-1"}, {"hardware": "cpu"}):
        with pytest.raises(ParamsError, match=r"as it was begun, and this asks for other .*leave it out") as said:
            workbook.open_run("phase0", resume=half.name, out=outputs, **more)
        assert ("seed" in str(said.value)) == ("seed" in more.get("settings", ()))
        assert (half.folder / manifest.FILE).read_bytes() == before
    again = workbook.open_run("phase0", resume="latest", hardware="cpu", settings=SMALL, out=outputs)
    assert again.folder == half.folder and again.params == half.params


def test_latest_is_the_newest_run_of_the_phase_that_is_not_completed(outputs, quick, monkeypatch):
    out = outputs / "latest"
    with pytest.raises(RecordError, match="no run of phase0 that was stopped: nothing to resume"):
        workbook.open_run("phase0", resume="latest", out=out)
    times = iter(f"2030-01-01T00:00:{second:02}+00:00" for second in range(60))
    monkeypatch.setattr("blockshock_lib.runs.open.now", times.__next__)
    older, newer, done = (opened(out) for _ in range(3))
    done.measure(progress=False).conclude()
    for run in (older, newer, workbook.open_run("phase1", hardware="cpu", out=out)):
        run._stop("failed", "planted")
    workbook.open_run("phase0", redraw=str(done.folder), out=out)
    assert workbook.open_run("phase0", resume="latest", out=out).folder == newer.folder
    for run, name in ((older, "job 1"), (newer, "job 2")):  # a job that is started anew goes on with its own run
        run._stop("failed", "planted")
        manifest.note(run.folder, job=name)
        assert latest(out, "phase0", name) == run.folder
    with pytest.raises(RecordError, match="nothing to resume"):
        latest(out, "phase0", "job 3")


def test_what_cannot_be_resumed_is_refused_and_left_as_it_was(outputs, quick, half):
    def refused(error, match, phase="phase0", **asked):
        before = (half.folder / manifest.FILE).read_bytes()
        with pytest.raises(error, match=match):
            workbook.open_run(phase, **({"resume": half.name, "out": outputs} | asked))
        assert (half.folder / manifest.FILE).read_bytes() == before

    for more in ({"redraw": half.name}, {"run_dir": "x"}):
        refused(ParamsError, "leave run_dir and redraw out", **more)
    refused(RecordError, "is a run of linear/phase0, not of linear/phase1", phase="phase1")
    refused(RecordError, "holds no readable manifest", resume=str(outputs / "nowhere"))
    with files.locked(half.folder):
        refused(LaunchError, f"{half.folder.name}: this run is still going on")
    card = machine.probe() | {"gpus": [], "unsupported": {"cuda": "no NVIDIA GPU is visible"}}
    asked = manifest.read(half.folder)["params"]
    manifest.note(half.folder, params=asked | {"hardware": asked["hardware"] | {"device": "cuda", "backend": "nccl"}})
    refused(ParamsError, "no NVIDIA GPU is visible", card=card)
    manifest.note(half.folder, params=asked | {"novel": 1})
    refused(RecordError, "parameters that this version does not know")
    drawn = workbook.open_run("phase0", redraw=written(outputs).name, out=outputs)
    refused(RecordError, "measures nothing: nothing to resume", resume=drawn.name)


def test_a_library_edited_while_it_measures_is_in_the_records_that_come_after(outputs, quick, monkeypatch):
    run = opened(outputs)

    def edit(event):
        if event["done"] == 2:
            monkeypatch.setattr(code, "digest", lambda *_, **__: OTHER)

    with pytest.warns(UserWarning, match="restart the kernel"):
        monkeypatch.setattr(code, "changed", lambda *_: ["blockshock_lib/plan.py"])
        made = code.version(run.study)
        monkeypatch.setattr(code, "version", lambda *_: made | {"sources": code.digest(run.study)})
        run.measure(progress=False, on_event=edit)
    found = [record.read(path)["context"]["code"]["sources"] for path in run.folder.glob("records/*.json")]
    assert sorted(found) == sorted([made["sources"]] * 2 + [OTHER] * 2)


def test_a_library_edited_before_a_run_is_opened_is_told_there_and_where_it_measures_and_no_record_stands(
    outputs, quick, monkeypatch
):
    monkeypatch.setattr(code, "AT_IMPORT", code.AT_IMPORT | {"blockshock_lib/errors.py": OTHER})
    changed = r"blockshock_lib/errors.py changed after .* restart the kernel"
    with pytest.warns(UserWarning, match=changed):
        run = opened(outputs)
    with pytest.warns(UserWarning, match=changed):
        run.measure(progress=False)
    made = manifest.read(run.folder)["code"]
    assert made["imported"] != made["sources"] and not run.finished(), "no resumed run keeps a stale record"
    assert {record.read(path)["context"]["code"] == made for path in run.folder.glob("records/*.json")} == {True}


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
