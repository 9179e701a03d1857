"""A picture of a pattern: the blocks that are visited."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from blockshock_lib.kernels.attention.pattern import Pattern

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 256  # cells a side, fewer than pixels: none is lost in drawing
KINDS = {"not visited": "#F4F4F4", "partial": "#F2A65A", "full": "#3F6FBF"}


def picture(pattern: Pattern, length: int, block: int = 128, batch: int = 0, head: int = 0) -> Axes:
    """The blocks that one head visits, drawn; `ax.figure` shows and saves it. The map of blocks is made whole, a byte
    for each; of more than 256 a side, a cell shows several, as the one that sees most. ValueError as of `lists`.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    for name, place, count in (("batch", batch, len(pattern.plane)), ("head", head, len(pattern.plane[0]))):
        if count > 1 and place not in range(count):  # what is shared is that of any
            raise ValueError(f"{name} lies between 0 and {count - 1} in this pattern, not at {place}")
    cells = pattern.lists(length, block=block).map(pattern.plane_of(batch, head))
    step, visited = -(-len(cells) // MOST), (cells > 0).double().mean().item()
    cells = F.max_pool2d(cells[None].float(), step, ceil_mode=True)[0]
    side = len(cells) * step * block  # the last cell may reach beyond the last position
    ax = Figure(figsize=(5, 5), layout="constrained").subplots()
    colours = ListedColormap(list(KINDS.values()))
    ax.imshow(cells.numpy(), colours, vmin=0, vmax=2, interpolation="nearest", extent=(0, side, side, 0))
    ax.set(xlabel="key", ylabel="query", xlim=(0, length), ylim=(length, 0))
    each = f"{step} x {step} blocks of {block}" if step > 1 else f"a block of {block}"
    ax.set_title(f"{visited:.1%} of blocks visited; a cell is {each}", fontsize="medium")
    patches = [Patch(color=colour, label=kind) for kind, colour in KINDS.items()]
    ax.figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize="small")
    return ax
