"""Which layers of a model a conversion takes, and why it leaves the others: all known before one is changed."""

from collections import defaultdict
from collections.abc import Callable
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel

from blockshock_lib.errors import UnsupportedError, first_line
from blockshock_lib.layers import guards
from blockshock_lib.layers.linear24 import Linear24
from blockshock_lib.layers.parts import refuse_hooks, refuse_lost, refuse_more, require_plain
from blockshock_lib.layers.pattern_linear import PatternLinear, linear_of
from blockshock_lib.layers.sparsify import parallel
from blockshock_lib.layers.sparsify.configs import Config
from blockshock_lib.layers.sparsify.fake import FakeSparse
from blockshock_lib.layers.sparsify.report import Row

Filter = Callable[[str, nn.Module], bool] | str | None
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def plan(
    model: nn.Module, config: Config | None, filter: Filter = None, parts: bool = False, fake: bool = False
) -> list[Row]:
    """A row for each linear layer that `filter` takes: a pattern of dotted names, or a function of name and module.
    Without `config` the weights are of no account, and may be on the meta device. `parts`: of a layer that torch's
    tensor parallelism split this rank's part is taken. `fake`: for training; a master of 32 bits is multiplied in 16,
    under autocast or once it is real.

    ValueError: it takes none; UnsupportedError: none of those can be converted.
    """
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise UnsupportedError("DistributedDataParallel holds on to the parameters it was made of: wrap it afterwards")
    if not (filter is None or isinstance(filter, str) or callable(filter)):
        raise ValueError(f"filter={filter!r}: it is a pattern of names, a function of name and module, or None")
    places, owners = defaultdict(list), defaultdict(list)  # of a module, the names; of a parameter, its modules
    for name, module in model.named_modules(remove_duplicate=False):
        places[module].append(name)
    for module in places:
        for parameter in module.parameters(recurse=False):
            owners[_place(parameter)].append(module)
    rows, experts = [], []
    for module, names in places.items():
        if not callable(filter) and any(_takes(filter, name, module) for name in names):  # else a function of layers
            experts += _experts(module, names[0])
        if not (_is_linear(module) and any(_takes(filter, name, module) for name in names)):
            continue
        held = map(_place, module.parameters(recurse=False))
        others = [places[other][0] for place in held for other in owners[place] if other != module]
        try:
            _refuse(module, names, others)
            taken = parts and parallel.split(module)
            require_plain(linear := parallel.part_of(module, config) if taken else as_linear(module))
            if not getattr(config, "frozen", True):  # else a copy is packed, and nothing is trained apart
                refuse_lost(module)
            if config and linear.weight.is_meta:
                raise UnsupportedError("its weight is on the meta device: load it first")
            if isinstance(module, nn.Linear) and type(module) not in (nn.Linear, FakeSparse):
                raise UnsupportedError(f"it is a {type(module).__name__}, and dense_ would give an nn.Linear: use that")
            if config:
                weight = linear.weight.detach()
                try:
                    config.refuse(weight)
                except UnsupportedError:
                    if not (fake and weight.dtype == torch.float32):
                        raise
                    config.refuse(weight.bfloat16())
            reason = ""
        except (UnsupportedError, ValueError) as error:
            reason = first_line(error)
        rows.append(row_of(names[0], module, reason))
    rows = parallel.agreed(rows, model) if parts else rows
    if not rows:
        raise ValueError(f"no linear layer of the model is taken by filter={filter!r}" if filter else "no linear layer")
    if all(row.refused for row in rows):
        first = f"{rows[0].name or 'the model'}: {rows[0].refused}"
        raise UnsupportedError(f"none of {len(rows)} layers can be converted; {first}")
    return rows + experts


def row_of(name: str, module: nn.Module, refused: str = "") -> Row:
    made = [p for p in module.parameters(recurse=False) if not isinstance(p, nn.UninitializedParameter)]
    count = sum(parallel.local(p).nbytes for p in made)
    if isinstance(module, Linear24 | PatternLinear):
        made, count = [module.weight], held(module)
    shape = shape_of(module) if made else ()
    where = (made[0].dtype, made[0].device) if made else (None, None)
    return Row(name, type(module).__name__, shape, *where, count, count, refused)


