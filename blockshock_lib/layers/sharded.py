"""What every method shares: one rank's part of y = x W^T + b, how the parts make y, and how they make the gradients."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from blockshock_lib.comm import Group, Pending
from blockshock_lib.comm.group import unkept
from blockshock_lib.comm.pull import side_stream
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.patterns.dense import Products
from blockshock_lib.kernels.sparse24 import masks
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.layers import autograd, guards, watch
from blockshock_lib.layers.dense_state import DenseState
from blockshock_lib.layers.graphed import Graphed
from blockshock_lib.layers.parts import Part, part_of, refuse_lost, refuse_size, refuse_wrapped, require_plain, train_as

ROWS = 8  # a chunk of the batch is a multiple of: what cuSPARSELt takes without padding


class ShardedLinear(DenseState):
    """One rank's share of y = x W^T + b; W is [out_features, in_features] = [N, K]. Trains like `nn.Linear`.

    A subclass says which part a rank holds (`part`), how it is stored (`shard`), multiplied (`local`, `local_dgrad`,
    `local_wgrad`) and joined (`reduce`, `start_dgrad`, `finish_wgrad`): by default dense, by sums. None knows autograd.

    Args:
        weight: the full W, of which the parameter `weight` is this rank's part in the method's own layout, None on a
            rank that stands by. A state dict holds W whole: all ranks call it.
        bias: [N] or None; added once, after the ranks' sum, and whole on every rank.
        mask: how a method of two terms splits W; `keep`, bool [N, K], True where term 0 holds the entry, by default.
        group: the ranks that share the layer; default the world.
        frozen: weight and bias are not trained; what only training needs is not held.
    """

    # These two, and `form`, may be set at any time, to the same on all ranks.
    overlap = True  # dX's collective runs while dW is computed, which is not always faster: they share the GPU
    chunks = 1  # parts of the batch in the forward; the collective of one runs beside the product of the next
    forms = ()  # ways to make its product that only time can choose between; `form` is the one in use
    collective = "all-reduce"  # how partial results make y; "all-gather", or "" where there is one rank's only
    split = ("weight",)  # parameters of which each rank holds a part
    uses_mask = False  # splits W into two terms
    transposed_y = False  # y is the transposed view of a contiguous [N, B]
    transposed_dgrad = False  # dX is the transposed view of a contiguous [K, B]
    gathered = False  # FSDP2 shards the weight over other ranks, and gathers it for each pass
    path = ""  # its dotted name in the model, where that is known
    met_forward = met_backward = 0  # how often the ranks have compared what they pass
    before_pass = watch.before_pass
    __call__ = guards.call
    __delattr__ = guards.before_delete
    dgrad_by = "dense"
    wgrad_by = "full"

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        mask: Mask | None = None,
        keep: Tensor | None = None,
        group: Group | None = None,
        frozen: bool = False,
    ):
        super().__init__()
        if not autograd.has_values(weight):
            raise UnsupportedError(f"{type(self).__name__} splits no fake or meta device's weights: load them first")
        self.out_features, self.in_features = weight.shape
        self.group = group or Group.of()
        self.mask, self.frozen, self.gemm = mask, frozen, Products()
        autograd.register(self)
        self.register_forward_pre_hook(guards.called)
        self.register_buffer("like", weight.new_empty(0), persistent=False)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None if bias is None else self._parameter(bias.detach().clone()))
        if self.uses_mask and mask is None:
            raise ValueError(f"{type(self).__name__} splits W by a mask: give mask=")
        self.drawn = keep is None and mask is not None and mask.family != "magnitude"  # so that it may be drawn anew
        if self.uses_mask and keep is None:
            keep = masks.make(mask, tuple(weight.shape), weight=weight, device=weight.device)
        if self.active:
            part = self.part(self.group.rank, self.group.world_size, *weight.shape)
            self.term, self.rows, self.cols = part.term, part.rows, part.cols
            self.shard(weight.detach(), keep, part)
            self.part_shape = self.weight.shape

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, mask: Mask | str | None = None, process_group=None, check: bool = True, **options
    ):
        """This rank's share of an `nn.Linear` that every rank of `process_group` (default: the world) holds whole.

        For the 2:4 kernels: features in multiples of 64, bf16 or fp16. `mask`: a Mask or the name of a shipped one
        ("checkerboard", "uniform_1100", "random", ...). UnsupportedError where the machine or shape cannot run it, for
        any other module, for what would be lost (hooks, more than weight and bias, a tie to another module) and, unless
        `check` is off, where the ranks were given unequal weights or options: it makes this a collective.
        """
        require_plain(linear)
        refuse_lost(linear)
        refuse_wrapped(linear, options)
        mask, group = Mask.named(mask) if isinstance(mask, str) else mask, Group.of(process_group)
        weight, bias = (None if p is None else p.detach() for p in (linear.weight, linear.bias))
        if check:
            guards.refuse_unequal(group, f"{cls.__name__}.from_linear", weight=weight, bias=bias, mask=mask, **options)
        layer = cls(weight, bias, mask=mask, group=group, **options)
        train_as(layer, linear)
        return layer

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        autograd.register(self)  # or the compiled operator would find the original of a copy

    def __setattr__(self, name: str, value: object) -> None:
        if name == "weight":
            self.gathered = guards.before_set(self, value)
        if name == "form" and value not in (self.forms or ("classes",)):
            raise ValueError(f"form {value!r} is not allowed; allowed: {', '.join(self.forms or ('classes',))}")
        super().__setattr__(name, value)
        if name == "weight":
            self._watch(value)

    def _parameter(self, data: Tensor) -> nn.Parameter:
        return nn.Parameter(data, requires_grad=not self.frozen)

    @classmethod
    def ranks(cls, world_size: int) -> int:
        """How many of the world's ranks work in this method; the others stand by."""
        return world_size

    @property
    def active(self) -> bool:
        return self.group.rank < self.ranks(self.group.world_size)

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        raise NotImplementedError(f"{cls.__name__} must say which part of W a rank holds")

    @classmethod
    def unsupported(cls, mask: Mask, device: torch.device, dtype: torch.dtype, **options) -> str:
        """Why this machine, mask or dtype cannot run the method with these options; "" when it can."""
        return ""

    def shard(self, weight: Tensor, keep: Tensor | None, part: Part) -> None:
        self.weight = self._parameter(part_of(weight, keep, part))

    def weight_bytes(self) -> int:  # of the weight that the forward multiplies
        return self.weight.untyped_storage().nbytes() if self.active else 0

    def hold_bytes(self) -> dict[str, int]:
        """Bytes held now: the parameter's storage, packed copies beside it, and the pattern of the mask."""
        return {"weights": self.weight_bytes(), "copies": 0, "pattern": 0}

    def local(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [B, K] -> this rank's partial result, without communication; a sum's part is written into `out` [B, N]."""
        return self.gemm(*self.factors(x), self.workspace(x) if out is None else out)

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Two whose product a b^T is the partial result for x [B, K]; so are those of dX and dW."""
        return self.columns(x), self.factor()

    def columns(self, x: Tensor) -> Tensor:
        """Of x [B, K], what this rank multiplies."""
        return x if self.cols.stop - self.cols.start == self.in_features else x[:, self.cols]

    def workspace(self, x: Tensor, chunk: int | None = None) -> Tensor | None:
        """`Group.buffer` for the partial result of x [B, K]; overwritten by the next call's."""
        return self.group.buffer(x.shape[0], self.out_features, x.dtype, x.device, chunk)

    def reduce(self, partial: Tensor, out: Tensor | None = None) -> Tensor:
        """`partial` -> y [B, N] on every rank. May overwrite `partial`; `out` as in `Group.all_reduce`."""
        return self.group.all_reduce(partial, self._parameters["bias"], out)

    def multiply(self, x: Tensor) -> Tensor:
        """x [B, K] -> y [B, N]: the whole forward of an active rank, without autograd; cut in `chunks` at most. A
        chunk's collective runs on a stream of its own beside the next one's product.
        """
        if self.chunks == 1 or (rows := self._rows(x)) >= x.shape[0]:
            return self.reduce(unkept(self.local(x)))
        main, side = (torch.cuda.current_stream(x.device), side_stream(x.device)) if x.is_cuda else (None, None)
        if self.transposed_y:
            y, into = x.new_empty(self.out_features, x.shape[0]).t(), None
        else:
            y, into = x.new_empty(x.shape[0], self.out_features), self.workspace(x, rows)
            into = y if into is None else into
        partials = []  # kept until both streams are done with them: the allocator knows of one only
        for start in range(0, x.shape[0], rows):
            chunk = slice(start, start + rows)
            places = [] if into is None else [into[chunk]]
            if into is None and self.collective == "all-reduce":  # the next piece would lie in the workspace too
                places = [x.new_empty(self.out_features, len(x[chunk]))]
            partials.append(self.local(x[chunk], *places))
            if side is not None:
                side.wait_stream(main)
            with torch.cuda.stream(side):  # None is no change
                self.reduce(partials[-1], y[chunk])
        if side is not None:
            main.wait_stream(side)
        return y

    def _rows(self, x: Tensor) -> int:
        if self.chunks == 1 or not self.collective or self.group.world_size == 1:
            return x.shape[0]
        return -(-x.shape[0] // self.chunks // ROWS) * ROWS

    def chunk_sizes(self, x: Tensor) -> list[Tensor]:
        """One chunk of each size that x [B, K] is cut into."""
        return list({len(chunk): chunk for chunk in x.split(self._rows(x))}.values())

    def forward(self, input: Tensor) -> Tensor:
        """y [..., N] of `input` [..., K], named as nn.Linear names it. ValueError: another width, dtype, or nested."""
        with torch._C.DisableTorchFunctionSubclass():  # each look at a weight that refuses some would take 1 us
            weight = self._parameters["weight"]  # distribute_module sets it past __setattr__
            odd = weight is None or isinstance(weight, DTensor) or type(input) is not Tensor or input.is_nested
            if odd or self.gathered or input.shape[-1] != self.in_features:
                input = guards.before_forward(self, input)
            return autograd.linear(self, input)

    def graphed(self, shapes: int = 8) -> Graphed:
        return Graphed(self, shapes)

    def memory_read(self) -> list[Tensor]:
        """What `multiply` reads beside x: a CUDA graph of it is right as long as these lie where they lay."""
        return [t for t in (self.weight, self.bias) if t is not None]

    def local_dgrad(self, dy: Tensor) -> Tensor:  # dy [B, N] -> this rank's partial dX
        return self.gemm(*self.dgrad_factors(dy))

    def dgrad_factors(self, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy[:, self.rows], self.factor().t()

    def start_dgrad(self, partial: Tensor) -> Pending:
        """Starts to join the partial dX; its `wait` gives dX [B, K] on every rank. May overwrite `partial`."""
        return self.group.start_all_reduce(partial)

    def wgrad_strategies(self) -> tuple[str, ...]:
        """For dW, what this mask and group can run; `wgrad_by` is the one in use."""
        return (self.wgrad_by,)

    def local_wgrad(self, dy: Tensor, x: Tensor, by: str | None = None):
        """dy [B, N], x [B, K] -> this rank's share of dW = dy^T x."""
        return self.gemm(*self.wgrad_factors(dy, x, by or self.wgrad_by))

    def wgrad_factors(self, dy: Tensor, x: Tensor, by: str) -> tuple[Tensor, Tensor]:
        return dy[:, self.rows].t(), x[:, self.cols].t()

    def finish_wgrad(self, partial, by: str | None = None) -> Tensor:
        """The gradient of `self.weight`, in its shape and dtype."""
        return partial

    def backward(self, dy: Tensor, x: Tensor | None, need=(True, True, True), overlap: bool | None = None) -> tuple:
        """(dX, dW, db) of dy [B, N]; `need` says which, None stands for the others. x [B, K] is needed for dW alone."""
        dx = self.start_dgrad(self.local_dgrad(dy)) if need[0] else None
        if dx is not None and not (self.overlap if overlap is None else overlap):
            dx = Pending(dx.wait())
        dw = self.finish_wgrad(self.local_wgrad(dy, x)) if need[1] else None
        # A product with ones needs no temporary; `dy.sum(0)` took 128 MiB for 4096 x 4096 on an H200.
        db = torch.mm(dy.new_ones(1, dy.shape[0]), dy)[0] if need[2] and self.bias is not None else None
        return None if dx is None else dx.wait(), dw, db

    def post_step(self) -> dict[str, Callable[[], None]]:
        """What must be done after an optimizer's step before the layer is right again, by name, in order."""
        return {}

    def refresh(self) -> None:
        """Runs `post_step`, as the layer does where it sees that its weight changed; it cannot see `weight.data`."""
        for step in self.post_step().values():
            step()

    def prepare(self, always: bool = False) -> None:
        """Refreshes if the weight changed since it was last looked at, or `always`. UnsupportedError: another shape."""
        if (weight := self._parameters["weight"]).shape != self.part_shape:  # lent, or set as its data
            refuse_size(self, self.part_shape, weight.shape)
        if not autograd.has_values(weight):
            way = "of x without them it computes shapes; to_empty(device=...) and then load_state_dict() bring them"
            raise UnsupportedError(f"{watch.describe(self)} has no values, on the meta device or fake: {way}")

    def tune(self, x: Tensor) -> None:
        """Searches for the fastest kernel for x [B, K]; no collective: the other ranks find what one of them kept."""
        for part in self.chunk_sizes(x):
            self.gemm.search(*self.factors(part))

    def tune_dgrad(self, dy: Tensor) -> None:
        """The same for dX of dy [B, N]."""
        self.gemm.search(*self.dgrad_factors(dy))

    def tune_wgrad(self, dy: Tensor, x: Tensor) -> None:
        for by in self.wgrad_strategies():
            self.gemm.search(*self.wgrad_factors(dy, x, by))

    def tune_reduce(self, x: Tensor) -> None:
        """Has the group measure its ways to join partial results of x [B, K]. A collective, unlike `tune`."""
        if self.collective == "all-reduce":
            for part in self.chunk_sizes(x):
                self.group.tune(part.shape[0] * self.out_features * part.element_size(), x.device)

    def extra_repr(self) -> str:
        mask = f", mask={self.mask.name}" if self.mask else ""
        return f"{self.in_features}, {self.out_features}, rank {self.group.rank} of {self.group.world_size}{mask}"
