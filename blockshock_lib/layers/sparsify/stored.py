"""Sparse models as safetensors that others open: 2:4 weights as the compressed-tensors library's sparse-24-bitmask.

Of a sparse layer W [N, K] the file has `name.compressed` [N, K/2], the kept weights row by row, `name.bitmask`, uint8
[N, K/8], a bit a weight from the lowest on, and `name.shape`, int64 [2, 1]; all else under its name in a state dict.
Of one in 8 bits the kept weights are what is multiplied, and `name.weight_scale` [N, 1], or one item, is their scale.
"""

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from blockshock_lib.errors import BlockShockError, CheckpointError, UnsupportedError, first_line
from blockshock_lib.kernels.patterns.eight_bits import DTYPES, EightBits
from blockshock_lib.kernels.sparse24 import masks
from blockshock_lib.layers.linear24 import Linear24, nonzero_places
from blockshock_lib.layers.parts import leave
from blockshock_lib.layers.pattern_linear import PatternLinear, linear_of
from blockshock_lib.layers.sparsify.configs import Sparse24, of_eight_bits
from blockshock_lib.layers.sparsify.convert import as_made, converted, put
from blockshock_lib.layers.sparsify.fake import FakeSparse
from blockshock_lib.layers.sparsify.parallel import ParallelLinear24, split
from blockshock_lib.layers.sparsify.plan import held, plan, refuse_hooked, row_of, shape_of
from blockshock_lib.layers.sparsify.report import Report

PARTS, SCALE = ("compressed", "bitmask", "shape"), "weight_scale"


