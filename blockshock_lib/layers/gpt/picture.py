"""A picture of a schedule: a lane for each sublayer's partial result, and what each later sublayer reads of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockshock_lib.layers.gpt.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = {"nothing": "#F4F4F4", "this rank's own": "#F2A65A", "the sum of all ranks": "#3F6FBF"}


def picture(schedule: Schedule) -> Axes:
    """One lane a sublayer, one column a reader, the end last; a line from where each sum starts to where it lands.
    `ax.figure` shows and saves it.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    end, steps = schedule.end, schedule.steps
    cells = [[2 if s >= step.lands else int(s >= step.own) for s in range(end + 1)] for step in steps]
    ax = Figure(figsize=(5, 5), layout="constrained").subplots()
    ax.imshow(cells, ListedColormap(list(KINDS.values())), vmin=0, vmax=2, interpolation="nearest", aspect="auto")
    for sync in schedule.syncs:
        ax.plot([sync.start + 0.5, sync.lands - 0.5], [sync.start] * 2, color="black", marker="|", markersize=7)
    ticks = range(0, end, max(2, end // 24 * 2))
    ax.set_xticks([*ticks, end], [*map(str, ticks), "end"])
    ax.set(xlabel="sublayer that reads", ylabel="sublayer that was read, even: attention, odd: MLP", yticks=ticks)
    ax.set_title(f"{schedule.name}: {len(schedule.syncs)} sums in {schedule.layers} layers", fontsize="medium")
    marks = [Patch(color=colour, label=kind) for kind, colour in KINDS.items()]
    (line,) = ax.plot([], [], color="black", marker="|", label="a sum, from start to landing")
    ax.figure.legend(handles=[*marks, line], loc="outside lower center", ncols=2, fontsize="small")
    return ax
