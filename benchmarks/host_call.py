"""What a call costs the host: every layer in a loop, as a model runs them, beside the same written by hand.

    python benchmarks/host_call.py                                     one process; torch's "fake" group joins two ranks
    torchrun --nproc-per-node 2 benchmarks/host_call.py --device cuda

Microseconds a layer without gradients, eager and compiled, and their ratios to the rival's: `F.linear` of the rank's
part, `dist.all_reduce` and the bias for sums, nn.Linear for Linear24. Keep the sizes small, so that a GPU waits for the
host. On a CPU the 2:4 product is a dense one of equal cost, so that the host alone is seen.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from blockshock_lib import layers
from blockshock_lib.kernels.sparse24 import packing

MASK = {"mask": "checkerboard", "check": False}
LAYERS = {
    "RowParallelLinear": {"check": False},
    "ColumnParallelLinear": {"check": False},
    "MaskedDenseLinear": MASK,
    "PermutedDenseLinear": MASK,
    "BlockShockLinear": MASK,
    "Linear24": {"mask": "magnitude"},
}


class ByHand(nn.Module):
    """A rank's columns of W, or all of one term; the sum; the bias."""

    def __init__(self, linear: nn.Linear, columns: slice):
        super().__init__()
        self.weight, self.bias = nn.Parameter(linear.weight[:, columns].detach().clone()), linear.bias
        self.columns = None if columns == slice(None) else columns

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x if self.columns is None else x[:, self.columns], self.weight)
        dist.all_reduce(y)
        return y.add_(self.bias)


class Gathered(ByHand):
    """A rank's rows of W and their bias; the gathered y^T, transposed."""

    def __init__(self, linear: nn.Linear, rows: slice):
        super().__init__(linear, slice(None))
        self.weight = nn.Parameter(linear.weight[rows].detach().clone())
        self.rows = nn.Parameter(linear.bias[rows, None].detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        part = torch.addmm(self.rows, self.weight, x.t())
        y = x.new_empty(dist.get_world_size() * part.shape[0], part.shape[1])
        dist.all_gather_into_tensor(y, part)
        return y.t()


def seconds(runs: dict[str, nn.Module], x: Tensor, rounds: int, calls: int) -> dict[str, float]:
    """The least of `rounds` means of so many calls, the runs in turns."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(calls):
                run(x)
            best[name] = min(best[name], (time.perf_counter() - start) / calls)
            if x.is_cuda:
                torch.cuda.synchronize()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 32  # all models are of one class
    cuda, rank = args.device == "cuda", int(os.environ.get("LOCAL_RANK", 0))
    if cuda:
        torch.cuda.set_device(rank)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    torch.manual_seed(0)
    like = {"device": args.device, "dtype": torch.bfloat16 if cuda else torch.float32}
    linears = [nn.Linear(args.features, args.features, **like) for _ in range(args.layers)]
    share = args.features // dist.get_world_size()
    mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    made = {
        name: lambda linear, name=name: getattr(layers, name).from_linear(linear, **LAYERS[name]) for name in LAYERS
    }
    made |= {"by hand, columns": lambda linear: ByHand(linear, mine), "by hand, rows": lambda one: Gathered(one, mine)}
    made |= {"by hand, a term": lambda linear: ByHand(linear, slice(None)), "nn.Linear": lambda linear: linear}
    rival = {"RowParallelLinear": "by hand, columns", "ColumnParallelLinear": "by hand, rows", "Linear24": "nn.Linear"}
    models = {name: nn.Sequential(*map(make, linears)).requires_grad_(False) for name, make in made.items()}
    for model in models.values():
        for layer in model:
            layer.met = 2  # a fake group's other rank has no x to compare
    x, dense = torch.randn(args.rows, args.features, **like), {}
    unpacked = packing.unpack

    def kept(values: Tensor, metadata: Tensor) -> Tensor:
        if (found := dense.get(values.data_ptr())) is None:
            found = dense[values.data_ptr()] = unpacked(values, metadata)
        return found

    with torch.no_grad(), mock.patch.object(packing, "unpack", kept):
        ways = {"eager": models}
        if not args.eager:
            ways["compiled"] = {name: torch.compile(model) for name, model in models.items()}
        for runs in ways.values():
            for run in runs.values():
                for _ in range(3):
                    run(x)
        found = {way: seconds(runs, x, args.rounds, 10) for way, runs in ways.items()}
    if dist.get_rank() == 0:
        print(f"{'us a layer':22}" + "".join(f"{way:>10} {'by hand':>8}" for way in found))
        for name in models:
            line = ""
            for times in found.values():
                ratio = times[name] / times[rival.get(name, "by hand, a term")] if name in LAYERS else 1
                line += f"{times[name] / args.layers * 1e6:10.1f} {ratio:7.2f}x"
            print(f"{name:22}{line}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
