"""Tuning ahead of a run: every 2:4 product and every all-reduce that it will ask for, measured once and kept on disk.

A run would do the same by itself, in its own time. Here one GPU searches for the products, as their choice depends on
no peer; the ranks are started for the all-reduces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import product as every
from typing import NamedTuple

import torch

from blockshock_lib import launch, machine, plan
from blockshock_lib.comm import Group
from blockshock_lib.comm import choices as all_reduces
from blockshock_lib.engine import roofline
from blockshock_lib.engine.phases import PHASES
from blockshock_lib.errors import ParamsError, UnsupportedError
from blockshock_lib.layers.case_costs import DTYPES
from blockshock_lib.layers.costs import Cost
from blockshock_lib.manifest import shown
from blockshock_lib.methods import METHODS
from blockshock_lib.params import Params
from blockshock_lib.sparse24 import choices, cslt, cslt_tune, ways
from blockshock_lib.sparse24.tuning import Found
from blockshock_lib.sparse24.ways import Way

TUNABLE = ("auto", "cslt", "small", "tuned")
REDUCE_SECONDS = 300.0


class Product(NamedTuple):
    """x [B, K] times a 2:4 weight [N, K] transposed; dtype "bf16" or "fp16"."""

    N: int
    K: int
    B: int
    dtype: str


def of_shapes(n: Iterable[int], k: Iterable[int], b: Iterable[int], dtype: str) -> list[Product]:
    """Every combination; without `k` the weights are square.

    Raises:
        ParamsError: a size that no 2:4 product can have.
    """
    found = (
        [Product(*sizes, dtype) for sizes in every(n, k, b)] if k else [Product(s, s, r, dtype) for s, r in every(n, b)]
    )
    for one in found:
        if min(one.N, one.K) < 64 or one.N % 64 or one.K % 64 or one.B < 1:
            raise ParamsError(f"{one.N}x{one.K} B={one.B}: N and K must be multiples of 64, and B at least 1")
    return found


def of_phase(params: Params) -> list[Product]:
    """The products that a rank of each method multiplies, each once, in the order of the run."""
    found = []
    for case in plan.expand(params):
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
    """Bytes of the partial results that the ranks of a phase add up, each size class once; none for a single process.

    y [B, out_features], and where the phase goes backward dX [B, in_features].
    """
    if params.hardware.processes == 1:
        return []
    found = set()
    for case in plan.expand(params):
        columns = [case.out_features, *([case.in_features] if PHASES[case.phase].backward else [])]
        found |= {all_reduces.size_class(case.batch * c * DTYPES[case.dtype].itemsize) for c in columns}
    return sorted(found)


def require_gpu(params: Params | None = None) -> torch.device:
    """The GPU that searches. UnsupportedError where there is none, ParamsError where the phase asks for more ranks."""
    device = torch.device("cuda", 0)
    if reason := cslt.unsupported(device, torch.bfloat16):
        raise UnsupportedError(f"nothing can be tuned on this machine: {reason}")
    if params is not None:
        machine.admit(params, machine.probe())
    return device


def tune_products(products: Iterable[Product], device: torch.device, say: Callable[[str], None]) -> bool:
    """Searches for those that are not kept yet, a line each; whether every one has a right way."""
    ceilings = functools.cache(lambda dtype: roofline.measure(device, dtype, Group()))
    done = True
    for one in products:
        dtype = DTYPES[one.dtype]
        key = cslt_tune.key_of((one.N, one.K), cslt.padded(one.B), dtype, device)
        found, kept = None, choices.find(key)
        if not kept:
            found = cslt_tune.searched(key, device)
            kept = {best.way: best.ms for kind in ways.PRODUCTS.values() if (best := found.best(kind))}
        done = done and bool(kept)
        say(line(key, kept, least_ms(one, ceilings(dtype)), found))
    say(f"kept in {shown(choices.default_path())}")
    return done


def least_ms(one: Product, ceilings: roofline.Ceilings) -> float:
    """What the ceilings allow: half of the multiplications, 9/16 of the dense weight's bytes, x and y once."""
    size = DTYPES[one.dtype].itemsize
    read = one.N * one.K * size * 9 / 16 + one.B * one.K * size
    return roofline.compute(Cost(one.B * one.N * one.K, read, one.B * one.N * size, 0, 0, 0), ceilings)


def line(key: choices.Key, kept: dict[Way, float], least: float, found: Found | None) -> str:
    """One product in words: the best of each kind, the fastest first, and what the search met; None: it was known."""
    timed = [f"{ways.words(way)} {ms:.4f} ms" for way, ms in sorted(kept.items(), key=lambda item: item[1])]
    if kept:
        timed[0] += f" ({100 * least / min(kept.values()):.0f}% of floor)"
    if found is None:
        told = "kept before"
    else:
        told = f"{len(found.trials)} tried: {found.wrong} wrong, {found.refused} refused, {len(found.crashes)} crashed"
        told += f"; {found.failed}" if found.failed else ""
    return f"{key.words}: {', '.join(timed) or 'nothing is right'} [{told}]"


def tune_sums(sizes: list[int], processes: int, device: torch.device, say: Callable[[str], None]) -> None:
    """Starts the ranks and has them tune their all-reduces, a line each; nothing where there is none."""
    if not sizes:
        return
    launch.call(_tune_sums, sizes, processes=processes, device=device.type, seconds=REDUCE_SECONDS)
    known = all_reduces.load()
    for size in sizes:
        times = known.get(all_reduces.Key.of(size, processes, device), {})
        timed = [f"{way.backend} {times[way]:.4f} ms" for way in all_reduces.ordered(times)]
        say(f"all-reduce of {size >> 10} KiB on {processes}: {', '.join(timed) or 'one way only'}")
    say(f"kept in {shown(all_reduces.default_path())}")


def _tune_sums(ctx, sizes: list[int]) -> None:
    for size in sizes:
        Group.of().tune(size, ctx.device)
