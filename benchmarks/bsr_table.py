"""Which setting of PyTorch's BSR product is the fastest on this GPU? The table that ships, for the MLP of ViT-L.

    python benchmarks/bsr_table.py                   # 256 rows of x: eight searches, of which two compile
    python benchmarks/bsr_table.py --batches 50432   # 256 images of 197 tokens
    make gallery_speed ARGS="--sweep gallery_speed-vit"   # times it beside PyTorch's own settings, and beside dense

Searches as `packed.tune` does, in the user's cache, and writes what is the fastest there into
blockshock_lib/kernels/patterns/bsr.json, in place of earlier entries of the same GPU, weight, batch and blocks. A
weight that nobody has tuned is multiplied by that. Prints a line a search; needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import product as every
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from blockshock_lib.kernels.patterns import blocks, tune
from blockshock_lib.kernels.tuning import store

WEIGHTS = (4096, 1024), (1024, 4096)
SIDES, SPARSITIES = (64, 32), (0.9, 0.8)


def search(weight: torch.Tensor, x: torch.Tensor, side: int, sparsity: float) -> dict:
    """The problem whose fastest setting then stands in the user's cache."""
    packed = blocks.Bsr(weight, blocks.PATTERN.mask(weight.float().abs(), sparsity, side), side)
    packed.tune(x)
    return tune.problem_of(packed, x, packed.about)


def ship(problems: list[dict], path: Path) -> list[dict]:
    """Writes the entries that the user's cache has of these problems into the table, and returns them."""
    read = lambda file: json.loads(file.read_text(encoding="utf-8"))["entries"] if file.exists() else []  # noqa: E731
    found = [entry for entry in read(blocks.STORE.path) if entry["problem"] in problems]
    last = [
        entry for at, entry in enumerate(found) if entry["problem"] not in [one["problem"] for one in found[at + 1 :]]
    ]
    kept = [entry for entry in read(path) if entry["problem"] not in [one["problem"] for one in last]]
    path.write_text(json.dumps({"schema": store.SCHEMA, "entries": [*kept, *last]}, indent=1) + "\n", encoding="utf-8")
    return last


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[256], help="rows of x, multiples of 16")
    parser.add_argument("--blocks", type=int, nargs="+", default=SIDES)
    parser.add_argument("--sparsities", type=float, nargs="+", default=SPARSITIES)
    parser.add_argument("--seconds", type=float, default=tune.SECONDS, help="of a search")
    parser.add_argument("--table", type=Path, default=blocks.TABLE.path)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("it searches on an NVIDIA GPU, and none is here")
    tune.SECONDS, problems, how = args.seconds, [], {"device": "cuda", "dtype": torch.bfloat16}
    for (n, k), rows, side, sparsity in every(WEIGHTS, args.batches, args.blocks, args.sparsities):
        start = time.perf_counter()
        problems.append(search(torch.randn(n, k, **how), torch.randn(rows, k, **how), side, sparsity))
        print(f"{n}x{k}, B={rows}, blocks of {side} at {sparsity}: {time.perf_counter() - start:.1f} s", flush=True)
    for entry in ship(problems, args.table):
        print(json.dumps({**entry["problem"], **entry["ways"][0]}))
    print(f"written to {args.table}")


if __name__ == "__main__":
    main()
