"""The layers of all ranks: as threads of this process, or in processes, which import a test's functions by name."""

from itertools import product

import torch

from blockshock_lib.comm import Group, local
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.studies.linear.methods import METHODS

N, K, B = 64, 128, 3
RUNNABLE = [name for name, method in METHODS.items() if name != "block_shock_torch" and not method.folded]
CASES = [
    ("row_parallel", "checkerboard", {}),
    ("column_parallel", "checkerboard", {}),
    ("masked_dense", "random", {}),
    ("permuted_dense", "checkerboard", {}),
    ("permuted_dense", "checkerboard", {"form": "batched"}),
    ("permuted_dense", "checkerboard", {"form": "transposed"}),
    ("permuted_dense", "uniform_1010", {}),
    ("block_shock", "checkerboard", {}),
    ("block_shock", "uniform_1100", {}),
    ("block_shock_recompress", "checkerboard", {}),
]
"""(method, mask, options): every layout, strategy and mask family."""
CASES += [
    ("block_shock", mask, {"update": update, "dw": dw})
    for mask, update, dw in product(("transposable_random", "random"), ("packed", "recompress"), ("full", "exchange"))
]


def built(name, mask, weight, bias, group=None, **changes):
    """This rank's layer of a method, trainable."""
    settings = {"overlap": True} | {name: changes.pop(name) for name in ("overlap", "form") if name in changes}
    options = METHODS[name].options("reference", frozen=False) | changes
    layer = METHODS[name].load()(weight, bias, mask=Mask.named(mask), group=group or Group.of(), **options)
    for name, value in settings.items():
        setattr(layer, name, value)
    return layer


def draw(*shape, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def problem(dtype=torch.float64):
    """W, b, x, dy: the same on every rank."""
    return tuple(draw(*shape, dtype=dtype) for shape in ((N, K), (N,), (B, K), (B, N)))


def in_process(ctx, fn, *args):
    """fn(group, *args) on this rank of a WorkerGroup."""
    return fn(Group.of(), *args)


class Threads:
    """The ranks' layers in one process: `each` runs a function on every rank's, as threads."""

    def __init__(self, make, world_size=2):
        self.layers = local.run(world_size, make)

    def each(self, fn):
        def rank(group):
            layer = self.layers[group.rank]
            layer.group = group
            return fn(layer) if layer.active else None

        return local.run(len(self.layers), rank)

    def passes(self, x, dy):
        """(y, dX), equal on all ranks; dW and db are left with the parameters."""

        def one(layer):
            mine = x.clone().requires_grad_()
            y = layer(mine)
            y.backward(dy)
            return y.detach(), mine.grad

        first, *others = [made for made in self.each(one) if made is not None]
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
        return first

    def dense(self, of=lambda layer: layer.weight):
        """[N, K] of what the ranks hold, by default their weights."""
        first = self.layers[0]
        dense = first.like.new_zeros(first.out_features, first.in_features)
        for layer in self.layers:
            if layer.active:
                dense[layer.rows, layer.cols] += layer.part_dense(of(layer).detach()).to(dense)
        return dense

    @property
    def weights(self):
        return [layer.weight for layer in self.layers if layer.active]
