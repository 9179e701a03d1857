"""CSR through nvmath's universal sparse tensor, which generates a kernel where no library has one."""

import torch
import torch.nn.functional as F
from torch import Tensor

from blockshock_lib.kernels import needs
from blockshock_lib.kernels.patterns.csr import Csr
from blockshock_lib.kernels.patterns.pattern import on_gpu


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


def unsupported(device: torch.device, dtype: torch.dtype, *_) -> str:
    missing = "" if needs.version("nvmath-python") else "nvmath-python is not installed (the extra `cuda`)"
    return on_gpu(device, dtype) or missing
