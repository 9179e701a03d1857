"""The small figure of a run in the list of all runs."""

from __future__ import annotations

import io

import pandas as pd
from PIL import Image

from blockshock_lib.report import figures, verdicts
from blockshock_lib.report.check_plots import check_matrix
from blockshock_lib.report.index_page import Picture
from blockshock_lib.report.ratio_plots import ratio_heatmap

WIDTH = 560  # pixels: twice what the list shows, for fine screens


def picture(frame: pd.DataFrame, phase: str) -> Picture:
    """Block-Shock's speed over B1 for a phase that measures speed, else the checks; no image without records."""
    if frame.empty:
        return Picture(alt="no figure: no records")
    timed = phase != "phase0" and not verdicts.best_ratio(frame, "row_parallel", "block_shock").empty
    figure = ratio_heatmap(frame) if timed else check_matrix(frame)
    image = Image.open(io.BytesIO(figures.png(figure))).convert("RGB")
    if image.width > WIDTH:
        image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)
    small = io.BytesIO()
    image.quantize(64, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return Picture(figure.alt, small.getvalue())
