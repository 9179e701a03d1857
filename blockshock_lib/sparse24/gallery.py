"""Masks to look at and to prove: what a notebook shows of each family."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pandas as pd
import torch

from blockshock_lib.sparse24 import masks, packing, reference

if TYPE_CHECKING:
    from blockshock_lib.params import Mask


def corners(families: Iterable[Mask], size: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """name -> the first `size` x `size` entries of term 0's mask, bool."""
    return {mask.name: masks.make(mask, (size, size), weight=_weight(size, seed), seed=seed) for mask in families}


def proofs(families: Iterable[Mask], size: int = 256, seed: int = 0) -> pd.DataFrame:
    """Each family proven on a random bf16 weight [size, size], a row a family; nothing in it depends on the machine.

    Both terms are packed and unpacked again, and what is proven is what came back. Columns: complementary (every weight
    in exactly one term), sum exact (W(0) + W(1) equals W bit for bit), 2:4 along the inputs, 2:4 along the outputs, and
    the bytes of one packed term over those of the dense weight.

    Raises:
        ValueError: a family lacks what it promises: all of this, but 2:4 along the outputs only where it is
        transposable.
    """
    weight = _weight(size, seed).bfloat16()
    rows = {}
    for mask in families:
        keep = masks.make(mask, (size, size), weight=weight, seed=seed)
        packed = [reference.pack(weight, term) for term in (keep, ~keep)]
        terms = [packing.unpack(*term.data) for term in packed]
        try:
            proof = masks.require(*(term != 0 for term in terms), columns=mask.transposable)
        except ValueError as error:
            raise ValueError(f"mask {mask.name} breaks its promise: {error}") from None
        exact = torch.equal(terms[0] + terms[1], weight)
        if not exact:
            raise ValueError(f"mask {mask.name} breaks its promise: its terms do not sum to the weight")
        rows[mask.name] = {
            "complementary": _word(proof.complementary),
            "sum exact": _word(exact),
            "2:4 along inputs": _word(proof.rows_2to4),
            "2:4 along outputs": _word(proof.columns_2to4),
            "packed / dense": packed[0].nbytes / weight.untyped_storage().nbytes(),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("mask")


def _weight(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed))


def _word(yes: bool) -> str:
    return "yes" if yes else "no"
