import pytest

from blockshock_lib import load
from blockshock_lib.errors import LaunchError, RecordError
from blockshock_lib.notebook import explore, workbook
from blockshock_lib.report import view
from blockshock_lib.report.figures import milliseconds
from blockshock_lib.runs import dry_run, manifest
from blockshock_lib.runs import open as opening
from blockshock_lib.runs.manifest import REFERENCE
from blockshock_lib.studies.linear import STUDY
from blockshock_lib.studies.linear.explore import floors_view, masks_view
from tests.faults.hostile import noted

PNG = b"\x89PNG\r\n\x1a\n"


def within(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from within(child)


@pytest.fixture
def views(tmp_path):
    return {"masks": masks_view(), "floors": floors_view(dry_run, out=tmp_path)}


def test_a_change_draws_once_a_drag_never_and_a_value_seen_before_is_not_drawn_again(views):
    sliders = [w for made in views.values() for w in within(made.box) if hasattr(w, "continuous_update")]
    assert sliders and not any(w.continuous_update for w in sliders), "it would draw at every step of a drag"
    assert all(control.description for made in views.values() for control in made.controls.values())
    v = views["floors"]
    assert v._draw.cache_info().misses == 1
    first = v.figure.value
    v.controls["n"].value = 8192
    assert v._draw.cache_info().misses == 2 and v.figure.value != first
    assert "8192x8192" in v.figure.value, "a weight is square until another number of rows is chosen"
    v.controls["n"].value = 4096
    assert v._draw.cache_info().misses == 2 and v.figure.value == first
    v.controls["out_features"].value = 512
    assert "512x4096" in v.figure.value


def test_a_floor_has_the_measured_time_beside_it_where_a_record_holds_the_case(views):
    v = views["floors"]
    assert "measured, it has 0.72 of its speed" in v.figure.value and ">measured<" in v.figure.value
    case = "in_features == 4096 and batch == 256 and metric == 'forward_kernel' and method == 'block_shock'"
    median = load(REFERENCE / "phase1-cuda-2").query(case)["value"].median()
    assert f"{view.html.escape(milliseconds(median))} measured" in v.figure.value
    v.controls["world_size"].value = 8
    assert "measured," not in v.figure.value and ">measured<" not in v.figure.value


def test_what_cannot_be_drawn_is_said_in_its_place_and_drawn_when_it_can():
    def draw(n):
        if n == 2:
            raise RecordError("<b>broken</b>")
        return f"drew {n}"

    v = view.View("x", {"n": view.steps("n", (1, 2, 3), 1, "t")}, draw)
    v.controls["n"].value = 2
    assert "&lt;b&gt;broken&lt;/b&gt;" in v.figure.value and 'role="alert"' in v.figure.value
    v.controls["n"].value = 3
    assert v.figure.value == "drew 3"


def drawn(folder, alt="what it shows", data=PNG):
    """`folder`, made a run with a saved figure."""
    (folder / "figures").mkdir(parents=True)
    (folder / "figures" / "speed.png").write_bytes(data)
    saved = [{"name": "speed", "file": "figures/speed.png", "alt": alt}]
    return noted(folder, figures=saved, files=manifest.digests(folder))


def test_of_a_colleagues_run_only_a_picture_that_its_manifest_vouches_for_is_taken(tmp_path):
    picture = explore.figure(drawn(tmp_path / "a", alt='1 < 2" onload="x'), "speed")
    assert picture.startswith('<img alt="1 &lt; 2&quot; onload=&quot;x"')
    assert "<img" not in explore.figure(drawn(tmp_path / "b", data=b"<svg>"), "speed")
    changed = drawn(tmp_path / "c")
    (changed / "figures" / "speed.png").write_bytes(PNG + b"x")
    assert "not the one that the run saved" in explore.figure(changed, "speed")
    assert "saved no figure “&lt;b&gt;”" in explore.figure(changed, "<b>")


def test_a_list_of_no_run_says_so_and_lists_those_that_came_since(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(explore, "OUTPUTS", tmp_path)
    monkeypatch.setattr(explore, "REFERENCE", tmp_path)
    monkeypatch.setattr(view.View, "show", lambda view: shown.append(view))
    explore.runs_view()
    assert "Pick a run" in shown[0].figure.value
    (hint,) = (one.value for one in shown[0].box.children if "bs-runs-hint" in one._dom_classes)
    assert "Ctrl-click" in hint
    folder = drawn(tmp_path / "2026-11-22" / "1-linear-phase1-cpu")
    explore.runs_view()
    assert [one for _, one in shown[1].controls["runs_list"].options] == [folder]


@pytest.fixture
def live(tmp_path, monkeypatch):
    monkeypatch.setattr(workbook, "draw_apart", lambda folder: (folder / "drawn").touch())
    found = explore.LiveView(STUDY, tmp_path)
    assert found.phase.value == next(iter(STUDY.phases)), "a run can be started at once"
    found.phase.value, found.controls["n"].value, found.controls["b"].value = "phase0", 128, 16
    yield found
    found.end()
    if found.thread is not None:
        found.thread.join(600)


def test_rows_arrive_while_it_runs_and_the_verdict_and_the_folder_at_its_end(live):
    seen = set()
    live.rows.observe(lambda change: seen.add(change["new"].count("<tr")), "value")
    live.start.click()
    assert live.start.disabled and not live.stop.disabled
    live.thread.join(600)
    assert len(seen - {0, 57}) > 1, "the rows came all at once"
    assert live.rows.value.count("<tr") == 57 and live.bar.value == live.bar.max == 7
    assert "phase0: PASS" in live.status.value and live.run.name in live.status.value
    assert "no claim about speed" in live.status.value
    assert manifest.read(live.run.folder)["status"] == "completed" and (live.run.folder / "drawn").exists()
    assert not live.start.disabled and live.stop.disabled


def test_stop_ends_it_after_the_case_and_the_manifest_says_interrupted(live):
    live.start.click()
    live.end()
    live.thread.join(600)
    assert "interrupted: stopped from the notebook" in live.status.value and live.run.name in live.status.value
    assert manifest.read(live.run.folder)["status"] == "interrupted"
    assert len(list(live.run.folder.glob("records/*.json"))) < 7
    assert not live.start.disabled


@pytest.mark.parametrize("error", [LaunchError("no <b>group</b>\nmore of it"), ZeroDivisionError("x"), SystemExit(3)])
def test_an_error_is_shown_in_the_view(live, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(opening, "open_run", fail)
    live.begin()
    live.thread.join(600)
    assert 'role="alert"' in live.status.value and "<b>group" not in live.status.value
    assert not live.start.disabled


def test_a_failed_check_has_its_reason():
    frame = load(REFERENCE / "phase1-cpu")
    order = list(frame["case"].unique())
    planted = frame["method"].eq("block_shock") & frame["metric"].eq("check")
    frame.loc[planted, ["status", "reason", "value"]] = ["failed", "<i>y holds NaN</i>", float("nan")]
    table = explore.live_table(frame, STUDY.axes, order)
    bad = table.set_index("method").loc["Block-Shock"]
    assert bad["outcome"].eq("failed").all() and bad["reason"].str.startswith("<i>").all()
    assert not table.loc[~table["method"].eq("Block-Shock"), "outcome"].eq("failed").any()
    assert "<i>" not in view.table(table)
