import json

import ipywidgets as widgets
import pytest

from blockshock_lib import manifest
from blockshock_lib.errors import RecordError
from blockshock_lib.explore import controls, floors, masks, runs, saved, view
from tests.report.training_frames import training_frame

REFERENCE = manifest.ROOT / "outputs" / "reference"
CPU, CUDA = "outputs/reference/phase1-cpu", "outputs/reference/phase1-cuda"


def within(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from within(child)


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    return tmp_path_factory.mktemp("out")


@pytest.fixture
def views(empty):
    return {"masks": masks.make(), "floors": floors.make(out=empty), "runs": runs.RunsView((CPU,), out=empty)}


def test_a_change_draws_once_a_drag_never_and_a_value_seen_before_is_not_drawn_again(views):
    for made in views.values():
        sliders = [w for w in within(made.box) if hasattr(w, "continuous_update")]
        assert not [w for w in sliders if w.continuous_update], "it would draw at every step of a drag"
    v = views["floors"]
    assert v.drawn == 1
    first = v.figure.value
    v.controls["n"].value = 8192
    assert v.drawn == 2 and v.figure.value != first
    v.controls["n"].value = 8192
    assert v.drawn == 2
    v.controls["n"].value = 4096
    assert v.drawn == 2 and v.figure.value == first
    with v.held():
        v.controls["b"].value, v.controls["mask"].value = 16, "random"
    assert v.drawn == 3


@pytest.mark.parametrize("name", ["masks", "floors"])
def test_every_control_changes_the_figure(name, views):
    v = views[name]
    if name == "floors":
        v.controls["square"].value = False
    for key, control in reversed(v.controls.items()):
        if key in ("n", "square"):
            continue
        before, options = v.figure.value, [o[1] if isinstance(o, tuple) else o for o in control.options]
        control.value = next(o for o in options if o != control.value)
        assert v.figure.value != before, key


def test_every_image_has_alternative_text_and_every_control_a_description(views):
    for made in views.values():
        assert '<img alt="' in made.figure.value and 'alt=""' not in made.figure.value
        for control in made.controls.values():
            assert control.description
            assert [name for name in control._dom_classes if name.startswith("bs-")]


def test_a_static_figure_stands_before_the_view_and_the_view_hides_it(views, monkeypatch):
    for name, made in views.items():
        shown = []
        monkeypatch.setattr(view, "display", shown.append)
        made.show()
        first, second = shown
        assert first.data.startswith(f'<div class="bs-static bs-{name}-static">')
        assert made.figure.value in first.data and second is made.box
        style = next(w.value for w in within(made.box) if isinstance(w, widgets.HTML) and "<style>" in w.value)
        assert f".bs-{name}-static" in style


def test_square_and_apart_show_their_own_sliders(views):
    found = views["floors"].controls
    assert [found[k].layout.display for k in ("n", "in_features", "out_features")] == ["", "none", "none"]
    found["square"].value = False
    assert [found[k].layout.display for k in ("n", "in_features", "out_features")] == ["none", "", ""]
    assert "4096x8192" not in views["floors"].figure.value
    found["in_features"].value = 8192
    assert "4096x8192" in views["floors"].figure.value


def test_every_size_splits_over_eight_ranks():
    assert all(size % 512 == 0 for size in controls.SIZES)


def test_what_cannot_be_drawn_is_said_in_its_place_and_drawn_when_it_can():
    def draw(n):
        if n == 2:
            raise RecordError("<b>broken</b>")
        return f"drew {n}"

    v = view.View("x", {"n": controls.steps("n", (1, 2, 3), 1, "t")}, draw)
    v.controls["n"].value = 2
    assert "&lt;b&gt;broken&lt;/b&gt;" in v.figure.value and 'role="alert"' in v.figure.value
    v.controls["n"].value = 3
    assert v.figure.value == "drew 3"


def test_runs_stand_side_by_side_from_their_own_notebooks_and_are_drawn_where_those_are_not_whole(empty, monkeypatch):
    v = runs.RunsView((CPU, CUDA), out=empty)
    assert v.figure.value.count("<img") == 2 and CPU in v.figure.value and CUDA in v.figure.value
    monkeypatch.setattr(saved, "from_notebook", lambda *_: "")
    saved._kept.clear()
    v.controls["runs_list"].value = [REFERENCE / "phase1-cpu"]
    assert "drawing this run" in v.figure.value and v.drawn == 2
    v.thread.join(60)
    assert v.figure.value.count("<img") == 1 and "drawing" not in v.figure.value and v.drawn == 2
    v.controls["runs_what"].value = ""
    v.thread.join(60)
    assert "<table" in v.figure.value
    with pytest.raises(RecordError, match="is no run"):
        runs.RunsView(("outputs/none",), out=empty)


def test_a_run_that_came_since_is_listed_by_look_again(tmp_path):
    v = runs.RunsView((CPU,), out=tmp_path)
    count = len(v.controls["runs_list"].options)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / manifest.FILE).write_bytes((REFERENCE / "phase1-cpu" / manifest.FILE).read_bytes())
    v.look_again()
    assert len(v.controls["runs_list"].options) == count + 1
    assert v.controls["runs_list"].value == (REFERENCE / "phase1-cpu",)


