"""Any entries: the largest of the whole weight, in PyTorch's COO and CSR, on a GPU multiplied by cuSPARSE's SpMM, and
in nvmath's universal sparse tensor, which generates a kernel where no library has one.

A weight of 16 bits is held and multiplied in fp32, and its product rounded once. In bf16 PyTorch has no COO product;
cuSPARSE's CSR product had 6.8 times the RMS error of F.linear at 4096x4096, half of it kept, and at 16 columns ended
in cudaErrorInvalidAddressSpace (H200, PyTorch 2.11).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from blockshock_lib.kernels import needs
from blockshock_lib.kernels.patterns import pattern
from blockshock_lib.kernels.patterns.pattern import Counts, Kernel, Packed, Pattern, largest, multiplied, whole


class Coo(Packed):
    """Values with a row and a column each, int64, as PyTorch has them."""

    def __init__(self, weight: Tensor, mask: Tensor, block: int = 0):
        super().__init__(weight, indices=mask.nonzero().t().contiguous(), values=wide(weight[mask]))

    def matrix(self) -> Tensor:
        given = self.tensors["indices"], self.tensors["values"], self.shape
        return torch.sparse_coo_tensor(*given, is_coalesced=True, check_invariants=False)

    def multiply(self, x: Tensor) -> Tensor:
        return multiplied(self.matrix(), wide(x)).to(self.dtype)

    def dense(self) -> Tensor:
        return self.matrix().to_dense().to(self.dtype)


class Csr(Coo):
    """Values with a column each and where each row begins, int32."""

    def __init__(self, weight: Tensor, mask: Tensor, block: int = 0):
        crow = F.pad(mask.sum(1).cumsum(0), (1, 0)).int()
        Packed.__init__(self, weight, crow=crow, columns=mask.nonzero()[:, 1].int(), values=wide(weight[mask]))

    def matrix(self) -> Tensor:
        return torch.sparse_csr_tensor(*self.tensors.values(), self.shape, check_invariants=False)


class Ust(Csr):
    def __init__(self, weight: Tensor, mask: Tensor, block: int = 0):
        super().__init__(weight, mask, block)
        self.made, self.plans = None, {}

    def multiply(self, x: Tensor) -> Tensor:
        from nvmath.sparse.ust.interfaces import torch_interface

        # Its own plans know a weight by its shape alone: one that keeps more would be read beyond its end (1.0.0).
        torch_interface._MATMUL_CACHE = self.plans
        if self.made is None:
            self.made = torch_interface.TorchUST.from_torch(self.matrix())
        # Its result lies in a buffer that the next call overwrites.
        return F.linear(wide(x), self.made).to(self.dtype, copy=True, memory_format=torch.contiguous_format)

    def copy(self) -> "Ust":
        other = super().copy()
        other.made = None
        return other


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def coo_bytes(counts: Counts, itemsize: int) -> float:
    """(e + 16) a kept entry, e at least 4: two indices of 8 bytes (torch.sparse_coo_tensor)."""
    return (max(itemsize, 4) + 16) * counts.kept


def csr_bytes(counts: Counts, itemsize: int) -> float:
    """(e + 4) a kept entry and 4 (N + 1), e at least 4, by indices of 4 bytes (torch.sparse_csr_tensor)."""
    return (max(itemsize, 4) + 4) * counts.kept + 4 * (counts.n + 1)


def ust(device: torch.device, dtype: torch.dtype, *_) -> str:
    missing = "" if needs.version("nvmath-python") else "nvmath-python is not installed (the extra `cuda`)"
    if why := pattern.on_gpu(device, dtype) or missing:
        return why
    from nvmath.sparse.ust.interfaces import torch_interface

    return "" if hasattr(torch_interface, "_MATMUL_CACHE") else "nvmath keeps its plans elsewhere than version 1.0"


def keep(scores: Tensor, sparsity: float, block: int) -> Tensor:
    return largest(scores, whole(1 - sparsity, scores.numel()))


PATTERN = Pattern(
    "unstructured",
    keep,
    (
        Kernel("coo", Coo, coo_bytes),
        Kernel("ust", Ust, csr_bytes, ust),
        Kernel("csr", Csr, csr_bytes),
    ),
)
