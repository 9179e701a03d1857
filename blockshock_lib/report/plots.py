"""Every figure: records frame in, figure with alternative text (`fig.alt`) out; `show(fig)` puts it on a page.

An empty frame, or one without the rows a figure needs, gives a figure that says so. Figures of a CPU, or of one GPU
that played several ranks, say that they carry no claim about speed.
"""

from blockshock_lib.report.compare.plots import ratios
from blockshock_lib.report.figures import png, show
from blockshock_lib.report.limit.plots import limit_figure
from blockshock_lib.report.machine_plots import memory_bars, roofline
from blockshock_lib.report.mask_plots import masks_figure
from blockshock_lib.report.ratio_plots import law, ratio_heatmap
from blockshock_lib.report.time_plots import stacked, time_vs_n
from blockshock_lib.report.timeline.plots import timeline
from blockshock_lib.report.training.memory import training_memory
from blockshock_lib.report.training.plots import loss_curves, pieces_figure

__all__ = [
    "law",
    "limit_figure",
    "loss_curves",
    "masks_figure",
    "memory_bars",
    "pieces_figure",
    "png",
    "ratio_heatmap",
    "ratios",
    "roofline",
    "show",
    "stacked",
    "time_vs_n",
    "timeline",
    "training_memory",
]
