"""The ways to multiply with cuSPARSELt's packed form, the library with a setting and the small-batch kernel with a
config, which takes up to 128 rows where nobody has tuned; and a probe that tries one on the GPU: are its values
those of a float32 product (`torch.mm` with `out_dtype`), and how long does it take, in a CUDA graph over copies of the
weight that together do not fit in the L2 cache?
"""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from blockshock_lib.kernels.sparse24 import cslt, masks, small
from blockshock_lib.kernels.sparse24.mask import MASKS
from blockshock_lib.kernels.sparse24.packing import Packed, check_input
from blockshock_lib.kernels.sparse24.plans import Setting
from blockshock_lib.kernels.sparse24.small import Config
from blockshock_lib.kernels.tuning.clock import Clock, guarded
from blockshock_lib.kernels.tuning.search import Error

_SMALL_WEIGHT, _SMALL_WORK = 2**28, 2**37  # weights and multiply-adds up to which a product takes < 0.5 ms on an H200
_FEWER = 3  # rows that are missing to a whole eight in one of two checks of the small-batch kernel

Way = Setting | Config
Kinds = tuple[type[Way], ...]
KINDS: dict[str, type[Way]] = {"cslt": Setting, "small": Config}


def linear(
    x: Tensor, packed: Packed, out: Tensor | None = None, bias: Tensor | None = None, kinds: Kinds = (Setting, Config)
) -> Tensor:
    """As `backends.Backend.linear`, by the way that was tuned for this batch, else by one of these kinds."""
    check_input(x, packed, out, bias)
    rows = cslt.padded(x.shape[0])
    way = packed.extra.get(rows) or _untuned(packed.shape, rows, packed.dtype, x.device, kinds)
    return multiply(x, packed.data[0], packed.shape, way, out, bias)


def multiply(
    x: Tensor, buffer: Tensor, shape: tuple[int, int], way: Way, out: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """The product of x [B, K] that fits `buffer` of a weight [N, K], this way; unchecked. RuntimeError: a refusal."""
    backend = small if isinstance(way, Config) else cslt
    return backend.multiply(x, buffer, shape, way, out, bias)


@functools.lru_cache(4096)
def _untuned(shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device, kinds: Kinds) -> Way:
    if Setting in kinds and (len(kinds) == 1 or rows > small.TILE_ROWS or small.unsupported(device, dtype)):
        return Setting()
    return small.default(shape, rows)


class Probe:
    """One problem to try ways on: a weight [N, K], two inputs [B, K] with their true products, and copies for timing.
    Its methods raise RuntimeError where the way is refused, and BrokenContextError.
    """

    def __init__(self, shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device, seed: int = 0):
        generator = torch.Generator(device).manual_seed(seed)
        mask = masks.make(MASKS["random"], shape, seed=seed, device=device)
        weight = torch.randn(shape, dtype=dtype, device=device, generator=generator)
        packed = cslt.pack(weight, mask)
        weight.masked_fill_(mask.logical_not_(), 0)
        self.inputs = [torch.randn(rows, shape[1], dtype=dtype, device=device, generator=generator) for _ in range(2)]
        self.truths = [torch.mm(x, weight.t(), out_dtype=torch.float32) for x in self.inputs]
        self.units = [_worst_and_rms(truth.to(dtype), truth) for truth in self.truths]
        # Twice the L2 cache, so that no copy is found there when its turn comes again.
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20
        copies = min(16, max(1, -(-2 * cache // packed.nbytes)))
        self.weights = [packed.data[0], *(packed.data[0].clone() for _ in range(copies - 1))]
        self.shape, self.rows, self.dtype, self.device = shape, rows, dtype, device
        self.small = shape[0] * shape[1] <= _SMALL_WEIGHT and shape[0] * shape[1] * rows <= _SMALL_WORK
        self.turn, self.clock = 0, Clock(device)

    def check(self, way: Way) -> Error:
        # A kernel that writes nothing must not be judged by what an earlier one left in the memory it is given: inputs
        # alternate, and the output is filled with NaN just before, as is a block that the allocator is given back.
        self.turn ^= 1
        rows = self.rows - _FEWER if self.turn and isinstance(way, Config) else self.rows
        with guarded(self.device):
            whole = torch.full((self.rows, self.shape[0]), torch.nan, dtype=self.dtype, device=self.device)
            torch.full_like(whole, torch.nan)
            multiply(self.inputs[self.turn][:rows], self.weights[0], self.shape, way, whole[:rows])
            if not whole[rows:].isnan().all():
                return Error(math.inf, math.inf)  # it wrote past the end of its output
            worst, rms = _worst_and_rms(whole[:rows], self.truths[self.turn][:rows])
        return Error(worst / self.units[self.turn][0], rms / self.units[self.turn][1])

    def timed(self, way: Way) -> AbstractContextManager[Callable[[], float]]:
        """Milliseconds of one product on the GPU, without host time; the check has just run the kernel."""
        calls = max(len(self.weights), 4 if self.small else 1)
        product = partial(multiply, self.inputs[0], shape=self.shape, way=way)
        return self.clock.timed([partial(product, self.weights[call % len(self.weights)]) for call in range(calls)])

    def library_search(self) -> tuple[Setting, int]:
        """(cuSPARSELt's own pick, number of algorithms)."""
        with guarded(self.device):
            operands = self.weights[0], self.inputs[0].t(), None, None, None, True
            alg_id, split_k, mode, count = torch._C._cusparselt.mm_search(*operands)
            torch.cuda.synchronize(self.device)
        # Without a split the op ignores the mode: leave it out, so that one setting has one name.
        return Setting(int(alg_id), int(split_k), int(mode) if split_k != 1 else -1), int(count)

    def close(self) -> None:
        self.inputs, self.truths, self.weights = [], [], []
        self.clock.close()


def _worst_and_rms(y: Tensor, truth: Tensor) -> tuple[float, float]:
    difference = y.float().sub_(truth)
    return torch.stack((difference.abs().max(), difference.square_().mean().sqrt())).tolist()
