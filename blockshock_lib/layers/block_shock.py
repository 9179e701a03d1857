"""Block-Shock: dense by superposition. W = W(0) + W(1), two complementary 2:4 terms, each packed on its own ranks."""

from __future__ import annotations

import torch

from blockshock_lib import sparse24
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers.sharded import Cost, Part, Shape, TermParallelLinear, summed, term_mask
from blockshock_lib.params import Mask


class BlockShockLinear(TermParallelLinear):
    """y = sum over ranks of x W(g)^T, each product on packed 2:4 values, joined by one all-reduce.

    Args (beside ShardedLinear's):
        product: the 2:4 backend: "auto", "reference", "torch" or "cslt" (see sparse24.product.BACKENDS).
    """

    product = "auto"

    def __init__(self, *args, product: str = "auto", **kwargs):
        self.product = product
        super().__init__(*args, **kwargs)

    @classmethod
    def unsupported(cls, mask: Mask, device: torch.device, dtype: torch.dtype, product: str = "auto") -> str:
        return sparse24.product.choose(product, device).unsupported(device, dtype)

    def hold(self, weight: torch.Tensor, keep: torch.Tensor | None, part: Part) -> None:
        self.backend = sparse24.product.choose(self.product, weight.device)
        if reason := self.backend.unsupported(weight.device, weight.dtype):
            raise UnsupportedError(reason)
        self.packed = self.backend.pack(weight[part.rows, part.cols], term_mask(keep, part))
        self.cols = part.cols

    def weight_bytes(self) -> int:
        return self.packed.nbytes

    def local(self, x: torch.Tensor) -> torch.Tensor:
        return self.backend.linear(x[:, self.cols], self.packed)

    def tune(self, x: torch.Tensor) -> None:
        self.backend.tune(x[:, self.cols], self.packed)

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        # Half of the values, and 2 bits of metadata for each kept value: 9/16 of the dense bytes in 16 bit.
        k = shape.in_features / (shape.world_size // 2)
        kept = shape.out_features * k / 2
        # The 2:4 ops read x as contiguous: from four ranks on, where a rank reads only its columns, they are copied.
        copied = shape.batch * k * shape.itemsize if shape.world_size > 2 else 0
        return summed(shape, 2.0 * shape.batch * kept, kept * (shape.itemsize + 0.25), k, copied)
