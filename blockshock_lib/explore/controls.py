"""The controls of the views. Each has a description and a tooltip, and works with the arrow keys once it has focus."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets

from blockshock_lib import params
from blockshock_lib.params import Mask
from blockshock_lib.report import labels

# Multiples of 512, which every method can split over eight ranks.
SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 40960)
BATCHES = (1, 4, 16, 64, 256, 1024, 4096)
SMALL = (128, 256, 512, 1024)
_STYLE = {"description_width": "initial"}


def steps(description: str, options: Sequence, value, tip: str, width: str = "300px") -> widgets.SelectionSlider:
    """A slider over listed values; it reports when it is let go, or at each key."""
    return widgets.SelectionSlider(
        options=list(options),
        value=value,
        description=description,
        tooltip=tip,
        continuous_update=False,
        style=_STYLE,
        layout=widgets.Layout(width=width),
    )


def choice(description: str, options: Sequence, value, tip: str, width: str = "auto") -> widgets.Dropdown:
    """One of several, by arrow keys or by its first letters."""
    return widgets.Dropdown(
        options=list(options),
        value=value,
        description=description,
        tooltip=tip,
        style=_STYLE,
        layout=widgets.Layout(width=width),
    )


def check(description: str, value: bool, tip: str) -> widgets.Checkbox:
    return widgets.Checkbox(
        value=value, description=description, tooltip=tip, indent=False, layout=widgets.Layout(width="auto")
    )


def button(description: str, icon: str, tip: str, style: str = "") -> widgets.Button:
    return widgets.Button(description=description, icon=icon, tooltip=tip, button_style=style)


def shipped_masks() -> dict[str, Mask]:
    """name -> every mask of params/masks, in the order of all tables."""
    names = labels.ordered((path.stem for path in (params.PARAMS / "masks").glob("*.yaml")), labels.MASKS)
    return {name: Mask.named(name) for name in names}
