"""How many bytes a case needs at once: an upper estimate, read off what the problem and the engine hold.

Every rank builds the whole problem (W, x, the float64 truth, the mask) before it keeps its part. N = out_features,
K = in_features, B = batch, e = bytes an element. What is counted, stage by stage:

- drawing W: 8 N K, for it is drawn and scaled in float32 and then rounded; drawing x: 8 B K, 16 B K with outliers;
- truth: 8 B K for x in float64, 4096 rows of W in float64, and y twice (its pieces, and joined): 16 B N;
- standing: e N K + e B K + 8 B N + N K (the mask), and for each method its weights and one expected y of e B N;
- a method while it is built, run or checked: see `_scratch`; the largest of these counts, for they follow each other;
- timing on a GPU: copies past the L2 cache, the outputs inside the CUDA graphs, and the buffers of the ceilings.
"""

from __future__ import annotations

import math
from pathlib import Path

from blockshock_lib.engine.phases import PHASES
from blockshock_lib.engine.roofline import Ceilings
from blockshock_lib.engine.timing import MAX_CALLS
from blockshock_lib.layers.problem import TRUTH_ROWS
from blockshock_lib.layers.sharded import Cost
from blockshock_lib.methods import METHODS
from blockshock_lib.plan import Case
from blockshock_lib.predict import costs

GIB = 2**30
_CHUNK = 1 << 24  # weights that sparse24 handles at once
# A process before it has a case: the interpreter and torch's pages; on a GPU CUDA's context, NCCL and cuBLAS.
PROCESS = {"cpu": int(0.45 * GIB), "cuda": 2 * GIB}
L2_BYTES = 128 * 2**20  # no GPU with 2:4 tensor cores has more; the card does not tell
GRAPH_MS = 2.0  # about how long the engine makes a captured graph
SLACK = 1.2  # blocks that an allocator holds and cannot reuse


def rank_bytes(case: Case, methods: dict[str, Cost], ceilings: Ceilings | None = None, device_bytes: int = 0) -> int:
    """Most bytes that the fullest rank holds at once, without its process; an upper estimate.

    Args:
        case: the case; an emulated one holds all ranks' parts in one process.
        methods: name -> cost of every method that can run.
        ceilings: say how many calls a captured graph holds at most; without them, as many as the engine allows.
        device_bytes: memory of the GPU, which sizes the ceilings' buffers.
    """
    n, k, b, e = case.out_features, case.in_features, case.batch, _itemsize(case)
    w, x, y64 = e * n * k, e * b * k, 8 * b * n
    keep = n * k if any(METHODS[name].load().uses_mask for name in methods) else 0
    rows = min(n, TRUTH_ROWS)
    making = max(
        8 * n * k,
        w + x + (16 if case.workload.distribution == "activation" else 8) * b * k,
        w + x + 8 * b * k + max(8 * rows * (k + b) + y64, 2 * y64),
        w + x + y64 + keep + (min(8 * n * k, 16 * _CHUNK) if keep else 0),
    )
    standing = w + x + y64 + keep + e * n + sum(c.weights + e * b * n for c in methods.values())
    scratch = max((_scratch(case, name, c) for name, c in methods.items()), default=0)
    timing = _timing(case, methods, ceilings, device_bytes) if PHASES[case.phase].time else 0
    return math.ceil(SLACK * max(making, standing + max(scratch, timing)))


def _itemsize(case: Case) -> int:
    return costs.DTYPES[case.dtype].itemsize


def _scratch(case: Case, name: str, work: Cost) -> int:
    """What a method holds for a moment, beyond its weights: the largest of four moments.

    build: a part masked, and stacked or packed from; and its mask. run: partial and y, and what the product unpacks.
    check: partial and y, then two float64 of y's size, or a part of W beside two y for what rounding alone allows.
    sharding: how often each weight is held, and its comparison.
    """
    n, k, b, e = case.out_features, case.in_features, case.batch, _itemsize(case)
    layer, y = METHODS[name].load(), e * case.batch * case.out_features
    parts = [layer.part(r, case.world_size, n, k) for r in range(layer.ranks(case.world_size))]
    part = max((p.rows.stop - p.rows.start) * (p.cols.stop - p.cols.start) for p in parts)
    index = min(12 * part, 12 * _CHUNK) if METHODS[name].product is not None else 0  # where the kept weights are
    unpacked = e * part + index if index and case.device == "cpu" else 0
    build = (2 * e + 1) * part + index
    run = work.peak - work.weights + y + max(unpacked, e * part if case.device == "cpu" else 0)
    check = 2 * y + max(2 * 8 * b * n, (2 * e + 1) * part + 2 * y)
    return int(max(build, run, check, 3 * n * k))


def _timing(case: Case, methods: dict[str, Cost], ceilings: Ceilings | None, device_bytes: int) -> int:
    y = _itemsize(case) * case.batch * case.out_features
    resets = 2 * y * len(methods)  # a partial, and the fresh start that each sample of its reduction takes
    if case.device == "cpu":
        return int(resets + 2 * max((c.peak - c.weights for c in methods.values()), default=0) + 64 * 2**20)
    copies, captured = 0.0, 0.0
    for work in methods.values():
        count = min(MAX_CALLS, math.ceil(3 * L2_BYTES / work.weights))
        copies += (count - 1) * work.weights
        least = costs.floor(work, ceilings).forward if ceilings else 0.0
        calls = max(count, min(MAX_CALLS, math.ceil(GRAPH_MS / least))) if least else MAX_CALLS
        captured = max(captured, calls * (work.peak - work.weights))
    ceiling_buffers = 2 * min(4 * GIB, device_bytes // 16 or 4 * GIB) + GIB
    return int(max(ceiling_buffers, copies + captured + resets + 2 * y * len(methods)))


def machine_bytes(case: Case, card: dict) -> int | None:
    """Bytes that one device has for a case (the smallest GPU), or a CPU has free for all ranks; None if untold."""
    if case.device == "cuda":
        return min((gpu["memory_bytes"] for gpu in card["gpus"]), default=None)
    return available()


def available(path: Path = Path("/proc/meminfo")) -> int | None:
    """MemAvailable of this computer in bytes; None where the system does not tell."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
