"""How many bytes a case needs at once: an upper estimate, read off what the problem and the engine hold.

Every rank builds the whole problem (W, x, the float64 truths, the mask) before it keeps its part. N = out_features,
K = in_features, B = batch, e = bytes an element. What is counted, stage by stage:

- drawing W: 8 N K, for it is drawn and scaled in float32 and then rounded; drawing x: 8 B K, 16 B K with outliers;
- truth: 8 B K for x in float64, 4096 rows of W in float64, and y twice (its pieces, and joined): 16 B N;
- standing: e N K + e B K + 8 B N + N K (the mask), for each method its weights, and for each way to shard one expected
  y of e B N;
- where dX is checked: dy of e B N, its truth of 8 B K, and for each way to shard one expected dX of e B K;
- where weights are trained: the truths of dW and of the trained W, 8 N K each, what rounding alone allows of both, the
  truths of y and dX once more, and while the optimizer makes them its moments;
- a method while it is built, run or checked: see `_scratch`; the largest of these counts, for they follow each other;
- timing on a GPU: copies past the L2 cache, the outputs inside the CUDA graphs, and the buffers of the ceilings; by
  then the truths of the size of W are dropped.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from blockshock_lib.engine.correctness import CHUNK
from blockshock_lib.engine.phases import PHASES
from blockshock_lib.engine.roofline import Ceilings
from blockshock_lib.engine.timing import MAX_CALLS
from blockshock_lib.layers.case_costs import DTYPES, CaseCosts
from blockshock_lib.layers.costs import MOMENTS
from blockshock_lib.layers.reference import TRUTH_ROWS
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
TIMING_SLACK = 1.1  # the same after the engine has emptied the allocator's cache, before it times


def rank_bytes(case: Case, names: list[str], ceilings: Ceilings | None = None, device_bytes: int = 0) -> int:
    """Most bytes that the fullest rank holds at once, without its process; an upper estimate.

    Args:
        case: the case; an emulated one holds all ranks' parts in one process.
        names: every method that can run.
        ceilings: say how many calls a captured graph holds at most; without them, as many as the engine allows.
        device_bytes: memory of the GPU, which sizes the ceilings' buffers.
    """
    n, k, b, e = case.out_features, case.in_features, case.batch, _itemsize(case)
    w, x, y, y64 = e * n * k, e * b * k, e * b * n, 8 * b * n
    phase, methods = PHASES[case.phase], {name: _Needs.of(case, name) for name in names}
    keep = n * k if any(METHODS[name].load().uses_mask for name in names) else 0
    rows = min(n, TRUTH_ROWS)
    making = max(
        8 * n * k,
        w + x + (16 if case.workload.distribution == "activation" else 8) * b * k,
        w + x + 8 * b * k + max(8 * rows * (k + b) + y64, 2 * y64),
        w + x + y64 + keep + (min(8 * n * k, 16 * _CHUNK) if keep else 0),
    )
    baselines = len({(METHODS[name].split, METHODS[name].load().gathers) for name in names})
    standing = w + x + y64 + keep + e * n + sum(need.held for need in methods.values()) + baselines * y
    if phase.backward:
        standing += y + 8 * b * k + baselines * x
    checking, trained = max((_scratch(case, name, need) for name, need in methods.items()), default=0), 0
    if phase.train:
        trained = 2 * (8 * n * k + w) + y64 + 8 * b * k + baselines * (x + y)
        making_them = max(8 * b * (k + rows), (1 + MOMENTS[case.optimizer]) * max(w, 8 * rows * k))
        checking = max(checking, making_them)
    timing = _timing(case, methods, ceilings, device_bytes) if phase.time else 0
    return math.ceil(max(SLACK * max(making, standing + trained + checking), TIMING_SLACK * (standing + timing)))


class _Needs(NamedTuple):
    """Bytes that a method holds from its check to its last sample; in a training step its gradients and the optimizer's
    state beside that; what a call gives (y, and dy and dX), and its largest temporaries.
    """

    held: float
    gradients: float
    optimizer: float
    outputs: float
    scratch: float

    @classmethod
    def of(cls, case: Case, name: str) -> _Needs:
        known = CaseCosts(case)
        work = known.cost(name)
        if not PHASES[case.phase].backward:
            return cls(work.weights, 0.0, 0.0, work.written, work.peak - work.weights - work.written)
        one = known.training_bytes(name)
        return cls(one.weights + one.copies, one.gradients, one.optimizer, one.activations, one.scratch)


def _itemsize(case: Case) -> int:
    return DTYPES[case.dtype].itemsize


def _scratch(case: Case, name: str, need: _Needs) -> int:
    """What a method holds for a moment, beyond what it holds throughout: the largest of five moments.

    build: a part masked, and stacked or packed from; and its mask. run: partial, y and dX, and what the product
    unpacks. check: partial and y, then two float64 of y's or dX's size, or a part of W beside two y for what rounding
    alone allows. train: a step's gradients and optimizer's state, and beside them a trained part, the truth's and the
    baseline's in its layout, and rows of them in float64. sharding: how often each weight is held, and its comparison.
    """
    n, k, b, e = case.out_features, case.in_features, case.batch, _itemsize(case)
    layer, y = METHODS[name].load(), e * case.batch * case.out_features
    parts = [layer.part(r, case.world_size, n, k) for r in range(layer.ranks(case.world_size))]
    sizes = [(p.rows.stop - p.rows.start) * (p.cols.stop - p.cols.start) for p in parts]
    part, mine = max(sizes), sum(sizes) if case.emulated else max(sizes)
    index = min(12 * part, 12 * _CHUNK) if METHODS[name].product is not None else 0  # where the kept weights are
    unpacked = e * part + index if index and case.device == "cpu" else 0
    build = (2 * e + 1) * part + index
    step = need.gradients + need.optimizer
    run = need.outputs + need.scratch + step + y + max(unpacked, e * part if case.device == "cpu" else 0)
    wide = max(n, k) if PHASES[case.phase].backward else n
    check = 2 * y + max(2 * 8 * b * wide, (2 * e + 1) * part + 2 * y)
    train = step + (e + 8 + 4) * mine + 3 * 8 * min(CHUNK, n * k) if PHASES[case.phase].train else 0
    return int(max(build, run, check, train, 3 * n * k))


def _timing(case: Case, methods: dict[str, _Needs], ceilings: Ceilings | None, device_bytes: int) -> int:
    y = _itemsize(case) * case.batch * case.out_features
    resets = 2 * y * len(methods)  # a partial, and the fresh start that each sample of its reduction takes
    if PHASES[case.phase].backward:
        resets *= 2  # dX's too
    if case.device == "cpu":
        training = sum(need.gradients + need.optimizer for need in methods.values())
        passing = max((need.outputs + need.scratch for need in methods.values()), default=0)
        return int(resets + training + 2 * passing + 64 * 2**20)
    copies, captured = 0.0, 0.0
    for name, need in methods.items():
        count = min(MAX_CALLS, math.ceil(3 * L2_BYTES / need.held))
        outputs = need.outputs + need.gradients  # a graph's last ones stay, to be checked
        copies += (count - 1) * need.held + count * need.optimizer + outputs
        least = costs.floor(costs.pieces(case, name), ceilings).whole if ceilings else 0.0
        calls = max(count, min(MAX_CALLS, math.ceil(GRAPH_MS / least))) if least else MAX_CALLS
        captured = max(captured, calls * outputs + need.scratch)
    ceiling_buffers = 2 * min(4 * GIB, device_bytes // 16 or 4 * GIB) + GIB
    spare = max((need.gradients for need in methods.values()), default=0)  # one for all, where the optimizer is timed
    return int(max(ceiling_buffers, copies + captured + resets + spare))


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
