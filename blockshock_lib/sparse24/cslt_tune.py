"""Tuning of cuSPARSELt on the GPU: find the fastest right algorithm for a product, and keep it.

The weight is random and of the search's own making, of the same shape and dtype: whether a kernel is right and how fast
it is does not depend on which weights it multiplies. Values are compared with a float32 product on the tensor cores
(`torch.mm` with `out_dtype`). Times are kernel times: a CUDA graph whose calls take turns through copies of the weight
that do not fit in the L2 cache together.

`tune` has the search made by another process (tuner.py), as some algorithms of cuSPARSELt 0.8.0 execute an illegal
instruction on some shapes, cuSPARSELt's own search among them, and a process that has met one can use its GPU no more.
"""

from __future__ import annotations

import contextlib
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.sparse24 import choices, cslt, masks, tuning
from blockshock_lib.sparse24.packed import Packed, check_input
from blockshock_lib.sparse24.tuning import BrokenContextError, Error, Found, Setting, Trial, ignore

FIRST = (17, 20, 1, 10, 15)
"""Algorithms that won on an H200 (cuSPARSELt 0.8.0), tried right after the default in case time runs out."""

SECONDS = 1.2
"""After this no further candidate is started. Small and middle sizes finish well before."""

OWN_SEARCH, COUNT = "mm_search", "mm_search for the number of algorithms"
"""The two uses of cuSPARSELt's own search, as they are named where one is announced or left out."""

chosen: dict[choices.Key, Setting] = {}
"""What this process uses so far, so that more copies of a weight cost no look into the file."""

_SAMPLE_MS = 2.0  # a sample repeats its graph for about this long
_SMALL_WEIGHT, _SMALL_WORK = 2**28, 2**37  # weights and multiply-adds up to which a product takes < 0.5 ms on an H200


def tune(x: Tensor, packed: Packed) -> None:
    """Choose the algorithm for x's batch size: from the file of choices, or by a search that is then kept there.

    x [B, K] gives the batch size only. A search takes about a second on an H200, the first one of a process some more
    to start the process that searches. What crashes there is left out, with a warning. Where no candidate gives right
    values, or the search fails, it warns and leaves the default in use. Not to be called while a graph is captured.

    Raises:
        ValueError: x does not fit the weight.
        UnsupportedError: nothing was found, and the default crashes.
    """
    check_input(x, packed)
    rows = x.shape[0] + -x.shape[0] % cslt.ROWS_MULTIPLE
    if rows in packed.extra:
        return
    key = key_of(packed, rows)
    if key not in chosen:
        chosen[key] = choices.find(key) or _searched(key, packed, x.device)
    packed.extra[rows] = chosen[key]


def _searched(key: choices.Key, packed: Packed, device: torch.device) -> Setting:
    from blockshock_lib.sparse24 import tuner  # here, as Python warns of a module imported before it is run with -m

    if device.type == "cuda":  # the other process needs a quiet GPU, and the memory that this one only holds in reserve
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    found = tuner.shared().search(packed.shape, key.B, packed.dtype, device)
    product = f"{key.N}x{key.K} B={key.B} {key.dtype}"
    if found.crashes:
        warnings.warn(f"tuning {product} left out what crashed: {'; '.join(found.crashes)}", stacklevel=3)
    if found.best is not None:
        choices.keep(key, found.best.setting, found.best.ms)
        return found.best.setting
    reason = found.failed or "no algorithm of cuSPARSELt gave right values"
    if (default := found.trial(Setting())) and default.crashed:
        raise UnsupportedError(f"cuSPARSELt's default algorithm crashes for {product}, and no other is known: {reason}")
    warnings.warn(f"tuning {product}: {reason}: the default stays", stacklevel=3)
    return Setting()


def key_of(packed: Packed, rows: int) -> choices.Key:
    """What the choice for this weight and a (padded) batch of so many rows is kept under."""
    return choices.Key(
        N=packed.shape[0],
        K=packed.shape[1],
        B=rows,
        dtype=str(packed.dtype).removeprefix("torch."),
        gpu=torch.cuda.get_device_name(packed.data[0].device),
        torch=str(torch.__version__),
        cusparselt=torch.backends.cusparselt.version(),
    )


