"""Views for a notebook that is kept open: saved runs side by side, and a small run that is started from the notebook.

Each call shows a static figure and after it a widget view. Where there is no live kernel (a rendered page, GitHub) the
static figure says everything; where there is one, the view hides it. A study brings more views of its own.
"""

import base64
import contextlib
import html
import pkgutil
import threading
from collections.abc import Sequence
from pathlib import Path

import ipywidgets as widgets
import pandas as pd
from IPython.display import display

from blockshock_lib import files, studies
from blockshock_lib.engine.study import Study
from blockshock_lib.errors import Interrupted, RecordError
from blockshock_lib.files import ROOT, shown
from blockshock_lib.notebook import workbook
from blockshock_lib.report import frames, view
from blockshock_lib.report.axes import Axes
from blockshock_lib.runs import manifest, records
from blockshock_lib.runs import open as opening
from blockshock_lib.runs.run import OUTPUTS, REFERENCE

MOST = 4  # runs side by side


def runs_view(*folders: str, figure: str = "") -> None:
    """Saved runs side by side: first `folders` (default: the newest two), `figure` of each (default: the first's)."""
    places = {folder: noted for place in (REFERENCE, OUTPUTS) for folder, noted in manifest.every(place)}
    found = sorted(places, key=lambda folder: (places[folder]["started"], folder), reverse=True)
    facts = "{started:.16} · {phase} · {machine[title]} · {status} · "
    listed = {facts.format_map(places[one]).replace("T", " ", 1) + shown(one): one for one in found}
    chosen = [ROOT / folder for folder in folders] or found[:2]
    if missing := [folder for folder in chosen if folder not in found]:
        raise RecordError(f"{shown(missing[0])} is no run under the outputs")
    saved = [saved.name for folder in (*chosen, *found) for saved in manifest.figures(folder)]
    names = list(dict.fromkeys(saved)) or ["none is saved"]
    select = widgets.SelectMultiple(
        options=list(listed.items()),
        value=[folder for folder in found if folder in chosen],
        rows=min(8, max(3, len(found))),
        description="runs",
        tooltip=f"up to {MOST}: Shift or Ctrl with the arrow keys or a click picks several",
        layout=widgets.Layout(width="98%"),
    )
    what = view.choice("figure", names, figure or names[0], "what is shown of each run", "360px")
    # Nothing is remembered: a run may be drawn again while the view is open.
    runs = view.View("runs", {"runs_list": select, "runs_what": what}, _side_by_side, keeps=0)
    hint = widgets.HTML(f"A click shows one run; Ctrl-click (⌘-click) adds one beside it, up to {MOST}.")
    hint.add_class("bs-runs-hint")
    runs.box.children = (*runs.box.children[:-1], hint, runs.figure)
    runs.show()


def figure(folder: Path, name: str) -> str:
    """A saved figure as HTML; a sentence if none or altered. Of a stranger's run only PNG bytes and escaped text."""
    saved = next((saved for saved in manifest.figures(folder) if saved.name == name), None)
    if saved is None:
        draw = f"<code>make report RUN={html.escape(shown(folder))}</code> draws it"
        return f"<p>This run saved no figure “{html.escape(name)}”; {draw}.</p>"
    data, digests = saved.path.read_bytes(), manifest.read(folder).get("files")
    known = digests.get(saved.path.relative_to(folder).as_posix()) if isinstance(digests, dict) else None
    if known != files.sha256(data) or not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "<p>This figure is not the one that the run saved.</p>"
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return f'<img alt="{html.escape(saved.alt)}" style="max-width:100%" src="{source}">'


def _side_by_side(runs_list: tuple[Path, ...], runs_what: str) -> str:
    if not runs_list:
        return "<p>Pick a run in the list.</p>"
    parts = "".join(_captioned(folder, runs_what) for folder in runs_list[:MOST])
    more = f"<p>{len(runs_list) - MOST} more are picked; {MOST} are shown.</p>" if len(runs_list) > MOST else ""
    return f'<div style="display:flex;flex-wrap:wrap;gap:8px 20px">{parts}</div>{more}'


def _captioned(folder: Path, name: str) -> str:
    try:
        picture, found = figure(folder, name), manifest.read(folder)
        facts = (found["started"][:16].replace("T", " "), found["phase"], found["machine"]["title"])
        said = " · ".join([*facts, str(found.get("verdict") or found["status"])])
    except (RecordError, OSError) as error:
        picture, said = view.problem(error), ""
    return (
        f'<figure class="bs-run" style="flex:1 1 360px;min-width:0;margin:0 0 12px">{picture}<figcaption '
        f'style="overflow-wrap:anywhere"><code>{html.escape(shown(folder))}</code><br>{html.escape(said)}</figcaption>'
        "</figure>"
    )


