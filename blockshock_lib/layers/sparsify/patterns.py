"""Configs of the other patterns, which kernels/patterns makes, packs and multiplies: for inference."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from blockshock_lib.errors import allowed
from blockshock_lib.kernels.patterns.pattern import empty_rows
from blockshock_lib.kernels.patterns.table import PATTERNS
from blockshock_lib.layers.pattern_linear import PatternLinear
from blockshock_lib.layers.sparsify.prune import sparsegpt, wanda


@dataclass(frozen=True, kw_only=True)
class Patterned:
    """What these configs share.

    Args:
        sparsity: the share of the weights that is left out, as near as whole units of the pattern come.
        method: "magnitude", "given" (what is not zero stays), "wanda" or "sparsegpt" (prune.py), if the pattern has it;
            SparseGPT takes the same share of each strip of columns.
        kernel: what multiplies it, one of the pattern's in kernels/patterns; "": the best that can.

    ValueError for another word, or a sparsity that is not from 0 to below 1.
    """

    methods: ClassVar[tuple[str, ...]] = ("magnitude", "given", "wanda", "sparsegpt")
    pattern: ClassVar[str]
    strip: ClassVar[int] = 128  # columns among which SparseGPT chooses, if no block says so
    block: ClassVar[int] = 0
    sparsity: float
    method: str = "magnitude"
    kernel: str = ""

    def __post_init__(self):
        if self.method not in self.methods:
            raise ValueError(f"method={self.method!r}: {allowed(self.method, self.methods)}")
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity={self.sparsity:g}: it lies from 0 to below 1")
        kernels = [kernel.name for kernel in PATTERNS[self.pattern].kernels]
        if self.kernel and self.kernel not in kernels:
            raise ValueError(f"kernel={self.kernel!r}: {allowed(self.kernel, kernels)}")

    def refuse(self, weight: Tensor) -> None:
        """UnsupportedError or ValueError where W [N, K] cannot be pruned, packed or multiplied so on its device."""
        if not bool(torch.isfinite(weight).all()):
            raise ValueError("its weight holds values that are not finite")
        PATTERNS[self.pattern].choose(weight, self.block, self.kernel)
        if self.method in ("magnitude", "given"):
            self.refuse_empty(self.kept(weight))

    def refuse_empty(self, keep: Tensor) -> None:
        if self.pattern != "rows" and (count := empty_rows(keep)):
            row = int((~keep.any(1)).nonzero()[0])
            raise ValueError(f"a sparsity of {self.sparsity:g} leaves {count} outputs without a weight, as row {row}")

    def kept(self, weight: Tensor) -> Tensor:
        """What is kept of W [N, K] without calibration."""
        return weight != 0 if self.method == "given" else self.keep(weight.abs())

    def keep(self, scores: Tensor) -> Tensor:
        return PATTERNS[self.pattern].mask(scores.contiguous(), self.sparsity, self.block)

    def layer(self, linear: nn.Linear, moments: Tensor | None = None) -> nn.Module:
        """The sparse layer; `moments` as prune.py takes them."""
        weight = linear.weight.detach()
        if self.method == "sparsegpt":
            weight, keep = sparsegpt(weight, moments, self.keep, self.block or self.strip)
        else:
            keep = self.keep(wanda(weight, moments)) if self.method == "wanda" else self.kept(weight)
        self.refuse_empty(keep)
        packed = PATTERNS[self.pattern].pack(weight, keep, self.block, self.kernel)
        return PatternLinear(packed, linear.bias, f"{self.pattern}, {1 - keep.float().mean():.3f} sparse")


@dataclass(frozen=True, kw_only=True)
class Unstructured(Patterned):
    """Any entries are left out; kernels "coo", "csr", "ust"."""

    pattern = "unstructured"


@dataclass(frozen=True, kw_only=True)
class BlockSparse(Patterned):
    """Whole square blocks are left out."""

    pattern = "blocks"
    block: int = 64


@dataclass(frozen=True, kw_only=True)
class ShuffledBlocks(BlockSparse):
    """Blocks of a weight whose rows and columns are put in another order first."""

    pattern = "shuffled blocks"
    methods = ("magnitude", "wanda")


@dataclass(frozen=True, kw_only=True)
class Sparse24InBlocks(BlockSparse):
    """2:4 inside the blocks that are kept: half of the weights or more are left out."""

    pattern = "2:4 in blocks"
    methods = ("magnitude", "wanda", "sparsegpt")


@dataclass(frozen=True, kw_only=True)
class StructuredRows(Patterned):
    """Whole outputs are left out, in whole multiples of `block`: they give the bias alone."""

    pattern, methods = "rows", ("magnitude", "given", "wanda")
    block: int = 8


@dataclass(frozen=True, kw_only=True)
class StructuredColumns(StructuredRows):
    """Whole inputs are left out."""

    pattern = "columns"
