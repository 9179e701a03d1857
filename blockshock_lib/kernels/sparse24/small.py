"""The 2:4 product for small batches, B <= 256, on Hopper GPUs: small.cu, with the choice of its sizes.

cuSPARSELt's kernels take as long for 8 rows as for 256. This one reads the very same buffer and was the faster one at
every size of benchmarks/small_product.py on an H200, of B <= 128: 1.5 to 2.8 times when tuned.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels import compiled
from blockshock_lib.kernels.sparse24 import compress, cslt

SOURCE = Path(__file__).with_name("small.cu")
MOST_ROWS = 256
TILE_ROWS = 128  # of x that one block multiplies at most: what its registers hold beside two tiles of W
SHARED_BYTES = 227 << 10  # that a block can have on compute capability 9.0
SHAPES = ((1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (2, 2, 1), (1, 4, 1))
"""(tiles, warpgroups, unroll): the fewest with which the best candidate is nearly the best of all, in
benchmarks/small_product.py behind by 2.3% at most and 0.5% in the mean; without any of these six by more.
"""
DEPTHS = (3, 4)
SPLITS = (1, 2, 4, 8)  # blocks of a cluster: 8 is what every GPU can do


class Config(NamedTuple):
    tiles: int  # of 64 rows of W that a warpgroup multiplies
    warpgroups: int  # of 128 threads in a block; each has rows of its own
    unroll: int  # times 128 columns of W in a stage
    depth: int  # stages in shared memory
    split: int  # blocks that share the columns of W

    def valid(self) -> bool:
        return min(self) >= 1

    @property
    def rows(self) -> int:
        return 64 * self.tiles * self.warpgroups

    def shared(self, eights: int) -> int:
        columns, batch = 128 * self.unroll, 8 * eights
        stages = self.depth * (self.rows * columns * 9 // 8 + batch * columns * 2)
        return max(stages, batch * (self.rows + 4) * 4)

    def fits(self, eights: int) -> bool:
        return self.shared(eights) <= SHARED_BYTES and 4 * eights * self.tiles <= 128


def unsupported(device: torch.device, dtype: torch.dtype) -> str:  # why it cannot run there; "" where it can
    if reason := cslt.unsupported(device, dtype) or compiled.unsupported(device):
        return reason
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"{torch.cuda.get_device_name(device)} has no wgmma.sp: compute capability 9.0 (Hopper) is needed"
    return compress.known(device)


def multiply(
    x: Tensor,
    buffer: Tensor,
    shape: tuple[int, int],
    config: Config | None = None,
    out: Tensor | None = None,
    bias=None,
) -> Tensor:
    """The kernel for x [B, K] that fits `buffer`, cuSPARSELt's of a weight of this shape; unchecked but for B."""
    rows, (n, k) = x.shape[0], shape
    count = eights(rows)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.stride(0) >= 1 << 31 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)  # the copies into shared memory are of 16 bytes
    config = config or default(shape, rows)
    y = x.new_empty(rows, n) if out is None else out
    # The metadata follow N K / 2 values of two bytes.
    values, meta = compiled.Long(buffer.data_ptr()), compiled.Long(buffer.data_ptr() + n * k)
    blocks = -(-n // config.rows) * -(-rows // (8 * count))
    launch = (blocks, config.split, 1), 128 * config.warpgroups, config.shared(count)
    kernel = _kernel(config, count, x.dtype == torch.float16, x.device.index)
    kernel(*launch, values, meta, x, y, bias, n, k, rows, x.stride(0))
    return y


def eights(rows: int) -> int:
    """How many times eight rows of x [rows, K] a block has; all blocks have the same."""
    if rows > MOST_ROWS:
        raise UnsupportedError(f"the small-batch product takes up to {MOST_ROWS} rows, not {rows}")
    return -(-rows // (8 * -(-rows // TILE_ROWS)))


def candidates(shape: tuple[int, int], rows: int) -> list[Config]:
    """Worth trying, `default` first: of each of `SHAPES` the deepest that fits, as copies hide the memory's latency."""
    if not 0 < rows <= MOST_ROWS:
        return []
    found = [default(shape, rows)]
    for sizes in SHAPES:
        depths = [depth for depth in DEPTHS if Config(*sizes, depth, 1).fits(eights(rows))]
        for split in SPLITS if depths else ():
            config = Config(*sizes, max(depths), split)
            if split <= most_split(config, shape):
                found.append(config)
    return list(dict.fromkeys(found))


DEFAULTS = {
    1: ((1, 1, 2, 3, 4), (1, 1, 2, 4, 2), (1, 1, 2, 3, 1)),
    2: ((1, 1, 1, 4, 4), (1, 1, 2, 3, 2), (1, 1, 2, 4, 2)),
    4: ((1, 1, 1, 4, 4), (1, 1, 2, 3, 2), (2, 2, 1, 4, 2)),
    8: ((1, 1, 1, 3, 4), (1, 1, 2, 4, 1), (2, 2, 1, 4, 2)),
    16: ((1, 1, 1, 4, 2), (1, 2, 1, 4, 2), (2, 2, 1, 3, 2)),
}
"""Up to so many times eight rows: the fastest, or near it, for up to 2^25, 2^27 and more weights. Seen on an H200 for
square ones; tune others, above all those with few rows and many columns, where these leave multiprocessors idle.
"""


@functools.lru_cache(4096)
def default(shape: tuple[int, int], rows: int) -> Config:
    by_size, weights = DEFAULTS[min(most for most in DEFAULTS if most >= eights(rows))], shape[0] * shape[1]
    config = Config(*by_size[(weights > 1 << 25) + (weights > 1 << 27)])
    return config._replace(split=min(config.split, most_split(config, shape)))


def most_split(config: Config, shape: tuple[int, int]) -> int:
    return max(s for s in SPLITS if s == 1 or s * 128 * config.unroll <= shape[1])


def prepare(configs: list[Config], rows: int, dtype: torch.dtype, device: torch.device) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda c: _kernel(c, eights(rows), dtype == torch.float16, device.index), configs))


@functools.cache
def _kernel(config: Config, count: int, half: bool, index: int | None) -> compiled.Kernel:
    defines = {name.upper(): value for name, value in config._asdict().items()} | {"EIGHTS": count}
    defines |= {"FP16": 1} if half else {}
    prelude, device = f"#define MULTIPLY {_instruction(count, half)}\n", torch.device("cuda", index)
    kernel = compiled.kernel(SOURCE, "product", device=device, prelude=prelude, specific=True, **defines)
    kernel.allow(config.shared(count))
    return kernel


def _instruction(count: int, half: bool) -> str:
    # Of 64 rows of W, 32 columns and 8 `count` rows of x (PTX ISA, "wgmma.mma_async.sp"). HALF is the pair of lanes, of
    # each four, whose metadata are meant.
    kind, sums = "f16" if half else "bf16", 4 * count
    registers = ", ".join(f"%{i}" for i in range(sums))
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(sums))
    a, b, sparsity, pair = (f"%{sums + i}" for i in range(4))
    return (
        f'asm volatile("wgmma.mma_async.sp.sync.aligned.m64n{8 * count}k32.f32.{kind}.{kind} '
        f'{{{registers}}}, {a}, {b}, {sparsity}, {pair}, 1, 1, 1, 0, 0;" '
        f': {outputs} : "l"(a), "l"(b), "r"(metadata), "n"(HALF));'
    )