def live_view(study: str, example: str = "") -> None:
    """Start, watch and stop a small run of a study. `example`: a run's folder, its figure where there is no kernel."""
    text = "<p>A run is started here where a kernel runs.</p>"
    if example:
        folder = ROOT / example
        try:
            text = figure(folder, next((saved.name for saved in manifest.figures(folder)), ""))
        except (RecordError, OSError) as error:
            text = view.problem(error)
        text += f"<p>What such a run gives, from <code>{html.escape(shown(folder))}</code>.</p>"
    display(view.static("live", text))
    display(LiveView(studies.load(study)).box)


class LiveView:
    """Controls, a bar, and the rows of a run, measured in a thread. css classes: bs-live, bs-live-<part or control>."""

    def __init__(self, study: Study, out: Path = OUTPUTS):
        self.study, self.out, self.run, self.thread = study, out, None, None
        self._stop = threading.Event()
        phases = [(f"{one.name}: {one.question}", name) for name, one in study.phases.items()]
        self.phase = view.choice("what", phases, next(iter(study.phases)), "a phase")
        self.controls, self._settings = {}, lambda phase, values: {}
        if study.live:
            self.controls, self._settings = pkgutil.resolve_name(study.live)()
        tips = "start this run on this machine", "end the run after the case that is being measured"
        self.start = widgets.Button(description="Start", icon="play", tooltip=tips[0], button_style="primary")
        self.stop = widgets.Button(description="Stop", icon="stop", tooltip=tips[1], button_style="warning")
        self.stop.disabled = True
        self.bar = widgets.IntProgress(min=0, max=1, layout=widgets.Layout(width="260px"))
        self.status, self.rows = widgets.HTML("Nothing runs."), widgets.HTML()
        self.start.on_click(lambda _: self.begin())
        self.stop.on_click(lambda _: self.end())
        asked = {"phase": self.phase, **self.controls}
        begun = {"start": self.start, "stop": self.stop, "bar": self.bar, "status": self.status}
        for name, part in (asked | begun | {"rows": self.rows}).items():
            part.add_class(f"bs-live-{name}")
        self.box = view.box("live", [asked.values(), begun.values()], self.rows)

    def begin(self) -> None:
        """Starts a run of seconds; until it has ended, the button does nothing."""
        self._stop.clear()
        self.run, self.rows.value, self.bar.value = None, "", 0
        self._busy(True)
        self.status.value = "starting: processes and their libraries take a few seconds"
        self.thread = threading.Thread(target=self._measure, name="live run", daemon=True)
        self.thread.start()

    def end(self) -> None:
        self._stop.set()
        self.status.value = "stopping after this case"
        self.stop.disabled = True

    def _busy(self, yes: bool) -> None:
        self.stop.disabled = not yes
        for control in (self.start, self.phase, *self.controls.values()):
            control.disabled = yes

    def _measure(self) -> None:
        # In a thread: what goes wrong must be said in the view, for nobody else would hear it.
        try:
            phase, controls = self.phase.value, {name: control.value for name, control in self.controls.items()}
            settings = self._settings(phase, controls)
            self.run = opening.open_run(f"{self.study.name}/{phase}", settings=settings, out=self.out)
            self.run.measure(progress=False, on_event=self._hear)
            said = html.escape(self.run.conclude())
            self.status.value = f"{said} · drawing notebook and page"
            workbook.draw_apart(self.run.folder)
        except Interrupted as stop:
            said = html.escape(f"interrupted: {stop}; the records so far are kept")
        except BaseException as error:
            said = view.problem(error)
        if self.run is not None:
            with contextlib.suppress(Exception):
                self._take()
            said += f" · <code>{html.escape(self.run.name)}</code>"
            said += " · no claim about speed: CPU" if self.run.params.hardware.device == "cpu" else ""
        self.status.value = said
        self._busy(False)

    def _hear(self, event: dict) -> None:
        self.bar.max, self.bar.value = event["total"], event["done"]
        self._take()
        if self._stop.is_set():
            raise Interrupted("stopped from the notebook")
        self.status.value = html.escape(f"{event['done']} of {event['total']} · {event['case']} · {event['status']}")

    def _take(self) -> None:
        order = [case.id for case in self.run.cases]
        table = view.table(live_table(records.load(self.run.folder), self.study.axes, order))
        self.rows.value = f'<div style="max-height:420px;overflow:auto">{table}</div>'


def live_table(frame: pd.DataFrame, axes: Axes, order: Sequence[str]) -> pd.DataFrame:
    """A row a case, group and method, the last measured first; `order`: ids of cases."""
    checks = frames.checks(frame).assign(at=lambda rows: rows["case"].map(order.index))
    checks = checks.sort_values(["group", "at"], ascending=False, kind="stable")
    cases = [", ".join(filter(None, (axes.case(row), row["dtype"], axes.setting(row)))) for _, row in checks.iterrows()]
    asked = checks.assign(case=cases, method=checks["method"].map(axes.label))
    return asked[["case", "group", "method", "outcome", "reason"]]
