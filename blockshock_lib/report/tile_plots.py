"""One mask tile by tile: a corner of it as both terms hold it, and the 4x4 tiles that it is made of."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from blockshock_lib.report import figures, mask_plots
from blockshock_lib.report.figures import MUTED

_ACROSS, _DOWN = 4, 3
_CELL, _WIDE = 8, 2  # subpixels of a weight, the last of them a line; and what widens every fourth line


def tile_counts(keep: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """The distinct 4x4 tiles of a mask [rows, columns], bool, with how often each is there; the commonest first."""
    rows, columns = keep.shape
    tiles = keep.reshape(rows // 4, 4, columns // 4, 4).swapaxes(1, 2).reshape(-1, 16)
    found, first, counts = np.unique(tiles, axis=0, return_index=True, return_counts=True)
    order = sorted(range(len(found)), key=lambda i: (-counts[i], first[i]))
    return [(found[i].reshape(4, 4), int(counts[i])) for i in order]


def tiles_figure(keep: np.ndarray, name: str) -> Figure:
    """A mask's corner, dark where term 0 holds the weight, and its commonest tiles with their share.

    Args:
        keep: bool [rows, columns], multiples of 4; rows are outputs, columns inputs; True where term 0 holds it.
        name: of the mask.
    """
    keep = np.asarray(keep, dtype=bool)
    if keep.size == 0 or keep.shape[0] % 4 or keep.shape[1] % 4:
        return figures.empty(f"{name}, tile by tile", "both sides of a mask's corner must be multiples of four")
    counts = tile_counts(keep)
    total = keep.size // 16
    both = mask_plots.two_of_four(keep) and mask_plots.two_of_four(keep.T)
    way = "2:4 along the inputs and the outputs" if both else "2:4 along the inputs only"
    made = "one 4x4 tile repeated" if len(counts) == 1 else f"{len(counts)} different tiles in {total}"
    with figures.theme():
        fig = figures.canvas(
            8.2,
            3.6,
            f"{name} is {way if mask_plots.two_of_four(keep) else 'not 2:4'}: {made}",
            f"left: {keep.shape[0]} outputs x {keep.shape[1]} inputs, a pixel a weight, a line every four; right: the "
            "commonest tiles and their share",
            f"{name}: {keep.shape[0]}x{keep.shape[1]} weights drawn as pixels; {made}; {way}.",
        )
        # Images at fixed places, with their lines drawn into the pixels: a layout with hundreds of lines is too slow
        # to follow a slider.
        width, height = fig.get_size_inches()
        fig.set_layout_engine("none")
        left = fig.add_axes((0.15 / width, 0.4 / height, 3.1 / width, 3.1 / height))
        right = fig.add_axes((3.75 / width, 0.25 / height, 4.3 / width, 3.25 / height))
        for ax in (left, right):
            ax.set_axis_off()
        colours = ListedColormap([figures.PAPER, *mask_plots.TERMS])
        look = dict(cmap=colours, vmin=0, vmax=2, interpolation="nearest", resample=False)
        left.imshow(_pixels(keep), **look)
        step = 1.55
        for place, (tile, count) in enumerate(counts[: _ACROSS * _DOWN]):
            x, y = step * (place % _ACROSS), step * (place // _ACROSS)
            right.imshow(_pixels(tile), extent=(x, x + 1, y + 1, y), **look)
            right.text(x + 0.5, y - 0.07, f"{100 * count / total:.3g}%", ha="center", va="bottom", fontsize=8.5)
        right.set(xlim=(-0.05, step * _ACROSS), ylim=(step * _DOWN - 0.4, -0.3), aspect="equal")
        patches = [Patch(color=colour, label=f"held by term {i}") for i, colour in enumerate(mask_plots.TERMS)]
        fig.legend(handles=patches, loc="lower left", ncols=2, fontsize=8.5)
        if len(counts) > _ACROSS * _DOWN:
            rest = len(counts) - _ACROSS * _DOWN
            fig.text(0.99, 0.02, f"and {rest} more", ha="right", fontsize=8.5, color=MUTED)
    return fig


def _pixels(keep: np.ndarray) -> np.ndarray:
    """uint8 image: 0 for a line, 1 where term 0 holds the weight, 2 where term 1 does."""
    values = np.where(keep, 1, 2).astype(np.uint8)
    large = values.repeat(_CELL, 0).repeat(_CELL, 1)
    for axis, size in enumerate(keep.shape):
        thin = np.arange(size * _CELL) % _CELL == _CELL - 1
        large[thin if axis == 0 else (slice(None), thin)] = 0
        large = np.insert(large, np.repeat(np.arange(1, size // 4) * 4 * _CELL, _WIDE), 0, axis)
    return large
