"""Is the engine's B1 as fast as the same GEMM and all-reduce written by hand?

    python benchmarks/b1_by_hand.py --n 4096 16384 --b 16 4096

Each rank times its own short loop, one CUDA graph of `mm` and `all_reduce` over weights that do not fit in the L2
cache together, and the engine times B1 on the same shapes; the two take turns, for clocks and heat move by more than
5% within minutes. The loop shares no code with the engine's clock. Both sides add up with NCCL. Prints a line a shape:
medians by hand and by the engine (ms) and their ratio; exits 1 where they differ by more than 5%.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from blockshock_lib.comm import symm


def by_hand(ctx, n: int, b: int, samples: int = 12) -> float:
    """Median ms of one forward on this rank: x [b, n/2] times W [n, n/2] transposed, then the sum over ranks."""
    half = n // ctx.world_size
    copies = max(1, min(16, 180_000_000 // (2 * n * half)))
    weights = [torch.randn(n, half, device=ctx.device, dtype=torch.bfloat16) for _ in range(copies)]
    x = torch.randn(b, n, device=ctx.device, dtype=torch.bfloat16)[:, :half]
    # About 2 ms, as the engine's graphs, by the arithmetic and the bytes at an H200's rates.
    least_ms = max(2 * b * n * half / 700e9, 2 * n * half / 4e9)
    calls = copies * max(1, min(16, round(2 / least_ms / copies)))

    def loop():
        for i in range(calls):
            dist.all_reduce(torch.mm(x, weights[i % copies].t()))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        loop()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        loop()
    times = []
    for _ in range(samples + 3):
        dist.barrier()  # as the engine aligns its ranks
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    graph.reset()
    return statistics.median(times[3:])


def nccl_alone(ctx) -> None:
    """Has this rank share no memory, so that the engine's B1 adds up with NCCL as the loop does."""
    symm.impossible = lambda world_size, device: "both sides are to add up with NCCL"


def main() -> int:
    from benchmarks import b1_by_hand  # the ranks must import this file by name
    from blockshock_lib import params
    from blockshock_lib.ranks import WorkerGroup
    from blockshock_lib.runs import measure
    from blockshock_lib.studies.linear import STUDY

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, nargs="+", default=[4096, 8192, 16384, 40960])
    parser.add_argument("--b", type=int, nargs="+", default=[16, 256, 4096])
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    worst = 0.0
    print(f"{'N':>6} {'B':>5} {'by hand (ms)':>13} {'engine (ms)':>12} {'engine / by hand':>17}")
    with (
        tempfile.TemporaryDirectory() as logs,
        WorkerGroup(2, device="cuda", backend="nccl", logs=Path(logs)) as group,
    ):
        group.call(b1_by_hand.nccl_alone, seconds=120)
        for n in args.n:
            for b in args.b:
                settings = {"sweep.n": [n], "sweep.b": [b], "methods": ["row_parallel"], "profile": "none"}
                asked = params.load(STUDY, "phase1", settings, choose={"hardware": "cuda"})
                (case,) = STUDY.expand(asked)
                found = [[], []]
                for _ in range(args.turns):
                    found[0].append(max(group.call(b1_by_hand.by_hand, n, b, seconds=120)))
                    rows = group.call(measure.measure, "linear", case, asked, 0, seconds=120)[0]
                    kernel = [row["value"] for row in rows if row["metric"] == "forward_kernel"]
                    found[1].append(statistics.median(kernel))
                hand, engine = map(statistics.median, found)
                worst = max(worst, abs(engine / hand - 1))
                print(f"{n:6} {b:5} {hand:13.4f} {engine:12.4f} {engine / hand:17.3f}", flush=True)
    print(f"largest difference: {worst:.1%}")
    return 0 if worst <= 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
