"""Masks to look at and to prove: what a notebook shows of each family."""

from collections.abc import Iterable

import pandas as pd
import torch

from blockshock_lib.kernels.sparse24 import masks, packing
from blockshock_lib.kernels.sparse24.mask import Mask


def corners(families: Iterable[Mask], size: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """name -> the first `size` x `size` entries of term 0's mask, bool."""
    return {mask.name: masks.make(mask, (size, size), weight=_weight(size, seed), seed=seed) for mask in families}


def proofs(families: Iterable[Mask], size: int = 256, seed: int = 0) -> pd.DataFrame:
    """Each family proven on a random bf16 weight [size, size], a row a family; nothing in it depends on the machine.

    Both terms are packed and unpacked again, and what is proven is what came back: complementary (every weight in
    exactly one term), sum exact (W(0) + W(1) equals W bit for bit), 2:4 along the inputs and, where the family is
    transposable, along the outputs. Raises ValueError where a family lacks what it promises.
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
            "2:4 along inputs": all(masks.first_bad_group(one) is None for one in kept),
            "2:4 along outputs": all(masks.first_bad_group(one.t()) is None for one in kept),
        }
        if lacks := [name for name in list(holds)[: 4 if mask.transposable else 3] if not holds[name]]:
            raise ValueError(f"mask {mask.name} breaks its promise: not {', '.join(lacks)}")
        rows[mask.name] = {name: "yes" if held else "no" for name, held in holds.items()}
        rows[mask.name]["packed / dense"] = packed[0].nbytes / weight.untyped_storage().nbytes()
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("mask")


def _weight(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
