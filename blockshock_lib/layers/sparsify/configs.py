"""How a weight is pruned, and what multiplies it then: one frozen class a pattern."""

from dataclasses import dataclass
from numbers import Integral, Real
from typing import ClassVar

import torch
from torch import Tensor, nn

from blockshock_lib.errors import UnsupportedError, allowed
from blockshock_lib.kernels.patterns import eight_bits, shuffled, two_four
from blockshock_lib.kernels.patterns.pattern import empty_rows
from blockshock_lib.kernels.patterns.table import PATTERNS
from blockshock_lib.kernels.sparse24.backends import BACKENDS, choose
from blockshock_lib.layers.linear24 import Linear24, nonzero_places
from blockshock_lib.layers.pattern_linear import PatternLinear, linear_of
from blockshock_lib.layers.sparsify.prune import COLUMNS, sparsegpt, wanda

CALIBRATED = ("wanda", "sparsegpt")


class Config:
    """What all configs share, beside `keep`: scores [N, K] -> what is kept, bool [N, K]; and `layer`: an nn.Linear and
    its moments, as prune.py takes them -> the sparse layer.

    Attributes:
        method: "magnitude" keeps the larger; "given": the weight is pruned already, and what is not zero stays; "wanda"
            and "sparsegpt" (prune.py) ask what the layers are given in calibration.
        strip: columns among which SparseGPT chooses.
    """

    methods: ClassVar[tuple[str, ...]] = ("magnitude", "given", *CALIBRATED)
    method: str
    strip: ClassVar[int]

    @staticmethod
    def one(config: object) -> None:
        """ValueError where that is none."""
        if not isinstance(config, Config):
            known = "Sparse24(), Unstructured(sparsity=...), BlockSparse(sparsity=...) and the like"
            raise ValueError(f"config is one of {known}, made with its options, not {config!r}")

    def allow(self, **words: tuple[str, tuple[str, ...]]) -> None:
        for what, (given, known) in ({"method": (self.method, self.methods)} | words).items():
            if given not in known:
                raise ValueError(f"{what}={given!r}: {allowed(given, known)}")

    def refuse(self, weight: Tensor) -> None:
        """UnsupportedError or ValueError where W [N, K] cannot be pruned, packed or multiplied so on its device."""
        if not weight.numel():
            raise ValueError("its weight is empty")
        if not bool(torch.isfinite(weight).all()):
            raise ValueError("its weight holds values that are not finite")

    def kept(self, weight: Tensor) -> Tensor:
        """What is kept of W [N, K] without calibration."""
        return weight != 0 if self.method == "given" else self.keep(weight.abs())

    def pruned(self, weight: Tensor, moments: Tensor | None) -> tuple[Tensor, Tensor]:
        """(W [N, K], of which only what is kept counts, and that, bool [N, K])."""
        if self.method == "sparsegpt":
            return sparsegpt(weight, moments, self.keep, self.strip)
        return weight, self.keep(wanda(weight, moments)) if self.method == "wanda" else self.kept(weight)


@dataclass(frozen=True)
class Sparse24(Config):
    """Two of each four neighbours along the inputs are kept, packed, and multiplied as `Linear24` does.

    Args:
        method: as above.
        product: the 2:4 backend, "auto" or one of kernels.sparse24.backends.BACKENDS.
        frozen: for inference. False: the packed values are trained, as Linear24's with update="packed".
        dtype: "float8_e4m3fn" or "int8": the kept weights of 8 bits with a scale an output, for inputs that are
            quantized in each call, by kernels/patterns/eight_bits.py; "": the weight's own.

    ValueError for another word, or 8 bits with another `product` or trained.
    """

    strip = 4
    method: str = "magnitude"
    product: str = "auto"
    frozen: bool = True
    dtype: str = ""

    def __post_init__(self):
        self.allow(product=(self.product, ("auto", *BACKENDS)), dtype=(self.dtype, ("", *eight_bits.DTYPES)))
        if self.dtype and not (self.frozen and self.product == "auto"):
            raise ValueError(f'dtype={self.dtype!r} is for inference: it takes frozen=True and product="auto"')

    def refuse(self, weight: Tensor) -> None:
        backend = choose(self.product, weight.device)
        if reason := two_four.unsupported(backend, weight.device, weight.dtype, tuple(weight.shape)):
            raise UnsupportedError(reason)
        super().refuse(weight)
        if self.dtype and eight_bits.by_library(weight.device):
            Sparse24(dtype=self.dtype).layer(linear_of(weight, None))  # whose product is tried
        if self.method == "given":
            nonzero_places(weight)

    def keep(self, scores: Tensor) -> Tensor:
        return two_four.keep(scores, 0.5, 0)

    def kept(self, weight: Tensor) -> Tensor:
        return nonzero_places(weight) if self.method == "given" else super().kept(weight)

    def layer(self, linear: nn.Linear, moments: Tensor | None = None) -> nn.Module:
        weight, keep = self.pruned(linear.weight.detach(), moments)
        return self.packed(linear_of(weight, linear.bias, linear), keep)

    def packed(self, linear: nn.Linear, keep: Tensor) -> nn.Module:
        """The layer of W [N, K], of which `keep` stays, bool [N, K]."""
        if self.dtype:
            weight = linear.weight.detach()
            given = eight_bits.quantized(torch.where(keep, weight, 0), eight_bits.DTYPES[self.dtype])
            return of_eight_bits(*given, weight.dtype, linear.bias)
        return Linear24.from_linear(linear, mask=keep, product=self.product, frozen=self.frozen)


