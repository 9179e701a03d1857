"""A transformer block over ranks: heads of sparse attention dealt out, the MLP tensor-parallel (arXiv:1909.08053).

Each rank has some heads and some of the MLP's hidden features, so that attention and GELU need no other rank. Of each
sublayer the first product is column-parallel, the second row-parallel: one all-reduce forward, one backward. A block of
one rank is the same class, and communicates nothing.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockshock_lib.comm import Group
from blockshock_lib.errors import allowed
from blockshock_lib.kernels.attention.pattern import Pattern, checked
from blockshock_lib.kernels.once import once
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.layers.attention.sparse import sparse_attention
from blockshock_lib.layers.block_shock import BlockShockLinear
from blockshock_lib.layers.guards import refuse_unequal
from blockshock_lib.layers.parts import cut, equal_shard

MLPS = ("dense", "block_shock")
HYBRID_1024 = {"width": 1024, "heads": 8}  # keyword arguments of a block of a common size


class Sum(torch.autograd.Function):
    """The sum of all ranks' x: `here`, g of the paper, or in the backward alone, its f."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, here: bool) -> Tensor:
        ctx.group, ctx.here = group, here
        return summed(x, group) if here else x.view_as(x)

    @staticmethod
    @once
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.here else summed(grad, ctx.group), None, None


class HybridTransformerBlock(nn.Module):
    """x + attention(norm(x)), then that + mlp(norm(that)): x [B, S, width] -> [B, S, width], whole on every rank.

    Args:
        pattern: which keys a query sees, causal or not; it may differ by head, of all ranks' heads.
        group: the ranks that share the block; default one rank alone.
        hidden: features of the MLP, 4 width by default. kv_heads: heads of keys and values, `heads` by default.
        mlp: "dense", or "block_shock": both its products are BlockShockLinear, of which each has an all-reduce of its
            own, forward and backward; an even number of ranks is needed.
        backend, block: as of `sparse_attention`.

    Weights are drawn whole from torch's own generator, then shared out: UnsupportedError where the ranks of a process
    group drew others, or were given other arguments. A rank's parameters and state dict are its share; layer norms, the
    biases that are added after a sum, and their gradients are whole on every rank. DistributedDataParallel over these
    very ranks and torch's clip_grad_norm_ are refused; blockshock_lib.clip_grad_norm_ clips as the whole block's.
    ValueError where the heads, heads of keys or hidden features do not divide by the ranks, or the width by the heads.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        pattern: Pattern,
        group: Group | None = None,
        hidden: int | None = None,
        kv_heads: int | None = None,
        mlp: str = "dense",
        backend: str = "auto",
        block: int = 128,
    ):
        super().__init__()
        hidden, kv_heads = 4 * width if hidden is None else hidden, heads if kv_heads is None else kv_heads
        if min(width, heads, hidden, kv_heads) < 1 or width % heads or heads % kv_heads:
            told = f"width {width} must be a multiple of {heads} heads, and these of {kv_heads} kv_heads"
            raise ValueError(f"{told}; none of them and of {hidden} hidden features may be below 1")
        self.size, self.pattern, self.backend, self.block = width // heads, checked(pattern), backend, block
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, self.size * kv_heads) for _ in range(2))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self._share(group or Group(), mlp)

    @classmethod
    def of(cls, whole: "HybridTransformerBlock", group: Group, mlp: str = "dense") -> "HybridTransformerBlock":
        """This rank's share of a block that every rank holds whole, one of one rank; the weights are copied."""
        if whole.group.world_size > 1 or isinstance(whole.up, BlockShockLinear):
            raise ValueError(f"of() shares out a dense block of one rank, not of {whole.group.world_size} ranks")
        block = copy.deepcopy(whole, {id(whole.pattern): whole.pattern})
        block._share(group, mlp)
        return block

    def _share(self, group: Group, mlp: str) -> None:
        if mlp not in MLPS:
            raise ValueError(f"unknown mlp {mlp!r}; {allowed(mlp, MLPS)}")
        self.group, ranks = group, group.world_size
        counts = {
            "heads": self.q.out_features // self.size,
            "kv_heads": self.k.out_features // self.size,
            "hidden features": self.up.out_features,
        }
        for name, count in counts.items():
            if count % ranks:
                raise ValueError(f"{count} {name} do not divide by {ranks} ranks")
        options = {"pattern": self.pattern, "heads": counts, "mlp": mlp, "backend": self.backend, "block": self.block}
        refuse_unequal(group, type(self).__name__, **options, **dict(self.named_parameters()))
        if len(self.pattern.plane[0]) not in (1, counts["heads"]):
            raise ValueError(f"a pattern of {len(self.pattern.plane[0])} heads does not fit {counts['heads']} heads")
        self.pattern = self.pattern.of_heads(equal_shard(counts["heads"], group.rank, ranks))
        self.q, self.k, self.v = (cut(linear, group, 0) for linear in (self.q, self.k, self.v))
        self.out = cut(self.out, group, 1)
        if mlp == "block_shock":
            made = ((linear.weight, linear.bias) for linear in (self.up, self.down))
            self.up, self.down = (BlockShockLinear(*one, mask=Mask.named("checkerboard"), group=group) for one in made)
        else:
            self.up, self.down = cut(self.up, group, 0), cut(self.down, group, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attend(self, x: Tensor) -> Tensor:
        """The attention sublayer, without its norm and residual."""
        x = copied(x, self.group)
        q, k, v = (linear(x).unflatten(2, (-1, self.size)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        out = _attention(q, k, v, self.pattern, self.backend, block=self.block)
        return joined(out.transpose(1, 2).flatten(2), self.out, self.group)

    def mlp(self, x: Tensor) -> Tensor:
        """The other sublayer, likewise."""
        if isinstance(self.up, BlockShockLinear):
            return self.down(F.gelu(self.up(x)))
        return joined(F.gelu(self.up(copied(x, self.group))), self.down, self.group)


# A compiler leaves these to Python: it knows no collective of a Group, and no block lists.
_attention = torch.compiler.disable(sparse_attention)


@torch.compiler.disable
def copied(x: Tensor, group: Group) -> Tensor:
    """What a column-parallel product reads."""
    return Sum.apply(x, group, False) if group.world_size > 1 else x


@torch.compiler.disable
def joined(x: Tensor, linear: nn.Linear, group: Group) -> Tensor:
    """A row-parallel product: x [..., own features] -> [..., all], the bias added once, after the sum."""
    partial = F.linear(x, linear.weight)
    return (Sum.apply(partial, group, True) if group.world_size > 1 else partial) + linear.bias


def summed(x: Tensor, group: Group) -> Tensor:
    """x [..., N] of all ranks, added up; x stays as it is."""
    rows = x.reshape(-1, x.shape[-1])
    shared = group.buffer(*rows.shape, x.dtype, x.device)
    own = rows.clone(memory_format=torch.contiguous_format) if shared is None else shared.copy_(rows)
    return group.all_reduce(own).view(x.shape)
