"""Checkpoints of a model and its optimizer that outlive a killed run, and that no damaged or hostile file gets past.

A folder is there whole or not at all: tensors.pt, weights and the optimizer's state in dense view, so that any mask,
any number of ranks and a plain nn.Linear read each other's; checkpoint.json, numbers, settings and digests.
"""

import json
import os
import shutil
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from blockshock_lib.comm.ranks import Ranks
from blockshock_lib.errors import CheckpointError, UnsupportedError, first_line
from blockshock_lib.files import sha256, write_atomic
from blockshock_lib.layers import ShardedLinear
from blockshock_lib.layers.guards import ENTRYWISE
from blockshock_lib.layers.parts import Share, laid_as

SUMMARY, TENSORS = "checkpoint.json", "tensors.pt"
SCHEMA = 2
STATE = "optimizer.state."  # the beginning of its keys, as torch's own state dicts of an optimizer have them
HOW = ("foreach", "fused", "capturable", "differentiable")  # how an optimizer computes: the loading machine's choice


def save(folder: Path | str, model: nn.Module, optimizer: Optimizer | None = None, **numbers: float | str) -> None:
    """Writes `model`, `optimizer` and `numbers` (a step, a loss) to `folder`, which every rank sees. All ranks call it.

    A checkpoint that lies there is replaced at the end: a run killed before keeps the old one, and `load` finds it.
    UnsupportedError: what has no dense view, or is no tensor. CheckpointError: other files lie there, or it failed.
    """
    if odd := _odd(numbers):
        raise TypeError(f"a checkpoint takes numbers and text beside its tensors, not {odd}")
    folder = Path(folder).resolve()
    scratch, previous = (folder.with_name(f".{folder.name}.{what}") for what in ("writing", "previous"))
    state = _State(model, optimizer)
    state.refuse_other_names()
    summary = {"schema": SCHEMA, "numbers": numbers, "groups": state.groups()}
    tensors = state.tensors()

    def write() -> None:
        if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - {SUMMARY, TENSORS}):
            raise CheckpointError("it holds other files than a checkpoint's: it is left alone")
        if previous.exists() and not folder.exists():
            previous.rename(folder)  # a save was killed between its last two steps
        for left in (scratch, previous):
            shutil.rmtree(left, ignore_errors=True)
        scratch.mkdir(parents=True)
        with open(scratch / TENSORS, "wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
        write_atomic(scratch / SUMMARY, _encode(summary | {TENSORS: sha256(scratch / TENSORS)}))
        if folder.exists():
            folder.rename(previous)
        scratch.rename(folder)
        shutil.rmtree(previous, ignore_errors=True)

    _agreed(folder, write, lead=True)


def load(folder: Path | str, model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Reads into `model` and `optimizer` what `save` wrote, bit for bit, and returns its numbers. All ranks call it.

    Everything is checked before anything is changed, and nothing in the files is executed. CheckpointError names the
    file that is missing, altered or holds more than tensors, or the key, shape or dtype that is not the model's.
    """
    folder = Path(folder).resolve()
    previous = folder.with_name(f".{folder.name}.previous")
    folder = previous if previous.exists() and not folder.exists() else folder
    state = _State(model, optimizer)
    # Whole, the model may fill the GPU: only what `_like` reads of it stays.
    state.model |= {k: v.new_empty(()).expand(v.shape) for k, v in state.model.items() if not isinstance(v, DTensor)}

    def read() -> tuple[dict[str, Tensor], dict[str, Any] | None, dict[str, Any]]:
        summary = _checked_summary(folder)
        # Mapped, not read: a tensor cannot claim more memory than the file has.
        found = torch.load(folder / TENSORS, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
            raise CheckpointError(f"{TENSORS} holds more than tensors")
        if not isinstance(numbers := summary["numbers"], dict) or _odd(numbers):
            raise CheckpointError(f"its numbers are no numbers and text: {str(numbers)[:40]}")
        states = state.state_of(found, summary["groups"])
        if optimizer:
            _try_step(optimizer, states)
        return state.weights_of(found), states, numbers

    weights, states, numbers = _agreed(folder, read)
    model.load_state_dict(weights)
    if optimizer:
        optimizer.load_state_dict(states)
    return numbers


def _odd(numbers: dict[str, Any]) -> dict[str, str]:
    return {key: type(v).__name__ for key, v in numbers.items() if not isinstance(v, int | float | str)}


@torch.no_grad()
def _try_step(optimizer: Optimizer, states: dict[str, Any]) -> None:
    """CheckpointError unless an optimizer of this kind, with the checkpoint's settings, steps and makes its state."""
    if type(optimizer) not in ENTRYWISE:
        return  # another may hold more than its groups, and step the model itself
    for own, group in zip(optimizer.param_groups, states["param_groups"], strict=True):
        for parameter, number in zip(own["params"], group["params"], strict=True):
            held, tiny = states["state"].get(number, {}), nn.Parameter(torch.ones([2] * parameter.dim()))
            tiny.grad, kind = torch.ones_like(tiny), type(optimizer)
            alone = {key: value for key, value in (group | dict.fromkeys(HOW, False)).items() if key != "params"}
            alone |= {key: value.item() for key, value in alone.items() if isinstance(value, Tensor)}
            try:
                # The kind's own checks of its settings, which a loaded state never meets.
                trial = kind([tiny], **{key: alone[key] for key in alone.keys() & signature(kind).parameters})
                trial.param_groups[0].update(alone)
                trial.step()
            except Exception as error:
                raise CheckpointError(f"its settings do not run: {first_line(error)}") from None
            if not bool(tiny.isfinite().all()):
                raise CheckpointError("its settings make weights that are not finite")
            if held and (missing := trial.state[tiny].keys() - held.keys()):
                raise CheckpointError(f"its optimizer state has no {', '.join(sorted(missing))}")


def _agreed(folder: Path, step: Callable[[], Any], lead: bool = False) -> Any:
    """What `step` returns, done by all ranks or, with `lead`, by rank 0; CheckpointError on all if it failed on one."""
    ranks, result, mine = Ranks.of(), None, ""
    ranks.meet("blockshock_lib.checkpoint's save or load")
    if not lead or ranks.rank == 0:
        try:
            result = step()
        except Exception as error:  # each becomes one sentence on every rank
            mine = first_line(error)
    if first := next(filter(None, ranks.gather_objects(mine)), ""):
        raise CheckpointError(f"{folder}: {first}")
    return result


class _State:
    """What a checkpoint holds of a model and its optimizer: tensors in dense view, and settings."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None):
        self.model = {f"model.{key}": _tensor(f"model.{key}", value) for key, value in model.state_dict().items()}
        if share := next((name for name, module in model.named_modules() if isinstance(module, Share)), ""):
            raise UnsupportedError(
                f"{share} holds one rank's part of a GPT's weight: save what gathered() returns, deal it out by of()"
            )
        self.optimizer = optimizer
        self.parameters = dict(model.named_parameters())
        layers = {f"{name}.weight".lstrip("."): m for name, m in model.named_modules() if isinstance(m, ShardedLinear)}
        self.layers = {name: layer for name, layer in layers.items() if name in self.parameters}  # weight -> its layer

    def refuse_other_names(self) -> None:
        """UnsupportedError, on all ranks, where a rank's model has tensors that rank 0's has not. A collective."""
        first, *others = Ranks.of().gather_objects(sorted(self.model))
        for rank, names in enumerate(others, 1):
            if odd := set(names) ^ set(first):
                raise UnsupportedError(
                    f"rank {rank}'s model is not rank 0's ({min(odd)}), as with pipeline stages: save its state_dict() "
                    "by torch.distributed.checkpoint"
                )

    def tensors(self) -> dict[str, Tensor]:
        """All of them, whole, on rank 0's CPU; the other ranks keep shapes alone. A collective."""
        tensors, device = dict(self.model), "meta" if Ranks.of().rank else "cpu"
        for name, parameter in self.parameters.items() if self.optimizer else ():
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                if value is None:
                    continue
                full, layer = f"{STATE}{name}.{key}", self.layers.get(name)
                tensors[full] = _tensor(full, value)
                if layer is not None and value.dim():
                    if value.shape != parameter.shape:
                        raise UnsupportedError(f"{full} has not its weight's shape, so it has no dense view")
                    tensors[full] = layer.as_saved(layer.to_dense(value)).to(device)  # one at a time on the GPU
        return {key: (t.full_tensor() if isinstance(t, DTensor) else t).to(device) for key, t in tensors.items()}

    def groups(self) -> list[dict[str, Any]] | None:
        if self.optimizer is None:
            return None
        names, kind, groups = {p: name for name, p in self.parameters.items()}, type(self.optimizer).__name__, []
        for group in self.optimizer.param_groups:
            if any(parameter not in names for parameter in group["params"]):
                raise UnsupportedError("the optimizer holds a parameter that is not the model's")
            settings = {key: value for key, value in group.items() if key not in ("params", *HOW)}
            settings |= {key: v.item() for key, v in settings.items() if isinstance(v, Tensor) and v.numel() == 1}
            for key, value in settings.items():
                values = value if isinstance(value, list | tuple) else [value]
                if not all(isinstance(one, int | float | str | None) for one in values):
                    raise UnsupportedError(f"the optimizer's {key} is no number or text: {type(value).__name__}")
            groups.append({"names": [names[p] for p in group["params"]], "settings": settings, "optimizer": kind})
        return groups

    def weights_of(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        _same_keys("model", {key for key in found if key.startswith("model.")}, set(self.model))
        return {key.removeprefix("model."): _like(key, found[key], own, own.dtype) for key, own in self.model.items()}

    def state_of(self, found: dict[str, Tensor], groups: list | None) -> dict[str, Any] | None:
        """What the optimizer's `load_state_dict` takes: the saved settings, and state in the parameters' layouts."""
        if self.optimizer is None:
            return None
        mine, wanted = self.groups(), self.optimizer.state_dict()["param_groups"]
        kinds_of = {"names": list, "settings": dict, "optimizer": str}
        for group in groups if isinstance(groups, list) else [groups] if groups else ():
            if not (isinstance(group, dict) and all(isinstance(group.get(k), kind) for k, kind in kinds_of.items())):
                raise CheckpointError(f"{SUMMARY} does not describe an optimizer")
        kinds = [" + ".join(group["optimizer"] for group in one or ()) or "none" for one in (groups, mine)]
        if kinds[0] != kinds[1]:  # one word a group of parameters
            raise CheckpointError(f"its optimizer is {kinds[0]}, this one {kinds[1]}")
        places, state = {}, {}
        for group, own, saved in zip(mine, wanted, groups, strict=True):
            _same_keys("optimizer", set(saved["names"]), set(group["names"]))
            places |= dict(zip(group["names"], own["params"], strict=True))
            for key, value in saved["settings"].items():
                value = torch.full_like(old, value) if isinstance(old := own.get(key), Tensor) else value
                own[key] = tuple(value) if isinstance(old, tuple) and isinstance(value, list) else value
        for full, value in found.items():
            if not full.startswith(STATE):
                continue
            name, _, key = full.removeprefix(STATE).rpartition(".")
            if name not in places:
                raise CheckpointError(f"{full} belongs to no parameter of the optimizer")
            layer = self.layers.get(name) if value.dim() else None
            like = self.model[f"model.{name}"] if layer else self.parameters[name]
            value = _like(full, value, like, value.dtype) if value.dim() else value.clone()
            if layer:
                value = laid_as(self.parameters[name], layer.from_dense(layer.as_saved(value)))
            state.setdefault(places[name], {})[key] = value
        return {"state": state, "param_groups": wanted}


def _tensor(key: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise UnsupportedError(f"{key} is a {type(value).__name__}: a checkpoint holds tensors only")
    return value


def _encode(summary: dict[str, Any]) -> bytes:
    """A summary's bytes, with its own digest; a function of its content, so that any other byte is damage."""
    digest = sha256(json.dumps(summary, sort_keys=True))
    return json.dumps(summary | {"digest": digest}, sort_keys=True, indent=1).encode()


def _checked_summary(folder: Path) -> dict[str, Any]:
    """The summary, once each file is what it says."""
    try:
        data = (folder / SUMMARY).read_bytes()
        summary = json.loads(data)
        del summary["digest"]
        whole = _encode(summary) == data
    except FileNotFoundError:
        raise CheckpointError(f"there is no {SUMMARY}: no checkpoint was finished here") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{SUMMARY} is damaged: it does not match its digest")
    if summary["schema"] != SCHEMA:
        raise CheckpointError(f"{SUMMARY} is of schema {summary['schema']}: this library reads {SCHEMA}")
    if not (folder / TENSORS).exists() or sha256(folder / TENSORS) != summary[TENSORS]:
        raise CheckpointError(f"{TENSORS} is missing, cut short or altered")
    return summary


def _same_keys(what: str, found: set[str], wanted: set[str]) -> None:
    for said, keys in (("has no", wanted - found), ("has also", found - wanted)):
        if keys:
            raise CheckpointError(f"its {what} {said} {', '.join(sorted(keys)[:5])}")


def _like(key: str, found: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a checkpoint's tensor that lies as `like` does: on its device, or sharded over its mesh."""
    if found.shape != like.shape:
        raise CheckpointError(f"{key} has shape {list(found.shape)} in the checkpoint, {list(like.shape)} in the model")
    if found.dtype != dtype:
        raise CheckpointError(f"{key} is {found.dtype} in the checkpoint, {dtype} in the model")
    return laid_as(like, found) if isinstance(like, DTensor) else found.to(like.device, copy=True)
