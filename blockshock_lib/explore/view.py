"""A widget view: controls, and a figure that is drawn once a change; and the static figure that stands before it."""

from __future__ import annotations

import contextlib
import functools
import gc
import html
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import ipywidgets as widgets
import pandas as pd
from IPython.display import HTML, display

from blockshock_lib.errors import BlockShockError, first_line

# matplotlib's settings of a drawing are global while it lasts: drawings in two threads take turns.
DRAWING = threading.RLock()


class View:
    """Controls above a figure, an HTML text.

    A change of any control draws once; a slider reports when it is let go, not while it is dragged. What was drawn
    before is shown again without drawing.

    Attributes:
        name: css classes are bs-<name> (the whole), bs-<name>-figure, bs-<name>-static, and bs-<control> for a control.
        box: the widget.
        drawn: how many times the figure was drawn, the first included.
        seconds: how long the last drawing took.
    """

    keeps = 64  # drawings that are remembered

    def __init__(
        self, name: str, controls: Mapping[str, widgets.Widget], draw: Callable[..., str], *, rows: tuple = ()
    ):
        """Args: draw: called with every control's value by name; gives HTML. rows: names of controls, a tuple a row;
        default all in one row.
        """
        _spare_what_is_imported()
        self.name, self.controls, self._draw = name, dict(controls), draw
        self.drawn, self.seconds, self._held = 0, 0.0, False
        self._memory: dict[tuple, str] = {}
        self.figure = widgets.HTML()
        self.figure.add_class(f"bs-{name}-figure")
        for key, control in self.controls.items():
            control.add_class(f"bs-{key.replace('_', '-')}")
            control.observe(self._changed, "value")
        lines = [self._row(names) for names in rows or (tuple(self.controls),)]
        hide = widgets.HTML(f"<style>.bs-{name}-static {{ display: none }}</style>")
        hide.layout.display = "none"
        self.box = widgets.VBox([hide, *lines, self.figure])
        self.box.add_class(f"bs-{name}")
        self.refresh()

    def _row(self, names: tuple[str, ...]) -> widgets.HBox:
        layout = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 14px", overflow="visible")
        return widgets.HBox([self.controls[name] for name in names], layout=layout)

    @property
    def values(self) -> dict:
        """Every control's value by name."""
        return {key: control.value for key, control in self.controls.items()}

    def _changed(self, _change: dict) -> None:
        if not self._held:
            self.refresh()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Several controls are set, and the figure is drawn once at the end."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.refresh()

    def refresh(self) -> None:
        """Shows the figure of the controls' values; what cannot be drawn is said in its place."""
        values = self.values
        key = tuple(values.values())
        text = self._memory.get(key)
        if text is None:
            start = time.perf_counter()
            self.drawn += 1
            try:
                with DRAWING:
                    text = self._draw(**values)
            except (BlockShockError, OSError, ValueError) as error:
                self.figure.value = problem(error)
                return
            self.seconds = time.perf_counter() - start
            self._memory[key] = text
            while len(self._memory) > self.keeps:
                self._memory.pop(next(iter(self._memory)))
        self.figure.value = text

    def show(self) -> None:
        """Displays the static figure, then the view."""
        display(static(self.name, self.figure.value))
        display(self.box)


@functools.cache
def _spare_what_is_imported() -> None:
    # Pandas, torch and matplotlib are some million objects that stay. Searched for garbage they hold up one change in
    # twenty by 0.15 s.
    gc.collect()
    gc.freeze()


def static(name: str, body: str) -> HTML:
    """What stands before a view, and says everything where the view cannot."""
    return HTML(f'<div class="bs-static bs-{name}-static">{body}</div>')


def problem(error: BaseException) -> str:
    """An error as it is shown inside a view: its first line, and all of it behind a fold."""
    whole = html.escape(str(error).strip())
    more = f"<details><summary>all of it</summary><pre>{whole}</pre></details>" if "\n" in whole else ""
    kind = "" if isinstance(error, BlockShockError) else f"{type(error).__name__}: "
    return f'<div class="bs-error" role="alert"><b>{html.escape(kind + first_line(error))}</b>{more}</div>'


def table(frame: pd.DataFrame, caption: str = "") -> str:
    """A frame as an HTML table; its text is escaped."""
    body = frame.to_html(index=False, border=0, na_rep="", justify="left")
    for cell in ("<th>", "<td>"):
        body = body.replace(cell, f'{cell[:-1]} style="padding:3px 14px 3px 0;text-align:left">')
    note = f"<caption style='caption-side:top;text-align:left'>{html.escape(caption)}</caption>" if caption else ""
    return f'<div style="overflow-x:auto">{body.replace("<thead>", f"{note}<thead>", 1)}</div>'
