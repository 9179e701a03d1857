"""The ways to multiply with cuSPARSELt's packed form, the library with a setting and the small-batch kernel with a
config, which takes up to 128 rows where nobody has tuned; and the search for the fastest, the best of each kind. A
process of its own searches (kernels/tuning/child.py), as some algorithms of cuSPARSELt 0.8.0 and its own search execute
an illegal instruction on some shapes, and a process that has met one can use its GPU no more.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.compiled import CompileError
from blockshock_lib.kernels.graph import Clock, guarded
from blockshock_lib.kernels.sparse24 import cslt, masks, small
from blockshock_lib.kernels.sparse24.mask import MASKS
from blockshock_lib.kernels.sparse24.packing import Packed, check_input
from blockshock_lib.kernels.sparse24.plans import Setting
from blockshock_lib.kernels.sparse24.small import Config
from blockshock_lib.kernels.tuning import store
from blockshock_lib.kernels.tuning.child import Search
from blockshock_lib.kernels.tuning.search import Error, Found, Trial, search

FIRST = (17, 20, 1, 10, 15)  # what won on an H200 (cuSPARSELt 0.8.0), tried early in case time runs out
SECONDS = 1.2  # after which no further candidate of a kind is started; small and middle sizes finish well before

# Steps that are announced and can be left out: two uses of cuSPARSELt's own search, and what comes before all trials.
OWN_SEARCH, COUNT = "mm_search", "mm_search for the number of algorithms"
COMPILING = "compiling the small-batch kernel"

_SMALL_WEIGHT, _SMALL_WORK = 2**28, 2**37  # weights and multiply-adds up to which a product takes < 0.5 ms on an H200
_FEWER = 3  # rows that are missing to a whole eight in one of two checks of the small-batch kernel

Way = Setting | Config
Kinds = tuple[type[Way], ...]
KINDS: dict[str, type[Way]] = {"cslt": Setting, "small": Config}

STORE = store.Store("sparse24", KINDS)


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


def tune(x: Tensor, packed: Packed, kinds: Kinds = (Setting, Config)) -> None:
    """Chooses the way among these kinds for x's batch: from the file, or by a search that is then kept there.

    Where nothing is right, or the search fails, it warns and takes cuSPARSELt's default; UnsupportedError where that is
    not among the kinds or crashes. Not to be called while a graph is captured.
    """
    check_input(x, packed)
    rows = cslt.padded(x.shape[0])
    if rows in packed.extra or (kinds == (Config,) and x.shape[0] > small.MOST_ROWS):
        return
    packed.extra[rows] = choice(packed.shape, rows, packed.dtype, x.device, kinds)


@functools.cache  # more copies of a weight ask no file
def choice(shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device, kinds: Kinds) -> Way:
    problem = problem_of(shape, rows, dtype, device)
    kept = {way: ms for way, ms in STORE.find(problem, versions(device)).items() if isinstance(way, kinds)}
    if kept:
        return min(kept, key=kept.get)
    found = searched(problem, device)
    if best := found.best(*kinds):
        return best.way
    what, reason = words(problem), found.failed or "nothing that was tried gave right values"
    if Setting not in kinds:
        raise UnsupportedError(f"no config of the small-batch kernel is known to be right for {what}: {reason}")
    if (default := found.trial(Setting())) and default.crashed:
        raise UnsupportedError(f"cuSPARSELt's default algorithm crashes for {what}, no other is known: {reason}")
    warnings.warn(f"tuning {what}: {reason}: the default stays", stacklevel=3)
    return Setting()


def searched(problem: dict, device: torch.device) -> Found:
    """Searches for this product, and keeps the best of each kind. Warns of what crashed."""
    found = SEARCH.find(problem, device)
    if found.crashes:
        warnings.warn(f"tuning {words(problem)} left out what crashed: {'; '.join(found.crashes)}", stacklevel=3)
    if bests := [best for kind in KINDS.values() if (best := found.best(kind))]:
        STORE.keep(problem, versions(device), {best.way: best.ms for best in bests})
    return found


def problem_of(shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device) -> dict:
    """What a choice is kept under: a weight [N, K] and a batch B, a multiple of 8."""
    name = torch.cuda.get_device_name(device)
    return {"N": shape[0], "K": shape[1], "B": rows, "dtype": str(dtype).removeprefix("torch."), "gpu": name}


def words(problem: dict) -> str:
    return "{N}x{K} B={B} {dtype}".format(**problem)


@functools.cache
def versions(device: torch.device) -> dict[str, str]:
    """Of what is installed here, and of the small-batch kernel, which is measured again when its source changes."""
    sources = () if small.unsupported(device, torch.bfloat16) else (small.SOURCE, Path(small.__file__))
    return store.versions(*sources, cusparselt=str(torch.backends.cusparselt.version()))


class Probe:
    """One problem to try ways on: a weight [N, K], two inputs [B, K] with their true products, and copies for timing.
    Its methods raise RuntimeError where the way is refused, and BrokenContextError.
    """

    def __init__(self, shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device):
        generator = torch.Generator(device).manual_seed(0)
        mask = masks.make(MASKS["random"], shape, device=device)
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


def run(
    problem: dict,
    device: torch.device | str,
    *,
    without: Iterable[str] = (),
    started: Callable[[Way | str], None] = lambda step: None,
    seconds: float = SECONDS,
    **options: Any,
) -> list[Trial]:
    """Finds the fastest right ways for [B, K] times a 2:4 weight [N, K] transposed, in this process; options as of
    `search`. `started` hears of `OWN_SEARCH`, `COUNT` and `COMPILING` too. BrokenContextError: a candidate broke it.
    """
    shape, rows, device = (problem["N"], problem["K"]), problem["B"], torch.device(device)
    probe = Probe(shape, rows, getattr(torch, problem["dtype"]), device)
    # Splits of K that could fill a GPU which the output's tiles alone leave idle; none for large outputs.
    # Modes of cusparseLtSplitKMode_t: 1 sums in the same kernel, 2 in a second one.
    tiles = -(-shape[0] // 128) * -(-rows // 128)
    idle = tiles < 2 * torch.cuda.get_device_properties(device).multi_processor_count
    splits = [dict(split_k=k, split_k_mode=mode) for k in (2, 4, 8) for mode in (1, 2) if idle and shape[1] >= 256 * k]
    configs = [] if COMPILING in without or small.unsupported(device, probe.dtype) else small.candidates(shape, rows)
    try:
        if configs:
            started(COMPILING)
            with contextlib.suppress(CompileError, RuntimeError):  # told again, of the very one, when it is tried
                small.prepare(configs, rows, probe.dtype, device)
        library, count = _library(probe, without, started)
        # Ids from `count` on do not exist; within it some are refused for a shape. Split-K -1 is segment-K.
        ids = dict.fromkeys((0, *(i for i in FIRST if i < count), *range(count)))
        settings = [Setting(i, split_k=k) for k in (1, -1) for i in ids]
        options |= dict(started=started, seconds=seconds)
        options["variants"] = lambda way: [way._replace(**s) for s in splits] if isinstance(way, Setting) else ()
        ways = [*configs, *settings[:1], *filter(None, [library]), *settings[1:]]
        return search(ways, probe.check, probe.timed, **options)
    finally:
        probe.close()


SEARCH = Search(f"{__name__}:SEARCH", KINDS, run, SECONDS)


def _library(probe: Probe, without: Iterable[str], started: Callable[[str], None]) -> tuple[Setting | None, int]:
    # (cuSPARSELt's own pick, number of algorithms). The pick is None for products too large to search so.
    with contextlib.suppress(RuntimeError):  # a refusal
        if probe.small and OWN_SEARCH not in without:
            started(OWN_SEARCH)
            return probe.library_search()
    with contextlib.suppress(RuntimeError):
        if COUNT not in without:
            started(COUNT)
            return None, Probe((128, 128), 128, probe.dtype, probe.device).library_search()[1]
    return None, max(FIRST) + 1
