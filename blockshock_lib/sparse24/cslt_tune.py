"""Tuning on the GPU: find the fastest right way to run a 2:4 product, and keep it.

`tune`, `tune_small` and `tune_any` are what the backends of product.py call. One search (tuning.py) by one check and
clock (probe.py) serves all three: it tries cuSPARSELt's algorithms and the cuts of the small-batch kernel, and the best
of each is kept (choices.py). It is made by another process (tuner.py), as some algorithms of cuSPARSELt 0.8.0 execute
an illegal instruction on some shapes, cuSPARSELt's own search among them, and a process that has met one can use its
GPU no more.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from blockshock_lib import cache
from blockshock_lib.compiled import CompileError
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.sparse24 import choices, cslt, small, tuning
from blockshock_lib.sparse24.choices import Key, Versions
from blockshock_lib.sparse24.packed import Packed, check_input
from blockshock_lib.sparse24.probe import Probe, guarded
from blockshock_lib.sparse24.small import Config
from blockshock_lib.sparse24.tuning import Found, Setting, Trial, ignore
from blockshock_lib.sparse24.ways import Way

FIRST = (17, 20, 1, 10, 15)
"""Algorithms that won on an H200 (cuSPARSELt 0.8.0), tried right after the default in case time runs out."""

SECONDS = 1.2
"""After this no further candidate of a kind is started. Small and middle sizes finish well before."""

OWN_SEARCH, COUNT = "mm_search", "mm_search for the number of algorithms"
"""The two uses of cuSPARSELt's own search, as they are named where one is announced or left out."""

COMPILING = "compiling the small-batch kernel"
"""How that step is named, which comes before its time is counted."""

chosen: dict[tuple[Key, tuple[type, ...]], Way] = {}
"""What this process uses so far, so that more copies of a weight cost no look into the file."""


def tune(x: Tensor, packed: Packed) -> None:
    """Choose cuSPARSELt's algorithm for x's batch: from the file of choices, or by a search that is then kept there.

    x [B, K] gives the batch only. A search takes a second or two on an H200, the first one of a process some more to
    start the process that searches. What crashes there is left out, with a warning. Where no candidate gives right
    values, or the search fails, it warns and leaves the default in use. Not to be called while a graph is captured.

    Raises:
        ValueError: x does not fit the weight.
        UnsupportedError: nothing was found, and the default crashes.
    """
    _tune(x, packed, Setting)


def tune_small(x: Tensor, packed: Packed) -> None:
    """`tune` for the small-batch kernel. Beyond the rows that it takes there is nothing to choose.

    Raises:
        ValueError: x does not fit the weight.
        UnsupportedError: no config is known to be right, so that there is no default to leave in use.
    """
    if x.shape[0] <= small.MOST_ROWS:
        _tune(x, packed, Config)


def tune_any(x: Tensor, packed: Packed) -> None:
    """`tune` among both: what is fastest for this batch."""
    _tune(x, packed, Setting, Config)


def _tune(x: Tensor, packed: Packed, *kinds: type[Way]) -> None:
    check_input(x, packed)
    rows = cslt.padded(x.shape[0])
    if rows in packed.extra:
        return
    key = key_of(packed.shape, rows, packed.dtype, x.device)
    if (key, kinds) not in chosen:
        kept = {way: ms for way, ms in choices.find(key).items() if isinstance(way, kinds)}
        chosen[key, kinds] = min(kept, key=kept.get) if kept else _found(searched(key, x.device), key, kinds)
    packed.extra[rows] = chosen[key, kinds]


def _found(found: Found, key: Key, kinds: tuple[type[Way], ...]) -> Way:
    if best := found.best(*kinds):
        return best.way
    reason = found.failed or "nothing that was tried gave right values"
    if Setting not in kinds:
        raise UnsupportedError(f"no config of the small-batch kernel is known to be right for {key.words}: {reason}")
    if (default := found.trial(Setting())) and default.crashed:
        raise UnsupportedError(f"cuSPARSELt's default algorithm crashes for {key.words}, no other is known: {reason}")
    warnings.warn(f"tuning {key.words}: {reason}: the default stays", stacklevel=4)
    return Setting()


def searched(key: Key, device: torch.device) -> Found:
    """Search for this product in the process that searches, and keep the best of each kind. Warns of what crashed."""
    from blockshock_lib.sparse24 import tuner  # here, as Python warns of a module imported before it is run with -m

    if device.type == "cuda":  # the other process needs a quiet GPU, and the memory that this one only holds in reserve
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    found = tuner.shared().search((key.N, key.K), key.B, getattr(torch, key.dtype), device)
    if found.crashes:
        warnings.warn(f"tuning {key.words} left out what crashed: {'; '.join(found.crashes)}", stacklevel=4)
    bests = filter(None, (found.best(kind) for kind in (Setting, Config)))
    if kept := {best.way: best.ms for best in bests}:
        choices.keep(key, kept)
    return found


