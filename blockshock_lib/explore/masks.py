"""Masks, tile by tile."""

from __future__ import annotations

from blockshock_lib.explore import controls
from blockshock_lib.explore.view import View
from blockshock_lib.report import figures, tile_plots
from blockshock_lib.sparse24 import gallery


def masks_view(mask: str = "transposable_random", corner: int = 32) -> None:
    """One mask: a corner of it, which term holds each weight, and the 4x4 tiles that it is made of.

    Args:
        mask: the shipped mask that is shown first.
        corner: how many outputs and inputs are drawn, a multiple of 8.
    """
    make(mask, corner).show()


def make(mask: str = "transposable_random", corner: int = 32) -> View:
    """The view of `masks_view`, not yet displayed."""
    masks = controls.shipped_masks()

    def draw(tile_mask: str, tile_corner: int, tile_seed: int) -> str:
        keep = gallery.corners([masks[tile_mask]], tile_corner, tile_seed)[tile_mask].numpy()
        return figures.show(tile_plots.tiles_figure(keep, tile_mask)).data

    return View(
        "masks",
        {
            "tile_mask": controls.choice("mask", masks, mask, "how a weight is split into two 2:4 terms"),
            "tile_corner": controls.steps("corner", range(8, 65, 8), corner, "outputs and inputs that are drawn"),
            "tile_seed": controls.steps("seed", range(10), 0, "of the weights, and of the random masks"),
        },
        draw,
    )
