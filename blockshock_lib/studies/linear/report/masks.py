"""Masks drawn as pixels: a corner of each, and one mask with the 4x4 tiles that it is made of."""

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from blockshock_lib.report import figures
from blockshock_lib.report.figures import MUTED
from blockshock_lib.studies.linear.axes import AXES

TERMS = ("#0072B2", "#F0C9A8")
_ACROSS, _DOWN, _STEP = 4, 3, 1.55  # how many tiles are shown, and how far apart
_CELL, _WIDE = 8, 2  # subpixels of a weight, the last of them a line; and what widens every fourth line


def two_of_four(tile: np.ndarray) -> bool:
    """Whether every group of four along the last axis holds exactly two."""
    return tile.shape[1] % 4 == 0 and bool((tile.reshape(tile.shape[0], -1, 4).sum(axis=2) == 2).all())


def masks_figure(tiles: Mapping[str, np.ndarray]) -> Figure:
    """A corner of each mask: a pixel a weight, dark where term 0 holds it. `tiles`: name -> bool [outputs, inputs],
    term 0's mask. The title counts from the pixels how many masks are 2:4 along rows, and along columns too.
    """
    if not tiles:
        return figures.empty("Masks", "no mask was given")
    tiles = {name: np.asarray(tiles[name], dtype=bool) for name in AXES.sort("mask", tiles)}
    rows = [name for name, tile in tiles.items() if two_of_four(tile)]
    both = [name for name in rows if two_of_four(tiles[name].T)]
    count = f"All {len(tiles)} masks are" if len(tiles) > 1 else f"{next(iter(tiles))} is"
    if len(rows) < len(tiles):
        count = f"{len(rows)} of {len(tiles)} masks are"
    columns = min(4, len(tiles))
    height = -(-len(tiles) // columns)
    with figures.drawing(
        *(2.15 * columns, 2.3 * height + 0.35),
        f"{count} 2:4 along the inputs, {len(both)} of them along the outputs too",
        "a pixel is a weight: rows are outputs, columns inputs; a line every four",
        alt=f"Masks drawn as pixels: {', '.join(tiles)}. 2:4 along the outputs too: {', '.join(both) or 'none'}.",
        rows=height,
        columns=columns,
    ) as (fig, grid):
        for ax in grid.ravel():
            ax.set_axis_off()
        for ax, (name, tile) in zip(grid.ravel(), tiles.items(), strict=False):
            ax.imshow(~tile, cmap=ListedColormap(TERMS), vmin=0, vmax=1, interpolation="nearest")
            for size, draw in zip(tile.shape[::-1], (ax.axvline, ax.axhline), strict=True):
                for edge in range(1, size):
                    draw(edge - 0.5, color="white", linewidth=1.6 if edge % 4 == 0 else 0.35)
            ax.set_title(name, fontsize=9, loc="center", fontweight="normal")
        patches = [Patch(color=colour, label=f"term {i}") for i, colour in enumerate(TERMS)]
        fig.legend(handles=patches, loc="outside lower center", ncols=2, fontsize=9)
    return fig


def tile_counts(mask0: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """The distinct 4x4 tiles of a mask [rows, columns], bool, with how often each is there; the commonest first."""
    rows, columns = mask0.shape
    tiles = mask0.reshape(rows // 4, 4, columns // 4, 4).swapaxes(1, 2).reshape(-1, 16)
    found, first, counts = np.unique(tiles, axis=0, return_index=True, return_counts=True)
    order = sorted(range(len(found)), key=lambda i: (-counts[i], first[i]))
    return [(found[i].reshape(4, 4), int(counts[i])) for i in order]


def tiles_figure(mask0: np.ndarray, name: str) -> Figure:
    """A mask's corner, bool [outputs, inputs], multiples of 4, True (dark) in term 0, and its commonest tiles."""
    counts, total = tile_counts(mask0), mask0.size // 16
    way = f"2:4 along the inputs {'and the outputs' if two_of_four(mask0.T) else 'only'}"
    way = way if two_of_four(mask0) else "not 2:4"
    made = "one 4x4 tile repeated" if len(counts) == 1 else f"{len(counts)} different tiles in {total}"
    with figures.theme():
        outputs, inputs = mask0.shape
        subtitle = f"left: {outputs} outputs x {inputs} inputs, a pixel a weight, a line every four"
        subtitle += "; right: the commonest tiles and their share"
        alt = f"{name}: {outputs}x{inputs} weights drawn as pixels; {made}; {way}."
        fig = figures.canvas(8.2, 3.6, f"{name} is {way}: {made}", subtitle, alt)
        # Images at fixed places, with their lines drawn into the pixels: a layout with hundreds of lines is too slow
        # to follow a slider.
        width, height = fig.get_size_inches()
        fig.set_layout_engine("none")
        left = fig.add_axes((0.15 / width, 0.4 / height, 3.1 / width, 3.1 / height))
        right = fig.add_axes((3.75 / width, 0.25 / height, 4.3 / width, 3.25 / height))
        for ax in (left, right):
            ax.set_axis_off()
        colours = ListedColormap([figures.PAPER, *TERMS])
        look = dict(cmap=colours, vmin=0, vmax=2, interpolation="nearest", resample=False)
        left.imshow(_pixels(mask0), **look)
        for place, (tile, count) in enumerate(counts[: _ACROSS * _DOWN]):
            x, y = _STEP * (place % _ACROSS), _STEP * (place // _ACROSS)
            right.imshow(_pixels(tile), extent=(x, x + 1, y + 1, y), **look)
            right.text(x + 0.5, y - 0.07, f"{100 * count / total:.3g}%", ha="center", va="bottom", fontsize=8.5)
        right.set(xlim=(-0.05, _STEP * _ACROSS), ylim=(_STEP * _DOWN - 0.4, -0.3), aspect="equal")
        patches = [Patch(color=colour, label=f"held by term {i}") for i, colour in enumerate(TERMS)]
        fig.legend(handles=patches, loc="lower left", ncols=2, fontsize=8.5)
        if (rest := len(counts) - _ACROSS * _DOWN) > 0:
            fig.text(0.99, 0.02, f"and {rest} more", ha="right", fontsize=8.5, color=MUTED)
    return fig


def _pixels(mask0: np.ndarray) -> np.ndarray:
    """uint8 image: 0 for a line, 1 where term 0 holds the weight, 2 where term 1 does."""
    values = np.where(mask0, 1, 2).astype(np.uint8)
    large = values.repeat(_CELL, 0).repeat(_CELL, 1)
    for axis, size in enumerate(mask0.shape):
        thin = np.arange(size * _CELL) % _CELL == _CELL - 1
        large[thin if axis == 0 else (slice(None), thin)] = 0
        large = np.insert(large, np.repeat(np.arange(1, size // 4) * 4 * _CELL, _WIDE), 0, axis)
    return large
