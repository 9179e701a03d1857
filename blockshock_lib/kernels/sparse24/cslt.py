"""The 2:4 product by cuSPARSELt, with a plan that is kept and the algorithm chosen by measurement.

Against the public interface (stock.py) it drops the wrapper, gets a contiguous output from the kernel itself, uses the
algorithm that was tuned and, where nvmath-python is installed (plans.py), plans once. Without that it calls PyTorch's
raw op, which plans every call anew (0.35 to 1 ms of host time beside an H200); a CUDA graph removes that.

Facts that this file rests on, read from aten/src/ATen/native/sparse/cuda/cuSPARSELtOps.cpp (torch 2.11):
- `_cslt_sparse_mm(packed, dense)` takes `dense` [K, B] as contiguous, or else as the transpose of a contiguous [B, K]:
  any other strides give wrong values without an error. So x is made contiguous here.
- It never compares K with the weight's. So x is checked here.
- The dense side must be a multiple of 8 in 16-bit types. Other batches are padded with zero rows and the result cut.
- the handle belongs to a thread and the device that was current at its first call: one process a GPU.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import compress, plans
from blockshock_lib.kernels.sparse24.packing import Packed, aligned, check_weight, contiguous_aligned
from blockshock_lib.kernels.sparse24.pattern import Pattern
from blockshock_lib.kernels.sparse24.plans import Setting

MOST_WEIGHTS = 2**32
"""N K of the largest weight that cuSPARSELt multiplies rightly. Measured on an H200 (cuSPARSELt 0.8.0): 65536x65536 is
right with all six algorithms tried. At 81920x81920 and 98304x98304 the rows whose weights lie beyond the 2^32-th are
wrong, by 5 standard deviations and without an error, with every algorithm alike and though `Packed.values` is right.
"""


def unsupported(device: torch.device, dtype: torch.dtype) -> str:  # why it cannot run there; "" where it can
    if device.type != "cuda":
        return f"PyTorch has no 2:4 product for the device type {device.type!r}, only for NVIDIA GPUs"
    if dtype == torch.float32:
        return "cuSPARSELt's fp32 is TF32 with a 1:2 pattern, not 2:4"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"cuSPARSELt multiplies bf16 and fp16 here, not {dtype}"
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    if torch.version.hip or not torch.backends.cusparselt.is_available() or not hasattr(torch._C, "_cusparselt"):
        return "this PyTorch was built without cuSPARSELt"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has no 2:4 tensor cores (compute capability 8.0 is needed)"
    if device.index not in (None, torch.cuda.current_device()):
        return f"cuSPARSELt's handle belongs to the current device, cuda:{torch.cuda.current_device()}, not to {device}"
    return ""


def too_large(shape: tuple[int, ...]) -> str:  # why a weight [N, K] cannot be multiplied; "" where it can
    advice = 'take more ranks (from 4 on a term has fewer columns) or product="reference"'
    fault = "has more than 2^32 entries, and beyond those cuSPARSELt gives wrong values without an error"
    return f"a weight of {'x'.join(map(str, shape))} {fault}; {advice}" if math.prod(shape) > MOST_WEIGHTS else ""


def require(
    shape: tuple[int, ...], device: torch.device | None = None, dtype: torch.dtype | None = None, name: str = "cslt"
) -> None:
    """UnsupportedError where a weight of this shape [N, K] cannot be multiplied, on this device if given."""
    if reason := (unsupported(device, dtype) if device else "") or too_large(shape):
        raise UnsupportedError(f"2:4 product {name!r} cannot run: {reason}")


def pack(weight: Tensor, mask: Tensor) -> Packed:
    """Compress weight [N, K], bf16 or fp16 on a GPU, by mask, bool [N, K]: a kept weight that is zero stays kept.

    The data are cuSPARSELt's buffer, the extra maps a batch size to its tuned way. ValueError where the two do not fit
    or the mask is not 2:4; UnsupportedError where this device, dtype or shape cannot be packed.
    """
    require(weight.shape, weight.device, weight.dtype)
    check_weight(weight, mask)
    pattern = Pattern.of(mask)
    packed = blank(pattern, weight.dtype)
    pattern.gather(weight, out=packed.values)
    return packed


def blank(pattern: Pattern, dtype: torch.dtype) -> Packed:  # of a mask [N, K], its values still to be written
    require(pattern.shape)
    compress.check(pattern.shape, dtype)
    # The op compresses by value: it would note another place for a kept zero, and values written later would go astray.
    # Ones where the mask keeps give the metadata of the mask.
    other = compress.known(pattern.tiles.device)  # why its metadata are not ours
    buffer = torch._cslt_compress(pattern.mask().to(dtype)) if other else compress.blank(pattern, dtype)
    return Packed("cslt", pattern.shape, dtype, (buffer,), {})


def padded(rows: int) -> int:
    """The batch as the library sees it, a multiple of 8."""
    return rows + -rows % 8


def multiply(
    x: Tensor, buffer: Tensor, shape: tuple[int, int], setting: Setting, out: Tensor | None = None, bias=None
) -> Tensor:
    """The product of x [B, K] that fits `buffer`, the library's of a weight of this shape; unchecked. A batch is padded
    to a multiple of 8. The bias is added in the product's epilogue where plans are kept and it begins at 16 bytes.
    RuntimeError where the library refuses the setting.
    """
    rows, n = x.shape[0], shape[0]
    if more := -rows % 8:
        y = multiply(F.pad(x, (0, 0, 0, more)), buffer, shape, setting, None, bias)[:rows]
        return y if out is None else out.copy_(y)
    if not plans.missing(x.device):
        x = x if plans.fits(x) else x.clone(memory_format=torch.contiguous_format)
        y = x.new_empty(rows, n) if out is None else out
        inside = bias is None or aligned(bias)  # what the epilogue reads
        plans.multiply(x, buffer, shape, setting, y, bias if inside else None)
        return y if inside else y.add_(bias)
    y = torch._cslt_sparse_mm(buffer, contiguous_aligned(x).t(), transpose_result=True, **setting._asdict())
    if bias is not None:
        y.add_(bias)
    return y if out is None else out.copy_(y)
