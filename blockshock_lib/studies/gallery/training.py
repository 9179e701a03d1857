"""gallery_training on one rank: a training step of y = f(h) W^T with a 2:4 weight or 2:4 activations, piece by piece.

With a = f(h) and a kept share m: dA = dy W, dH = m f'(h) dA, dW = dy^T a. Weights are 2:4 both ways under a mask that
stays, so that y and dA are sparse products; T1 packs a dense master anew in each step, T3 trains the packed values.
Activations are 2:4 by their size, anew in each step: in strips of four along the features y is a sparse product; in
tiles, 2:4 both ways, dW is one too, and the gradient is straight-through: dH = f'(h) dA, as no mask is at hand.
"""

from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT

from blockshock_lib.engine.study import Check
from blockshock_lib.errors import UnsupportedError, first_line
from blockshock_lib.kernels.patterns import dense
from blockshock_lib.kernels.patterns.pattern import on_gpu
from blockshock_lib.kernels.patterns.table import PATTERNS
from blockshock_lib.kernels.sparse24.pattern import Pattern, larger
from blockshock_lib.layers import Linear24
from blockshock_lib.layers.pattern_linear import linear_of
from blockshock_lib.studies.gallery.methods import WAYS
from blockshock_lib.studies.gallery.phases import STEP
from blockshock_lib.studies.gallery.problem import LOOSER, GalleryProblem, GalleryRunner

PATTERN = PATTERNS["2:4"]


class TrainingProblem(GalleryProblem):
    """`x` is h [B, K], before the nonlinearity f that the case is named after."""

    def f(self, h: Tensor) -> Tensor:
        return F.gelu(h) if self.case.pattern == "GELU" else F.relu(h).square()

    def df(self, dy: Tensor, h: Tensor) -> Tensor:
        return torch.ops.aten.gelu_backward(dy, h) if self.case.pattern == "GELU" else 2 * F.relu(h) * dy

    def unsupported(self, method: str) -> str:
        way = WAYS[method]
        if way.operand == "weight":
            return Linear24.unsupported(None, self.device, self.dtype, product=way.kernel)
        if way.tiles:
            return on_gpu(self.device, self.dtype) or untrue_tiles(self.device, self.dtype)
        try:
            PATTERN.choose(self.x, 0, way.kernel)
        except UnsupportedError as error:
            return first_line(error) if way.operand != "dense" else ""
        return ""

    def prepare(self, method: str) -> None:
        pass

    def build(self, method: str) -> "TrainingRunner":
        return TrainingRunner(self, method)


@cache
def untrue_tiles(device: torch.device, dtype: torch.dtype) -> str:
    """Why PyTorch's tiles cannot be multiplied on this GPU: it writes their metadata by CUTLASS's layout, and the
    cuSPARSELt of some GPUs reads another.
    """
    a = torch.randn(256, 512, generator=torch.Generator(device).manual_seed(0), device=device, dtype=dtype)
    packed = SparseSemiStructuredTensorCUSPARSELT.prune_dense_static_sort(a)
    for made in (packed.to_dense(), packed.t().to_dense().t()):
        keep = made != 0
        if crowded(keep, keep.t()) or not torch.equal(made, torch.where(keep, a, 0)):
            return "cuSPARSELt multiplies other places here than PyTorch's tile op keeps"
    return ""


def crowded(*masks: Tensor) -> bool:
    """Whether one of them [., .] keeps more than two of four neighbours along its rows."""
    return any(int(keep.unflatten(1, (-1, 4)).sum(-1).max()) > 2 for keep in masks)


class Operand(NamedTuple):
    """a [B, K], what of it is kept, and it packed; None where all is, or its packed form alone tells."""

    a: Tensor
    keep: Pattern | None = None
    packed: Any = None