@torch.no_grad()
def save_sparse(path: Path | str, model: nn.Module) -> None:
    """Writes the model to one .safetensors file, whole or not at all; a tied tensor under its first name alone."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"save_sparse(path, model): the model is an nn.Module, not {type(model).__name__}")
    tensors, place = {}, torch.device("cpu")
    for name, layer in model.named_modules():
        if split(layer) or isinstance(layer, ParallelLinear24):
            raise UnsupportedError(f"{name} is split over ranks: torch.distributed.checkpoint saves a state dict of it")
        if isinstance(layer, PatternLinear | FakeSparse) and not _is_sparse(layer):
            raise UnsupportedError(
                f"{name} is {layer.words}, and a file holds 2:4 layers alone: call dense_(model) first"
            )
    for name, layer in _sparse(model).items():
        eight = isinstance(layer, PatternLinear)
        dense = (layer.packed.quantized() if eight else layer.to_dense()).cpu()
        # Of a trained one also a kept weight that is zero just now: an optimizer's state goes by places.
        keep = nonzero_places(dense.float() if eight else dense) if layer.frozen else layer.pattern.mask().cpu()
        shape = torch.tensor(dense.shape, device=place).view(2, 1)
        bits = (keep.unflatten(1, (-1, 8)) * 2 ** torch.arange(8, device=place)).sum(-1).to(torch.uint8)
        found = _whole(dense)[keep].view(len(dense), -1).view(dense.dtype), bits, shape
        tensors |= {f"{name}.{part}": value for part, value in zip(PARTS, found, strict=True)}
        tensors |= {f"{name}.{SCALE}": layer.packed.tensors["scales"].cpu()} if eight else {}
    once = {id(value): name for name, value in reversed(_others(model).items())}.values()
    tensors |= {name: value.detach().cpu().contiguous() for name, value in _others(model).items() if name in once}
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _safetensors().torch.save_file(tensors, scratch, metadata={"format": "pt"})
        os.replace(scratch, path)
    except (OSError, RuntimeError, _safetensors().SafetensorError) as error:
        raise CheckpointError(f"{path} could not be written: {first_line(error)}") from error
    finally:
        scratch.unlink(missing_ok=True)


@as_made
def load_sparse_(model: nn.Module, path: Path | str, config: Sparse24 | None = None) -> Report:
    """Reads a .safetensors file, or all of a folder, into the model, and makes 2:4 what is 2:4 there; in place.

    The model may be dense, sparse or, in part, on the meta device, whose layers come to the CPU; `dense_(model)` makes
    it dense again. `config`: the product of the layers, whether they are frozen, and 8 bits for what has 16 in the
    file; what has 8 there stays as it is. All is checked before anything is changed. CheckpointError: a file is
    damaged, or names, shapes or dtypes are not the model's.
    """
    if not isinstance(config, Sparse24 | None):
        raise ValueError(f"a file holds 2:4 layers, so that config is a Sparse24(), not {config!r}")
    with torch.device("cpu"), contextlib.ExitStack() as stack:  # whatever the caller's default is
        try:
            found = _opened(Path(path), stack)
            names = [key.removesuffix(".compressed") for key in found if key.endswith(".compressed")]
            keeps, weights = {}, {}
            for name in names:
                weights[name], keeps[name] = _weight(name, *(found.pop(f"{name}.{part}")() for part in PARTS))
            scales = {name: _scale(name, weights[name], found) for name in names if weights[name].itemsize == 1}
            rest = {key: read() for key, read in found.items()}
            _check(model, weights, rest)
        except (OSError, KeyError, ValueError, RuntimeError, BlockShockError, _safetensors().SafetensorError) as error:
            raise CheckpointError(f"{path}: {first_line(error)}") from error
    config, rows, left = config or Sparse24(), [], {}
    with torch.device("cpu"), contextlib.ExitStack() as undo:
        for name, weight in weights.items():
            old = model.get_submodule(name)
            device = torch.device("cpu") if old.weight.is_meta else old.weight.device
            bias = None if old.bias is None else rest.pop(f"{name}.bias").to(device)
            weight = weight.to(device)
            if name in scales:
                new = of_eight_bits(weight, scales[name].to(device), old.weight.dtype, bias)
            else:
                new = config.packed(linear_of(weight, bias, old), keeps[name].to(device))
            new = converted(new, old, name)
            rows.append(replace(row_of(name, old), after=held(new), made=type(new).__name__))
            put(undo, model, name, new)
            left[name] = old
        own = _others(model)
        shared = {}  # of a tensor of the model, what all of its names get, so that they stay tied where it is replaced
        for key, value in rest.items():
            value = value.to("cpu" if own[key].is_meta else own[key].device)
            parameter = isinstance(own[key], nn.Parameter)
            shared[id(own[key])] = nn.Parameter(value, own[key].requires_grad) if parameter else value
        rest = {key: shared[id(old)] for key, old in own.items() if id(old) in shared}
        assign = any(own[key].is_meta for key in rest)
        for module in model.modules():
            undo.callback(module._parameters.update, dict(module._parameters))
            undo.callback(module._buffers.update, dict(module._buffers))
        for key in () if assign else rest:
            undo.callback(own[key].copy_, own[key].clone())
        model.load_state_dict(rest, strict=False, assign=assign)
        undo.pop_all()
    for name, old in left.items():
        leave(old, name)
    return Report(tuple(rows))


def _sparse(model: nn.Module) -> dict[str, Linear24 | PatternLinear]:
    return {name: module for name, module in model.named_modules() if _is_sparse(module)}


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, Linear24) or isinstance(getattr(module, "packed", None), EightBits)


def _others(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers but the sparse weights, by each of their names in a state dict."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        own = module._parameters | {
            k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set
        }
        leave = {"weight"} if isinstance(module, Linear24) else set()
        found |= {f"{name}.{key}".lstrip("."): v for key, v in own.items() if v is not None and key not in leave}
    return found


def _opened(path: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Of each tensor in the file, or in the folder's files, a function that reads it."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise CheckpointError("no .safetensors file lies there")
    opened = [stack.enter_context(_safetensors().safe_open(file, framework="pt")) for file in files]
    return {key: (lambda file=file, key=key: file.get_tensor(key)) for file in opened for key in file.keys()}  # noqa: SIM118


def _weight(name: str, values: Tensor, bits: Tensor, shape: Tensor) -> tuple[Tensor, Tensor]:
    """The dense W [N, K] of a sparse layer, and what is kept of it, bool [N, K]."""
    rows, columns = shape.flatten().tolist()
    if values.shape != (rows, columns // 2) or bits.shape != (rows, -(-columns // 8)) or bits.dtype != torch.uint8:
        raise CheckpointError(f"{name} of {rows}x{columns} has other values or another bitmask than that needs")
    keep = (bits[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten(1)[:, :columns]
    masks.check_groups(keep)
    dense = torch.zeros(rows, columns, dtype=values.dtype)
    _whole(dense).masked_scatter_(keep, _whole(values))
    return dense, keep


def _whole(values: Tensor) -> Tensor:
    """Those of 8 bits as integers: PyTorch moves no fp8 by a mask."""
    return values.view(torch.int8) if values.itemsize == 1 else values


def _scale(name: str, values: Tensor, found: dict[str, Any]) -> Tensor:
    """The scales [N, 1] of a sparse layer's values of 8 bits."""
    scale, known = found.pop(f"{name}.{SCALE}")().float().view(-1, 1), values.dtype in DTYPES.values()
    if not known or len(scale) not in (1, len(values)) or not bool(scale.isfinite().all()):
        wanted = f"{' or '.join(DTYPES)} with a finite scale a row"
        raise CheckpointError(f"{name} is of {values.dtype} with {len(scale)} scales: 8 bits are {wanted}")
    return scale.expand(len(values), 1)


