"""2:4 weights of 8 bits with a scale a row, for inputs that are quantized in each call with a scale a row of theirs: by
cuSPARSELt on NVIDIA GPUs, unpacked elsewhere. No row of table.py, where a product is held to operands of 16 bits.

y = (x8 W8^T) x_scale w_scale, x8 [B, K] and W8 [N, K] in int8 or fp8 (e4m3), float32 scales [B, 1] and [N, 1]. The
library can apply w_scale itself: `alpha` of PyTorch's `_cslt_sparse_mm`, a float32 vector with an item a row of the
sparse operand (aten/src/ATen/native/sparse/cuda/cuSPARSELtOps.cpp).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from blockshock_lib.errors import UnsupportedError, first_line
from blockshock_lib.kernels.patterns.pattern import Packed, padded
from blockshock_lib.kernels.sparse24 import masks, packing
from blockshock_lib.kernels.sparse24.mask import MASKS
from blockshock_lib.kernels.sparse24.plans import Setting

DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}
WIDE = {torch.float8_e4m3fn: torch.float32, torch.int8: torch.int32}  # in which a product is not rounded
ROWS = 16  # of x: the library takes multiples of so many
RMS = 2**-7  # of y's own, that y may be off; twice that in a row or column: y may be rounded to bf16 twice


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(values [R, K] of 8 bits, scales [R, 1] in float32) of x [R, K], whose product is x but for rounding. A row with
    a NaN has NaN for a scale, one of zeros a scale above zero. By the reciprocal, as a GPU divides: bits are the same.
    """
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = torch.linalg.vector_norm(x, math.inf, 1, True).float().clamp_min(1e-12) * (1 / largest)
    values = x / scale
    return (values.round_() if dtype == torch.int8 else values).to(dtype), scale


def by_kernel(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from blockshock_lib.kernels.patterns import quantize  # Triton is PyTorch's on GPUs alone

    return quantize.quantized(x.contiguous(), dtype)


class EightBits(Packed):
    """Values [N, K] of 8 bits, two of four of them not zero at most, with scales [N, 1]; x and y are of `dtype`.
    UnsupportedError where the library's product, which is tried here, is refused or wrong.
    """

    def __init__(self, values: Tensor, scales: Tensor, dtype: torch.dtype):
        self.shape, self.dtype, self.chosen = tuple(values.shape), dtype, {}
        self.tensors = {"values": values, "scales": scales.float().contiguous()}
        if by_library(values.device):
            # fp16 has no room for a y that is still to be made smaller by x's scale.
            for self.fused in (True, False) if dtype == torch.bfloat16 else (False,):
                if not (why := self._fault(values)):
                    return
            raise UnsupportedError(f"cuSPARSELt does not multiply 2:4 in {values.dtype}, leave out dtype=: {why}")
        mask = masks.make(MASKS["magnitude"], self.shape, weight=values.float(), device=values.device)
        kept, self.tensors["metadata"] = packing.pack(values.float(), mask).data
        self.tensors["values"] = kept.to(values.dtype)

    def _fault(self, values: Tensor) -> str:
        """Compresses the values; what is wrong with their product."""
        draw = torch.Generator(values.device).manual_seed(0)
        x = torch.randn(ROWS, self.shape[1], generator=draw, dtype=self.dtype, device=values.device)
        try:
            self.tensors["values"] = torch._cslt_compress(values)
            y = self.by(Setting(), x)
        except torch.OutOfMemoryError:  # it says nothing of the product
            raise
        except Exception as error:  # whatever the library, or Triton on an older GPU, raises
            return first_line(error)
        x, x_scale = quantized(x, values.dtype)
        truth = torch.cat([F.linear(x.float(), values[part].float()) for part in masks.parts(*self.shape)], 1)
        return off(y, scaled(truth, x_scale, self.tensors["scales"], torch.float64))

    def multiply(self, x: Tensor) -> Tensor:
        rows, x = len(x), padded(x, ROWS)
        return self.by(self.chosen.get(len(x), Setting()), x)[:rows]

    def by(self, way: Setting, x: Tensor) -> Tensor:
        values, scales = self.tensors["values"], self.tensors["scales"]
        x, x_scale = by_kernel(x, values.dtype) if by_library(x.device) else quantized(x, values.dtype)
        if not by_library(x.device):
            return scaled(F.linear(x.float(), self.quantized().float()), x_scale, scales, self.dtype)
        how = way._asdict() | {"transpose_result": True}
        if self.fused:
            how |= {"alpha": scales.view(-1), "out_dtype": self.dtype}
            return torch._cslt_sparse_mm(values, x.t(), **how).mul_(x_scale)
        y = torch._cslt_sparse_mm(values, x.t(), out_dtype=WIDE[x.dtype], **how)
        return scaled(y, x_scale, scales, self.dtype)

    def quantized(self) -> Tensor:
        """The values [N, K]; on a GPU by products with the identity's columns."""
        values, columns = self.tensors["values"], self.shape[1]
        if not by_library(values.device):
            return packing.unpack(values.view(torch.int8), self.tensors["metadata"]).view(values.dtype)
        out = values.new_empty(self.shape)
        for start in range(0, columns, 1024):
            one = torch.eye(min(1024, columns - start), columns, device=values.device).roll(start, 1).to(values.dtype)
            made = torch._cslt_sparse_mm(values, one.t(), out_dtype=WIDE[one.dtype], transpose_result=True)
            out[:, start : start + len(one)] = made.t()
        return out

    def dense(self) -> Tensor:
        return (self.quantized().float() * self.tensors["scales"]).to(self.dtype)

    def tune(self, x: Tensor) -> None:
        """Takes the library's own pick for x's batch, if it is right; it is not kept on disk."""
        if by_library(x.device) and len(x := padded(x, ROWS)) not in self.chosen:
            values, scales = self.tensors["values"], self.tensors["scales"]
            form = (scales.view(-1), self.dtype) if self.fused else (None, WIDE[values.dtype])
            found = torch._C._cusparselt.mm_search(values, quantized(x, values.dtype)[0].t(), None, *form, True)
            pick = Setting(*map(int, found[:3]))
            wrong = off(self.by(pick, x), self.by(Setting(), x).double())
            self.chosen[len(x)] = Setting() if wrong else pick


def scaled(y: Tensor, x_scale: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (y * x_scale).mul_(scales.t()).to(dtype)


def by_library(device: torch.device) -> bool:
    return device.type == "cuda"


def off(y: Tensor, truth: Tensor) -> str:
    """Why y [B, N] is not the truth, in float64; "" where it is."""
    wrong, size = (y.double() - truth).square(), truth.square()
    whole = (wrong.mean() / size.mean().clamp_min(1e-30)).sqrt().item()
    # Of fewer entries all may have cancelled: their error is then held against the size of all.
    least = [1e-30 if length >= ROWS else max(1e-30, size.mean().item()) for length in y.shape]
    line = max((wrong.mean(dim) / size.mean(dim).clamp_min(least[dim])).sqrt().max().item() for dim in (0, 1))
    good = y.shape == truth.shape and whole <= RMS and line <= 2 * RMS  # neither with a NaN
    return "" if good else f"RMS error is {whole:.3g} of the truth's RMS, {line:.3g} in the worst row or column"
