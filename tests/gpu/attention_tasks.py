"""What the ranks of test_attention_ranks.py run on GPUs; a spawned process imports it by name."""

import torch

from blockshock_lib import attention
from blockshock_lib.comm import Group, all_reduce
from tests.gpu.reduce_tasks import integers

LENGTH, BLOCK = 1100, 64  # 18 blocks, the last of 12 positions: the shares of 4 and 8 ranks differ by a block
SHAPES = {torch.bfloat16: (2, 3, 128), torch.float16: (5,), torch.float32: (3,), torch.int8: (7,), torch.float64: (64,)}
PATTERN = attention.causal() & (attention.window(150) | attention.strided(256, 64, 32))


class Sent(Group):
    """Ranks that share no memory."""

    def _sharing(self, device, nbytes):
        return None


def rows(ctx, calls=400):
    """Values of pulls in a row that are wrong: rows and places of any number, ranks delayed at random, no host wait."""
    group, wrong = Group.of(), torch.zeros((), dtype=torch.int64, device=ctx.device)
    draw, late = torch.Generator().manual_seed(3), torch.Generator().manual_seed(ctx.rank)

    def asked(size):
        if torch.rand(1, generator=draw) < 0.3:
            ends = torch.randint(size + 1, (2,), generator=draw).sort().values.tolist()
            return slice(*ends)
        return torch.nonzero(torch.rand(size, generator=draw) < 0.5)[:, 0].to(ctx.device)

    for call in range(calls):
        sizes = torch.randint(300, (ctx.world_size,), generator=draw).tolist()
        sizes[call % ctx.world_size] += 1  # one at least holds a row
        dtype = list(SHAPES)[call % len(SHAPES)]
        places = [[asked(size) for size in sizes] for _ in sizes]
        every = [integers(8 * call + r, (size, *SHAPES[dtype]), dtype, ctx.device) for r, size in enumerate(sizes)]
        torch.cuda._sleep(int(2e5 * torch.rand(1, generator=late)) if torch.rand(1, generator=late) < 0.2 else 0)
        x = every[ctx.rank].clone()
        arrive = group.start_pull(x, [each[ctx.rank] for each in places], places[ctx.rank], max(sizes))
        x.zero_()
        found, right = arrive(), torch.cat([x[at] for x, at in zip(every, places[ctx.rank], strict=True)])
        wrong += (found != right).sum() if found.shape == right.shape else 1
    space = all_reduce.reducer(group, ctx.device).space
    return wrong.item() + (space.peer(ctx.rank, 1, 1, torch.uint8).data_ptr() != space.begin)


def layer_of(ctx, group, strategy, placement="zigzag"):
    options = {"backend": "triton", "block": BLOCK, "device": ctx.device}
    return attention.ContextParallelAttention(PATTERN, LENGTH, group, strategy, placement, **options)


def drawn(ctx, seed, dtype=torch.bfloat16):
    draw = torch.Generator(ctx.device).manual_seed(seed)
    sizes = [(2, heads, LENGTH, 64) for heads in (16, 8, 8, 16)]
    return [torch.randn(size, generator=draw, device=ctx.device).bfloat16().to(dtype) for size in sizes]


def step(attend, q, k, v, dout):
    made = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*made)
    return [out.detach(), *torch.autograd.grad(out, made, dout)]


def values(ctx, strategy):
    """What is off float64 on one GPU by more than a fiftieth, of out, dq, dk and dv."""
    wrong = []
    right = step(
        lambda *x: attention.sparse_attention(*x, PATTERN, "reference", block=BLOCK), *drawn(ctx, 0, torch.float64)
    )
    for placement in ("contiguous", "zigzag", "cost"):
        layer = layer_of(ctx, Group.of(), strategy, placement)
        for mine, true in zip(step(layer, *map(layer.shard, drawn(ctx, 0))), right, strict=True):
            off = ((layer.gather(mine).double() - true).norm() / true.norm()).item()
            wrong += [f"{placement}: {off:.3g}"] * (not off < 0.02)
    return wrong


def graphs(ctx, strategy, replays=100):
    """Replays of a forward and backward, inputs changing, that are not bit for bit what ranks that send give."""
    layer, other = (layer_of(ctx, of.of(), strategy) for of in (Group, Sent))
    held, wrong = [layer.shard(x) for x in drawn(ctx, 0)], 0
    step(layer, *held), step(other, *held)  # makes the memory
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        kept = step(layer, *held)
    for replay in range(replays):
        for one, x in zip(held, drawn(ctx, replay), strict=True):
            one.copy_(layer.shard(x))
        for one in kept:
            one.fill_(torch.nan)
        graph.replay()
        wrong += not all(map(torch.equal, kept, step(other, *held)))
    torch.cuda.synchronize()
    graph.reset()
    return wrong