def _check(model: nn.Module, weights: dict[str, Tensor], rest: dict[str, Tensor]) -> None:
    """CheckpointError where names, shapes or dtypes are not the model's, or a layer cannot be made sparse."""
    own, sparse = _others(model), _sparse(model)
    for name, layer in sparse.items():
        refuse_hooked(layer, f"{name}: ")
    if lost := ", ".join(name for name, buffer in model.named_buffers() if buffer.is_meta and name not in own):
        how = "build the model on the CPU, or its linear layers alone on meta"
        raise CheckpointError(f"{lost} is on the meta device and in no checkpoint: {how}")
    wanted = {name: (shape_of(layer), layer.weight.dtype) for name, layer in sparse.items()}
    with contextlib.suppress(ValueError):  # which says that all are sparse already, or none is there
        for row in plan(model, None, lambda name, _: name in weights.keys() - sparse.keys()):
            if row.refused:
                raise CheckpointError(f"{row.name} cannot be made 2:4: {row.refused}")
            wanted[row.name] = row.shape, row.dtype
    if unlike := sorted(weights.keys() - wanted.keys()):
        raise CheckpointError(f"{unlike[0]} is 2:4 in the checkpoint and no linear layer of the model")
    if unlike := sorted(sparse.keys() - weights.keys()):
        raise CheckpointError(f"{unlike[0]} is sparse in the model and not in the checkpoint: call dense_(model) first")
    wanted |= {key: (tuple(value.shape), value.dtype) for key, value in own.items()}
    given = {key: (tuple(value.shape), value.dtype) for key, value in (weights | rest).items()}
    given |= {key: (given[key][0], wanted[key][1]) for key in wanted.keys() & weights if weights[key].itemsize == 1}
    if unlike := sorted(given.keys() - wanted.keys()):
        raise CheckpointError(f"the model has no {unlike[0]}")
    there = {id(own[key]) for key in rest}
    if unlike := [k for k, v in own.items() if id(v) not in there and k.removesuffix(".weight") not in weights]:
        raise CheckpointError(f"the checkpoint has no {unlike[0]}")
    for key, found in given.items():
        if found != wanted[key]:
            raise CheckpointError(f"{key}: shape or dtype {found} in the checkpoint, {wanted[key]} in the model")


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError:
        raise UnsupportedError("sparse checkpoints need the package safetensors: pip install safetensors") from None
    return safetensors
