"""What the ranks of test_all_reduce.py run on GPUs; a spawned process imports it by name."""

import gc
import os
from unittest import mock

import torch
import torch.distributed as dist

from blockshock_lib.comm import Group, all_reduce, tuning
from blockshock_lib.comm.all_reduce import BACKENDS, Way
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.layers import BlockShockLinear, ColumnParallelLinear, RowParallelLinear

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SYMMETRIC = [name for name, kernel in BACKENDS.items() if kernel]


def integers(seed: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, most: int = 15):
    """Small integers: every order of summation over 8 ranks is exact, in bf16 too."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator, device=device).to(dtype)


def unsupported(ctx):
    return all_reduce.reducer(Group.of(), ctx.device).why


def values(ctx, cases=210):
    """What is not the exact sum, or not rounded once, over random shapes, dtypes and numbers of blocks."""
    group, wrong = Group.of(), []
    one, shapes = all_reduce.reducer(group, ctx.device), torch.Generator().manual_seed(5)
    for case in range(cases):
        rows = torch.randint(1, 300, (1,), generator=shapes).item()
        columns = 8 * torch.randint(1, 700, (1,), generator=shapes).item() if case % 7 else 8
        dtype, name = DTYPES[case % 3], SYMMETRIC[case // 3 % 2]
        blocks = (1, 3, 16, 64, 256)[case % 5]
        every = [integers(case * 8 + r, (rows, columns), dtype, ctx.device) for r in range(ctx.world_size)]
        bias = integers(case + 10**6, (columns,), dtype, ctx.device) if case % 2 else None
        expected = sum(every) if bias is None else sum(every) + bias
        place = one.workspace(group, rows, columns, dtype)
        place.copy_(every[ctx.rank])
        if not torch.equal(one.sum(place, bias, way=Way(name, blocks)), expected):
            wrong.append(f"{name} {tuple(place.shape)} {dtype} blocks={blocks} bias={bias is not None}")
        # Real numbers: one rounding of a sum in fp32, the same on every rank.
        seeds = (torch.Generator(ctx.device).manual_seed(case * 8 + r) for r in range(ctx.world_size))
        every = [torch.randn(rows, columns, device=ctx.device, generator=seed).to(dtype) for seed in seeds]
        place.copy_(every[ctx.rank])
        y = one.sum(place, way=Way(name, blocks))
        total = every[0].float()
        for part in every[1:]:
            total = total + part.float()
        if not torch.equal(y, total.to(dtype)):
            wrong.append(f"{name} {tuple(place.shape)} {dtype} blocks={blocks}: not the rounded sum")
    return wrong


def races(ctx, calls=600):
    """Calls in a row that change what they sum, ranks delayed at random, two kernels and sizes in turns."""
    group, wrong = Group.of(), torch.zeros((), dtype=torch.int64, device=ctx.device)
    one, late = all_reduce.reducer(group, ctx.device), torch.Generator().manual_seed(ctx.rank)
    every = [integers(r, (512, 1024), torch.bfloat16, ctx.device, most=7) for r in range(ctx.world_size)]
    expected = sum(every)
    for call in range(calls):
        rows = (512, 8, 100)[call % 3]
        place = one.workspace(group, rows, 1024, torch.bfloat16)
        if torch.rand(1, generator=late) < 0.2:
            torch.cuda._sleep(int(2e5 * torch.rand(1, generator=late)))
        torch.add(every[ctx.rank][:rows], call % 5, out=place)
        y = one.sum(place, way=Way(SYMMETRIC[call % 2], (4, 64)[call // 2 % 2]))
        wrong += (y != expected[:rows] + ctx.world_size * (call % 5)).sum()
    return wrong.item()


def graphs(ctx, replays=100):
    """A product and its sum in a CUDA graph, replayed with changing inputs; and what an uncaptured growth says."""
    group, wrong = Group.of(), 0
    one = all_reduce.reducer(group, ctx.device)
    weight = integers(3, (1024, 64), torch.bfloat16, ctx.device, most=1)
    x = torch.zeros(32, 64, dtype=torch.bfloat16, device=ctx.device)

    def forward(name):
        place = torch.mm(x, weight.t(), out=one.workspace(group, 32, 1024, torch.bfloat16))
        return one.sum(place, way=Way(name, 8))

    for name in SYMMETRIC:
        forward(name)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = forward(name)
        # The workspace grows: the graph goes on with the one it has captured.
        one.workspace(group, one.space.nbytes // 1024, 1024, torch.bfloat16)
        for replay in range(replays):
            every = [integers(100 * replay + r, x.shape, x.dtype, ctx.device, most=1) for r in range(ctx.world_size)]
            x.copy_(every[ctx.rank])
            y.fill_(torch.nan)
            graph.replay()
            wrong += not torch.equal(y, sum(every) @ weight.t())
        graph.reset()
    return wrong


def streams(ctx, calls=40):
    """Calls of one group on two streams in turns share the workspace without a race."""
    group, wrong = Group.of(), 0
    one, every = all_reduce.reducer(group, ctx.device), []
    two = [torch.cuda.Stream(ctx.device) for _ in range(2)]
    torch.cuda.synchronize()
    for call in range(calls):
        with torch.cuda.stream(two[call % 2]):
            place = one.workspace(group, 2048, 1024, torch.bfloat16)
            place.fill_(call % 50 + ctx.rank)
            every.append((one.sum(place, way=Way(SYMMETRIC[call // 2 % 2], 32)), call % 50))
    torch.cuda.synchronize()
    for y, number in every:
        expected = number * ctx.world_size + sum(range(ctx.world_size))
        wrong += not bool((y == torch.tensor(expected, dtype=y.dtype)).all())
    return wrong


def tuned(ctx, folder):
    """The layers through the workspace, whole, in chunks and captured; after the group measured its sizes."""
    os.environ["BLOCKSHOCK_CACHE"] = folder
    group, wrong = Group.of(), []
    n, k, b = 2048, 1024, 2048
    shapes = ((n, k), (n,), (b, k))
    weight, bias, x = (integers(seed, s, torch.bfloat16, ctx.device, most=1) for seed, s in enumerate(shapes, 1))
    expected = (x.float() @ weight.float().t() + bias.float()).bfloat16()
    times = {Way("one-shot", 32): 1.0, Way("nccl"): 2.0}
    with torch.no_grad():
        mask = {"mask": Mask.named("checkerboard")}
        for make, options in ((RowParallelLinear, {}), (ColumnParallelLinear, {}), (BlockShockLinear, mask)):
            layer = make(weight, bias, group=group, **options)
            for chunks in (1, 2, 4):
                layer.chunks = chunks
                # Whatever is fastest here, the workspace is what is tried.
                with mock.patch.object(tuning, "measure", lambda *_: times):
                    layer.tune_reduce(x)
                layer.form = (layer.forms or ["classes"])[-1]  # the shards of y are read
                name = f"{make.__name__} chunks={chunks}"
                way = all_reduce.reducer(group, ctx.device).ways(b // chunks * n * 2)[0]
                if way.backend not in SYMMETRIC:
                    wrong.append(f"{name}: {way}")
                y, again = layer(x), layer(x)
                if not (torch.equal(y, expected) and torch.equal(again, expected) and y.data_ptr() != again.data_ptr()):
                    wrong.append(f"{name}: off by {(y.float() - expected.float()).abs().max().item()}")
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    kept = layer(x)
                kept.zero_()
                graph.replay()
                if not torch.equal(kept, expected):
                    wrong.append(f"{name}: wrong in a graph")
                graph.reset()
    return wrong


def searched(ctx, folder, sizes):
    """Size -> what the group really measured, the fastest first."""
    os.environ["BLOCKSHOCK_CACHE"] = folder
    group, found = Group.of(), {}
    for nbytes in sizes:
        group.tune(nbytes, ctx.device)
        found[nbytes] = all_reduce.reducer(group, ctx.device).ways(nbytes)
    return found


def freed(ctx):
    """Bytes of device memory that a workspace of 256 MiB leaves behind when its group is destroyed."""
    all_reduce.reducer(Group.of(), ctx.device)
    torch.cuda.synchronize()
    handle = dist.new_group()
    group = Group.of(handle)
    one = all_reduce.reducer(group, ctx.device)
    one.workspace(group, 64, 1024, torch.bfloat16)  # also starts what stays
    before = torch.cuda.mem_get_info()[0]
    one.workspace(group, 128 << 10, 1024, torch.bfloat16)
    held = before - torch.cuda.mem_get_info()[0]
    dist.barrier()
    dist.destroy_process_group(handle)
    del handle, one
    gc.collect()
    dist.barrier()  # memory is free once no peer maps it
    return held, before - torch.cuda.mem_get_info()[0]
