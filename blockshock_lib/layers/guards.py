"""What other parts of PyTorch would do wrong, without a word, to a layer that several ranks share: refused by name.

Importing this changes torch's DistributedDataParallel, clip_grad_norm_, get_total_norm, GradScaler, model averaging,
add_param_group, register_parametrization, weight_norm and spectral_norm.
"""

import functools
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.model_averaging import utils as averaging
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad, parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer

from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import autograd
from blockshock_lib.layers.parts import Share, refuse_size, reshaped, wrapped
from blockshock_lib.layers.watch import count, describe

_NAMES = "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD"
ENTRYWISE = {getattr(torch.optim, name) for name in _NAMES.split()}
# Of torch: they need factors of a whole weight; norms of all its entries, or send one rank's weights to the others.
WHOLE, SPREAD = {"Muon", "Adafactor"}, {"LBFGS", "ZeroRedundancyOptimizer"}


def model_around(module: nn.Module) -> tuple[nn.Module, str]:
    """The model that torch's function, which tells of the module alone, was called with, and the name there."""
    model = module
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_name in ("parallelize_module", "fully_shard"):
            given = frame.f_locals["module"]  # fully_shard takes a list too
            model = given if isinstance(given, nn.Module) else model
    return model, next((name for name, found in model.named_modules() if found is module), "")


def refuse_same_ranks(layer: nn.Module, wrapper: str, ranks: Iterable[int]) -> None:
    """UnsupportedError where `wrapper` takes for replicas what are the layer's shares: `ranks`, as the world counts."""
    if not layer.group.connected:
        return
    shared = sorted(set(ranks) & set(dist.get_process_group_ranks(layer.group.handle)))
    if len(shared) > 1:
        layer.path = max(layer.path, model_around(layer)[1], key=len)
        raise UnsupportedError(
            f"{wrapper} over ranks {shared}, which share {describe(layer)}: each holds another part of its "
            "weight; wrap the model over the mesh's other dimension, as in mesh['dp']"
        )


def before_set(layer: nn.Module, weight: object) -> bool:
    """Whether FSDP2 gathers the weight that is set; UnsupportedError where over the layer's own ranks."""
    if "weight" not in layer._parameters:  # prune, and weight_norm and spectral_norm of torch.nn.utils, took it out
        _refuse_made_anew(layer)
    held, plain = layer._parameters.get("weight"), type(weight) in (Tensor, nn.Parameter) and not layer.gathered
    if plain and held is not None and held.shape != weight.shape:
        refuse_size(layer, held.shape, weight.shape)
    if not layer.gathered and isinstance(weight, DTensor):
        refuse_same_ranks(layer, "FSDP2", weight.device_mesh.mesh.flatten().tolist())
        return True
    return layer.gathered


def before_delete(layer: nn.Module, name: str) -> None:
    if name == "weight":  # as torch.nn.utils.parametrize and FSDP1 do
        _refuse_made_anew(layer)
    nn.Module.__delattr__(layer, name)


def _refuse_made_anew(layer: nn.Module) -> None:
    raise UnsupportedError(
        f"{describe(layer)} takes no FSDP1, pruning, weight_norm, spectral_norm or other parametrization: it holds a "
        "part of its weight, or packed values alone: use fully_shard (FSDP2), and parametrize the nn.Linear before"
    )


def _plain_only(own: Callable, module: nn.Module, *args, **kwargs) -> nn.Module:
    if (hasattr(type(module), "to_linear") and hasattr(module, "path")) or isinstance(module, Share):
        _refuse_made_anew(module)
    return own(module, *args, **kwargs)


def called(layer: nn.Module, inputs: tuple) -> None:
    """A hook alone tells nn.TransformerEncoderLayer in eval mode to call the layer, not to read its weight itself."""


def call(layer: nn.Module, input: Tensor) -> Tensor:
    """A layer's `__call__`: the forward, where `called` is its one hook. nn.Module's way past a hook takes 2 us."""
    hooks = layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks or _has_any_global_hook()
    if hooks or [*layer._forward_pre_hooks.values()] != [called] or layer._compiled_call_impl is not None:
        return nn.Module.__call__(layer, input)
    return layer.forward(input)


