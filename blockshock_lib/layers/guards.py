"""What other parts of PyTorch would do wrong, without a word, to a layer that several ranks share: refused by name.

Importing this adds hooks for all modules and optimizers of the process, and one check to torch's clip_grad_norm_.
"""

import functools
import os
import sys
import warnings
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import autograd

_NAMES = "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD"
ENTRYWISE = {getattr(torch.optim, name) for name in _NAMES.split()}
# Of torch: they need norms or factors of a whole weight, or send one rank's weights to the others.
WHOLE = {"LBFGS", "Muon", "Adafactor", "ZeroRedundancyOptimizer"}
CHECK = os.environ.get("BLOCKSHOCK_CHECK") == "1"  # the ranks compare the shapes of x in each forward: slow
_judged: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def describe(layer: nn.Module, name: str = "") -> str:
    """A layer in a message: by its dotted name in the model where that is known."""
    return f"{name}: {type(layer).__name__}({layer.extra_repr()})".removeprefix(": ")


def refuse_same_ranks(layer: nn.Module, wrapper: str, ranks: Iterable[int], name: str = "") -> None:
    """UnsupportedError where `wrapper` takes for replicas what are the layer's shares: `ranks`, as the world counts."""
    if not layer.group.connected:
        return
    shared = sorted(set(ranks) & set(dist.get_process_group_ranks(layer.group.handle)))
    if len(shared) > 1:
        raise UnsupportedError(
            f"{wrapper} over ranks {shared}, which share {describe(layer, name)}: each holds another part of its "
            "weight; wrap the model over the mesh's other dimension, as in mesh['dp']"
        )


def sharded_over_others(layer: nn.Module, weight: object) -> bool:
    """Whether FSDP2 sets this weight, sharded; UnsupportedError where over the layer's own ranks."""
    if not isinstance(weight, DTensor):
        return False
    refuse_same_ranks(layer, "FSDP2", weight.device_mesh.mesh.flatten().tolist())
    return True


def before_forward(layer: nn.Module, x: Tensor) -> None:
    if isinstance(layer.weight, DTensor):
        raise UnsupportedError(f"{describe(layer)} holds a sharded weight: call the module that FSDP2 wraps")
    if CHECK:
        refuse_unequal(layer.group, describe(layer), **{"shape or dtype of x": (x.shape, x.dtype)})


def refuse_unequal(group: Group, what: str, **given: object) -> None:
    """UnsupportedError names the rank that was given another tensor or setting than rank 0. A collective."""
    if not group.connected:
        return
    group.meet(what)
    all_ranks = group.gather_objects({name: _digest(value) for name, value in given.items()})
    for rank, found in enumerate(all_ranks):
        if odd := [name for name, value in found.items() if value != all_ranks[0][name]]:
            raise UnsupportedError(f"{what}: rank {rank} was given another {' and '.join(odd)} than rank 0")


def _digest(value: object) -> object:
    """Of a tensor [N, K] or [N], sums of its bits by place, exact in any order of summing; else its text."""
    if not isinstance(value, Tensor):
        return repr(value)
    shape = tuple(value.shape), value.dtype
    if value.is_meta or not value.numel():
        return shape
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    bits = torch.atleast_2d(value.detach()).contiguous().view(kind)
    parts = bits.split(max(1, 2**24 // bits.shape[1]))  # of rows: a sum casts all that it reads to int64 first
    sums = (
        sum(part.sum(0, dtype=torch.int64) for part in parts),
        torch.cat([p.sum(1, dtype=torch.int64) for p in parts]),
    )
    return shape, [(one * torch.arange(1, len(one) + 1, device=one.device)).sum().item() for one in sums]


def _held(tensors: Iterable[Tensor], of=lambda layer: layer.weight) -> list[nn.Module]:
    """The layers of which these tensors are the weights."""
    wanted = {id(tensor) for tensor in tensors}
    return [layer for layer in autograd.layers() if layer.weight is not None and id(of(layer)) in wanted]


def _before_wrapped(wrapper: nn.Module, _: str, model: nn.Module | None) -> None:
    flattens = type(wrapper).__name__ == "FullyShardedDataParallel"
    if not (flattens or isinstance(wrapper, DistributedDataParallel)) or model is None:
        return
    layers = {id(layer) for layer in autograd.layers()}
    for name, layer in model.named_modules():
        if id(layer) in layers and flattens:
            raise UnsupportedError(f"FSDP1 flattens the weight of {describe(layer, name)}: use fully_shard (FSDP2)")
        if id(layer) in layers:
            ranks = dist.get_process_group_ranks(wrapper.process_group)
            refuse_same_ranks(layer, "DistributedDataParallel", ranks, name)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    if optimizer in _judged:
        return
    layers = _held(p for group in optimizer.param_groups for p in group["params"])
    shared, kind = [layer for layer in layers if layer.group.world_size > 1], type(optimizer)
    if shared:
        whole = kind.__module__.startswith("torch.") and kind.__name__ in WHOLE
        how = f"{kind.__name__} {'does' if whole else 'may'} not work entry by entry, and each rank holds a part of "
        how += f"{describe(shared[0])}; SGD, AdamW and the like train it as the dense layer"
        if whole:
            raise UnsupportedError(how)
        if kind not in ENTRYWISE:
            warnings.warn(how, stacklevel=3)
        optimizer.register_state_dict_pre_hook(_refuse_dcp)
        optimizer.register_load_state_dict_pre_hook(_refuse_dcp)
    _judged.add(optimizer)


def _refuse_dcp(optimizer: Optimizer, *_: object) -> None:
    """Not of `optimizer.state_dict()` itself: each rank may keep its own in a file of its own."""
    frame = sys._getframe()
    while frame := frame.f_back:
        if str(frame.f_globals.get("__name__")).startswith("torch.distributed.checkpoint"):
            raise UnsupportedError(
                f"torch.distributed.checkpoint would keep one rank's share of the state of {type(optimizer).__name__} "
                "for all ranks: save model and optimizer by blockshock_lib.checkpoint.save"
            )


def _refusing(own):
    @functools.wraps(own)
    def total_norm(tensors, *args, **kwargs):
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        for layer in _held(tensors, lambda layer: layer.weight.grad):
            if layer.group.world_size > 1:
                raise UnsupportedError(
                    f"torch.nn.utils.clip_grad_norm_ sees this rank's share of the gradient of {describe(layer)} and "
                    "would clip each rank differently: use blockshock_lib.clip_grad_norm_(model, max_norm)"
                )
        return own(tensors, *args, **kwargs)

    return total_norm


register_module_module_registration_hook(_before_wrapped)
register_optimizer_step_pre_hook(_before_step)
# What torch's clip_grad_norm_ calls, so that one that was imported before this is checked too.
if own := getattr(clip_grad, "_get_total_norm", None):
    clip_grad._get_total_norm = nn.utils.get_total_norm = _refusing(own)
