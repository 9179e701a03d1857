"""Figures of saved runs, side by side."""

from __future__ import annotations

import html
import threading
from pathlib import Path

import ipywidgets as widgets

from blockshock_lib import manifest
from blockshock_lib.errors import BlockShockError, RecordError
from blockshock_lib.explore import controls, saved
from blockshock_lib.explore.view import View, problem
from blockshock_lib.manifest import ROOT, shown

MOST = 4  # runs side by side
_WAIT = "<p><i>drawing this run from its records …</i></p>"


def runs_view(*folders: str, figure: str = "speed over B1") -> None:
    """Any saved runs, their figures side by side.

    Args:
        folders: of the runs that are shown first, relative to the project; default the two newest.
        figure: one of saved.FIGURES.
    """
    RunsView(folders, figure).show()


class RunsView(View):
    """The view of `runs_view`, not yet displayed.

    A figure that must be drawn from many records takes longer than a control may wait: it is drawn beside, and shown
    when it is there.

    Attributes:
        thread: draws what is still missing; None before the first.
    """

    keeps = 0  # saved.figure keeps each run's; one that is still to come must not be kept

    def __init__(self, folders: tuple[str, ...] = (), figure: str = "speed over B1", out: Path | None = None):
        self.out, self.thread = out, None
        found = saved.runs(out)
        chosen = [ROOT / folder for folder in folders] or list(found.values())[:2]
        if missing := [folder for folder in chosen if folder not in found.values()]:
            raise RecordError(f"{shown(missing[0])} is no run under the outputs")
        self._select = widgets.SelectMultiple(
            options=list(found.items()),
            value=[folder for folder in found.values() if folder in chosen],
            rows=min(8, max(3, len(found))),
            description="runs",
            tooltip=f"up to {MOST}: Shift or Ctrl with the arrow keys or a click picks several",
            layout=widgets.Layout(width="98%"),
        )
        what = controls.choice(
            "figure", saved.FIGURES.items(), saved.FIGURES[figure], "what is shown of each run", "260px"
        )
        super().__init__("runs", {"runs_list": self._select, "runs_what": what}, self._side_by_side)
        again = controls.button("look again", "refresh", "list the runs that came since")
        again.add_class("bs-runs-refresh")
        again.on_click(lambda _: self.look_again())
        self.box.children = (*self.box.children[:-1], again, self.figure)

    def look_again(self) -> None:
        """Lists the runs that came since; those that were picked stay picked."""
        kept, fresh = self._select.value, saved.runs(self.out)
        with self.held():
            self._select.options = list(fresh.items())
            self._select.value = [folder for folder in kept if folder in fresh.values()]

    def _side_by_side(self, runs_list: tuple[Path, ...], runs_what: str) -> str:
        some = runs_list[:MOST]
        first = self.drawn == 1  # the static figure is whole from the start
        bodies = {folder: _body(folder, runs_what, draw=first) for folder in some}
        late = [folder for folder, body in bodies.items() if body is None]
        if late:
            self.thread = threading.Thread(target=self._draw_late, args=(late, self.values), daemon=True)
            self.thread.start()
        return _page(bodies, len(runs_list))

    def _draw_late(self, late: list[Path], asked: dict) -> None:
        for folder in late:
            if self.values != asked:
                return  # something else is asked for by now
            _body(folder, asked["runs_what"], draw=True)
        some = asked["runs_list"][:MOST]
        bodies = {folder: _body(folder, asked["runs_what"], draw=True) for folder in some}
        if self.values == asked:
            self.figure.value = _page(bodies, len(asked["runs_list"]))


def _body(folder: Path, what: str, *, draw: bool) -> str | None:
    try:
        return saved.figure(folder, what) if draw else saved.at_hand(folder, what)
    except (BlockShockError, OSError, ValueError) as error:
        return problem(error)


def _page(bodies: dict[Path, str | None], picked: int) -> str:
    if not bodies:
        return "<p>Pick a run in the list.</p>"
    parts = [
        f'<figure class="bs-run" style="flex:1 1 360px;min-width:0;margin:0 0 12px">{body or _WAIT}'
        f'<figcaption style="overflow-wrap:anywhere">{_caption(folder)}</figcaption></figure>'
        for folder, body in bodies.items()
    ]
    more = f"<p>{picked - MOST} more are picked; {MOST} are shown.</p>" if picked > MOST else ""
    return f'<div style="display:flex;flex-wrap:wrap;gap:8px 20px">{"".join(parts)}</div>{more}'


def _caption(folder: Path) -> str:
    try:
        m = manifest.read(folder)
    except RecordError as error:
        return html.escape(str(error))
    facts = (m["started"][:16].replace("T", " "), m["phase"], m["machine"]["title"], m.get("verdict") or m["status"])
    return f"<code>{html.escape(shown(folder))}</code><br>{html.escape(' · '.join(map(str, facts)))}"
