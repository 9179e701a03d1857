"""Any entries: the largest of the whole weight."""

from torch import Tensor

from blockshock_lib.kernels.patterns import csr, ust
from blockshock_lib.kernels.patterns.pattern import Kernel, Pattern, largest, whole


def keep(scores: Tensor, sparsity: float, block: int) -> Tensor:
    return largest(scores, whole(1 - sparsity, scores.numel()))


PATTERN = Pattern(
    "unstructured",
    "the largest entries, wherever they lie",
    keep,
    (
        Kernel("coo", csr.unsupported, csr.Coo, csr.coo_bytes),
        Kernel("ust", ust.unsupported, ust.Ust, csr.csr_bytes),
        Kernel("csr", csr.unsupported, csr.Csr, csr.csr_bytes),
    ),
)
