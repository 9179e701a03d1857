"""Checkpoints of a model and its optimizer that outlive a killed run, and that no damaged or hostile file gets past.

torch.distributed.checkpoint writes and reads them. Beside it, here: optimizer state in dense view, as a layer's
state_dict has its weights, so that any mask, any number of ranks and a plain nn.Linear read each other's; a folder that
is there whole or not at all; a digest of every file; and reading without unpickling code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

from blockshock_lib.errors import CheckpointError, UnsupportedError, first_line
from blockshock_lib.layers import ShardedLinear
from blockshock_lib.model import stored

SUMMARY = "checkpoint.json"
SCHEMA = 1
KEYS = {"schema", "numbers", "groups", "files"}
METADATA = ".metadata"
STATE = "optimizer.state."  # the beginning of its keys, as torch's own state dicts of an optimizer have them
FILES = re.compile(r"\.metadata|[\w.-]+\.distcp")  # what torch.distributed.checkpoint writes
HOW = ("foreach", "fused", "capturable", "differentiable")  # how an optimizer computes: the loading machine's choice


def save(
    folder: Path | str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **numbers: int | float | str,
) -> None:
    """Writes `model`, `optimizer` and `numbers` (a step, a loss) to `folder`, which every rank sees. All ranks call it.

    The weights and the optimizer's state are written in dense view. A checkpoint that lies there is replaced at the
    end: a run killed before keeps the old one, and `load` finds it.

    Raises:
        UnsupportedError: the optimizer's state has no dense view, or the model holds more than tensors.
        CheckpointError: the folder holds other files, or cannot be written.
    """
    for name, value in numbers.items():
        if not isinstance(value, int | float | str):
            raise TypeError(
                f"{name} is a {type(value).__name__}: a checkpoint takes numbers and text beside its tensors"
            )
    folder = Path(folder).resolve()
    scratch, previous = _scratch(folder), _previous(folder)
    tensors = _tensors_of(model) | (_state_of(model, optimizer) if optimizer else {})
    groups = _groups_of(model, optimizer) if optimizer else None

    def prepare() -> None:
        if folder.exists() and (not folder.is_dir() or any(not _ours(path) for path in folder.iterdir())):
            raise CheckpointError("it holds other files than a checkpoint's: it is left alone")
        if previous.exists() and not folder.exists():
            previous.rename(folder)  # a save was killed between its last two steps
        for left in (scratch, previous):
            shutil.rmtree(left, ignore_errors=True)
        scratch.mkdir(parents=True)

    def finish() -> None:
        summary = {"schema": SCHEMA, "numbers": numbers, "groups": groups, "files": _digests(scratch)}
        with (scratch / SUMMARY).open("wb") as file:
            file.write(_encode(summary))
            file.flush()
            os.fsync(file.fileno())  # the files of tensors were synced as they were written
        if folder.exists():
            folder.rename(previous)
        scratch.rename(folder)
        shutil.rmtree(previous, ignore_errors=True)

    _agreed(folder, prepare, lead=True)
    _agreed(folder, lambda: _quietly(dcp.save, tensors, checkpoint_id=scratch, no_dist=not dist.is_initialized()))
    _agreed(folder, finish, lead=True)


def load(folder: Path | str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Reads into `model` and `optimizer` what `save` wrote, and returns its numbers. All ranks call it.

    The mask, the number of ranks and the method may be others than those that wrote it: weights and state are the same
    bit for bit. Everything is checked before anything is changed, and nothing in the files is executed.

    Raises:
        CheckpointError: a file is missing, cut short or altered, holds more than tensors, or the checkpoint has other
            keys, shapes or dtypes than the model; the message names the file or key.
    """
    folder = Path(folder).resolve()
    if not folder.exists() and _previous(folder).exists():
        folder = _previous(folder)
    weights = {key: torch.empty_like(value) for key, value in _tensors_of(model).items()}

    def read() -> tuple[dict[str, Any], dict[str, Any] | None]:
        summary = _checked_summary(folder)
        sizes = {name: (folder / name).stat().st_size for name in summary["files"]}
        metadata = stored.read_metadata(folder, sizes)
        found = metadata.state_dict_metadata
        _same_keys("model", {key for key in found if key.startswith("model.")}, set(weights))
        for key, value in weights.items():
            _same(key, found[key], value.shape, value.dtype)
        states = _state_like(model, optimizer, summary["groups"], found) if optimizer else {}
        # Each rank reads what it needs by itself: no collective, and no pickle from another rank.
        reader = stored.Reader(folder, metadata)
        _quietly(dcp.load, weights | states, storage_reader=reader, no_dist=True)
        return summary, _optimizer_state(model, optimizer, summary["groups"], states) if optimizer else None

    summary, state = _agreed(folder, read)
    model.load_state_dict({key.removeprefix("model."): value for key, value in weights.items()})
    if optimizer:
        optimizer.load_state_dict(state)
    return summary["numbers"]


