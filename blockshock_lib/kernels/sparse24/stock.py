"""The 2:4 product of PyTorch's public interface, which plans every call anew, with two things added:
- x is made contiguous first, at a multiple of 16 bytes: the op hands cuSPARSELt its address and shape, not its strides,
  and multiplies a column slice of a wider tensor as if its rows lay end to end, wrong and without an error;
- y is made contiguous last: up to torch 2.11 the op returns a transposed view, which a collective refuses.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT

from blockshock_lib.kernels.sparse24 import cslt
from blockshock_lib.kernels.sparse24.packing import Packed, check_input, check_weight, contiguous_aligned


def pack(weight: Tensor, mask: Tensor) -> Packed:
    """Compress weight [N, K], bf16 or fp16 on a GPU, by mask, bool [N, K]; errors as `cslt.pack`. That goes by value:
    for a kept zero another place may be noted, `Packed.values` need then not be `weight[mask]`, the product is right.
    """
    cslt.require(weight.shape, weight.device, weight.dtype, name="torch")
    check_weight(weight, mask)
    # torch.where, as weight * mask leaves -0.0 in the holes.
    return compress(torch.where(mask, weight.detach(), weight.new_zeros(())))


def compress(kept: Tensor) -> Packed:
    """Compress a weight [N, K] that is masked already: what training by the public interface repeats each step."""
    cslt.require(kept.shape, name="torch")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of SparseSemiStructuredTensor is in prototype")
        # What to_sparse_semi_structured makes, unless told to take CUTLASS, whose kernels run on capability 8.x only.
        wrapper = SparseSemiStructuredTensorCUSPARSELT.from_dense(kept.detach().contiguous())
    return Packed("torch", tuple(kept.shape), kept.dtype, (wrapper.packed,), wrapper)


def linear(x: Tensor, packed: Packed, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """As `backends.Backend.linear`; x that is a slice of a wider tensor, or begins anywhere, is copied first."""
    check_input(x, packed, out, bias)
    y = F.linear(contiguous_aligned(x), packed.extra).contiguous()
    if bias is not None:
        y.add_(bias)
    return y if out is None else out.copy_(y)