def of_eight_bits(values: Tensor, scales: Tensor, dtype: torch.dtype, bias: Tensor | None) -> PatternLinear:
    """The layer of 2:4 values [N, K] of 8 bits and their scales [N, 1], for inputs of `dtype`."""
    return PatternLinear(eight_bits.EightBits(values, scales, dtype), bias, f"2:4 of {values.dtype}")


@dataclass(frozen=True, kw_only=True)
class Patterned(Config):
    """What the configs of the other patterns share, which kernels/patterns makes, packs and multiplies: for inference.

    Args:
        sparsity: the share of the weights that is left out, as near as whole units of the pattern come.
        method: as above, if the pattern has it; SparseGPT takes the same share of each strip of columns.
        kernel: what multiplies it, one of the pattern's in kernels/patterns; "": the best that can.

    ValueError for another word, or a sparsity that is not from 0 to below 1.
    """

    pattern: ClassVar[str]
    block: ClassVar[int] = 0
    sparsity: float
    method: str = "magnitude"
    kernel: str = ""

    def __post_init__(self):
        self.allow(kernel=(self.kernel, ("", *(kernel.name for kernel in PATTERNS[self.pattern].kernels))))
        if not (isinstance(self.sparsity, Real) and 0 <= self.sparsity < 1):
            raise ValueError(f"sparsity={self.sparsity!r}: it lies from 0 to below 1")
        if PATTERNS[self.pattern].blocks and not (isinstance(self.block, Integral) and self.block > 0):
            raise ValueError(f"block={self.block!r}: it is a whole number from 1 on")

    @property
    def strip(self) -> int:
        return self.block or 128

    def keep(self, scores: Tensor) -> Tensor:
        return PATTERNS[self.pattern].mask(scores.contiguous(), self.sparsity, self.block)

    def refuse(self, weight: Tensor) -> None:
        super().refuse(weight)
        PATTERNS[self.pattern].choose(weight, self.block, self.kernel)
        if self.method == "sparsegpt" and COLUMNS % (self.block or 1):
            raise ValueError(f"blocks of {self.block} do not divide the {COLUMNS} columns that SparseGPT takes at once")
        most = keep = self.keep(weight.abs())
        if self.method == "given":
            keep = self.kept(weight)
            if (count := int(keep.sum())) > (wanted := int(most.sum())):
                raise ValueError(f"its weight is not pruned: it keeps {count}, and sparsity={self.sparsity:g} {wanted}")
        if self.method not in CALIBRATED:
            self.refuse_empty(keep)

    def refuse_empty(self, keep: Tensor) -> None:
        if (count := empty_rows(keep)) and (self.pattern != "rows" or count == len(keep)):
            row = int((~keep.any(1)).nonzero()[0])
            raise ValueError(f"a sparsity of {self.sparsity:g} leaves {count} outputs without a weight, as row {row}")

    def layer(self, linear: nn.Linear, moments: Tensor | None = None) -> nn.Module:
        weight, keep = self.pruned(linear.weight.detach(), moments)
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
    methods = ("magnitude", "given", "wanda")

    def kept(self, weight: Tensor) -> Tensor:
        keep = super().kept(weight)
        shuffled.order(keep, self.block), shuffled.order(keep.t(), self.block)  # which refuse a mask of another kind
        return keep


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

    def kept(self, weight: Tensor) -> Tensor:
        keep = super().kept(weight)
        return keep.any(1, keepdim=True) & keep.any(0)  # a zero among what is kept stays


@dataclass(frozen=True, kw_only=True)
class StructuredColumns(StructuredRows):
    """Whole inputs are left out."""

    pattern = "columns"
