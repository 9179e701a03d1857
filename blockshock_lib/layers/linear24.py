"""A 2:4-pruned linear layer on one device, without ranks: the packed product alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockshock_lib.comm import Group
from blockshock_lib.layers.block_shock import BlockShockLinear
from blockshock_lib.layers.part import Part
from blockshock_lib.params import Mask
from blockshock_lib.sparse24 import masks
from blockshock_lib.sparse24.packed import Packed
from blockshock_lib.sparse24.product import choose

PRUNED = Mask(name="pruned", family="random")
"""Of a mask that was given, not drawn: nothing but 2:4 along K is taken for granted."""
_CHUNK = 1 << 24  # weights looked at at once


class Linear24(BlockShockLinear):
    """y = x W^T + b with W [N, K] packed 2:4, 9/16 of its bytes in 16 bit; on one device, whatever process group there
    is.

    It is one term of Block-Shock by itself, so what is said there holds here: it runs x [..., K] of any batch, trains
    (the packed values are the parameter), compiles, and follows an optimizer's step. The product adds the bias. A state
    dict holds the dense W, as a plain `nn.Linear` of a pruned model does.

        linear = Linear24.from_linear(pruned, frozen=True)
        with linear.graphed() as fast, torch.no_grad():
            y = fast(x)
    """

    joined = ""

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, mask: Mask | str | Tensor | None = None, **options) -> Linear24:
        """Packs an `nn.Linear`.

        Args:
            linear: out_features and in_features multiples of 64; bf16 or fp16 for the 2:4 kernels.
            mask: which weights are kept. None: those of a pruned weight that are not zero. Else the weight is pruned: a
                Mask or the name of a shipped one ("magnitude" keeps the larger two of four), or bool [N, K].
            options: of the layer: product, update, dw, dx, frozen.

        Raises:
            ValueError: three or four of a group are kept; the first such group is named.
            UnsupportedError: the machine, dtype or shape cannot run it.
        """
        weight = linear.weight.detach()
        mask = Mask.named(mask) if isinstance(mask, str) else mask
        if isinstance(mask, Mask):
            keep = None
        else:
            keep, mask = nonzero_places(weight) if mask is None else mask.to(weight.device), PRUNED
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(weight, bias, mask=mask, keep=keep, group=Group(), **options)

    def to_linear(self) -> nn.Linear:
        """A plain layer with the same weights, and zeros where nothing is kept."""
        like = {"dtype": self.weight.dtype, "device": self.weight.device}
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, **like)
        linear.load_state_dict(self.state_dict())
        return linear

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        return Part(0, slice(0, out_features), slice(0, in_features))

    def make_keep(self, weight: Tensor) -> Tensor | None:
        """None where the mask would only be made to be packed by: then the packing chooses by magnitude itself."""
        by_magnitude = self.frozen and self.mask.family == "magnitude"
        one_pass = by_magnitude and choose(self.product, weight.device).pack_magnitude
        return None if one_pass else super().make_keep(weight)

    def _pack(self, w: Tensor, kept: Tensor | None) -> tuple[Packed, Packed | None]:
        return (self.backend.pack_magnitude(w), None) if kept is None else super()._pack(w, kept)

    def local(self, x: Tensor) -> Tensor:
        return self.backend.linear(x, self.packed, bias=self.bias)

    def reduce(self, partial: Tensor) -> Tensor:
        """Nothing to add: the product added the bias."""
        return partial

    def load_dense(self, dense: Tensor) -> None:
        """Writes W [N, K], pruned by this layer's mask, into the packed values.

        Raises:
            ValueError: another shape, or a weight that is not zero where the mask keeps none; nothing is changed then.
        """
        if dense.shape == (self.out_features, self.in_features):
            self.prepare()
            dropped = (dense.to(self.weight) != 0) & ~self.pattern.mask()
            if bool(dropped.any()):
                row, column = dropped.nonzero()[0].tolist()
                raise ValueError(
                    f"W[{row}, {column}] is not zero but pruned here: make the layer anew from that weight"
                )
        super().load_dense(dense)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, mask={self.mask.name}, product={self.backend.name}"


def nonzero_places(weight: Tensor) -> Tensor:
    """The 2:4 mask, bool [N, K], that keeps what is not zero in a pruned weight [N, K].

    A group with fewer than two nonzeros also keeps its last zeros, as cuSPARSELt does.

    Raises:
        ValueError: K is no multiple of 4, or a group of four has more than two nonzeros; the first is named.
    """
    rows, columns = weight.shape
    if columns % 4:
        raise ValueError(f"2:4 groups need a multiple of 4 input features, not {columns}")
    keep = torch.empty(rows, columns, dtype=torch.bool, device=weight.device)
    step = max(1, _CHUNK // columns)
    for source, target in zip(weight.split(step), keep.split(step), strict=True):
        nonzero = (source != 0).unflatten(1, (-1, 4))
        held, target = nonzero.sum(-1, dtype=torch.int8), target.unflatten(1, (-1, 4))
        for place in range(4):
            # A zero is kept where the nonzeros and the zeros after it are not enough.
            zeros_after = (~nonzero[..., place + 1 :]).sum(-1, dtype=torch.int8)
            target[..., place] = nonzero[..., place] | (held + zeros_after < 2)
    if (bad := masks.first_bad_group(keep)) is not None:
        row, column, count = bad
        raise ValueError(
            f"the weight is not pruned 2:4: row {row}, columns {column} to {column + 3} hold {count} nonzeros; "
            'prune it, for example with mask="magnitude"'
        )
    return keep