def search(
    shape: tuple[int, int],
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int = 0,
    seconds: float = SECONDS,
    known: Iterable[Trial] = (),
    without: Iterable[str] = (),
    started: Callable[[Setting | str], None] = ignore,
    ended: Callable[[Trial], None] = ignore,
) -> Found:
    """Find the fastest right setting for [rows, K] times a 2:4 weight [N, K] transposed, in this process.

    Args:
        shape: (N, K), multiples of 64.
        rows: B, a multiple of 8.
        dtype: bf16 or fp16.
        device: the current CUDA device.
        seed: of the probe's weight and inputs. The caller's random state is left alone.
        seconds, known, started, ended: see `tuning.search`. `started` also hears of `OWN_SEARCH` and `COUNT`.
        without: which of those two to leave out.

    Raises:
        BrokenContextError: a candidate broke this process's CUDA context.
        UnsupportedError: cuSPARSELt cannot run there.
        torch.OutOfMemoryError: the probe needs the dense weight twice for a moment, and the packed one.
    """
    probe = Probe(shape, rows, dtype, device, seed)
    try:
        library, count = _library(probe, without, started)
        # Ids from `count` on do not exist; within it some are refused for a shape. Split-K -1 is segment-K.
        ids = dict.fromkeys((0, *(i for i in FIRST if i < count), *range(count)))
        settings = [Setting(i, split_k=k) for k in (1, -1) for i in ids]
        best, trials = tuning.search(
            settings[:1] + [library] * (library is not None) + settings[1:],
            _guarded(device)(probe.check),
            _guarded(device)(probe.clock),
            splits=_splits(shape, rows, device),
            seconds=seconds,
            known=known,
            started=started,
            ended=ended,
        )
        return Found(best, library, tuple(trials))
    finally:
        probe.close()


def _library(probe: Probe, without: Iterable[str], started: Callable[[str], None]) -> tuple[Setting | None, int]:
    """(cuSPARSELt's own pick, number of algorithms). The pick is None for products too large to search so."""
    with contextlib.suppress(RuntimeError):  # a refusal
        if probe.small and OWN_SEARCH not in without:
            started(OWN_SEARCH)
            return _guarded(probe.device)(probe.library_search)()
    with contextlib.suppress(RuntimeError):
        if COUNT not in without:
            started(COUNT)
            tiny = Probe((128, 128), 128, probe.dtype, probe.device)
            return None, _guarded(probe.device)(tiny.library_search)()[1]
    return None, max(FIRST) + 1


@contextlib.contextmanager
def _guarded(device: torch.device) -> Iterator[None]:
    """Let a refusal of the library pass as the RuntimeError it is, where the context still works after it.

    The library's words do not tell: "internal error" has been both. So the context is tried.
    """
    try:
        yield
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
    """One problem to try settings on: a weight, two inputs with their true products, and copies for timing."""

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

    def check(self, setting: Setting) -> Error:
        """Error of one fresh product. RuntimeError where the library refuses the setting."""
        # A kernel that writes nothing must not be judged by what an earlier one left in the memory it is given: inputs
        # alternate, and the allocator is given back a block of NaN just before.
        self.turn ^= 1
        torch.full((self.rows, self.shape[0]), torch.nan, dtype=self.dtype, device=self.device)
        y = cslt.multiply(self.inputs[self.turn], self.weights[0], setting)
        worst, rms = _worst_and_rms(y, self.truths[self.turn])
        return Error(worst / self.units[self.turn][0], rms / self.units[self.turn][1])

    def clock(self, setting: Setting, samples: int) -> float:
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
                    cslt.multiply(x, self.weights[call % len(self.weights)], setting)
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


def _splits(shape: tuple[int, int], rows: int, device: torch.device) -> tuple[tuple[int, int], ...]:
    """(split_k, mode) pairs that could fill a GPU which the output's tiles alone leave idle; none for large outputs.

    Modes of cusparseLtSplitKMode_t: 1 sums in the same kernel, 2 in a second one.
    """
    tiles = -(-shape[0] // 128) * -(-rows // 128)
    if tiles >= 2 * torch.cuda.get_device_properties(device).multi_processor_count:
        return ()
    return tuple((k, mode) for k in (2, 4, 8) for mode in (1, 2) if shape[1] >= 256 * k)
