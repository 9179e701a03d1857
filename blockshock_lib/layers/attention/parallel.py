"""Attention over a sequence whose positions several ranks share (context parallelism), for any pattern.

A rank holds some blocks of the sequence: their queries, keys and values. What it must see of the other ranks' keys
comes to it by one of five strategies, and the gradients go back the same way:
    gather   all keys and values of all ranks, while it attends to its own
    pull     the blocks that its queries visit, and no others: the pattern knows which. GPUs of a host read them
    send     the same by send and receive
    ring     one rank's share after the other, so that no rank ever holds more than two
    heads    (Ulysses) no keys travel to the queries: each rank gets some heads whole
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError, allowed
from blockshock_lib.kernels.attention import backends
from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.kernels.attention.lists import BlockLists
from blockshock_lib.kernels.attention.merge import absorb, wide
from blockshock_lib.kernels.attention.pattern import Pattern, checked
from blockshock_lib.kernels.once import once
from blockshock_lib.layers import watch
from blockshock_lib.layers.attention.fetch import Beside, Fetch, Routes, routes
from blockshock_lib.layers.attention.placement import placed
from blockshock_lib.layers.attention.sparse import SparseAttention, refuse_unfit
from blockshock_lib.layers.guards import refuse_unequal

STRATEGIES = ("gather", "pull", "send", "ring", "heads")


class ContextParallelAttention(nn.Module):
    """`sparse_attention` over a sequence of `length` positions that the ranks of `group` share.

    Each rank calls it with its share: q [B, H, s, D], k and v [B, H / G, s, D] -> out [B, H, s, D]. `shard` takes a
    rank's share of a whole tensor, `gather` puts the shares together. Making it is a collective: UnsupportedError where
    the ranks disagree about the pattern, or, in the first call of a shape and dtype, about these; a rank that passes
    other ones later, or makes no pass, is named within a minute. ValueError where a rank would hold nothing, or
    operands do not fit as of `sparse_attention`.
    """

    path = ""  # in the model, for messages

    def __init__(
        self,
        pattern: Pattern,
        length: int,
        group: Group,
        strategy: str = "pull",
        placement: str = "auto",
        backend: str = "auto",
        scale: float | None = None,
        block: int = 128,
        device: object = "cpu",
    ):
        super().__init__()
        if not isinstance(group, Group):
            raise ValueError(f"group is a Group of ranks, as Group.of() gives, not a {type(group).__name__}")
        given = {"pattern": pattern, "length": length, "block": block, "strategy": strategy}
        # First of all: where one rank alone refuses what it was given, the others would wait for it.
        refuse_unequal(group, type(self).__name__, **given, placement=placement, backend=backend, scale=scale)
        if strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy {strategy!r}; {allowed(strategy, STRATEGIES)}")
        self.pattern, self.group, self.strategy, self.backend, self.scale = pattern, group, strategy, backend, scale
        self.lists = lists = checked(pattern).lists(length, block=block, device=device)
        self.placement = placed(lists, group.world_size, placement, "pull" if strategy == "send" else strategy)
        self.own, self.parts, self.agreed = self.placement.blocks[group.rank], {}, set()
        self.needed = [self._needed(rank) for rank in range(group.world_size)]

    def extra_repr(self) -> str:
        shared = f"{self.placement.length} positions over {self.group.world_size} ranks"
        return f"{shared}, strategy={self.strategy}, placement={self.placement.name}"

    def _needed(self, rank: int) -> Tensor:
        """The blocks of keys that come to a rank before it attends to them: to pull its own too."""
        if self.strategy not in ("pull", "send"):
            every = torch.arange(self.lists.k_blocks, device=self.own.device)
            return every[torch.isin(every, self.placement.blocks[rank], invert=True)]
        visited = torch.cat([each[:, 1:] for each in self.lists.blocks()])
        mine = torch.isin(visited[:, 0], self.placement.blocks[rank])
        return visited[mine, 1].unique()

    @cached_property
    def routes(self) -> Routes:
        return routes(self.placement, self.needed, self.group.rank)

    def shard(self, x: Tensor, dim: int = 2) -> Tensor:
        """This rank's positions of a whole tensor, along `dim`. ValueError where it is not as long as the sequence."""
        if x.shape[dim] != self.placement.length:
            raise ValueError(f"a whole tensor has {self.placement.length} positions along {dim}, not {x.shape[dim]}")
        return x.index_select(dim, self.placement.positions[self.group.rank])

    def gather(self, x: Tensor, dim: int = 2) -> Tensor:
        """The whole tensor of the ranks' shares. Collective, without a gradient."""
        x = x.detach().movedim(dim, 0).contiguous()
        take = [x.new_empty((length, *x.shape[1:])) for length in self.placement.lengths]
        self.group.start_all_to_all([x] * len(take), take)()
        return torch.cat(take)[self.placement.order].movedim(0, dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[3] ** -0.5 if self.scale is None else self.scale
        if self.strategy == "heads":
            return self.exchanged(q, k, v, partial(self._by_heads, scale=scale))
        self._check(q, k, v)
        if self.strategy in ("ring", "gather"):
            return self._counted((_Ring if self.strategy == "ring" else Beside).apply(q, k, v, self, scale))
        k, v = Fetch.apply(k, v, self)
        return self._counted(self._attend(Call(q, k, v, None, self.selected("needed"), scale)))

    def _counted(self, out: Tensor) -> Tensor:
        """Whose backward is counted, as its forward was."""
        if out.requires_grad and not torch.compiler.is_compiling():
            out.register_hook(lambda _: self._count("backward", ()))
        return out

    def _count(self, what: str, shape: tuple[int, ...]) -> None:
        if self.group.connected and not torch.compiler.is_compiling():
            watch.count(self, what, shape)

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        own = self.placement.lengths[self.group.rank]
        dtype = q.dtype, k.dtype, v.dtype
        shape = tuple((*x.shape[:2], x.shape[2:3] == (own,), *x.shape[3:]) for x in (q, k, v))
        capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
        compared = (dtype, shape) not in self.agreed and not capturing  # else no rank waits for another here
        if not capturing:  # of a call that all compare the watch keeps silent
            self._count("forward", () if compared else (zlib.crc32(repr((dtype, shape)).encode()),))
        if compared:
            refuse_unequal(self.group, type(self).__name__, dtype=dtype, shape=shape)
            self.agreed.add((dtype, shape))
        refuse_unfit(q, k, v, self.pattern, self.scale)
        if not q.shape[2] == k.shape[2] == own:
            shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
            raise ValueError(f"rank {self.group.rank} holds {own} positions, [B, H, {own}, D]; not {shapes}")

    def exchanged(self, q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """attend(q, k, v, heads), where this rank's shares have become the whole sequences of its `heads`, a slice of
        q's; its result becomes this rank's share again. UnsupportedError where heads do not divide by the ranks.
        """
        self._check(q, k, v)
        ranks, rank = self.group.world_size, self.group.rank
        if q.shape[1] % ranks or k.shape[1] % ranks:
            told = f"{q.shape[1]} heads of queries and {k.shape[1]} of keys"
            raise UnsupportedError(f"strategy 'heads' deals whole heads to {ranks} ranks, which {told} do not allow")
        mine = slice(q.shape[1] // ranks * rank, q.shape[1] // ranks * (rank + 1))
        return self._counted(_Heads.apply(self, False, attend(*_Heads.apply(self, True, q, k, v), mine))[0])

    def _attend(self, call: Call) -> Tensor:
        return backends.chosen(self.backend, call).attend(call)[0]

    def selected(self, source: int | str) -> BlockLists:
        """The lists of this rank's queries and of the keys of a rank, or of those that are "needed" of others."""
        if source not in self.parts:
            keys = self.needed[self.group.rank] if source == "needed" else self.placement.blocks[source]
            self.parts[source] = self.lists.select(self.own, keys)
        return self.parts[source]

    def shared_bytes(self, k: Tensor) -> int:
        """Of a share of keys: of the memory that the peers read, which no peak of PyTorch's allocator counts."""
        if self.strategy not in ("pull", "gather") or self.group.unshared(k.device):
            return 0
        return 2 * max(self.routes.there[2], self.routes.back[2]) * k[:, :, 0].numel() * k.element_size()

    def part(self, source: int | str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Call | None:
        """Attention to the keys of `selected`; None if this rank's queries see none of them."""
        lists = self.selected(source)
        return Call(q, k, v, None, lists, scale) if len(lists.rows.full) + len(lists.rows.partial) else None

    def _by_heads(self, q: Tensor, k: Tensor, v: Tensor, heads: slice, scale: float) -> Tensor:
        if "heads" not in self.parts:  # with what backends make of them
            plane = self.lists.plane[:, heads] if self.lists.plane.shape[1] > 1 else self.lists.plane
            lists = replace(self.lists, plane=plane.contiguous(), forms={})
            self.parts["heads"] = self.pattern.of_heads(heads), lists
        return self._attend(Call(q, k, v, *self.parts["heads"], scale))


class ContextParallel(ParallelStyle):
    """Turns a SparseAttention into a ContextParallelAttention over the ranks of a 1-D mesh.

    `parallelize_module(model, mesh, {"blocks.*.attention": ContextParallel(length=65536)})`. What reaches the module is
    then each rank's share of the positions, `module.placement.positions[rank]`, which the rest of the model works on.
    UnsupportedError for another module or mesh.
    """

    def __init__(self, length: int, strategy: str = "pull", placement: str = "auto"):
        super().__init__()
        self.length, self.strategy, self.placement = length, strategy, placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not SparseAttention:
            raise UnsupportedError(f"ContextParallel shares a SparseAttention, not a {type(module).__name__}")
        if device_mesh.ndim != 1:
            raise UnsupportedError(f"ContextParallel takes a mesh of one dimension, not {device_mesh.ndim}: slice it")
        made = ContextParallelAttention(
            *(module.pattern, self.length, Group.of(device_mesh.get_group()), self.strategy, self.placement),
            *(module.backend, module.scale, module.block, device_mesh.device_type),
        )
        vars(module).update({name: value for name, value in vars(made).items() if "_hook" not in name})
        module.__class__ = ContextParallelAttention
        return module


class _Heads(torch.autograd.Function):
    """Between all heads of a rank's positions, [B, H, s, D], and all positions of its heads, [B, H / ranks, S, D]; of
    several tensors, which travel at once.
    """

    @staticmethod
    def forward(ctx, layer: ContextParallelAttention, gather: bool, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.layer, ctx.gather = layer, gather
        return _exchanged(layer, xs, gather)

    @staticmethod
    @once
    def backward(ctx, *grads: Tensor) -> tuple:
        return None, None, *_exchanged(ctx.layer, grads, not ctx.gather)


def _exchanged(layer: ContextParallelAttention, xs: Sequence[Tensor], gather: bool) -> tuple[Tensor, ...]:
    placed, ranks = layer.placement, layer.group.world_size
    cut = [x.chunk(ranks, 1) if gather else x[:, :, placed.dealt].split(placed.lengths, 2) for x in xs]
    give = [[part.contiguous() for part in parts] for parts in cut]
    lengths = placed.lengths if gather else [placed.lengths[layer.group.rank]] * ranks
    take = [[one[0].new_empty((*one[0].shape[:2], length, one[0].shape[3])) for length in lengths] for one in give]
    for wait in [layer.group.start_all_to_all(*each) for each in zip(give, take, strict=True)]:
        wait()
    return tuple(torch.cat(parts, 2)[:, :, placed.order] if gather else torch.cat(parts, 1) for parts in take)


class _Ring(torch.autograd.Function):
    """Keys and values go round; in the backward they go round again, and their gradients, in fp32, with them."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, layer: ContextParallelAttention, scale: float) -> Tensor:
        ctx.layer, ctx.scale, out, lse = layer, scale, None, None
        for call, arrive in _round(torch.stack((k, v)), q, layer, scale):
            if call is not None:
                found, level = backends.explicit(layer.backend, call).forward(call)
                out, lse = (wide(found), level) if out is None else (out, absorb(out, lse, found, level))
            arrive()
        if out is None:  # it sees nothing
            out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once
    def backward(ctx, grad: Tensor) -> tuple:
        q, k, v, out, lse = ctx.saved_tensors
        layer, last, dq, moving, come = ctx.layer, ctx.layer.group.world_size - 1, None, None, lambda: None
        for step, (call, arrive) in enumerate(_round(held := torch.stack((k, v)), q, layer, ctx.scale)):
            each = None if call is None else backends.explicit(layer.backend, call).backward(call, grad, out, lse, None)
            arrive()
            come()  # what the ranks before found for these keys travels while this rank makes its own
            if each is not None:
                mine = torch.stack(each[1:])
                dq = wide(each[0]) if dq is None else dq.add_(each[0])
                moving = wide(mine) if moving is None else moving.add_(mine)
            elif moving is None:
                moving = torch.zeros_like(wide(held))
            # The last to add rounds, as the owner would.
            moving, come = _pass_on(moving if step < last else moving.to(k.dtype), layer, step)
        come()
        return torch.zeros_like(q) if dq is None else dq.to(q.dtype), *moving, None, None


def _round(held: Tensor, q: Tensor, layer: ContextParallelAttention, scale: float):
    """Of each step: what this rank attends to, None if it sees nothing, and what waits for the next step's keys."""
    ranks, rank = layer.group.world_size, layer.group.rank
    for step in range(ranks):
        source = (rank - step) % ranks
        last = step == ranks - 1
        coming, arrive = (None, lambda: None) if last else _pass_on(held, layer, step)
        yield layer.part(source, q, *held, scale), arrive
        held = coming


def _pass_on(x: Tensor, layer: ContextParallelAttention, step: int) -> tuple[Tensor, Callable[[], None]]:
    """Gives x to the next rank; returns where the one before gives its own to, once the callable was called."""
    ranks, rank = layer.group.world_size, layer.group.rank
    length = layer.placement.lengths[(rank - step - 1) % ranks]
    give, take = ([x.new_empty(0) for _ in range(ranks)] for _ in range(2))
    take[(rank - 1) % ranks] = x.new_empty((*x.shape[:3], length, x.shape[4]))
    give[(rank + 1) % ranks] = x.contiguous()
    return take[(rank - 1) % ranks], layer.group.start_all_to_all(give, take)