PNG = "iVBORw0KGgo="


@pytest.mark.parametrize(
    "text",
    [
        f'<img alt="a" src="data:image/png;base64,{PNG}" onerror="alert(1)">',
        f'<img alt="a" src="data:image/png;base64,{PNG}"><script>alert(1)</script>',
        '<img alt="a" src="data:image/svg+xml;base64,PHN2Zz4=">',
        '<img alt="a" src="data:image/png;base64,PHN2Zz4=">',
        '<img alt="a" src="https://example.org/x.png">',
        "",
    ],
)
def test_nothing_but_a_picture_is_taken_from_a_colleagues_notebook(text):
    assert saved.picture(text) == ""


def test_a_picture_is_made_anew_without_what_else_its_tag_holds():
    text = f'<img alt="1 &lt; 2" onload="alert(1)" src="data:image/png;base64,{PNG}">'
    assert saved.picture(text) == f'<img alt="1 &lt; 2" style="max-width:100%" src="data:image/png;base64,{PNG}">'


def test_a_notebook_that_the_manifest_does_not_vouch_for_is_not_used(tmp_path):
    for name in (manifest.FILE, "phase1_forward.ipynb"):
        (tmp_path / name).write_bytes((REFERENCE / "phase1-cpu" / name).read_bytes())
    assert saved.from_notebook(tmp_path, "ratio_heatmap").startswith("<img")
    path = tmp_path / "phase1_forward.ipynb"
    path.write_text(path.read_text() + "\n")
    assert saved.from_notebook(tmp_path, "ratio_heatmap") == ""


@pytest.mark.parametrize("work, optimizer", [("a forward and dX", ""), ("a training step, AdamW", "AdamW")])
def test_floors_of_a_pass_and_of_a_training_step_are_told_as_such(work, optimizer, empty):
    v = floors.make(out=empty)
    before = v.figure.value
    assert "Bytes a rank in a forward," in before and "recompress" not in before
    v.controls["work"].value = floors.WORKS[work]
    assert f"Bytes a rank in {work.partition(',')[0]}, and its floor" in v.figure.value and optimizer in v.figure.value
    assert ("Block-Shock recompress (T1)" in v.figure.value) is bool(optimizer)


@pytest.mark.parametrize("phase, work", [("phase2", "a forward and dX"), ("phase3", "a training step")])
def test_every_figure_of_a_training_run_is_drawn_of_its_own_work(phase, work, tmp_path, monkeypatch):
    frame = training_frame(ns=(4096,), bs=(256,), phase=phase, groups=2, loss_steps=5)
    monkeypatch.setattr(saved, "_frame", lambda folder, key: frame)
    facts = manifest.read(manifest.ROOT / CUDA) | {"phase": phase, "run": phase, "files": {}}
    (tmp_path / manifest.FILE).write_text(json.dumps(facts))
    drawn = {words: saved.figure(tmp_path, name) for words, name in saved.FIGURES.items()}
    for words in ("speed over B1", "time against N"):
        assert f"kernel time of {work}" in drawn[words], words
    assert all("<img" in text for words, text in drawn.items() if words != "checks (table)")


def test_a_training_runs_own_drawing_is_taken_from_its_notebook():
    for phase, cells in {"phase2": "phase2_backward", "phase3": "phase3_training"}.items():
        source = (manifest.ROOT / "notebooks" / f"{cells}.ipynb").read_text()
        calls = {"".join(cell["source"]).strip() for cell in json.loads(source)["cells"]}
        for name in ("ratio_heatmap", "time_vs_n", "stacked"):
            assert saved.call(phase, name) in calls, (phase, name)
