"""What every method shares: one rank's part of y = x W^T + b, how the parts make y, and how they make the gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from blockshock_lib import sparse24
from blockshock_lib.comm import Group, Pending, Reduction
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import autograd, chunked
from blockshock_lib.layers.dense_view import DenseView
from blockshock_lib.layers.graphed import Graphed
from blockshock_lib.layers.layer_costs import LayerCosts
from blockshock_lib.layers.part import Part, part_of
from blockshock_lib.params import Mask


class ShardedLinear(LayerCosts, DenseView):
    """One rank's share of y = x W^T + b; W is [out_features, in_features]. Trains like `nn.Linear`.

    A subclass says which part each rank holds (`part`), how it is stored (`hold`), multiplied (`local`, `local_dx`,
    `local_dw`) and joined with the other ranks' (`reduce`, `start_dx` by a collective; `combine`, `combine_dx` the same
    in one process), and what it costs. Those pieces know no autograd; `forward` puts one node around them.

    Args:
        weight: [N, K], the full dense weight; only this rank's part is kept.
        bias: [N] or None; added once, after the ranks' sum. Every rank holds it whole.
        mask: the mask family, for methods that split W into two terms.
        keep: [N, K] bool, True where term 0 holds the entry; made from `mask` when left out.
        group: the ranks that share the layer.
        frozen: weight and bias are not trained; what only training needs is not held.

    Attributes:
        weight: this rank's share, a parameter in the method's own layout; None on a rank that stands by.
        bias: a parameter [N], or None.
        overlap: whether dX's collective runs while dW is computed. Both kernels then share the GPU, which is not always
            faster: phase 3 measures both orders. May be set at any time, to the same on all ranks.
        chunks: into how many parts of the batch the forward is cut; with more than one, a part is joined while the next
            is multiplied. May be set at any time, to the same on all ranks.
    """

    overlap = True
    chunks = 1
    joined = "all-reduce"  # how the ranks' partial results make y; "all-gather", or "" where there is one rank's only
    uses_mask = False  # splits W into two terms
    gathers = False  # multiplies only the columns that a periodic mask keeps, as a dense product
    transposed_y = False  # y is the transposed view of a contiguous [N, B]
    transposed_dx = False  # dX is the transposed view of a contiguous [K, B]
    dx_by = "dense"
    dw_by = "full"

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        mask: Mask | None = None,
        keep: torch.Tensor | None = None,
        group: Group | None = None,
        frozen: bool = False,
    ):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.group = group or Group.of()
        self.mask, self.frozen = mask, frozen
        self.handle = autograd.handle_of(self)
        self.register_buffer("like", weight.new_empty(0), persistent=False)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None if bias is None else self._parameter(bias.detach().clone()))
        if self.uses_mask:
            if mask is None:
                raise ValueError(f"{type(self).__name__} splits W by a mask: give mask=")
            if keep is None:
                keep = self.make_keep(weight)
        if self.active:
            part = self.part(self.group.rank, self.group.world_size, *weight.shape)
            self.term, self.rows, self.cols = part.term, part.rows, part.cols
            self.hold(weight.detach(), keep, part)

    def make_keep(self, weight: torch.Tensor) -> torch.Tensor | None:
        """`keep` by the layer's mask; None where `hold` needs none."""
        return sparse24.masks.make(self.mask, tuple(weight.shape), weight=weight, device=weight.device)

    def __setstate__(self, state: dict) -> None:
        """A copy is a layer of its own: the compiled operator must not find the original in its place."""
        super().__setstate__(state)
        self.handle = autograd.handle_of(self)

    def _parameter(self, data: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(data, requires_grad=not self.frozen)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, mask: Mask | str | None = None, process_group=None, **options):
        """This rank's share of an `nn.Linear` that every rank holds whole.

        Args:
            linear: out_features and in_features multiples of 64; bf16 or fp16 for the 2:4 kernels.
            mask: a Mask or the name of a shipped one ("checkerboard", "uniform_1100", "random", "magnitude", ...).
            process_group: the ranks that share the layer; default the world.

        Returns: a module [..., in_features] -> [..., out_features], the full y on every rank, that trains.
        Raises: UnsupportedError where the machine, dtype or shape cannot run it.
        """
        if isinstance(mask, str):
            mask = Mask.named(mask)
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(linear.weight.detach(), bias, mask=mask, group=Group.of(process_group), **options)

    @classmethod
    def ranks(cls, world_size: int) -> int:
        """How many of the world's ranks work in this method."""
        return world_size

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        raise NotImplementedError(f"{cls.__name__} must say which part of W a rank holds")

    @classmethod
    def unsupported(cls, mask: Mask, device: torch.device, dtype: torch.dtype, **options) -> str:
        """Why this machine, mask or dtype cannot run the method with these options; "" when it can."""
        return ""

    @property
    def active(self) -> bool:
        """Whether this rank works in the method at all."""
        return self.group.rank < self.ranks(self.group.world_size)

    @property
    def owners(self) -> list[ShardedLinear]:
        """The layers whose weights this one computes with: itself."""
        return [self]

    @property
    def weights(self) -> list[nn.Parameter]:
        return [self.weight] if self.active else []

    def hold(self, weight: torch.Tensor, keep: torch.Tensor | None, part: Part) -> None:
        """Stores this rank's part of `weight` [N, K]; `keep` [N, K] is True where term 0 holds the entry."""
        self.weight = self._parameter(part_of(weight, keep, part))

    def weight_bytes(self) -> int:
        """Bytes of the weight that the forward multiplies, read off its storage."""
        return self.weight.untyped_storage().nbytes() if self.active else 0

    def hold_bytes(self) -> dict[str, int]:
        """Bytes held now: the parameter's storage, packed copies beside it, and the pattern of the mask."""
        return {"weights": self.weight_bytes(), "copies": 0, "pattern": 0}

    # Forward

    def local(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [B, K] -> this rank's partial result, before any communication; where it is a sum's part, written into
        `out` [B, N], by default where the group can add it up without a copy.
        """
        raise NotImplementedError(f"{type(self).__name__} must multiply its part")

    def room(self, x: torch.Tensor, chunk: int | None = None) -> torch.Tensor | None:
        """`Group.buffer` for the partial result of x [B, K]; overwritten by the next call's."""
        return self.group.buffer(x.shape[0], self.out_features, x.dtype, x.device, chunk)

    def reduce(self, partial: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's partial result -> y [B, N] on every rank. May overwrite `partial`; `out` as in
        `Group.all_reduce`.
        """
        return self.group.all_reduce(partial, self.bias, out)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, K] -> y [B, N]: the whole forward of an active rank, without autograd."""
        return self.reduce(self.local(x)) if self.chunks == 1 else chunked.multiply(self, x)

    def combine(self, partials: list[torch.Tensor]) -> torch.Tensor:
        """What `reduce` computes, from all ranks' partial results in one process: the collective's oracle. May
        overwrite them.
        """
        return self._add_bias(_sum(partials))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.active:
            raise UnsupportedError(
                f"rank {self.group.rank} stands by in {type(self).__name__}: it holds no weight to use"
            )
        if not x.shape[-1] == self.in_features:
            raise ValueError(f"x has {x.shape[-1]} features, the layer {self.in_features}")
        return autograd.linear(self, x)

    def graphed(self, shapes: int = 8) -> Graphed:
        """The forward as a CUDA graph for each of so many batch sizes, for inference; see `graphed.Graphed`."""
        return Graphed(self, shapes)

    def memory_read(self) -> list[torch.Tensor]:
        """What `multiply` reads beside x: a CUDA graph of it is right as long as these lie where they lay."""
        return [t for t in (self.weight, self.bias) if t is not None]

    def _add_bias(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.bias is None else y.add_(self.bias)

    # Backward

    def local_dx(self, dy: torch.Tensor) -> torch.Tensor:
        """dy [B, N] -> this rank's partial dX, before any communication."""
        raise NotImplementedError(f"{type(self).__name__} must say how its part makes dX")

    def start_dx(self, partial: torch.Tensor) -> Pending:
        """Starts to join the partial dX; its `wait` gives dX [B, K] on every rank. May overwrite `partial`."""
        return self.group.start_all_reduce(partial)

    def combine_dx(self, partials: list[torch.Tensor]) -> torch.Tensor:
        """What `start_dx` computes, from all ranks' partial results in one process. May overwrite them."""
        return _sum(partials)

    def dw_strategies(self) -> tuple[str, ...]:
        """The strategies for dW that this mask and group can run; `dw_by` is the one in use."""
        return (self.dw_by,)

    def local_dw(self, dy: torch.Tensor, x: torch.Tensor, by: str | None = None):
        """dy [B, N], x [B, K] -> this rank's share of dW = dy^T x, before any communication."""
        return torch.mm(dy[:, self.rows].t(), x[:, self.cols])

    def finish_dw(self, partial, by: str | None = None) -> torch.Tensor:
        """The gradient of `self.weight`, in its shape and dtype."""
        return partial

    def combine_dw(self, partials: list, by: str | None = None) -> list[torch.Tensor]:
        """What the ranks swap in `finish_dw`, swapped in one process; each rank's `in_layout` then ends it."""
        return partials

    def in_layout(self, values: torch.Tensor) -> torch.Tensor:
        """What `combine_dw` gives this rank, in the layout of `self.weight`."""
        return values

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor | None,
        need: tuple[bool, bool, bool] = (True, True, True),
        overlap: bool | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """(dX, dW, db) of dy [B, N]; `need` says which, None stands for the others. x [B, K] is needed for dW alone.

        dX's collective runs while dW is computed, or before, as `overlap` or else the layer's own says. db is the sum
        of dy over the batch, which is the same on every rank. As a product with ones it needs no temporary;
        `dy.sum(0)` took 128 MiB for 4096 x 4096 on an H200.
        """
        dx = self.start_dx(self.local_dx(dy)) if need[0] else None
        if dx is not None and not (self.overlap if overlap is None else overlap):
            dx = Pending(dx.wait())
        dw = self.finish_dw(self.local_dw(dy, x)) if need[1] else None
        db = torch.mm(dy.new_ones(1, dy.shape[0]), dy)[0] if need[2] and self.bias is not None else None
        return None if dx is None else dx.wait(), dw, db

    # What must follow a change of the weight

    def stages(self) -> dict[str, Callable[[], None]]:
        """What must be done after an optimizer's step before the layer is right again, by name, in order."""
        return {}

    def refresh(self) -> None:
        """Runs all stages. The layer does so by itself where it sees that its weight changed; a change through
        `weight.data` cannot be seen and needs this call.
        """
        for stage in self.stages().values():
            stage()

    def prepare(self, always: bool = False) -> None:
        """Refreshes if the weight changed since it was last looked at, or `always`."""

    def tune(self, x: torch.Tensor) -> None:
        """Chance to search for the fastest kernel for x [B, K] before anything is timed. Communicates nothing: one rank
        searches alone, and the others then find what it kept.
        """

    def tune_reduce(self, x: torch.Tensor) -> None:
        """Has the group measure its ways to join the partial results of x [B, K]. A collective, unlike `tune`."""
        if self.joined == "all-reduce":
            for part in chunked.sizes(self, x):
                self.group.tune(part.shape[0] * self.out_features * part.element_size(), x.device)

    def tune_dx(self, dy: torch.Tensor) -> None:
        """The same for dX of dy [B, N]."""

    def reductions(self, x: torch.Tensor) -> dict[str, Reduction]:
        """Every way to add up the ranks' partial results of x [B, K], by name, the one that is taken first. Collective,
        and so is each call.
        """
        return self.group.reductions(self.local(x)) if self.joined == "all-reduce" else {}

    def product_by(self, x: torch.Tensor) -> str:
        """Which of `products` the layer takes for x [B, K]; "" where that is not known."""
        return "dense"

    def products(self, x: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
        """Every way to make the product of `local` that this machine has, by name, tuned; what phase 1 compares."""
        return {"dense": lambda: self.local(x)}

    # Layout

    def from_dense(self, dense: torch.Tensor) -> torch.Tensor:
        """This rank's part of a dense [N, K], as a new tensor in the layout of `self.weight`."""
        return part_of(dense, None, Part(None, self.rows, self.cols))

    def part_dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the layout of `self.weight` as this rank's [rows, columns] of W, +0.0 where it holds nothing."""
        return tensor

    def extra_repr(self) -> str:
        mask = f", mask={self.mask.name}" if self.mask else ""
        return f"{self.in_features}, {self.out_features}, rank {self.group.rank} of {self.group.world_size}{mask}"


def _sum(partials: list[torch.Tensor]) -> torch.Tensor:
    """In rank order, into the first."""
    total = partials[0]
    for partial in partials[1:]:
        total.add_(partial)
    return total
