"""One product to try on the GPU: are its values right, and how long does it take?

The weight is random and of the probe's own making: whether a kernel is right and how fast it is does not depend on
which weights it multiplies. Values are compared with a float32 product on the tensor cores (`torch.mm` with
`out_dtype`). Times are kernel times: a CUDA graph whose calls take turns through copies of the weight that do not fit
in the L2 cache together.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from blockshock_lib.compiled import CompileError
from blockshock_lib.sparse24 import cslt, masks, tuned
from blockshock_lib.sparse24.small import Config
from blockshock_lib.sparse24.tuning import BrokenContextError, Error, Setting
from blockshock_lib.sparse24.ways import Way

_SAMPLE_MS = 2.0  # a sample repeats its graph for about this long
_SMALL_WEIGHT, _SMALL_WORK = 2**28, 2**37  # weights and multiply-adds up to which a product takes < 0.5 ms on an H200
_FEWER = 3  # rows that are missing to a whole eight in one of two checks of the small-batch kernel


@contextlib.contextmanager
def guarded(device: torch.device) -> Iterator[None]:
    """Let a refusal pass as the RuntimeError it is, where the context still works after it.

    The library's words do not tell: "internal error" has been both. So the context is tried. What the compiler refuses
    is a refusal too.
    """
    try:
        yield
    except CompileError as error:
        raise RuntimeError(str(error)) from error
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, torch.AcceleratorError):
            raise BrokenContextError(reason) from error
        try:
            torch.cuda.synchronize(device)
            torch.ones(1, device=device).add_(1).item()
        except RuntimeError as second:
            raise BrokenContextError(reason) from second
        raise


class Probe:
    """One problem to try ways on: a weight, two inputs with their true products, and copies for timing."""

    def __init__(self, shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device, seed: int = 0):
        generator = torch.Generator(device).manual_seed(seed)
        mask = masks.make(SimpleNamespace(family="random", pattern=""), shape, seed=seed, device=device)
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
        self.turn, self.keeper = 0, None

    def check(self, way: Way) -> Error:
        """Error of one fresh product. RuntimeError where the way is refused."""
        # A kernel that writes nothing must not be judged by what an earlier one left in the memory it is given: inputs
        # alternate, and the output is filled with NaN just before, as is a block that the allocator is given back.
        self.turn ^= 1
        rows = self.rows - _FEWER if self.turn and isinstance(way, Config) else self.rows
        whole = torch.full((self.rows, self.shape[0]), torch.nan, dtype=self.dtype, device=self.device)
        torch.full_like(whole, torch.nan)
        tuned.multiply(self.inputs[self.turn][:rows], self.weights[0], self.shape, way, whole[:rows])
        if not whole[rows:].isnan().all():
            return Error(math.inf, math.inf)  # it wrote past the end of its output
        worst, rms = _worst_and_rms(whole[:rows], self.truths[self.turn][:rows])
        return Error(worst / self.units[self.turn][0], rms / self.units[self.turn][1])

    def clock(self, way: Way, samples: int) -> float:
        """Milliseconds of one product on the GPU, without host time: the median of so many samples."""
        x, calls = self.inputs[0], max(len(self.weights), 4 if self.small else 1)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        # Not torch.cuda.graph(): it empties the allocator's cache at every entry, which costs more than the search. And
        # thread_local, as the watchdog thread of a NCCL group queries events while this thread captures.
        with torch.cuda.stream(stream):
            pool = self.keeper.pool() if self.keeper else None
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                for call in range(calls):
                    tuned.multiply(x, self.weights[call % len(self.weights)], self.shape, way)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.keeper = self.keeper or graph  # a pool can be shared only while one of its graphs lives

        first = max(_replayed_ms(graph, 1), 1e-3)
        replays = max(1, min(50, round(_SAMPLE_MS / first)))
        if samples == 1 and replays == 1:
            return first / calls  # at large sizes the first replay is sample enough: the check has just run the kernel
        return statistics.median(_replayed_ms(graph, replays) for _ in range(samples)) / replays / calls

    def library_search(self) -> tuple[Setting, int]:
        """(cuSPARSELt's own pick, number of algorithms)."""
        alg_id, split_k, mode, count = torch._C._cusparselt.mm_search(
            self.weights[0], self.inputs[0].t(), None, None, None, True
        )
        torch.cuda.synchronize(self.device)
        # Without a split the op ignores the mode: leave it out, so that one setting has one name.
        return Setting(int(alg_id), int(split_k), int(mode) if split_k != 1 else -1), int(count)

    def close(self) -> None:
        """Give the memory back, that of the graphs' pool included, which the allocator would else keep apart."""
        self.inputs, self.truths, self.weights, self.keeper = [], [], [], None
        with contextlib.suppress(RuntimeError):  # a broken context fails here too, and has nothing to give back
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()


def _replayed_ms(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def _worst_and_rms(y: Tensor, truth: Tensor) -> tuple[float, float]:
    difference = y.float().sub_(truth)
    return torch.stack((difference.abs().max(), difference.square_().mean().sqrt())).tolist()
