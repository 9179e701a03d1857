"""What if the 2:4 kernel, the link or the compression were faster: the measured ratios, moved by sliders."""

from __future__ import annotations

import math

import pandas as pd

from blockshock_lib.explore import controls
from blockshock_lib.explore.view import View
from blockshock_lib.report import figures
from blockshock_lib.report.findings import plots
from blockshock_lib.report.findings.needs import Parts, what_if

SPEEDS = {"as measured": 0.0} | {f"{s:g}": s for s in (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0)}
LINKS = {"as measured": 0.0} | {f"{gbs}": float(gbs) for gbs in (25, 50, 100, 200, 400, 900)} | {"free": math.inf}
FACTORS = {"free": 0.0, "x 0.1": 0.1, "x 0.25": 0.25, "x 0.5": 0.5, "as measured": 1.0, "x 2": 2.0}


def what_if_view(frame: pd.DataFrame, s: float = 2.0) -> None:
    """Block-Shock's speed over B1 in every measured case, with another s, link or compress time.

    Args:
        frame: records of phase 1, and of phase 3 for the training step.
        s: of the static figure: speed of the 2:4 product over the dense one, one of SPEEDS.
    """
    make(frame, s).show()


def make(frame: pd.DataFrame, s: float = 2.0) -> View:
    """The view of `what_if_view`, not yet displayed."""
    parts = Parts.of(frame)

    def draw(s: float, link: float, compress: float) -> str:
        words = [f"{name} {text(value)}" for name, value, text in zip(_NAMES, (s, link, compress), _TEXTS, strict=True)]
        return figures.show(plots.what_if(what_if(parts, s, link, compress), ", ".join(words))).data

    found = {
        "s": controls.steps("s", SPEEDS.items(), s, "speed of the 2:4 product over the dense one of its size"),
        "link": controls.steps("link (GB/s)", LINKS.items(), 0.0, "bus bandwidth of every all-reduce"),
        "compress": controls.steps("T1's compress time", FACTORS.items(), 1.0, "only in training that recompresses"),
    }
    return View("what-if", found, draw)


def _named(options: dict[str, float]):
    words = {value: text for text, value in options.items()}
    return lambda value: words[value]


_NAMES = ("s", "link (GB/s)", "compress time")
_TEXTS = (_named(SPEEDS), _named(LINKS), _named(FACTORS))
