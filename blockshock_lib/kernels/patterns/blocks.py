"""Square blocks: those with the largest sums, by PyTorch's BSR product or by grouped products over rows of blocks."""

import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels import needs
from blockshock_lib.kernels.patterns import tune
from blockshock_lib.kernels.patterns.pattern import (
    Counts,
    Kernel,
    Packed,
    Pattern,
    largest,
    multiplied,
    on_gpu,
    padded,
    spread,
    tiled,
    whole,
)
from blockshock_lib.kernels.tuning.store import Store

ALIGNED = 16  # bytes at whose multiples a grouped product's rows begin
LEAST = 16  # sides of a block that Triton's product takes: powers of two from here on


class Setting(NamedTuple):
    """Of Triton's kernel, by its own names."""

    SPLIT_N: int
    GROUP_SIZE_ROW: int = 4
    num_stages: int = 1
    num_warps: int = 4

    def valid(self) -> bool:
        return min(self) > 0


class Table(Store):
    """What benchmarks/bsr_table.py found, in the package: taken where nobody has tuned, whatever the versions are."""

    path = Path(__file__).with_name("bsr.json")


STORE, TABLE = (kind("bsr", {"bsr": Setting}) for kind in (Store, Table))


@functools.cache
def tabled(problem: tuple) -> Setting | None:
    """The table's setting for exactly this problem, its items in order; None where it has none, or is damaged."""
    return next((min(ways, key=ways.get) for its, _, ways in TABLE._load()[0] if tuple(its.items()) == problem), None)


