"""Masks drawn as pixels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from blockshock_lib.report import figures, labels

TERMS = ("#0072B2", "#F0C9A8")


def masks_figure(tiles: Mapping[str, np.ndarray]) -> Figure:
    """A corner of each mask: a pixel a weight, dark where term 0 holds it, light where term 1 does; lines every four.

    Args:
        tiles: name -> bool array [rows, columns], term 0's mask (rows: outputs, columns: inputs).

    The title says that every row, and of which masks every column too, has two of four: counted from the pixels.
    """
    if not tiles:
        return figures.empty("Masks", "no mask was given")
    names = labels.ordered(tiles, labels.MASKS)
    tiles = {name: np.asarray(tiles[name], dtype=bool) for name in names}
    rows = [name for name in names if two_of_four(tiles[name])]
    both = [name for name in rows if two_of_four(tiles[name].T)]
    title = f"{_count(rows, names)} 2:4 along the inputs, {len(both)} of them along the outputs too"
    columns = min(4, len(names))
    height = -(-len(names) // columns)
    with figures.theme():
        fig = figures.canvas(
            2.15 * columns,
            2.3 * height + 0.35,
            title,
            "a pixel is a weight: rows are outputs, columns inputs; a line every four",
            f"Masks drawn as pixels: {', '.join(names)}. 2:4 along the outputs too: {', '.join(both) or 'none'}.",
        )
        axes = fig.subplots(height, columns, squeeze=False).ravel()
        for ax in axes:
            ax.set_axis_off()
        for ax, name in zip(axes, names, strict=False):
            _tile(ax, tiles[name], name)
        patches = [Patch(color=colour, label=f"term {i}") for i, colour in enumerate(TERMS)]
        fig.legend(handles=patches, loc="outside lower center", ncols=2, fontsize=9)
    return fig


def _tile(ax, tile: np.ndarray, name: str) -> None:
    ax.imshow(~tile, cmap=ListedColormap(TERMS), vmin=0, vmax=1, interpolation="nearest")
    height, width = tile.shape
    for edges, draw in ((range(1, width), ax.axvline), (range(1, height), ax.axhline)):
        for edge in edges:
            draw(edge - 0.5, color="white", linewidth=1.6 if edge % 4 == 0 else 0.35)
    ax.set_title(name, fontsize=9, loc="center", fontweight="normal")


def two_of_four(tile: np.ndarray) -> bool:
    """Whether every group of four along the last axis holds exactly two."""
    if tile.shape[1] % 4:
        return False
    return bool((tile.reshape(tile.shape[0], -1, 4).sum(axis=2) == 2).all())


def _count(found: list[str], names: list[str]) -> str:
    if len(found) == len(names):
        return f"All {len(names)} masks are" if len(names) > 1 else f"{names[0]} is"
    return f"{len(found)} of {len(names)} masks are"
