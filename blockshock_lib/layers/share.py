"""A rank's part of an nn.Linear that it multiplies by itself; what joins the parts is the model's."""

import torch
from torch import nn

from blockshock_lib.comm import Group
from blockshock_lib.layers import autograd


class Share(nn.Linear):
    """A rank's part of an nn.Linear, known to what guards and clips the layers that ranks share."""

    collective, mask, path = "all-reduce", None, ""
    group: Group
    split: tuple[str, ...]

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        autograd.register(self)  # a copy is another layer


def cut(whole: nn.Linear, group: Group, dim: int) -> Share:
    """This rank's rows (dim 0) of W and the bias, or its columns (dim 1) of W and the whole bias."""
    weight = whole.weight.chunk(group.world_size, dim)[group.rank].detach()
    bias = (whole.bias if dim else whole.bias.chunk(group.world_size)[group.rank]).detach()
    linear = Share(weight.shape[1], weight.shape[0], device="meta")
    linear.group, linear.split = group, ("weight",) if dim else ("weight", "bias")
    autograd.register(linear)
    linear.weight, linear.bias = (nn.Parameter(x.clone(memory_format=torch.contiguous_format)) for x in (weight, bias))
    return linear