class Bsr(Packed):
    """Blocks with a column each and where each row of blocks begins, int32."""

    def __init__(self, weight: Tensor, mask: Tensor, block: int):
        self.block, self.chosen, kept = block, {}, kept_blocks(mask, block)
        self.guessed: dict[int, Setting] = {}
        crow = F.pad(kept.sum(1).cumsum(0), (1, 0)).int()
        values = torch.where(tiled(mask, block)[kept], tiled(weight, block)[kept], 0)
        super().__init__(weight, crow=crow, columns=kept.nonzero()[:, 1].int(), values=values)

    def matrix(self) -> Tensor:
        return torch.sparse_bsr_tensor(*self.tensors.values(), self.shape, check_invariants=False)

    def multiply(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return multiplied(self.matrix(), x)
        rows, x = x.shape[0], padded(x, LEAST)
        if not (way := self.chosen.get(len(x)) or self.guessed.get(len(x))):
            way = self.guessed[len(x)] = self.ways(x)[0]
        return self.by(way, x)[:rows]

    def ways(self, x: Tensor) -> list[Setting]:
        """Those to try for x, the first of them where nobody tries any."""
        first = tabled(tuple(tune.problem_of(self, x, self.about).items()))
        return [first] * bool(first) + settings(len(x), self.block)

    def by(self, way: Setting | None, x: Tensor) -> Tensor:
        """The product with this setting of Triton's kernel; None: as PyTorch ships it, measured on an A100."""
        from torch.sparse._triton_ops import bsr_dense_addmm

        y = x.new_empty(len(x), self.shape[0])
        bsr_dense_addmm(y.t(), self.matrix(), x.t(), beta=0, out=y.t(), meta=way and way._asdict())
        return y

    def tune(self, x: Tensor) -> None:
        x = padded(x, LEAST)
        if x.device.type == "cuda" and len(x) not in self.chosen:
            self.chosen[len(x)] = tune.choice(STORE, self.ways(x), self, x, self.about, _variants)

    @property
    def about(self) -> dict[str, int]:
        return {"block": self.block, "blocks": len(self.tensors["values"])}

    def dense(self) -> Tensor:
        return self.matrix().to_dense()


class Shipped(Bsr):
    """With the settings that PyTorch ships."""

    def multiply(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return super().multiply(x)
        split = max(1, len(x) // self.block)
        if len(x) // split * split != len(x) or not _width(len(x) // split):
            raise UnsupportedError(f"as PyTorch ships it, it takes no batch of {len(x)} with blocks of {self.block}")
        return self.by(None, x)

    def tune(self, x: Tensor) -> None:
        return None


def settings(batch: int, block: int) -> list[Setting]:
    """Those that are tried for a batch, a multiple of 16: columns of x a program by stages and warps; first those
    nearest to a square.
    """
    widths = [width for width in (16, 32, 64, 128, 256) if batch % width == 0]
    widths.sort(key=lambda width: (abs(math.log2(width / block)), width))
    warps = (4, 8) if block >= 64 else (4, 2)
    return [Setting(batch // width, 4, s, w) for s in (3, 1, 5) for w in warps for width in widths[:3]]


def _variants(way: Setting) -> list[Setting]:
    return [way._replace(GROUP_SIZE_ROW=rows) for rows in (1, 16)] + [way._replace(num_stages=2)]


def _width(columns: int) -> bool:
    return columns >= LEAST and not columns & (columns - 1)


class Grouped(Packed):
    """y^T of each row of blocks is one product, of its blocks side by side with the rows of x^T that they need: in one
    grouped call. An empty row of blocks holds one of zeros.
    """

    def __init__(self, weight: Tensor, mask: Tensor, block: int):
        self.block, kept = block, kept_blocks(mask, block)
        kept[~kept.any(1), 0] = True
        values = torch.where(tiled(mask, block)[kept], tiled(weight, block)[kept], 0)
        values = values.transpose(0, 1).flatten(1).contiguous()  # [b, blocks b]
        columns = (kept.nonzero()[:, 1:] * block + torch.arange(block, device=mask.device)).flatten().int()
        super().__init__(weight, values=values, columns=columns, ends=(kept.sum(1).cumsum(0) * block).int())

    def multiply(self, x: Tensor) -> Tensor:
        values, columns, ends = (self.tensors[name] for name in ("values", "columns", "ends"))
        rows, x = x.shape[0], padded(x, ALIGNED // x.element_size())
        return F.grouped_mm(values, x.t()[columns], offs=ends).flatten(0, 1)[:, :rows].t().contiguous()

    def dense(self) -> Tensor:
        out = self.tensors["values"].new_zeros(self.shape)
        rows = torch.repeat_interleave(torch.diff(self.tensors["ends"], prepend=self.tensors["ends"].new_zeros(1)))
        lines = rows * self.block + torch.arange(self.block, device=rows.device)[:, None]
        out[lines, self.tensors["columns"].long().expand_as(lines)] = self.tensors["values"]
        return out


def kept_blocks(mask: Tensor, block: int) -> Tensor:
    """bool [N/b, K/b]: blocks that keep something."""
    return tiled(mask, block).any(-1).any(-1)


def bsr_bytes(counts: Counts, itemsize: int) -> float:
    """e a kept block's entries, 4 a block, and 4 (N/b + 1) (torch.sparse_bsr_tensor)."""
    entries, lines = counts.blocks * counts.block**2, counts.n // counts.block + 1
    return itemsize * entries + 4 * (counts.blocks + lines)


def grouped_bytes(counts: Counts, itemsize: int) -> float:
    """e a held block's entries, 4 a column of a block, and 4 N/b; a row of blocks that keeps nothing holds one."""
    lines = counts.n // counts.block
    blocks = counts.blocks + lines - counts.rows // counts.block
    return itemsize * blocks * counts.block**2 + 4 * (blocks * counts.block + lines)


def bsr(device: torch.device, dtype: torch.dtype, shape: tuple[int, int], block: int) -> str:
    if device.type == "cpu":
        wide = dtype in (torch.float32, torch.float64)
        return "" if wide else f"a CPU multiplies sparse fp32 and fp64; it sums {dtype} in that dtype, or has no kernel"
    if block < LEAST or block & (block - 1):
        return f"Triton's product takes blocks of a power of two from {LEAST} on, not of {block}"
    return on_gpu(device, dtype) or ("" if needs.version("triton") else "triton is not installed")


def grouped(device: torch.device, dtype: torch.dtype, shape: tuple[int, int], block: int) -> str:
    able = (torch.bfloat16,) if device.type == "cuda" else (torch.bfloat16, torch.float16, torch.float32)
    if not hasattr(F, "grouped_mm"):
        return "this torch has no grouped product"
    return "" if dtype in able else f"grouped products on the device type {device.type!r} do not take {dtype}"


def keep(scores: Tensor, sparsity: float, block: int) -> Tensor:
    sums = tiled(scores.double(), block).sum((-1, -2))
    return spread(largest(sums, whole(1 - sparsity, sums.numel())), block)


PATTERN = Pattern(
    "blocks",
    keep,
    (
        Kernel("grouped", Grouped, grouped_bytes, grouped),
        Kernel("bsr_shipped", Shipped, bsr_bytes, bsr),
        Kernel("bsr", Bsr, bsr_bytes, bsr),
    ),
    blocks=True,
)
