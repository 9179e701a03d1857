"""What the ranks of test_chunked.py run; a spawned process imports it by name."""

from __future__ import annotations

from unittest import mock

import torch

from blockshock_lib.comm import Group
from blockshock_lib.comm.choices import Way
from tests.comm import fake_symm
from tests.layers.tasks import K, N, built

B = 40
CPU = torch.device("cpu")


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """W, b, x of small integers, whose products every order of summation gets exactly."""
    seed = torch.Generator().manual_seed(0)
    return tuple(torch.randint(-3, 4, shape, generator=seed).to(dtype) for shape in ((N, K), (N,), (B, K)))


def chunked(ctx, cases, counts, symmetric):
    """Where the forward in chunks is not, bit for bit, that in one; or does not go through the workspace."""
    # Chunks of 16 rows were not measured: gloo adds up those, but a last one goes as the rest did.
    wrong, sizes = [], [rows * N * 4 for rows in (8, 24, B)]
    with fake_symm.installed({size: [Way("two-shot", 8)] for size in sizes} if symmetric else {}) as fake:
        for name, mask, changes in cases:
            w, bias, x = inputs(torch.float32)
            layer = built(name, mask, w, bias, **changes)
            whole = layer(x).detach()
            if not torch.equal(whole, x @ w.T + bias):
                wrong.append(f"{name} {mask}: wrong in one")
            for count in counts:
                layer.chunks = count
                fake.sums.clear()
                given, y = x.clone().requires_grad_(), None
                with mock.patch.object(Group, "all_gather", counted(Group.all_gather)) as gather:
                    y = layer(given)
                joins = len(fake.sums) or gather.calls
                y.sum().backward()
                told = f"{name} {mask} in {count}"
                if not (torch.equal(y, whole) and y.stride() == whole.stride()):
                    wrong.append(f"{told}: another y")
                if not torch.equal(given.grad, torch.ones(B, N) @ w):
                    wrong.append(f"{told}: another dX")
                rows = -(-B // count // 8) * 8
                if joins != (-(-B // rows) if gather.calls or (symmetric and rows != 16) else 0):
                    wrong.append(f"{told}: joined {joins} times")
    return wrong


def counted(function):
    def run(*args):
        run.calls += 1
        return function(*args)

    run.calls = 0
    return run


def reduced_sizes(ctx):
    """The sizes that a layer has its group measure, whole and in chunks."""
    w, bias, x = inputs(torch.float32)
    asked = {}
    with mock.patch.object(Group, "tune", lambda self, nbytes, device: asked[key].append(nbytes)):
        for name in ("row_parallel", "block_shock", "column_parallel", "dense"):
            layer = built(name, "checkerboard", w, bias)
            for key in ((name, 1), (name, 2)):
                asked[key] = []
                layer.chunks = key[1]
                layer.tune_reduce(x)
    return asked
