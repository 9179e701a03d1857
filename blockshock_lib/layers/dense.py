"""The methods that multiply dense parts: whole, sharded as in arXiv:1909.08053, or as two terms of W.

A GEMM reads a transposed view at the same cost; an elementwise operation with a row-major tensor, across its rows.
"""

import torch
from torch import Tensor

from blockshock_lib.comm import Pending
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.patterns.dense import preferred
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.layers.classes import classes_of, gather, products, scatter
from blockshock_lib.layers.parts import Part, equal_shard
from blockshock_lib.layers.sharded import ShardedLinear
from blockshock_lib.layers.weight_stores import WatchedParameter


class DenseLinear(ShardedLinear):
    """A: rank 0 computes all of y; the other ranks stand by. The absolute reference for speed and error."""

    collective = ""

    @classmethod
    def ranks(cls, world_size: int) -> int:
        return 1

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        return Part(None, slice(0, out_features), slice(0, in_features))

    def local(self, x: Tensor) -> Tensor:
        return self.gemm(*self.factors(x))

    def reduce(self, partial: Tensor) -> Tensor:
        return partial if self.bias is None else partial.add_(self.bias)

    def start_dgrad(self, partial: Tensor) -> Pending:
        return Pending(partial)


class RowParallelLinear(ShardedLinear):
    """B1, the rival that Block-Shock must beat: weight columns are sharded; the [B, N] partial sums are all-reduced.

    Each rank makes its columns of dX as dX^T, [K/w, B]; gathered without a copy, their transposed view is dX.
    """

    transposed_dgrad = True

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        return Part(None, slice(0, out_features), equal_shard(in_features, rank, world_size))

    def dgrad_factors(self, dy: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight.t(), dy

    def start_dgrad(self, partial: Tensor) -> Pending:
        return self.group.start_all_gather(partial, torch.t)


class ColumnParallelLinear(ShardedLinear):
    """B2: weight rows are sharded; each rank's shard of y^T, [N/w, B], gathers into y^T without a copy.
    `form`: the group's library has them "sent", or, where GPUs share memory, they are "read" by their peers.
    """

    watched = WatchedParameter
    transposed_y = True
    collective = "all-gather"
    forms = property(lambda self: ("sent", "read") if self.group.shared_bytes(self.like.device) else ())
    form = "sent"

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        return Part(None, equal_shard(out_features, rank, world_size), slice(0, in_features))

    def local(self, x: Tensor) -> Tensor:
        bias, size = self._parameters["bias"], (self.rows.stop - self.rows.start, x.shape[0])
        whole = self.form == "read" and self.chunks == 1  # else the next piece would overwrite what is read
        out = self.group.shared(*size, x.dtype, x.device) if whole else None
        return self.gemm(*self.factors(x), out, None if bias is None else bias[self.rows, None])

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.factor(), x

    def reduce(self, partial: Tensor, out: Tensor | None = None) -> Tensor:
        gathered = self.group.all_gather(partial, self.form == "read").t()
        return gathered if out is None else out.copy_(gathered)

    def tune_reduce(self, x: Tensor) -> None:
        self.group.shared(1, 16, x.dtype, x.device)  # from now on there are two forms, where ranks share memory


class TermParallelLinear(ShardedLinear):
    """Superposition: W = W(0) + W(1). Rank r holds term r % 2 of input shard r // 2; one all-reduce adds them."""

    uses_mask = True

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        if world_size % 2:
            way = ": start them with torchrun --nproc-per-node 2, or use Linear24 on one" if world_size == 1 else ""
            raise UnsupportedError(f"two terms need an even number of ranks, not {world_size}{way}")
        return Part(rank % 2, slice(0, out_features), equal_shard(in_features, rank // 2, world_size // 2))

    def place_dgrad(self, made: Tensor) -> Tensor:
        """dX of this rank's columns -> [B, K], else zeros: its sum moves as much as a shard's sum and a gather."""
        if made.shape[1] == self.in_features:
            return made
        dx = made.new_zeros(made.shape[0], self.in_features)
        dx[:, self.cols] = made
        return dx


class PermutedDenseLinear(TermParallelLinear):
    """D, the honest strongest rival: a periodic mask's term as C dense blocks [N/C, K/2], one a class of rows.

    No zeros are stored, no 2:4 kernel is needed. The gather of x and dy and the scatter of y and dX, one pass each, are
    part of `local`, `local_dgrad` and `local_wgrad`: a model could fold them into its neighbours' weights.
    `form`, of `forms`, says how y and dX are multiplied (dW has one way, as a timed step's is compared): one product a
    class; one "batched"; or "transposed", y into every fourth row of y^T, without a scatter; by cuBLASLt where it
    says so. The same on all ranks.
    """

    FORMS = ("classes", "batched", "transposed", "batched, cublaslt", "transposed, cublaslt")
    wgrad_by = "periodic"
    forms = property(lambda self: self.FORMS[: 5 if self.like.is_cuda else 3] if len(self.classes) > 1 else ())
    form = "classes"

    @classmethod
    def unsupported(cls, mask: Mask, device: torch.device, dtype: torch.dtype, **options) -> str:
        return "" if mask.periodic else f"mask {mask.name} is not periodic: D permutes masks that repeat one 4x4 tile"

    def shard(self, weight: Tensor, keep: Tensor | None, part: Part) -> None:
        self.classes = classes_of(self.mask, part.term)
        self.weight = self._parameter(self.from_dense(weight))  # classes are of equal size

    @property
    def transposed_y(self) -> bool:
        return self.form.startswith("transposed") and len(self.classes) > 1

    def local(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The partial y [B, N]; of the transposed form y^T [N, B], `out` too."""
        rows, columns = zip(*self.classes, strict=True)
        if self.transposed_y:
            return self._local_transposed(gather(x[:, self.cols], columns), out)
        y = self.workspace(x) if out is None else out
        if len(self.classes) == 1:
            return self.gemm(*self.factors(x), y)
        made = products(self.gemm, gather(x[:, self.cols], columns), self.weight.mT, self.form)
        return scatter(made, rows, x.new_empty(x.shape[0], self.out_features) if y is None else y)

    def _local_transposed(self, gathered: Tensor, y: Tensor | None) -> Tensor:
        y = self.group.buffer(self.out_features, gathered.shape[1], gathered.dtype, gathered.device) if y is None else y
        y = gathered.new_empty(self.out_features, gathered.shape[1]) if y is None else y
        for (rows, _), x, w in zip(self.classes, gathered, self.weight, strict=True):
            # Rows of one residue modulo 4 lie at one distance from each other, as a GEMM can write them.
            into = y.unflatten(0, (-1, 4))[:, rows].transpose(0, 1)  # [p, N/4, B]
            with preferred(self.form.partition(", ")[2]):
                torch.bmm(w.unflatten(0, (-1, len(into))).transpose(0, 1), x.t().expand(len(into), -1, -1), out=into)
        return y

    def reduce(self, partial: Tensor, out: Tensor | None = None) -> Tensor:
        if not self.transposed_y:
            return super().reduce(partial, out)
        y = self.group.all_reduce(partial).t()
        y = y if self.bias is None else y.add_(self.bias)
        return y if out is None else out.copy_(y)

    def local_dgrad(self, dy: Tensor) -> Tensor:
        rows, columns = zip(*self.classes, strict=True)
        made = products(self.gemm, gather(dy, rows), self.weight, self.form)
        dx = dy.new_empty(dy.shape[0], self.cols.stop - self.cols.start)
        # A uniform mask's term reads half of x, so half of its dX is zero.
        for place in set(range(4)).difference(*(range(4)[cols] for cols in columns)):
            dx[:, place::4] = 0
        return self.place_dgrad(scatter(made, columns, dx))

    def local_wgrad(self, dy: Tensor, x: Tensor, by: str | None = None) -> Tensor:
        rows, columns = zip(*self.classes, strict=True)
        return products(self.gemm, gather(dy, rows).mT, gather(x[:, self.cols], columns))

    # Of the first class; the others' are of the same shapes.

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return gather(x[:, self.cols], [self.classes[0][1]])[0], self.weight[0]

    def dgrad_factors(self, dy: Tensor) -> tuple[Tensor, Tensor]:
        return gather(dy, [self.classes[0][0]])[0], self.weight[0].t()

    def wgrad_factors(self, dy: Tensor, x: Tensor, by: str) -> tuple[Tensor, Tensor]:
        return self.dgrad_factors(dy)[0].t(), self.factors(x)[0].t()

    def from_dense(self, dense: Tensor) -> Tensor:
        tiles = dense[self.rows, self.cols].unflatten(1, (-1, 4)).unflatten(0, (-1, 4))
        return torch.stack([tiles[:, rows][..., cols].flatten(2).flatten(0, 1) for rows, cols in self.classes])

    def part_dense(self, tensor: Tensor) -> Tensor:
        dense = tensor.new_zeros(self.out_features, self.cols.stop - self.cols.start)
        tiles = dense.unflatten(1, (-1, 4)).unflatten(0, (-1, 4))
        for (rows, cols), block in zip(self.classes, tensor, strict=True):
            place = tiles[:, rows][..., cols]
            place.copy_(block.view(place.shape))
        return dense
