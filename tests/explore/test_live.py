import time

import pytest

from blockshock_lib import manifest, params, plan, records, run
from blockshock_lib.engine.phases import PHASES
from blockshock_lib.errors import Interrupted, LaunchError
from blockshock_lib.explore import live

REFERENCE = manifest.ROOT / "outputs" / "reference"


@pytest.fixture
def view(tmp_path):
    found = live.LiveView(tmp_path)
    found.phase.value, found.n.value, found.b.value = "phase0", 128, 16
    yield found
    found.end()
    if found.thread is not None:
        found.thread.join(60)


def test_rows_arrive_while_it_runs_and_the_verdict_and_the_folder_at_its_end(view):
    view.start.click()
    assert view.start.disabled and not view.stop.disabled
    seen = set()
    while view.thread.is_alive():
        seen.add(view.rows.value.count("bs-row"))
        time.sleep(0.02)
    assert len(seen - {0, 49}) > 1, "the rows came all at once"
    assert view.rows.value.count("bs-row") == 49 and view.bar.value == view.bar.max == 7
    assert "phase0: PASS" in view.status.value and view.run.name in view.status.value
    assert "no claim about speed" in view.status.value
    assert manifest.read(view.run.folder)["status"] == "completed"
    assert not view.start.disabled and view.stop.disabled


def test_stop_ends_it_after_the_case_and_the_manifest_says_interrupted(view):
    view.start.click()
    view.end()
    view.thread.join(60)
    assert "interrupted: stopped from the notebook" in view.status.value and view.run.name in view.status.value
    assert manifest.read(view.run.folder)["status"] == "interrupted"
    assert len(list(view.run.folder.glob("records/*.json"))) < 7
    assert not view.start.disabled


def test_a_second_click_starts_no_second_run(view, monkeypatch):
    started = []
    monkeypatch.setattr(run, "open_run", lambda *_, **__: started.append(1) or time.sleep(0.3) or 1 / 0)
    view.begin()
    view.begin()
    view.thread.join(10)
    assert started == [1]


@pytest.mark.parametrize("error", [LaunchError("no <b>group</b>\nmore of it"), ZeroDivisionError("x"), SystemExit(3)])
def test_an_error_is_shown_in_the_view(view, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(run, "open_run", fail)
    view.begin()
    view.thread.join(10)
    assert 'role="alert"' in view.status.value and "<b>group" not in view.status.value
    assert not view.start.disabled


def test_the_settings_are_a_run_of_seconds(view):
    assert view.settings == {"sweep.n": [128], "sweep.b": [16], "layers.workload": "gaussian"}
    view.phase.value = "phase1"
    assert view.settings["sweep.b"] == [16, 64] and view.settings["timing.groups"] == 1


def test_every_phase_can_be_started_and_one_that_trains_has_one_batch(view):
    assert set(view.phase.options.values()) == set(PHASES)
    for name in ("phase2", "phase3"):
        view.phase.value = name
        (case, *_) = plan.expand(params.load(name, view.settings, choose={"hardware": "cpu"}))
        assert (case.phase, case.batch, case.in_features, case.mask.name) == (name, 16, 128, "checkerboard")


def test_a_failed_check_has_its_reason_and_no_time():
    record = records.read(sorted((REFERENCE / "phase1-cpu" / "records").glob("*-0.json"))[0])
    good = {row[2]: row for row in live.record_rows(record)}
    assert good["Block-Shock"][3] == "pass" and good["Block-Shock"][5].endswith("s")
    for row in record["rows"]:
        if row["method"] == "block_shock" and row["metric"] == "check":
            row |= {"status": "failed", "reason": "<i>y holds NaN</i>", "value": None}
    bad = {row[2]: row for row in live.record_rows(record)}
    assert bad["Block-Shock"][3].startswith("failed: ") and bad["Block-Shock"][5] == ""
    assert "<i>" not in live.rows_table(list(bad.values()))


def test_of_a_training_step_its_time_its_optimizer_and_its_worst_error_are_shown():
    record = records.read(sorted((REFERENCE / "phase1-cpu" / "records").glob("*-0.json"))[0])
    record["case"]["optimizer"] = "adamw"
    record["rows"] += [
        records.row("block_shock", metric, value, detail=detail)
        for metric, value, detail in (("step_call", 25.0, ""), ("error_max_ratio", 1.75, "dw"))
    ]
    row = {row[2]: row for row in live.record_rows(record)}["Block-Shock"]
    assert row[0].endswith(" AdamW") and row[4] == "1.75x" and row[5] == "step 25 ms"


def test_stopping_uses_the_error_that_a_run_listens_for(view):
    view._stop.set()
    with pytest.raises(Interrupted):
        view._hear({"done": 0, "total": 1, "case": "c", "group": 0, "status": "running"})
