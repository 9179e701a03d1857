"""A small run on this machine, started from the notebook, whose rows arrive while it goes."""

from __future__ import annotations

import contextlib
import html
import threading
from pathlib import Path

import ipywidgets as widgets
from IPython.display import display

from blockshock_lib import records, run
from blockshock_lib.errors import BlockShockError, Interrupted, RecordError
from blockshock_lib.explore import controls, saved
from blockshock_lib.explore.view import problem, static
from blockshock_lib.manifest import ROOT, shown
from blockshock_lib.report import labels
from blockshock_lib.report.time_plots import milliseconds

PHASES = {
    "time it (phase 1)": "phase1",
    "check it (phase 0)": "phase0",
    "forward + dX (phase 2)": "phase2",
    "train it (phase 3)": "phase3",
}
_HEAD = ("case", "group", "method", "check", "largest error, of the baseline's", "call, median")
_CALLS = {"step_call": "step", "pass_call": "forward + dX", "forward_call": "forward"}  # the widest one is shown


def live_view(example: str = "outputs/reference/phase1-cpu") -> None:
    """Start a small run on this machine, watch its rows arrive, and stop it.

    Args:
        example: folder of the run whose figure stands for one where there is no kernel to run anything.
    """
    display(static("live", _example(ROOT / example)))
    display(LiveView().box)


def _example(folder: Path) -> str:
    try:
        figure = saved.figure(folder, "stacked")
    except BlockShockError as error:
        figure = problem(error)
    return f"{figure}<p>What such a run gives, from <code>{html.escape(shown(folder))}</code>.</p>"


