"""Masks to look at and to prove: what a notebook shows of each family."""

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from blockshock_lib.kernels.sparse24 import masks, packing
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.kernels.sparse24.masks import first_bad_group
from blockshock_lib.report import figures
from blockshock_lib.studies.linear.axes import AXES

TERMS = ("#0072B2", "#F0C9A8")


def corners(families: Iterable[Mask], size: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """name -> the first `size` x `size` entries of term 0's mask, bool."""
    return {mask.name: masks.make(mask, (size, size), weight=_weight(size, seed), seed=seed) for mask in families}


def proofs(families: Iterable[Mask], size: int = 256, seed: int = 0) -> pd.DataFrame:
    """Each family proven on a random bf16 weight [size, size], a row a family. Both terms are packed and unpacked
    again, and what is proven is what came back: complementary (every weight in exactly one term), sum exact, bit for
    bit, 2:4 along the inputs and, where the family is transposable, along the outputs; else ValueError.
    """
    weight, rows = _weight(size, seed).bfloat16(), {}
    for mask in families:
        keep = masks.make(mask, (size, size), weight=weight, seed=seed)
        packed = [packing.pack(weight, term) for term in (keep, ~keep)]
        terms = [packing.unpack(*term.data) for term in packed]
        kept = [term != 0 for term in terms]
        holds = {
            "complementary": bool((kept[0] != kept[1]).all()),
            "sum exact": torch.equal(terms[0] + terms[1], weight),
            "2:4 along inputs": all(first_bad_group(one) is None for one in kept),
            "2:4 along outputs": all(first_bad_group(one.t()) is None for one in kept),
        }
        if lacks := [name for name in list(holds)[: 4 if mask.transposable else 3] if not holds[name]]:
            raise ValueError(f"mask {mask.name} breaks its promise: not {', '.join(lacks)}")
        if holds["2:4 along outputs"] and not mask.transposable:  # its copies would be in no formula of memory
            raise ValueError(f"mask {mask.name} is 2:4 along the outputs too: name its family in TRANSPOSABLE")
        rows[mask.name] = {name: "yes" if held else "no" for name, held in holds.items()}
        rows[mask.name]["packed / dense"] = packed[0].nbytes / weight.untyped_storage().nbytes()
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("mask")


def _weight(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed))


def masks_figure(corners: Mapping[str, torch.Tensor]) -> Figure:
    """A pixel a weight, dark where term 0 holds it. `corners`: name -> bool [outputs, inputs], term 0's mask."""
    names = AXES.sort("mask", corners)
    rows = [name for name in names if first_bad_group(corners[name]) is None]
    both = [name for name in rows if first_bad_group(corners[name].t()) is None]
    if len(names) == 1:
        ways = "not 2:4", "2:4 along the inputs only", "2:4 along the inputs and the outputs"
        title = f"{names[0]} is {ways[len(rows) + len(both)]}"
    else:
        count = "All" if len(rows) == len(names) else f"{len(rows)} of"
        title = f"{count} {len(names)} masks are 2:4 along the inputs, {len(both)} of them along the outputs too"
    columns, side = min(4, len(names)), 4.2 if len(names) == 1 else 2.15
    height = -(-len(names) // columns)
    with figures.drawing(
        *(side * columns, (side + 0.15) * height + 0.35, title),
        "a pixel is a weight: rows are outputs, columns inputs; a line every four",
        alt=f"Masks drawn as pixels: {', '.join(names)}. 2:4 along the outputs too: {', '.join(both) or 'none'}.",
        rows=height,
        columns=columns,
    ) as (fig, grid):
        for ax in grid.ravel():
            ax.set_axis_off()
        for ax, name in zip(grid.ravel(), names, strict=False):
            ax.imshow(~corners[name].numpy(), cmap=ListedColormap(TERMS), vmin=0, vmax=1, interpolation="nearest")
            size = len(corners[name])
            for step, width in ((1, 1), (4, 3)):
                for draw in (ax.hlines, ax.vlines):
                    draw(np.arange(step, size, step) - 0.5, -0.5, size - 0.5, color=figures.PAPER, linewidth=width)
            ax.set_title(name, fontsize=9, loc="center", fontweight="normal")
        patches = [Patch(color=colour, label=f"term {i}") for i, colour in enumerate(TERMS)]
        fig.legend(handles=patches, loc="outside lower center", ncols=2, fontsize=9)
    return fig


def split_figure(weight: torch.Tensor, *terms: torch.Tensor) -> Figure:
    """A weight [outputs, inputs] and its terms side by side: a pixel a weight in the colour of its value, white: 0."""
    parts = {"W": weight, **{f"W({place})": term for place, term in enumerate(terms)}}
    total = f"W {'=' if torch.equal(sum(terms), weight) else '≠'} {' + '.join(list(parts)[1:])}"
    held = {name: f"{(term != 0).double().mean():.0%} of the weights" for name, term in parts.items()}
    with figures.drawing(
        *(1.75 * len(parts), 1.75, total, "rows are outputs, columns inputs; a colour a value, white: 0"),
        alt=f"A pixel a weight. {', '.join(f'{name} holds {share}' for name, share in held.items())}.",
        columns=len(parts),
    ) as (fig, grid):
        for ax, (name, term) in zip(grid[0], parts.items(), strict=True):
            ax.imshow(np.ma.masked_equal(term.numpy(), 0), cmap="viridis", vmin=-2.5, vmax=2.5)
            ax.set_title(f"{name}: {held[name]}", fontsize=8.5, fontweight="normal")
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set(visible=True, color=figures.FAINT)
    return fig
