"""`eight_bits.quantized`, its oracle, as one Triton kernel: a row of x is read once, by one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

HALF_EVEN = constexpr(1.5 * 2**23)  # added and taken away, it rounds a float32 below 2^22 to integers, halves to even


@triton.jit
def _quantize(x, values, scales, columns, LARGEST: constexpr, INTEGER: constexpr, BLOCK: constexpr):
    # x, values [R, columns], scales [R]; a program's row is [BLOCK].
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < columns
    own = tl.load(x + row * columns + at, mask=inside, other=0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(own), 0), 1e-12) * (1 / LARGEST)
    scale = tl.where(tl.max((own != own).to(tl.int32), 0) > 0, float("nan"), scale)  # a maximum passes over a NaN
    own = tl.math.div_rn(own, scale)
    if INTEGER:
        own = own + HALF_EVEN - HALF_EVEN
    tl.store(values + row * columns + at, own.to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As its oracle: (values [R, K], scales [R, 1]) of x [R, K] in bf16, fp16 or fp32, which is contiguous."""
    (rows, columns), integer = x.shape, dtype == torch.int8
    values, scales = torch.empty_like(x, dtype=dtype), x.new_empty(rows, 1, dtype=torch.float32)
    largest, block = 127.0 if integer else torch.finfo(dtype).max, triton.next_power_of_2(columns)
    how = {"LARGEST": largest, "INTEGER": integer, "BLOCK": block, "num_warps": min(16, max(4, block // 1024))}
    _quantize[(rows,)](x, values, scales, columns, **how)
    return values, scales
