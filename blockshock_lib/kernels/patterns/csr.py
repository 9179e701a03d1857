"""PyTorch's formats of single entries: COO and CSR, on a GPU multiplied by cuSPARSE's SpMM."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from blockshock_lib.kernels.patterns.pattern import Counts, Packed, multiplied


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


def coo_bytes(counts: Counts, itemsize: int) -> float:
    """(e + 16) a kept entry: two indices of 8 bytes (torch.sparse_coo_tensor)."""
    return (itemsize + 16) * counts.kept


def csr_bytes(counts: Counts, itemsize: int) -> float:
    """(e + 4) a kept entry and 4 (N + 1), by indices of 4 bytes (torch.sparse_csr_tensor)."""
    return (itemsize + 4) * counts.kept + 4 * (counts.n + 1)


def unsupported(device: torch.device, dtype: torch.dtype, *_) -> str:
    wide = device.type != "cpu" or dtype in (torch.float32, torch.float64)
    return "" if wide else f"a CPU multiplies sparse fp32 and fp64; it sums {dtype} in that dtype, or has no kernel"
