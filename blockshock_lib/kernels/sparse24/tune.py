"""Tuning on the GPU: one search for cuSPARSELt's algorithms and the cuts of the small-batch kernel; the best of each
kind are kept. Another process searches (kernels/tuning/child.py), as some algorithms of cuSPARSELt 0.8.0 and its own
search execute an illegal instruction on some shapes, and a process that has met one can use its GPU no more.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.compiled import CompileError
from blockshock_lib.kernels.sparse24 import cslt, small
from blockshock_lib.kernels.sparse24.packing import Packed, check_input
from blockshock_lib.kernels.sparse24.plans import Setting
from blockshock_lib.kernels.sparse24.small import Config
from blockshock_lib.kernels.sparse24.ways import KINDS, Kinds, Probe, Way
from blockshock_lib.kernels.tuning import store
from blockshock_lib.kernels.tuning.child import Search
from blockshock_lib.kernels.tuning.search import Found, Trial, search

FIRST = (17, 20, 1, 10, 15)  # what won on an H200 (cuSPARSELt 0.8.0), tried early in case time runs out
SECONDS = 1.2  # after which no further candidate of a kind is started; small and middle sizes finish well before

# Steps that are announced and can be left out: two uses of cuSPARSELt's own search, and what comes before all trials.
OWN_SEARCH, COUNT = "mm_search", "mm_search for the number of algorithms"
COMPILING = "compiling the small-batch kernel"

STORE = store.Store("sparse24", KINDS)


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
    """The way for a weight [N, K] and a padded batch; see `tune`."""
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
