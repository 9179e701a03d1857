"""The search for the fastest way of a kernel that has several: on this GPU, for a weight and a batch; kept on disk."""

import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from blockshock_lib.errors import BlockShockError, first_line
from blockshock_lib.kernels import needs
from blockshock_lib.kernels.graph import Clock, guarded
from blockshock_lib.kernels.patterns.pattern import Packed
from blockshock_lib.kernels.tuning import store
from blockshock_lib.kernels.tuning.search import Error, Way, leaders, search

ROWS = 8192  # of a product that are compared, when it has more: evenly over all of it
SECONDS = 20.0  # after which no further way is started; the first of a side of blocks compile for about a second each

_chosen: dict[tuple, Way] = {}


def choice(
    kept: store.Store,
    ways: Sequence[Way],
    packed: Packed,
    x: Tensor,
    about: dict,
    variants: Callable = lambda way: (),
) -> Way:
    """The fastest right one of `ways`, by packed.by(way, x): from the file, or by a search that is then kept there. The
    first, with a warning, where none was right.
    """
    problem = problem_of(packed, x, about)
    sources = Path(__file__), Path(inspect.getfile(type(packed)))
    versions = store.versions(*sources, triton=needs.version("triton"))
    known = kept.path, *map(str, (problem, versions))
    if known in _chosen:  # more copies of a weight ask no file
        return _chosen[known]
    if found := kept.find(problem, versions):
        return _chosen.setdefault(known, min(found, key=found.get))
    probe = Probe(packed, x)
    try:
        best = leaders(search(ways, probe.check, probe.timed, variants=variants, seconds=SECONDS))
    finally:
        probe.clock.close()
    if not best:
        warnings.warn(f"tuning {problem}: nothing that was tried gave right values: the default stays", stacklevel=3)
        return _chosen.setdefault(known, ways[0])
    kept.keep(problem, versions, {best[0].way: best[0].ms})
    return _chosen.setdefault(known, best[0].way)


def problem_of(packed: Packed, x: Tensor, about: dict) -> dict:
    (n, k), gpu = packed.shape, torch.cuda.get_device_name(x.device)
    return {"N": n, "K": k, "B": len(x), "dtype": str(x.dtype).removeprefix("torch."), "gpu": gpu} | about


class Probe:
    """A packed weight and two inputs with their products in float32, and copies past the L2 cache for timing: of the
    weight, or of an input that is larger, as where a layer's weight is multiplied from the left.
    """

    def __init__(self, packed: Packed, x: Tensor):
        dense, self.step = packed.dense(), max(1, math.ceil(len(x) / ROWS))
        draw = torch.Generator(x.device).manual_seed(0)  # the process's own would no more be that of the other ranks
        self.inputs = [x, torch.empty_like(x).normal_(generator=draw)]
        self.truths = [torch.mm(one[:: self.step], dense.t(), out_dtype=torch.float32) for one in self.inputs]
        self.units = [_errors(truth.to(x.dtype), truth) for truth in self.truths]
        cache = torch.cuda.get_device_properties(x.device).L2_cache_size or 64 << 20  # 0 on some
        count = min(16, max(1, math.ceil(2 * cache / max(packed.nbytes, x.nbytes)))) - 1
        if x.nbytes > packed.nbytes:
            others = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for _ in range(count)]
            self.timings = [(packed, x), *((packed, other.copy_(x)) for other in others)]
        else:
            self.timings = [(packed, x), *((packed.copy(), x) for _ in range(count))]
        self.clock = Clock(x.device)

    def check(self, way: Way) -> Error:
        each, packed = [], self.timings[0][0]
        for x, truth, units in zip(self.inputs, self.truths, self.units, strict=True):
            with guarded(x.device):
                # What is not written shows.
                torch.full((len(x), truth.shape[1]), torch.nan, dtype=x.dtype, device=x.device)
                try:
                    errors = _errors(packed.by(way, x)[:: self.step], truth)
                except (BlockShockError, RuntimeError):
                    raise
                except Exception as error:  # of Triton's compiler: a setting that asks for more than the GPU has
                    raise RuntimeError(first_line(error)) from error
            each.append([one / unit for one, unit in zip(errors, units, strict=True)])
        return Error(*torch.tensor(each).amax(0).tolist())  # which keeps a NaN

    def timed(self, way: Way) -> contextlib.AbstractContextManager[Callable[[], float]]:
        return self.clock.timed([functools.partial(packed.by, way, x) for packed, x in self.timings])


def _errors(y: Tensor, truth: Tensor) -> tuple[float, float]:
    off = y.float() - truth
    return off.abs().max().item(), off.square().mean().sqrt().item()