def before_forward(layer: nn.Module, x: Tensor) -> Tensor:
    """x [..., K] on every rank; UnsupportedError or ValueError for what the layer cannot take."""
    if isinstance(x, torch.fx.Proxy):
        raise UnsupportedError(f"torch.fx cannot look into {describe(layer)}: make it a leaf of the Tracer")
    if not layer.active:
        raise UnsupportedError(f"rank {layer.group.rank} stands by in {type(layer).__name__}: it holds no weight")
    if isinstance(layer.weight, DTensor):
        raise UnsupportedError(f"{describe(layer)} holds a sharded weight: call the module that FSDP2 wraps")
    if isinstance(x, DTensor):  # its gradient is sharded again on the way back
        x = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()
    if x.is_nested:
        raise ValueError(
            "x is a nested tensor: pad it; nn.TransformerEncoder makes none with enable_nested_tensor=False"
        )
    if x.shape[-1] != layer.in_features:
        raise ValueError(f"x has {x.shape[-1]} features, the layer {layer.in_features}")
    return x


def refuse_unequal(group: Group, what: str, **given: object) -> None:
    """UnsupportedError names the rank that was given another tensor or setting than rank 0. A collective."""
    if group.world_size == 1:
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
    columns = sum(part.sum(0, dtype=torch.int64) for part in parts)
    rows = torch.cat([part.sum(1, dtype=torch.int64) for part in parts])
    return shape, [(one * torch.arange(1, len(one) + 1, device=one.device)).sum().item() for one in (columns, rows)]


def _shared(tensors: Iterable[Tensor], of=lambda layer: layer.weight) -> dict[int, nn.Module]:
    """By the id of each of these tensors that is the weight of one, the layers that several ranks share."""
    wanted = {id(tensor) for tensor in tensors}
    layers = {id(of(layer)): layer for layer in autograd.layers() if layer.weight is not None and layer.collective}
    return {key: layer for key, layer in layers.items() if key in wanted and layer.group.world_size > 1}


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _before_wrapped(wrapper: DistributedDataParallel, name: str, model: nn.Module) -> None:
    if name == "process_group":  # set first, of a copy too
        wrapped.add(wrapper)
    if name != "module" or model is None:
        return nn.Module.__setattr__(wrapper, name, model)
    names = {id(module): name for name, module in model.named_modules()}
    given = {id(parameter) for parameter in model.parameters()}  # all that torch's replicate passes on
    for layer in autograd.layers():
        if id(layer) in names or id(layer.weight) in given:
            layer.path = max(layer.path, names.get(id(layer), ""), key=len)
            ranks = dist.get_process_group_ranks(wrapper.process_group)
            refuse_same_ranks(layer, "DistributedDataParallel", ranks)
    nn.Module.__setattr__(wrapper, name, model)


def _judged(own: Callable, optimizer: Optimizer, param_group: dict) -> None:
    own(optimizer, param_group)
    optimizer._looked = -1  # at what conversions have left
    if type(optimizer) in ENTRYWISE and _fitting not in optimizer._optimizer_load_state_dict_pre_hooks.values():
        optimizer.register_load_state_dict_pre_hook(_fitting)
    kind, given = type(optimizer), optimizer.param_groups[-1]["params"]
    torchs = kind.__name__ if kind.__module__.startswith("torch.") else ""
    shared = list(_shared(given).values())
    layers, whole = shared or (reshaped(given) if torchs not in SPREAD else []), torchs in WHOLE | SPREAD
    if layers and kind not in ENTRYWISE:
        what = f"each rank holds a part of {describe(layers[0])}" if shared else f"{describe(layers[0])} is held packed"
        how = f"{kind.__name__} {'does' if whole else 'may'} not work entry by entry, and {what}; "
        how += "SGD, AdamW and the like train it as the dense layer"
        how += "" if shared else ', and any optimizer what Linear24.from_linear(..., update="recompress") makes'
        if whole:
            raise UnsupportedError(how)
        warnings.warn(how, stacklevel=5)
    if not shared:
        return
    if _named_by_rank not in optimizer._optimizer_state_dict_post_hooks.values():
        optimizer.register_state_dict_post_hook(_named_by_rank)
        optimizer.register_load_state_dict_pre_hook(_named_plainly)


def _fitting(optimizer: Optimizer, state: dict) -> None:
    """UnsupportedError where a state is of a dense weight and the weight that it would serve is a layer's part."""
    numbers, ours = chain.from_iterable(group["params"] for group in state["param_groups"]), None
    for number, parameter in zip(numbers, _parameters(optimizer), strict=False):
        held = [one for one in state["state"].get(number, {}).values() if isinstance(one, Tensor) and one.dim()]
        if odd := [one for one in held if one.shape != parameter.shape]:
            ours = ours or {id(layer.weight): layer for layer in autograd.layers()}
            if layer := ours.get(id(parameter)):
                raise UnsupportedError(
                    f"a state of {list(odd[0].shape)} is none of {describe(layer)}, whose weight is held as "
                    f"{list(parameter.shape)}: blockshock_lib.checkpoint loads a dense model's into it"
                )