def _scratch(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.writing")


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _ours(path: Path) -> bool:
    return path.is_file() and (path.name == SUMMARY or bool(FILES.fullmatch(path.name)))


def _agreed(folder: Path, step: Callable[[], Any], lead: bool = False) -> Any:
    """What `step` returns, after all ranks (or, with `lead`, rank 0 alone) did it; CheckpointError on every rank when
    it failed on one, so that none waits for another in a collective.
    """
    together = dist.is_available() and dist.is_initialized()
    result, words = None, [""]
    if not lead or not together or dist.get_rank() == 0:
        try:
            result = step()
        except dcp.CheckpointException as error:
            words = [first_line(next(iter(error.failures.values()))[0])]
        except Exception as error:  # each becomes one sentence on every rank
            words = [first_line(error)]
    if together:
        mine, words = words[0], [""] * dist.get_world_size()
        dist.all_gather_object(words, mine)
    if word := next((word for word in words if word), ""):
        raise CheckpointError(f"{folder}: {word}")
    return result


def _quietly(step: Callable[..., Any], *args: Any, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        step(*args, **options)


# Model and optimizer in dense view


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    state = {f"model.{key}": value for key, value in model.state_dict().items()}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise UnsupportedError(f"{key} is a {type(value).__name__}: a checkpoint holds tensors only")
    return state


def _named(model: nn.Module) -> dict[str, tuple[nn.Parameter, ShardedLinear | None]]:
    """Name -> the parameter, and the sharded layer whose weight it is."""
    layers = {f"{name}.weight".lstrip("."): m for name, m in model.named_modules() if isinstance(m, ShardedLinear)}
    return {name: (parameter, layers.get(name)) for name, parameter in model.named_parameters()}


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, (parameter, layer) in _named(model).items():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            full = f"{STATE}{name}.{key}"
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                raise UnsupportedError(f"{full} is a {type(value).__name__}: a checkpoint holds tensors only")
            if layer is not None and value.dim():
                if value.shape != parameter.shape:
                    raise UnsupportedError(f"{full} has not its weight's shape, so it has no dense view")
                value = layer.to_dense(value).cpu()  # one at a time on the GPU
            tensors[full] = value
    return tensors


def _groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's settings a group, with the names of its parameters."""
    names = {parameter: name for name, (parameter, _) in _named(model).items()}
    groups = []
    for group in optimizer.param_groups:
        if any(parameter not in names for parameter in group["params"]):
            raise UnsupportedError("the optimizer holds a parameter that is not the model's")
        settings = {key: value for key, value in group.items() if key not in ("params", *HOW)}
        for key, value in settings.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                settings[key] = value.item()
            elif not isinstance(value, int | float | str | list | tuple | None):
                raise UnsupportedError(f"the optimizer's {key} is a {type(value).__name__}, no number")
        own = {"names": [names[parameter] for parameter in group["params"]], "settings": settings}
        groups.append(own | {"optimizer": type(optimizer).__name__})
    return groups


def _state_like(
    model: nn.Module, optimizer: torch.optim.Optimizer, groups: list | None, found: dict[str, dcp.TensorStorageMetadata]
) -> dict[str, torch.Tensor]:
    """Empty tensors for the optimizer state that a checkpoint holds, in dense view; groups and shapes are checked."""
    if groups is None:
        raise CheckpointError("it holds no optimizer state")
    mine = _groups_of(model, optimizer)
    if len(mine) != len(groups):
        raise CheckpointError(f"its optimizer has {len(groups)} groups of parameters, this one {len(mine)}")
    for saved, own in zip(groups, mine, strict=True):
        if saved["optimizer"] != own["optimizer"]:
            raise CheckpointError(f"its state is of {saved['optimizer']}, this optimizer is {own['optimizer']}")
        _same_keys("optimizer", set(saved["names"]), set(own["names"]))
    named, like = _named(model), {}
    for key, stored_as in found.items():
        if not key.startswith(STATE):
            continue
        name = key.removeprefix(STATE).rpartition(".")[0]
        if name not in named:
            raise CheckpointError(f"{key} belongs to no parameter of the model")
        parameter, layer = named[name]
        dtype = stored_as.properties.dtype
        if stored_as.size:
            dense = parameter.shape if layer is None else torch.Size((layer.out_features, layer.in_features))
            _same(key, stored_as, dense, dtype)
        sharded = isinstance(parameter, DTensor) and stored_as.size == parameter.shape
        like[key] = (
            torch.empty_like(parameter.detach(), dtype=dtype) if sharded else torch.empty(stored_as.size, dtype=dtype)
        )
    return like


def _optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, groups: list, states: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """What optimizer.load_state_dict takes: the state in each parameter's own layout, and the saved settings."""
    wanted = optimizer.state_dict()["param_groups"]
    named, places, state = _named(model), {}, {}
    for own, group, saved in zip(wanted, _groups_of(model, optimizer), groups, strict=True):
        places |= dict(zip(group["names"], own["params"], strict=True))
        for key, value in saved["settings"].items():
            own[key] = tuple(value) if isinstance(own.get(key), tuple) else value
    for full, value in states.items():
        name, _, key = full.removeprefix(STATE).rpartition(".")
        parameter, layer = named[name]
        own_part = layer is not None and value.dim()
        state.setdefault(places[name], {})[key] = layer.from_dense(value.to(parameter.device)) if own_part else value
    return {"state": state, "param_groups": wanted}


# What is checked


def _encode(summary: dict[str, Any]) -> bytes:
    """The bytes of a summary with its own digest; a function of its content, so that any other byte is damage."""
    digest = hashlib.sha256(json.dumps(summary, sort_keys=True).encode()).hexdigest()
    return json.dumps(summary | {"digest": digest}, sort_keys=True, indent=1).encode()


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(folder.iterdir()):
        if FILES.fullmatch(path.name):
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _checked_summary(folder: Path) -> dict[str, Any]:
    """The summary, once each file is what it says."""
    try:
        data = (folder / SUMMARY).read_bytes()
        summary = json.loads(data)
        del summary["digest"]
        whole = set(summary) == KEYS and summary["schema"] == SCHEMA and _encode(summary) == data
    except FileNotFoundError:
        raise CheckpointError(f"there is no {SUMMARY}: no checkpoint was finished here") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{SUMMARY} is damaged: it does not match its digest")
    found = _digests(folder)
    for name, digest in ({METADATA: ""} | summary["files"]).items():
        if found.get(name) != digest:
            raise CheckpointError(f"{name} is " + ("cut short or altered" if name in found else "missing"))
    return summary


def _same_keys(what: str, found: set[str], wanted: set[str]) -> None:
    for said, keys in (("has no", wanted - found), ("has also", found - wanted)):
        if keys:
            more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
            raise CheckpointError(f"its {what} {said} {', '.join(sorted(keys)[:5])}{more}")


def _same(key: str, found: dcp.TensorStorageMetadata, shape: torch.Size, dtype: torch.dtype) -> None:
    if found.size != shape:
        raise CheckpointError(f"{key} has shape {list(found.size)} in the checkpoint, {list(shape)} in the model")
    if found.properties.dtype != dtype:
        raise CheckpointError(f"{key} is {found.properties.dtype} in the checkpoint, {dtype} in the model")