def key_of(shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device) -> Key:
    """What the choice for a weight [N, K] and a (padded) batch of so many rows is kept under."""
    name = torch.cuda.get_device_name(device)
    return Key(*shape, rows, str(dtype).removeprefix("torch."), name, versions(device))


@functools.cache
def versions(device: torch.device) -> Versions:
    """Of what is installed here, and of the small-batch kernel, which is measured again when its source changes."""
    unable = small.unsupported(device, torch.bfloat16)
    return Versions(
        driver=cache.driver_version(),
        torch=str(torch.__version__),
        cusparselt=torch.backends.cusparselt.version(),
        kernel="" if unable else cache.version_of(small.SOURCE, Path(small.__file__)),
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
    started: Callable[[Way | str], None] = ignore,
    ended: Callable[[Trial], None] = ignore,
) -> Found:
    """Find the fastest right ways for [rows, K] times a 2:4 weight [N, K] transposed, in this process.

    Args:
        shape: (N, K), multiples of 64.
        rows: B, a multiple of 8.
        dtype: bf16 or fp16.
        device: the current CUDA device.
        seed: of the probe's weight and inputs. The caller's random state is left alone.
        seconds, known, started, ended: see `tuning.search`. `started` also hears of `OWN_SEARCH`, `COUNT` and
            `COMPILING`.
        without: which of those three to leave out; without the last the kernel is not tried.

    Raises:
        BrokenContextError: a candidate broke this process's CUDA context.
        UnsupportedError: cuSPARSELt cannot run there.
        torch.OutOfMemoryError: the probe needs the dense weight twice for a moment, and the packed one.
    """
    probe = Probe(shape, rows, dtype, device, seed)
    try:
        configs = _configs(probe, without, started)
        library, count = _library(probe, without, started)
        # Ids from `count` on do not exist; within it some are refused for a shape. Split-K -1 is segment-K.
        ids = dict.fromkeys((0, *(i for i in FIRST if i < count), *range(count)))
        settings = [Setting(i, split_k=k) for k in (1, -1) for i in ids]
        trials = tuning.search(
            [*configs, *settings[:1], *filter(None, [library]), *settings[1:]],
            guarded(device)(probe.check),
            guarded(device)(probe.clock),
            splits=_splits(shape, rows, device),
            seconds=seconds,
            known=known,
            started=started,
            ended=ended,
        )
        return Found(tuple(trials), library)
    finally:
        probe.close()


def _configs(probe: Probe, without: Iterable[str], started: Callable[[str], None]) -> list[Config]:
    """The small-batch kernel's candidates, compiled; none where it cannot run."""
    if COMPILING in without or small.unsupported(probe.device, probe.dtype):
        return []
    configs = small.candidates(probe.shape, probe.rows)
    if configs:
        started(COMPILING)
        with contextlib.suppress(CompileError, RuntimeError):  # told again, of the very one, when it is tried
            small.prepare(configs, probe.rows, probe.dtype, probe.device)
    return configs


def _library(probe: Probe, without: Iterable[str], started: Callable[[str], None]) -> tuple[Setting | None, int]:
    """(cuSPARSELt's own pick, number of algorithms). The pick is None for products too large to search so."""
    with contextlib.suppress(RuntimeError):  # a refusal
        if probe.small and OWN_SEARCH not in without:
            started(OWN_SEARCH)
            return guarded(probe.device)(probe.library_search)()
    with contextlib.suppress(RuntimeError):
        if COUNT not in without:
            started(COUNT)
            tiny = Probe((128, 128), 128, probe.dtype, probe.device)
            return None, guarded(probe.device)(tiny.library_search)()[1]
    return None, max(FIRST) + 1


def _splits(shape: tuple[int, int], rows: int, device: torch.device) -> tuple[tuple[int, int], ...]:
    """(split_k, mode) pairs that could fill a GPU which the output's tiles alone leave idle; none for large outputs.

    Modes of cusparseLtSplitKMode_t: 1 sums in the same kernel, 2 in a second one.
    """
    tiles = -(-shape[0] // 128) * -(-rows // 128)
    if tiles >= 2 * torch.cuda.get_device_properties(device).multi_processor_count:
        return ()
    return tuple((k, mode) for k in (2, 4, 8) for mode in (1, 2) if shape[1] >= 256 * k)