class TrainingRunner(GalleryRunner):
    """`operand`: as pieces that are timed alone find it; a step makes its own."""

    pieces = STEP[:-1]

    def __init__(self, problem: TrainingProblem, method: str):
        self.problem, self.name, self.way = problem, method, WAYS[method]
        self.layer, self.operand, self.searched = None, None, dense.Products()
        if self.way.operand == "weight":
            how = {"update": self.way.update, "product": self.way.kernel, "frozen": False}
            self.layer = Linear24.from_linear(
                linear_of(problem.weight, None).requires_grad_(), mask="transposable_random", **how
            )
        self.operand = self.run("sparsify")

    @cached_property
    def weight(self) -> Tensor:
        """What is multiplied, dense."""
        return self.layer.to_dense() if self.layer else self.problem.weight

    def sparsify(self) -> Operand:
        """All that a step does before its products: f, and what makes the operand 2:4."""
        h, a, way = self.problem.x, self.problem.f(self.problem.x), self.way
        if self.layer:
            for stage in self.layer.post_step().values():
                stage()
        if way.tiles:
            return Operand(a, None, SparseSemiStructuredTensorCUSPARSELT.prune_dense_static_sort(a))
        if way.operand in ("dense", "weight"):
            return Operand(a)
        keep, a = larger(h if way.operand == "before" else a, a)
        # The first was checked and tuned, which is no part of a step.
        packed = self.operand.packed.again(a, keep) if self.operand else PATTERN.pack(a, keep.mask(), kernel=way.kernel)
        return Operand(a, keep, packed)

    def forward(self, operand: Operand | None = None) -> Tensor:
        """y [B, N]."""
        (a, _, packed), weight = operand or self.operand, self.problem.weight
        if self.layer:
            return self.layer.multiply(a)
        if self.way.tiles:
            return packed @ weight.t()
        return packed.product(weight).t() if packed else self.searched(a, weight)

    def backward(self, operand: Operand | None = None) -> tuple[Tensor, Tensor]:
        """dH [B, K], and dW as the weight lies."""
        (a, keep, packed), dy = operand or self.operand, self.problem.dy
        if self.layer:
            da, dw, _ = self.layer.backward(dy, a)
        else:
            da = self.searched(dy, self.problem.weight.t())
            dw = (packed.t() @ dy).t() if self.way.tiles else self.searched(dy.t(), a.t())
        dh = self.problem.df(da, self.problem.x)
        return (dh if keep is None else keep.masked(dh, out=dh)), dw

    def step(self) -> tuple[Tensor, ...]:
        made = self.sparsify()
        return self.forward(made), *self.backward(made)

    def tune(self) -> None:
        if self.layer:
            self.layer.tune(self.operand.a)
            self.layer.tune_dgrad(self.problem.dy)
        else:
            (a, keep, packed), weight, dy = self.operand, self.problem.weight, self.problem.dy
            if keep is not None:
                packed.tune(weight)
            for x, w in ((a, weight), (dy, weight.t()), (dy.t(), a.t())):
                self.searched.search(x, w)

    def compared(self, part: str, made: tuple[Tensor, ...]) -> Iterator[Check]:
        true, base = (self.expected(dtype) for dtype in (torch.float64, self.problem.dtype))
        made = (*made[:2], self.layer.to_dense(made[2])) if self.layer else made
        looser = LOOSER.get(self.problem.dtype, 1.0)
        for what, *three in zip(("y", "dH", "dW"), made, base, true, strict=True):
            yield Check(what, *three, "" if what == "y" else what, looser=looser, fault=self.fault())

    def expected(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(y, dH, dW) by the formulas, of what is kept here."""
        h, weight, dy = (x.to(dtype) for x in (self.problem.x, self.weight, self.problem.dy))
        a, kept = self.problem.f(h), self.kept
        a = a if kept is None or self.layer else torch.where(kept, a, 0)
        dh, dw = self.problem.df(dy @ weight, h), dy.t() @ a
        dh = dh if self.operand.keep is None else torch.where(kept, dh, 0)
        return F.linear(a, weight), dh, torch.where(kept, dw, 0) if self.layer else dw

    @property
    def kept(self) -> Tensor | None:
        """Of the weight, bool [N, K], a kept weight of 0 too, or of the activations, [B, K]; None: all."""
        if self.layer:
            return self.layer.pattern.mask()
        if self.way.tiles:
            return self.operand.packed.to_dense() != 0
        return self.operand.keep and self.operand.keep.mask()

    def fault(self) -> str:
        """What is not 2:4, or not the larger two of four; "" where all is as it should be."""
        if (kept := self.kept) is None:
            return ""
        if crowded(kept, *([kept.t()] if self.layer or self.way.tiles else [])):
            return "more than two of four neighbours are kept"
        if self.operand.keep is None:
            return ""
        source = (self.problem.x if self.way.operand == "before" else self.problem.f(self.problem.x)).abs()
        groups, inside = (x.unflatten(1, (-1, 4)) for x in (source, kept))
        least, most = groups.masked_fill(~inside, torch.inf).amin(-1), groups.masked_fill(inside, 0).amax(-1)
        return "a smaller one of four is kept" if bool((least < most).any()) else ""

    def weigh(self) -> dict[str, float]:
        """Bytes of the weight in training, without gradient and optimizer, and in inference; of what a step keeps of
        the activations for its backward.
        """
        dense = float(self.problem.weight.nbytes)
        training = float(sum(self.layer.hold_bytes().values())) if self.layer else dense
        a, keep, _ = self.operand
        held = 2.0 * a.nbytes + (0 if keep is None else keep.nbytes)  # h and a
        if self.way.tiles:
            held = a.nbytes * (1 + 9 / 8)  # a packed in both directions
        inference = float(self.layer.weight_bytes()) if self.layer else dense
        return {"weight_training": training, "weight_inference": inference, "activations": held}

    def operand_bytes(self) -> int:
        return self.problem.weight.nbytes

    def parts(self) -> tuple[str, ...]:
        return STEP

    def make(self, part: str) -> Any:
        return getattr(self, part)()
