"""A 2:4-pruned linear layer on one device, without ranks: the packed product alone."""

import torch
from torch import Tensor, nn

from blockshock_lib.comm import Group
from blockshock_lib.kernels.sparse24 import masks
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.layers.block_shock import BlockShockLinear
from blockshock_lib.layers.parts import Part, refuse_lost, refuse_wrapped, require_plain, train_as, whole

PRUNED = Mask(name="pruned", family="random")  # for a given mask: nothing but 2:4 along K is taken for granted


class Linear24(BlockShockLinear):
    """y = x W^T + b with W [N, K] packed 2:4: one term of Block-Shock by itself, whatever process group there is.

    linear = Linear24.from_linear(pruned, frozen=True)
    with linear.graphed() as fast, torch.no_grad():
        y = fast(x)
    """

    collective = ""
    conv1d: type | None = None  # transformers' Conv1D, where it was one

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, mask: Mask | str | Tensor | None = None, **options) -> "Linear24":
        """Packs an `nn.Linear`; `options`: product, update, dw, frozen.

        Features in multiples of 64, bf16 or fp16 for the 2:4 kernels. `mask`: which weights are kept. None: those of a
        pruned weight that are not zero. Else the weight is pruned: a Mask or the name of a shipped one ("magnitude"
        keeps the larger two of four), or bool [N, K].

        ValueError names a group of which three or four are kept; UnsupportedError: what cannot run here, any other
        module, and what would be lost: hooks, more than weight and bias, and a tie to another module.
        """
        require_plain(linear)
        refuse_lost(linear)
        refuse_wrapped(linear, options)
        mask, keep = Mask.named(mask) if isinstance(mask, str) else mask, None
        if not isinstance(mask, Mask):
            keep, mask = nonzero_places(linear.weight) if mask is None else mask.to(linear.weight.device), PRUNED
        layer = cls(linear.weight, linear.bias, mask=mask, keep=keep, group=Group(), **options)
        train_as(layer, linear)
        return layer

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        return Part(0, slice(0, out_features), slice(0, in_features))

    def local(self, x: Tensor) -> Tensor:
        return (store := self.store).backend.linear(x, store.packed, None, self._parameters["bias"])

    multiply = local

    def load_dense(self, dense: Tensor) -> None:
        """As a sharded layer's; ValueError too for a weight that is not zero where the mask keeps none."""
        dense = whole(dense)
        if dense.shape == (self.out_features, self.in_features):
            self.prepare()
            dropped = (dense.to(self.weight.device, self.weight.dtype) != 0) & ~self.pattern.mask()
            if bool(dropped.any()):
                row, column = dropped.nonzero()[0].tolist()
                raise ValueError(f"W[{row}, {column}] is not zero but pruned here: make the layer anew from it")
        super().load_dense(dense)


def nonzero_places(weight: Tensor) -> Tensor:
    """The 2:4 mask, bool [N, K], of a pruned weight's nonzeros and, as in cuSPARSELt, last zeros; else ValueError."""
    if weight.shape[1] % 4:
        raise ValueError(f"2:4 groups need a multiple of 4 input features, not {weight.shape[1]}")
    keep = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
    for part in masks.parts(*weight.shape):
        nonzero = (weight[part] != 0).unflatten(1, (-1, 4))
        zeros = (~nonzero).flip(-1).cumsum(-1, dtype=torch.int8).flip(-1)  # from each place on
        keep[part] = (nonzero | (nonzero.sum(-1, keepdim=True) + zeros <= 2)).flatten(1)
    if (bad := masks.first_bad_group(keep)) is not None:
        row, column, count = bad
        raise ValueError(
            f"the weight is not pruned 2:4: row {row}, columns {column} to {column + 3} hold {count} nonzeros; "
            "prune it, for example by magnitude"
        )
    return keep