def _named_by_rank(optimizer: Optimizer, state: dict) -> dict:
    """A share under its rank's name: torch.distributed.checkpoint keeps what has one name once for all ranks."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        torchs = frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
        given = frame.f_locals.get("info") if torchs else None  # its StateDictOptions
        for option in ("full_state_dict", "flatten_optimizer_state_dict"):  # which loads no name but the optimizer's
            if getattr(given, option, False):
                raise UnsupportedError(
                    f"{option}=True would not keep each rank's share of the state of {type(optimizer).__name__}: save "
                    "model and optimizer by blockshock_lib.checkpoint.save"
                )
    return _renamed(optimizer, state, lambda key, mine: f"{key}/{mine}")


def _named_plainly(optimizer: Optimizer, state: dict) -> dict:
    def plain(key: str, mine: str) -> str:
        name, _, whose = key.partition("/")
        if whose not in ("", mine):
            raise UnsupportedError(
                f"this is the optimizer state of {whose}, and here is {mine}: each rank loads its own; "
                "blockshock_lib.checkpoint reads it into any ranks and masks"
            )
        return name

    return _renamed(optimizer, state, plain)


def _renamed(optimizer: Optimizer, state: dict, rename: Callable[[str, str], str]) -> dict:
    """A state dict of which the tensors of shared weights have other names; it shares their values."""
    parameters, changed = _parameters(optimizer), {}
    shared, numbers = _shared(parameters), chain.from_iterable(group["params"] for group in state["param_groups"])
    for number, parameter in zip(numbers, parameters, strict=False):
        if (layer := shared.get(id(parameter))) and (held := state["state"].get(number)):
            mine = f"rank {layer.group.rank} of {layer.group.world_size}"
            mine += f", mask {layer.mask.name}" if layer.mask else ""
            changed[number] = {
                rename(key, mine) if isinstance(value, Tensor) and value.dim() else key: value
                for key, value in held.items()
            }
    return state | {"state": state["state"] | changed}


def _skipping_alike(own: Callable, scaler: GradScaler, optimizer: Optimizer, *args, **kwargs) -> dict:
    """An infinity in one rank's share makes all ranks of the layer skip the step."""
    found = own(scaler, optimizer, *args, **kwargs)
    for group, layer in {layer.group: layer for layer in _shared(_parameters(optimizer)).values()}.items():
        count(layer, "GradScaler", ())
        for infinite in found.values():
            dist.all_reduce(infinite, dist.ReduceOp.MAX, group.handle)
    return found


def _refusing(own: Callable, tensors: Tensor | Iterable[Tensor], *args, **kwargs) -> Tensor:
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for layer in _shared(tensors, lambda layer: layer.weight.grad).values():
        share = f"torch.nn.utils.clip_grad_norm_ sees this rank's share of the gradient of {describe(layer)} and "
        way = "would clip each rank differently: use blockshock_lib.clip_grad_norm_(model, max_norm)"
        raise UnsupportedError(share + way)
    return own(tensors, *args, **kwargs)


def _not_over_parts(own: Callable, params: Iterable[nn.Parameter], process_group: dist.ProcessGroup) -> None:
    params = list(params)
    for layer in _shared(params).values():
        refuse_same_ranks(layer, "model averaging", dist.get_process_group_ranks(process_group))
    return own(iter(params), process_group)


def _around(own: Callable, how: Callable) -> Callable:
    """What stands in the place of torch's `own`: `how`, which is given that first."""
    return functools.wraps(own)(lambda *args, **kwargs: how(own, *args, **kwargs))


DistributedDataParallel.__setattr__ = _before_wrapped
for place, name in ((parametrize, "register_parametrization"), (WeightNorm, "apply"), (SpectralNorm, "apply")):
    setattr(place, name, _around(getattr(place, name), _plain_only))
averaging.average_parameters = _around(averaging.average_parameters, _not_over_parts)
Optimizer.add_param_group = _around(Optimizer.add_param_group, _judged)
GradScaler._unscale_grads_ = _around(GradScaler._unscale_grads_, _skipping_alike)
# Inside of what torch's clip_grad_norm_ calls, so that either that was imported before this is checked too.
for cell in clip_grad._get_total_norm.__closure__ or ():
    if cell.cell_contents is clip_grad._get_total_norm.__wrapped__:
        cell.cell_contents = _around(cell.cell_contents, _refusing)
