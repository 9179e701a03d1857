"""Nothing is left out: the rival of every pattern."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockshock_lib.kernels.patterns import tune
from blockshock_lib.kernels.patterns.pattern import Counts, Kernel, Packed, Pattern, anywhere, on_gpu
from blockshock_lib.kernels.tuning.store import Store

FEW = 256  # rows up to which parts of K can fill a GPU that the output leaves idle
MOST_ENTRIES = 1 << 28  # of a result for which a way is searched: its truths take 16 bytes an entry


class Dense(Packed):
    """The masked weight as it is."""

    def __init__(self, weight: Tensor, mask: Tensor, block: int = 0):
        self.shape, self.dtype = tuple(weight.shape), weight.dtype
        self.tensors = {"values": torch.where(mask, weight, 0).contiguous()}

    def product(self, x: Tensor) -> Tensor:
        self.check(x)
        return F.linear(x, self.tensors["values"])

    def dense(self) -> Tensor:
        return self.tensors["values"]


class Way(NamedTuple):
    """`library`: "cublas" or "cublaslt"; `splits`: of K into so many products, which are added up."""

    library: str
    splits: int

    def valid(self) -> bool:
        return self.library in LIBRARIES and self.splits > 0


LIBRARIES = ("cublas", "cublaslt")
WAYS = tuple(Way(library, splits) for splits in (1, 2, 4, 8) for library in LIBRARIES)
STORE = Store("dense", {"dense": Way})


class Searched(Dense):
    """By the fastest of PyTorch's two libraries, K whole or in parts."""

    def __init__(self, weight: Tensor, mask: Tensor, block: int = 0):
        super().__init__(weight, mask)
        self.chosen: dict[int, Way] = {}

    def product(self, x: Tensor) -> Tensor:
        self.check(x)
        return self.by(self.chosen.get(len(x)), x)

    def by(self, way: Way | None, x: Tensor) -> Tensor:
        return multiplied(way, x, self.tensors["values"])

    def tune(self, x: Tensor) -> None:
        if not on_gpu(x.device, x.dtype) and len(x) not in self.chosen:
            ways = [way for way in WAYS if way.splits == 1 or (len(x) <= FEW and self.shape[1] % (8 * way.splits) == 0)]
            turned = [not one.is_contiguous() for one in (x, self.tensors["values"])]
            self.chosen[len(x)] = tune.choice(STORE, ways, self, x, {"turned": turned} if any(turned) else {})


def multiplied(
    way: Way | None, x: Tensor, weight: Tensor, out: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """x [B, K] times a weight [N, K] transposed, in this way, into `out`, or plus a `bias` that broadcasts to [B, N],
    rounded once; None: PyTorch's own way.
    """
    if way is None:
        return _whole(x, weight, out, bias)
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(way.library)
    try:
        if way.splits == 1:
            return _whole(x, weight, out, bias)
        # [splits, B or N, K / splits]
        parts, others = (one.unflatten(1, (way.splits, -1)).transpose(0, 1) for one in (x, weight))
        wide = {"out_dtype": torch.float32} if x.itemsize == 2 else {}
        y = torch.bmm(parts, others.transpose(1, 2), **wide).sum(0)
        y = y if bias is None else y + bias
        return y.to(x.dtype) if out is None else out.copy_(y)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def _whole(x: Tensor, weight: Tensor, out: Tensor | None, bias: Tensor | None) -> Tensor:
    if bias is not None:
        return torch.addmm(bias, x, weight.t())
    return F.linear(x, weight) if out is None else torch.mm(x, weight.t(), out=out)


class Products:
    """`multiplied`, each shape in the way that `search` found for it, PyTorch's own where it was not asked."""

    def __init__(self):
        self.ways: dict[tuple[torch.Size, torch.Size], Way] = {}

    def search(self, x: Tensor, weight: Tensor) -> None:
        if len(x) * len(weight) <= MOST_ENTRIES and (way := fastest(x, weight)):
            self.ways[x.shape, weight.shape] = way

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        way = self.ways.get((x.shape, weight.shape)) if self.ways else None
        return multiplied(way, x, weight, out, bias)


def fastest(x: Tensor, weight: Tensor) -> Way | None:
    """Of `multiplied` for operands that lie so, transposed views too, by a search that is kept; None on a CPU."""
    lent = object.__new__(Searched)
    lent.__dict__ |= {"shape": tuple(weight.shape), "dtype": weight.dtype, "tensors": {"values": weight}, "chosen": {}}
    lent.tune(x)
    return lent.chosen.get(len(x))


def weight_bytes(counts: Counts, itemsize: int) -> float:
    """e N K."""
    return itemsize * counts.n * counts.k


PATTERN = Pattern(
    "dense",
    lambda scores, sparsity, block: torch.ones_like(scores, dtype=torch.bool),
    (Kernel("linear", anywhere, Dense, weight_bytes), Kernel("searched", anywhere, Searched, weight_bytes)),
)
