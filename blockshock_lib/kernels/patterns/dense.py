"""Nothing is left out: the rival of every pattern."""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockshock_lib.kernels.patterns import tune
from blockshock_lib.kernels.patterns.pattern import Counts, Kernel, Packed, Pattern, on_gpu
from blockshock_lib.kernels.tuning.store import Store

FEW = 256  # rows up to which parts of K can fill a GPU that the output leaves idle


class Dense(Packed):
    """The masked weight as it is."""

    def __init__(self, weight: Tensor, mask: Tensor, block: int = 0):
        super().__init__(weight, values=torch.where(mask, weight, 0).contiguous())

    def multiply(self, x: Tensor) -> Tensor:
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
_SETTING = threading.Lock()  # the preferred library is the whole process's


class Searched(Dense):
    """By the fastest of PyTorch's two libraries, K whole or in parts."""

    def __init__(self, weight: Tensor, mask: Tensor, block: int = 0):
        super().__init__(weight, mask)
        self.chosen: dict[int, Way] = {}

    def multiply(self, x: Tensor) -> Tensor:
        return self.by(self.chosen.get(len(x)), x)

    def by(self, way: Way | None, x: Tensor) -> Tensor:
        return multiplied(way, x, self.tensors["values"])

    def tune(self, x: Tensor) -> None:
        if not on_gpu(x.device, x.dtype) and len(x) not in self.chosen:
            few = min(len(x), self.shape[0]) <= FEW
            ways = [way for way in WAYS if way.splits == 1 or (few and self.shape[1] % (8 * way.splits) == 0)]
            lie = [_lies(one) for one in (x, self.tensors["values"])]
            self.chosen[len(x)] = tune.choice(STORE, ways, self, x, {"lie": lie} if lie != ["N", "N"] else {})


def _lies(x: Tensor) -> str:
    """As BLAS says it: N or T, and s where it is a slice of something wider."""
    turned = int(x.stride(1) != 1)
    return "NT"[turned] + "s" * (x.stride(turned) != x.shape[1 - turned])


def multiplied(
    way: Way | None, x: Tensor, weight: Tensor, out: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """x [B, K] times a weight [N, K] transposed, in this way, into `out`, plus a `bias` that broadcasts to [B, N],
    rounded once; None: PyTorch's own way.
    """
    if way is None:
        return _whole(x, weight, out, bias)
    with preferred(way.library):
        if way.splits == 1:
            return _whole(x, weight, out, bias)
        # [splits, B or N, K / splits]
        parts, others = (one.unflatten(1, (way.splits, -1)).transpose(0, 1) for one in (x, weight))
        wide = {"out_dtype": torch.float32} if x.itemsize == 2 else {}
        y = torch.bmm(parts, others.transpose(1, 2), **wide).sum(0)
        y = y if bias is None else y + bias
        return y.to(x.dtype) if out is None else out.copy_(y)


@contextlib.contextmanager
def preferred(library: str) -> Iterator[None]:
    """Has this library multiply; "": PyTorch's own choice."""
    if not library:
        yield
        return
    with _SETTING:
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library(library)
        try:
            yield
        finally:
            torch.backends.cuda.preferred_blas_library(before)


def _whole(x: Tensor, weight: Tensor, out: Tensor | None, bias: Tensor | None) -> Tensor:
    if bias is not None:
        return torch.addmm(bias, x, weight.t(), out=out)
    return F.linear(x, weight) if out is None else torch.mm(x, weight.t(), out=out)


class Products:
    """`multiplied`, in the way that `search` found for operands that lie so; PyTorch's own where it was not asked, or
    found no better. K in parts takes several launches, so an eager call, which they would hold up, takes it whole.
    """

    def __init__(self):
        self.ways: dict[tuple, Way] = {}

    def __reduce__(self) -> tuple:
        return Products, ()  # a copy may go to another device, and finds in the file what was searched

    @torch.no_grad()
    def search(self, x: Tensor, weight: Tensor) -> None:
        if any(hasattr(one, "device_mesh") for one in (x, weight)):
            return  # FSDP2 holds a part of it
        with contextlib.suppress(torch.OutOfMemoryError):
            if (way := fastest(x, weight)) not in (None, WAYS[0]):  # PyTorch's own
                self.ways[_operands(x, weight)] = way
                if way.splits > 1:  # else first in a capture, which may load no kernel
                    multiplied(way, x, weight)

    def way(self, x: Tensor, weight: Tensor) -> Way | None:
        return self.ways.get(_operands(x, weight)) if self.ways else None

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        way = self.way(x, weight)
        if way and way.splits > 1 and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            way = None
        return multiplied(way, x, weight, out, bias)


def _operands(x: Tensor, weight: Tensor) -> tuple:
    return x.shape, x.stride(), weight.shape, weight.stride(), x.dtype, x.device


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
    (Kernel("linear", Dense, weight_bytes), Kernel("searched", Searched, weight_bytes)),
)