def held(layer: Linear24 | PatternLinear) -> int:
    return sum(layer.hold_bytes().values()) + (0 if layer.bias is None else layer.bias.nbytes)


def shape_of(module: nn.Module) -> tuple[int, ...]:
    """(N, K) of a linear layer, or of this rank's part."""
    own = (getattr(module, "out_features", None), getattr(module, "in_features", None))
    own = tuple(parallel.local(module.weight).shape) if parallel.split(module) else own
    return tuple(module.weight.shape)[:: -1 if is_conv1d(module) else 1] if None in own else own


def is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D, a linear layer that holds W as [K, N]; told by its name, as that library may be absent."""
    return type(module).__name__ == "Conv1D" and not isinstance(module, nn.Conv1d)


def conv1d_of(module: nn.Module) -> type | None:
    """The class of a Conv1D, or of that which the layer was before it was made sparse."""
    return type(module) if is_conv1d(module) else getattr(module, "conv1d", None)


def as_linear(module: nn.Module) -> nn.Linear:
    """The layer itself; of a Conv1D an nn.Linear with a copy of its weight, of a FakeSparse with what it multiplies."""
    if isinstance(module, FakeSparse):
        return linear_of(module.effective().detach().contiguous(), module.bias, module)
    if not is_conv1d(module) or not isinstance(module.weight, nn.Parameter) or "forward" in vars(module):
        return module
    return linear_of(module.weight.detach().t().contiguous(), module.bias, module)


def _is_linear(module: nn.Module) -> bool:
    # By name too: a quantizer's linear layers, of whatever class, are told that they are left.
    named = type(module).__name__.endswith(("Linear", "Linear24")) and not any(map(_is_linear, module.children()))
    return isinstance(module, nn.Linear) or is_conv1d(module) or named


def _experts(module: nn.Module, path: str) -> list[Row]:
    """The parameters [experts, N, K] of a module, which are left too."""
    own = {} if isinstance(module, _ConvNd) else module._parameters
    found = {name: p for name, p in own.items() if type(p) is nn.Parameter and p.dim() == 3 and len(p) > 1}
    why = f"it is weights in one parameter of {type(module).__name__}, and no nn.Linear"
    return [
        Row(f"{path}.{name}".lstrip("."), "Parameter", tuple(p.shape), p.dtype, p.device, p.nbytes, p.nbytes, why)
        for name, p in found.items()
        if min(p.shape[1:]) >= 16
    ]


def _place(parameter: nn.Parameter) -> int | nn.Parameter:
    """By which parameters over one storage are known."""
    made = type(parameter) is nn.Parameter and not parameter.is_meta
    return (parameter.data_ptr() if made else 0) or parameter


def _takes(filter: Filter, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, filter) if isinstance(filter, str) else filter is None or bool(filter(name, module))


def _refuse(module: nn.Module, names: list[str], tied: list[str]) -> None:
    if "" in names:
        raise UnsupportedError("it is the whole model: put it into another module, or use Linear24.from_linear")
    if len(names) > 1:
        raise UnsupportedError(f"it is used twice, as {' and '.join(names)}")
    weight = module._parameters.get("weight")
    if weight is None and isinstance(module, nn.Linear):
        raise UnsupportedError(
            "its weight is made anew in each pass, as prune, weight_norm and FSDP do: take that off first"
        )
    if hasattr(module, "to_linear") or type(weight) not in (nn.Parameter, DTensor):
        return  # which require_plain refuses by its kind
    refuse_hooked(module)
    own = module._non_persistent_buffers_set if isinstance(module, FakeSparse) else ()
    refuse_more(module, own=("weight", "bias", *own))
    if tied:
        raise UnsupportedError(f"it shares a parameter with {tied[0] or 'the model'}: give it one of its own first")
    if weight.dtype not in DTYPES:
        raise UnsupportedError(f"its weight is quantized, {weight.dtype}")


def refuse_hooked(module: nn.Module, where: str = "") -> None:
    """UnsupportedError for hooks of a layer but our own and those of torch's styles, or of its parameters."""
    refuse_hooks(module, where, (guards.called, *parallel.hooks_of(module)))
