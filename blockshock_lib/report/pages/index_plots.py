"""The small figure of a run in the list of all runs."""

from __future__ import annotations

import io

import pandas as pd
from PIL import Image

from blockshock_lib.report import cells, figures, verdicts
from blockshock_lib.report.check_plots import check_matrix
from blockshock_lib.report.compare.changes import WORKS
from blockshock_lib.report.pages.index import Picture
from blockshock_lib.report.ratio_plots import ratio_heatmap

WIDTH = 560  # pixels: twice what the list shows, for fine screens


def picture(frame: pd.DataFrame, phase: str) -> Picture:
    """Block-Shock's speed over B1 in the widest work that the run timed, else the checks; no image without records."""
    if frame.empty:
        return Picture(alt="no figure: no records")
    metric = whole(frame)
    sides = "row_parallel", "block_shock"
    timed = phase != "phase0" and not verdicts.ratio(frame, *sides, cells.time_metric(frame, metric)).empty
    figure = ratio_heatmap(frame, *sides, metric) if timed else check_matrix(frame)
    image = Image.open(io.BytesIO(figures.png(figure))).convert("RGB")
    if image.width > WIDTH:
        image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)
    small = io.BytesIO()
    image.quantize(64, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return Picture(figure.alt, small.getvalue())


def whole(frame: pd.DataFrame) -> str:
    """The kernel time of the widest work that the frame tells of: a step, else forward + dX, else a forward."""
    known = set(frame["metric"])
    timed = [work for work in WORKS if known & {f"{work}_kernel", f"{work}_call"}]
    return f"{timed[-1] if timed else 'forward'}_kernel"