class LiveView:
    """Controls, a bar, and the rows of one run after the other; measuring goes on in a thread, so the kernel answers.

    css classes: bs-live, bs-live-phase, bs-live-n, bs-live-b, bs-live-mask, bs-live-start, bs-live-stop, bs-live-bar,
    bs-live-status, bs-live-rows (each row of its table: bs-row).

    Attributes:
        box: the widget.
        run: the run that goes on, or the last one; None before the first.
        thread: measures; None before the first run.
    """

    def __init__(self, out: Path | None = None):
        self.out, self.run, self.thread = out, None, None
        self._stop, self._rows, self._read = threading.Event(), [], set()
        masks = controls.shipped_masks()
        self.phase = widgets.ToggleButtons(
            options=PHASES,
            description="what",
            tooltips=[
                "time and check every method",
                "check every method and mask",
                "check and time the forward and the gradient of the input",
                "check and time training steps of every method",
            ],
        )
        self.n = controls.steps("N (in = out)", controls.SMALL, 256, "in and out features")
        self.b = controls.steps("B", (16, 64, 256), 256, "rows of the input; 16 and 64 are run too in phase 1", "240px")
        self.mask = controls.choice("mask", masks, "checkerboard", "of a timed run; a check runs all masks", "230px")
        self.start = controls.button("Start", "play", "start this run on this machine", "primary")
        self.stop = controls.button("Stop", "stop", "end the run after the case that is being measured", "warning")
        self.stop.disabled = True
        self.bar = widgets.IntProgress(min=0, max=1, layout=widgets.Layout(width="260px"))
        self.status, self.rows = widgets.HTML("Nothing runs."), widgets.HTML()
        self.start.on_click(lambda _: self.begin())
        self.stop.on_click(lambda _: self.end())
        for name in ("phase", "n", "b", "mask", "start", "stop", "bar", "status", "rows"):
            getattr(self, name).add_class(f"bs-live-{name}")
        hide = widgets.HTML("<style>.bs-live-static { display: none }</style>")
        hide.layout.display = "none"
        line = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 14px", overflow="visible")
        asked = widgets.HBox([self.phase, self.n, self.b, self.mask], layout=line)
        begun = widgets.HBox([self.start, self.stop, self.bar, self.status], layout=line)
        self.box = widgets.VBox([hide, asked, begun, self.rows])
        self.box.add_class("bs-live")

    @property
    def settings(self) -> dict[str, object]:
        """What `open_run` is asked for: a run of seconds."""
        small = {"sweep.n": [self.n.value], "layers.workload": "gaussian"}
        if self.phase.value == "phase0":
            return small | {"sweep.b": [self.b.value]}
        batches = {16, 64, self.b.value} if self.phase.value == "phase1" else {self.b.value}
        quick = {"layers.mask": self.mask.value, "timing.groups": 1, "timing.samples": 8, "profile": "none"}
        return small | {"sweep.b": sorted(batches)} | quick

    def begin(self) -> None:
        """Starts a run, unless one goes on."""
        if self.thread is not None and self.thread.is_alive():
            return
        self._stop.clear()
        self.run, self._rows, self._read = None, [], set()
        self.rows.value, self.bar.value = "", 0
        self._busy(True)
        self.status.value = "starting: processes and their libraries take a few seconds"
        self.thread = threading.Thread(target=self._go, name="live run", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Asks the run to end; the case that is being measured is finished first."""
        self._stop.set()
        self.status.value = "stopping after this case"
        self.stop.disabled = True

    def _busy(self, yes: bool) -> None:
        self.start.disabled, self.stop.disabled = yes, not yes
        for control in (self.phase, self.n, self.b, self.mask):
            control.disabled = yes

    def _go(self) -> None:
        # In a thread: what goes wrong must be said in the view, for nobody else would hear it.
        try:
            self.run = run.open_run(self.phase.value, settings=self.settings, **({"out": self.out} if self.out else {}))
            self.run.measure(progress=False, on_event=self._hear)
            self._say(html.escape(self.run.conclude()))
        except Interrupted as stop:
            self._take()
            self._say(html.escape(f"interrupted: {stop}; the records so far are kept"))
        except BaseException as error:
            with contextlib.suppress(Exception):
                self._take()
            self._say(problem(error))
        finally:
            self._busy(False)

    def _say(self, text: str) -> None:
        parts = [text]
        if self.run is not None:
            parts.append(f"<code>{html.escape(self.run.name)}</code>")
            if self.run.params.hardware.device == "cpu":
                parts.append("no claim about speed: CPU")
        self.status.value = " · ".join(parts)

    def _hear(self, event: dict) -> None:
        """One of launch.run's events, on the measuring thread."""
        self.bar.max, self.bar.value = event["total"], event["done"]
        self._take()
        if self._stop.is_set():
            raise Interrupted("stopped from the notebook")
        self.status.value = html.escape(f"{event['done']} of {event['total']} · {event['case']} · {event['status']}")

    def _take(self) -> None:
        """Adds the rows of the records that came since."""
        if self.run is None:
            return
        new = [path for path in (self.run.folder / "records").glob("*.json") if path.name not in self._read]
        for path in sorted(new, key=lambda path: path.stat().st_mtime_ns):
            with contextlib.suppress(RecordError):
                self._rows += record_rows(records.read(path))
            self._read.add(path.name)
        if new:
            self.rows.value = rows_table(self._rows)


def record_rows(record: dict) -> list[tuple[str, ...]]:
    """A record as the live table shows it: a row a method, in the order of _HEAD; a failed check has no time."""
    case = record["case"]
    what = f"{case['out_features']}x{case['in_features']} B={case['batch']} {case['dtype']} {case['mask']['name']}"
    what += f" {labels.optimizer(case['optimizer'])}" if case.get("optimizer") else ""
    found = []
    for method in case["methods"]:
        rows = [row for row in record["rows"] if row["method"] == method]
        bad = [row for row in rows if row["status"] != "ok" and row["metric"] == "check"]
        passed = any(row["metric"] == "check" and row["status"] == "ok" and row["value"] == 1 for row in rows)
        error = [row["value"] for row in rows if row["metric"] == "error_max_ratio" and row["status"] == "ok"]
        calls = {metric: [] for metric in _CALLS}
        for row in rows:
            if row["metric"] in calls and row["status"] == "ok":
                calls[row["metric"]].append(row["value"])
        metric, times = next(((name, sorted(found)) for name, found in calls.items() if found), ("", []))
        good = passed and not bad
        word = "pass" if good else f"{bad[0]['status']}: {bad[0]['reason']}" if bad else "no check"
        found.append(
            (
                what,
                str(record["group"]),
                labels.label(method),
                word,
                f"{max(error):.2f}x" if error else "",
                f"{_CALLS[metric]} {milliseconds(times[len(times) // 2])}" if good and times else "",
            )
        )
    return found


def rows_table(rows: list[tuple[str, ...]]) -> str:
    """The live table, newest rows first; all text is escaped."""
    head = "".join(f'<th style="text-align:left">{name}</th>' for name in _HEAD)
    body = "".join(
        '<tr class="bs-row">' + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>"
        for row in reversed(rows)
    )
    style = "max-height:420px;overflow:auto"
    return f'<div style="{style}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
