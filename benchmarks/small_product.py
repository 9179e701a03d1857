"""How should the small-batch kernel be cut? Every configuration that fits, timed for square weights and many batches.

    python benchmarks/small_product.py --n 1024 4096 16384 --b 8 64 128 --json small.json

`small.candidates` and `small.DEFAULTS` were chosen from such a sweep on an H200 (benchmarks/measured). The check and
the clock are the tuner's own: kernel times of bf16 products, as the median of three samples whose calls rotate over
copies of the weight that do not fit in the L2 cache together. A configuration with wrong values ends the benchmark.
cuSPARSELt's tuned product of the same size is timed beside them.

Prints a line a size, the fastest configurations first; needs a Hopper GPU. Each configuration is compiled for each
batch: some hundred kernels in all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from itertools import product as every
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from blockshock_lib.kernels.sparse24 import small, tune
from blockshock_lib.kernels.sparse24.plans import Setting
from blockshock_lib.kernels.sparse24.small import Config
from blockshock_lib.kernels.sparse24.tune import Probe
from blockshock_lib.kernels.tuning import store as cache

SIZES = (1024, 2048, 4096, 8192, 16384, 40960)
BATCHES = (8, 16, 32, 64, 128)
DEPTHS = (2, 3, 4, 6)
SAMPLES = 3
SHOWN = 4  # configurations of a line


def grid(n: int, rows: int) -> list[Config]:
    """Every configuration that fits a weight [n, n] and so many rows of x."""
    found = [Config(*sizes) for sizes in every((1, 2), (1, 2, 4), (1, 2), DEPTHS, small.SPLITS)]
    return [c for c in found if c.fits(small.eights(rows)) and c.split <= small.most_split(c, (n, n))]


def measure(n: int, rows: int, device: torch.device) -> dict:
    """One size: N, B, ms of cuSPARSELt's tuned product, and of each configuration, the fastest first.

    Raises:
        RuntimeError: a configuration gives wrong values, or the driver refuses it.
    """
    problem = tune.problem_of((n, n), rows, torch.bfloat16, device)
    library = tune.searched(problem, device).best(Setting)
    probe = Probe((n, n), rows, torch.bfloat16, device)
    try:
        configs = grid(n, rows)
        small.prepare(configs, rows, torch.bfloat16, device)
        times = {}
        for config in configs:
            if not (error := probe.check(config)).right:
                raise RuntimeError(f"{config} is wrong for {n}x{n}, B={rows}: {error}")
            with probe.timed(config) as sample:
                times[config] = statistics.median(sample() for _ in range(SAMPLES))
        ranked = [[*config, times[config]] for config in sorted(times, key=times.get)]
        return {"n": n, "b": rows, "cslt_ms": library and library.ms, "configs": ranked}
    finally:
        probe.close()


def line(row: dict) -> str:
    best = "  ".join(f"{ms:.4f} {tuple(config)}" for *config, ms in row["configs"][:SHOWN])
    beside = "-" if row["cslt_ms"] is None else f"{row['cslt_ms']:.4f}"
    return f"{row['n']:6} {row['b']:4}  {beside:>8}  {best}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, nargs="+", default=SIZES)
    parser.add_argument("--b", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--json", type=Path, help="where to keep the times")
    args = parser.parse_args(argv)
    device = torch.device("cuda", 0)
    if reason := small.unsupported(device, torch.bfloat16):
        print(f"this benchmark needs a Hopper GPU: {reason}", file=sys.stderr)
        return 1
    print(f"{'N':>6} {'B':>4}  cuSPARSELt  ms (tiles, warpgroups, unroll, depth, split)")
    rows = []
    for n, b in every(args.n, args.b):
        rows.append(measure(n, b, device))
        print(line(rows[-1]), flush=True)
    if args.json:
        versions = {"torch": torch.__version__, "cusparselt": torch.backends.cusparselt.version()}
        found = {"gpu": torch.cuda.get_device_name(device), "driver": cache.driver_version(), **versions}
        args.json.write_text(json.dumps(found | {"rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
