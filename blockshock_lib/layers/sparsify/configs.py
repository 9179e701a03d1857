"""How a weight is pruned, and what multiplies it then: one frozen class a pattern."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from blockshock_lib.errors import UnsupportedError, allowed
from blockshock_lib.kernels.sparse24 import masks
from blockshock_lib.kernels.sparse24.backends import BACKENDS, choose
from blockshock_lib.kernels.sparse24.mask import MASKS
from blockshock_lib.kernels.sparse24.packing import check_shape
from blockshock_lib.layers.linear24 import Linear24, nonzero_places
from blockshock_lib.layers.sparsify.prune import sparsegpt, wanda

CALIBRATED = ("wanda", "sparsegpt")


@dataclass(frozen=True)
class Sparse24:
    """Two of each four neighbours along the inputs are kept, packed, and multiplied as `Linear24` does.

    Args:
        method: "magnitude" keeps the two larger; "given": the weight is pruned already, and what is not zero stays;
            "wanda" and "sparsegpt" (prune.py) ask what the layers are given in calibration.
        product: the 2:4 backend, "auto" or one of kernels.sparse24.backends.BACKENDS.
        frozen: for inference. False: the packed values are trained, as Linear24's with update="packed".

    ValueError for another word.
    """

    methods: ClassVar[tuple[str, ...]] = ("magnitude", "given", *CALIBRATED)
    method: str = "magnitude"
    product: str = "auto"
    frozen: bool = True

    def __post_init__(self):
        for what, given, known in (
            ("method", self.method, self.methods),
            ("product", self.product, ("auto", *BACKENDS)),
        ):
            if given not in known:
                raise ValueError(f"{what}={given!r}: {allowed(given, known)}")

    def refuse(self, weight: Tensor) -> None:
        """UnsupportedError or ValueError where W [N, K] cannot be pruned, packed or multiplied so on its device."""
        check_shape(weight.shape)
        backend = choose(self.product, weight.device)
        if reason := backend.unsupported(weight.device, weight.dtype) or backend.too_large(tuple(weight.shape)):
            raise UnsupportedError(reason)
        if not bool(torch.isfinite(weight).all()):
            raise ValueError("its weight holds values that are not finite")
        if self.method == "given":
            nonzero_places(weight)

    def layer(self, linear: nn.Linear, moments: Tensor | None = None) -> nn.Module:
        """The sparse layer; `moments` as prune.py takes them."""
        mask = None if self.method == "given" else "magnitude"
        if self.method == "wanda":
            mask = self.keep(wanda(linear.weight.detach(), moments))
        elif self.method == "sparsegpt":
            weight, mask = sparsegpt(linear.weight.detach(), moments, self.keep, width=4)
            linear = linear_of(weight, linear.bias)
        return Linear24.from_linear(linear, mask=mask, product=self.product, frozen=self.frozen)

    def kept(self, weight: Tensor) -> Tensor:
        """What is kept of W [N, K] without calibration."""
        return nonzero_places(weight) if self.method == "given" else self.keep(weight.abs())

    def keep(self, scores: Tensor) -> Tensor:
        """Bool [N, K] of scores [N, K]: the two larger of each four."""
        return masks.make(MASKS["magnitude"], tuple(scores.shape), weight=scores, device=scores.device)


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer of this very weight [N, K] and bias."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return linear
