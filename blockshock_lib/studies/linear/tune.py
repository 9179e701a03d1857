"""Tuning ahead of a run: every 2:4 product (by one GPU) and every all-reduce (by the ranks) that it will ask for,
measured once and kept on disk. A run would do the same by itself, in its own time.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from blockshock_lib.comm import Group, all_reduce
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.files import shown
from blockshock_lib.kernels.sparse24 import cslt
from blockshock_lib.kernels.sparse24 import tune as search
from blockshock_lib.kernels.sparse24.ways import KINDS
from blockshock_lib.kernels.tuning.search import words
from blockshock_lib.ranks import call
from blockshock_lib.studies.linear.costs import DTYPES
from blockshock_lib.studies.linear.methods import METHODS
from blockshock_lib.studies.linear.params import Params, expand
from blockshock_lib.studies.linear.phases import PHASES

TUNABLE = ("auto", "cslt", "small", "tuned")
REDUCE_SECONDS = 300.0


class Product(NamedTuple):
    """x [B, K] times a 2:4 weight [N, K] transposed; dtype "bf16" or "fp16"."""

    N: int
    K: int
    B: int
    dtype: str


def of_phase(params: Params) -> list[Product]:
    """The products that a rank of each method multiplies, each once, in the order of the run."""
    found = []
    for case in expand(params):
        for method in (METHODS[name] for name in case.methods):
            if method.product is None or (method.product or case.product) not in TUNABLE or case.dtype == "fp32":
                continue
            k_parts, n_parts = method.shards(case.world_size)
            n, k = case.out_features // n_parts, case.in_features // k_parts
            found.append(Product(n, k, case.batch, case.dtype))
            if PHASES[case.phase].backward and case.mask.transposable:
                found.append(Product(k, n, case.batch, case.dtype))
    return list(dict.fromkeys(found))


def sums_of_phase(params: Params) -> list[int]:
    """Bytes of the partial y, and where the phase goes backward dX, that several processes add up; size classes."""
    found = set()
    for case in expand(params) if params.hardware.processes > 1 else ():
        columns = (case.out_features, case.in_features)[: 1 + PHASES[case.phase].backward]
        found |= {all_reduce.size_class(case.batch * c * DTYPES[case.dtype].itemsize) for c in columns}
    return sorted(found)


def require_gpu() -> torch.device:
    device = torch.device("cuda", 0)
    if reason := cslt.unsupported(device, torch.bfloat16):
        raise UnsupportedError(f"nothing can be tuned on this machine: {reason}")
    return device


def tune_products(products: Iterable[Product], device: torch.device, say: Callable[[str], None]) -> bool:
    """Searches for those not kept yet; says a line each, the fastest way first. Whether every one has a right way."""
    done = True
    for one in products:
        dtype = DTYPES[one.dtype]
        problem = search.problem_of((one.N, one.K), cslt.padded(one.B), dtype, device)
        kept, told = search.STORE.find(problem, search.versions(device)), "kept before"
        if not kept:
            found = search.searched(problem, device)
            kept = {best.way: best.ms for kind in KINDS.values() if (best := found.best(kind))}
            told = f"{len(found.trials)} tried: {sum(trial.wrong for trial in found.trials)} wrong, "
            told += f"{sum(bool(trial.refused) for trial in found.trials)} refused, {len(found.crashes)} crashed"
            told += f"; {found.failed}" * bool(found.failed)
        done = done and bool(kept)
        timed = [f"{words(way, KINDS)} {ms:.4f} ms" for way, ms in sorted(kept.items(), key=lambda item: item[1])]
        say(f"{search.words(problem)}: {', '.join(timed) or 'nothing is right'} [{told}]")
    say(f"kept in {shown(search.STORE.path)}")
    return done


def tune_sums(sizes: list[int], processes: int, device: torch.device, say: Callable[[str], None]) -> None:
    """Has the ranks tune their all-reduces, a line each; nothing where there is none."""
    if not sizes:
        return
    call(_tune_sums, sizes, processes=processes, device=device.type, seconds=REDUCE_SECONDS)
    kept = all_reduce.measured(processes, device)
    for size in sizes:
        timed = [f"{way.backend} {ms:.4f} ms" for way, ms in kept.get(size, {}).items()]
        say(f"all-reduce of {size >> 10} KiB on {processes}: {', '.join(timed) or 'one way only'}")
    say(f"kept in {shown(all_reduce.STORE.path)}")


def _tune_sums(ctx, sizes: list[int]) -> None:
    for size in sizes:
        Group.of().tune(size, ctx.device)
