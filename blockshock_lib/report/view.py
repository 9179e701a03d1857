"""A widget view: controls and a figure that is drawn once a change; and a static figure where widgets do not run."""

import functools
import html
from collections.abc import Callable, Iterable, Mapping, Sequence

import ipywidgets as widgets
import pandas as pd
from IPython.display import HTML, display

from blockshock_lib.errors import BlockShockError, first_line


class View:
    """Controls, in `rows` of their names (default one), above the HTML that `draw` gives for their values by name,
    drawn once a change; it `keeps` so many. The widget is `box`; css classes: bs-<name>, bs-<name>-figure,
    bs-<name>-static, bs-<control>.
    """

    def __init__(
        self, name: str, controls: Mapping[str, widgets.Widget], draw: Callable[..., str], *, rows: tuple = (), keeps=64
    ):
        self.name, self.controls = name, dict(controls)
        self._draw = functools.lru_cache(keeps)(draw)
        self.figure = widgets.HTML()
        self.figure.add_class(f"bs-{name}-figure")
        for key, control in self.controls.items():
            control.add_class(f"bs-{key.replace('_', '-')}")
            control.observe(lambda _: self.refresh(), "value")
        lines = [[self.controls[key] for key in keys] for keys in rows or (tuple(self.controls),)]
        self.box = box(name, lines, self.figure)
        self.refresh()

    def refresh(self) -> None:
        """Shows the figure of the controls' values; what cannot be drawn is said in its place."""
        try:
            self.figure.value = self._draw(**{key: control.value for key, control in self.controls.items()})
        except (BlockShockError, OSError, ValueError) as error:
            self.figure.value = problem(error)

    def show(self) -> None:
        display(static(self.name, self.figure.value))
        display(self.box)

    _ipython_display_ = show


def box(name: str, lines: Iterable[Iterable[widgets.Widget]], shown: widgets.Widget) -> widgets.VBox:
    """The widget of a view: rows of controls above what they show; it hides the view's static figure."""
    # What a slider stands at, "as measured" for one, is shown whole.
    whole = f".bs-{name} .widget-readout {{ max-width: none; min-width: max-content }}"
    hide = widgets.HTML(f"<style>.bs-{name}-static {{ display: none }} {whole}</style>")
    hide.layout.display = "none"
    layout = dict(flex_flow="row wrap", align_items="center", grid_gap="2px 14px", overflow="visible")
    rows = [widgets.HBox(list(line), layout=widgets.Layout(**layout)) for line in lines]
    made = widgets.VBox([hide, *rows, shown])
    made.add_class(f"bs-{name}")
    return made


def static(name: str, body: str) -> HTML:
    """What is shown where widgets do not run; a view hides it."""
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


def _control(kind: type, description: str, tip: str, width: str, **how) -> widgets.Widget:
    look = dict(style={"description_width": "initial"}, layout=widgets.Layout(width=width))
    return kind(description=description, tooltip=tip, **look, **how)


def steps(description: str, options: Sequence, value, tip: str, width: str = "300px") -> widgets.SelectionSlider:
    """A slider over listed values; it reports when it is let go, or at each key."""
    how = dict(options=list(options), value=value, continuous_update=False)
    return _control(widgets.SelectionSlider, description, tip, width, **how)


def choice(description: str, options: Sequence, value, tip: str, width: str = "auto") -> widgets.Dropdown:
    return _control(widgets.Dropdown, description, tip, width, options=list(options), value=value)
