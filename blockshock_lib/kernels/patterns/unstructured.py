"""Any entries: the largest of the whole weight, in PyTorch's COO and CSR, on a GPU multiplied by cuSPARSE's SpMM, and
in nvmath's universal sparse tensor, which generates a kernel where no library has one.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from blockshock_lib.kernels import needs
from blockshock_lib.kernels.patterns.pattern import Counts, Kernel, Packed, Pattern, largest, multiplied, on_gpu, whole


class Coo(Packed):
    """Values with a row and a column each, int64, as PyTorch has them."""

    def __init__(self, weight: Tensor, mask: Tensor, block: int = 0):
        self.shape = tuple(weight.shape)
        self.tensors = {"indices": mask.nonzero().t().contiguous(), "values": weight[mask]}

    def matrix(self) -> Tensor:
        given = self.tensors["indices"], self.tensors["values"], self.shape
        return torch.sparse_coo_tensor(*given, is_coalesced=True, check_invariants=False)

    def product(self, x: Tensor) -> Tensor:
        self.check(x)
        return multiplied(partial(torch.addmm, mat1=self.matrix(), mat2=x.t(), beta=0), x, self.shape[0])

    def dense(self) -> Tensor:
        return self.matrix().to_dense()


class Csr(Coo):
    """Values with a column each and where each row begins, int32."""

    def __init__(self, weight: Tensor, mask: Tensor, block: int = 0):
        self.shape = tuple(weight.shape)
        crow = F.pad(mask.sum(1).cumsum(0), (1, 0)).int()
        self.tensors = {"crow": crow, "columns": mask.nonzero()[:, 1].int(), "values": weight[mask]}

    def matrix(self) -> Tensor:
        return torch.sparse_csr_tensor(*self.tensors.values(), self.shape, check_invariants=False)


class Ust(Csr):
    made: Tensor | None = None

    def product(self, x: Tensor) -> Tensor:
        self.check(x)
        if self.made is None:
            from nvmath.sparse.ust.interfaces.torch_interface import TorchUST

            self.made = TorchUST.from_torch(self.matrix())
        # Its result lies in a buffer that the next call overwrites.
        return F.linear(x, self.made).clone(memory_format=torch.contiguous_format)

    def copy(self) -> "Ust":
        other = super().copy()
        other.made = None
        return other


def coo_bytes(counts: Counts, itemsize: int) -> float:
    """(e + 16) a kept entry: two indices of 8 bytes (torch.sparse_coo_tensor)."""
    return (itemsize + 16) * counts.kept


def csr_bytes(counts: Counts, itemsize: int) -> float:
    """(e + 4) a kept entry and 4 (N + 1), by indices of 4 bytes (torch.sparse_csr_tensor)."""
    return (itemsize + 4) * counts.kept + 4 * (counts.n + 1)


def unsupported(device: torch.device, dtype: torch.dtype, *_) -> str:
    wide = device.type != "cpu" or dtype in (torch.float32, torch.float64)
    return "" if wide else f"a CPU multiplies sparse fp32 and fp64; it sums {dtype} in that dtype, or has no kernel"


def ust(device: torch.device, dtype: torch.dtype, *_) -> str:
    missing = "" if needs.version("nvmath-python") else "nvmath-python is not installed (the extra `cuda`)"
    return on_gpu(device, dtype) or missing


def keep(scores: Tensor, sparsity: float, block: int) -> Tensor:
    return largest(scores, whole(1 - sparsity, scores.numel()))


PATTERN = Pattern(
    "unstructured",
    "the largest entries, wherever they lie",
    keep,
    (
        Kernel("coo", unsupported, Coo, coo_bytes),
        Kernel("ust", ust, Ust, csr_bytes),
        Kernel("csr", unsupported, Csr, csr_bytes),
    ),
)
