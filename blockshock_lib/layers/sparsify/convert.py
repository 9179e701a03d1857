"""A model's layers made sparse, and dense again, in place and all or none."""

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from blockshock_lib.errors import DataError, UnsupportedError
from blockshock_lib.layers.linear24 import Linear24
from blockshock_lib.layers.parts import leave, refuse_wrapped, trained_of
from blockshock_lib.layers.pattern_linear import PatternLinear, linear_of
from blockshock_lib.layers.sparsify.calibrate import batches_of, moments, survey
from blockshock_lib.layers.sparsify.configs import CALIBRATED, Config, Sparse24
from blockshock_lib.layers.sparsify.fake import FakeSparse, PruneSchedule, fake, unfake
from blockshock_lib.layers.sparsify.parallel import ParallelLinear24, parallel, part_of, split
from blockshock_lib.layers.sparsify.plan import Filter, as_linear, conv1d_of, held, plan, refuse_hooked, row_of
from blockshock_lib.layers.sparsify.report import Report


def as_made(convert: Callable) -> Callable:
    """Runs in torch's inference mode where the model was made in it, else never: what is made is to be trained."""

    @functools.wraps(convert)
    def run(model: nn.Module, *given: Any, **options: Any) -> Report:
        with (
            torch.inference_mode(any(not is_lazy(one) and one.is_inference() for one in model.parameters())),
            torch.no_grad(),
        ):
            return convert(model, *given, **options)

    return run


@as_made
def sparsify_(
    model: nn.Module, config: Config, filter: Filter = None, calibration: Iterable[Any] | None = None
) -> Report:
    """Makes the model's nn.Linear layers, and transformers' Conv1D, sparse as `config` says; in place.

    `filter` says which: a pattern of dotted names ("*.mlp.*"), or a function of name and module; None: all. A layer
    that cannot be converted stays as it is, and its row of the report says why. All is checked before the first is
    changed, and whatever interrupts it, an error or Ctrl-C, leaves the model as it was; so until the end both weights
    are held, and in calibration those of other patterns than 2:4 a third time, dense. Make optimizers,
    DistributedDataParallel and CUDA graphs afterwards.

    `calibration`, for a method that needs it: batches, each what the model takes, a tensor, or a tuple, list or mapping
    of its arguments, on its device. A layer is pruned by what it is given once all layers before it are pruned, in eval
    mode; one that no batch reaches stays as it is.

    ValueError: the filter takes no linear layer, or calibration is missing or not needed; UnsupportedError: none of the
    layers can be converted; DataError: calibration that is not finite, or has fewer rows than a layer has inputs.
    """
    Config.one(config)
    full, batches = config.method == "sparsegpt", batches_of(calibration)
    if config.method in CALIBRATED and not batches:
        raise ValueError(f"method={config.method!r} needs calibration=[...], batches of what the model takes")
    if config.method not in CALIBRATED and calibration is not None:
        raise ValueError(f"method={config.method!r} takes no calibration")
    rows = {row.name: row for row in plan(model, config, filter, parts=True)}
    groups = dict.fromkeys(((name,) for name, row in rows.items() if not row.refused), False)
    if batches:
        called = survey(model, [name for (name,) in groups], batches, full)
        for name in {name for (name,) in groups}.difference(*called):
            rows[name] = replace(rows[name], refused="no batch of calibration reaches it")
        if not (groups := called):
            raise UnsupportedError("no batch of calibration reaches a layer that could be converted")
    made, left = {}, {}
    with contextlib.ExitStack() as undo:
        for names, once in groups.items():
            given = moments(model, names[0], once, batches, full) if batches else None
            for name in names:
                old = model.get_submodule(name)
                try:
                    refuse_wrapped(old, {"frozen": getattr(config, "frozen", True)})
                    new = config.layer(part_of(old, config) if split(old) else as_linear(old), given)
                except (DataError, UnsupportedError, ValueError) as error:
                    raise type(error)(f"{name}: {error}") from error
                made[name], left[name] = converted(new, old, name), old
                rows[name] = replace(rows[name], after=held(new), made=type(new).__name__)
                # Calibration passes through it many times, which a slow pattern would dominate.
                put(undo, model, name, new.to_linear() if batches and isinstance(new, PatternLinear) else new)
        for name, new in made.items():
            put(undo, model, name, new)
        undo.pop_all()
    for name, old in left.items():
        leave(old, name)
    return Report(tuple(rows.values()))


@torch.no_grad()
def fake_sparsify_(
    model: nn.Module, config: Config, filter: Filter = None, schedule: PruneSchedule | None = None
) -> Report:
    """Makes layers train as if they were sparse, in place: parameters, names and optimizers stay, and `schedule`
    (default: once) says what each pass multiplies. `sparsify_` makes them real, with equal values once the schedule has
    ended; before, Sparse24("given") is refused, and "magnitude" prunes at once what is still to go.

    `filter`, what is refused and ValueErrors as for `sparsify_`; ValueError too for a method that needs calibration,
    UnsupportedError for a model that holds fake layers already.
    """
    Config.one(config)
    if any(isinstance(module, FakeSparse) for module in model.modules()):
        raise UnsupportedError("the model trains as if it were sparse already: call sparsify_ or dense_ first")
    if not isinstance(schedule := schedule or PruneSchedule(), PruneSchedule):
        raise ValueError(f"schedule is a PruneSchedule(kind=...), not {schedule!r}")
    if config.method in CALIBRATED:
        raise ValueError(f"method={config.method!r} needs calibration: use sparsify_, then train with frozen=False")
    if isinstance(config, Sparse24) and config.dtype:
        raise ValueError(f"dtype={config.dtype!r} is for inference: train without it, then call sparsify_ with it")
    if schedule.kind == "s-ste" and not isinstance(config, Sparse24):
        raise ValueError("the schedule 's-ste' is one of Sparse24 alone")
    rows = plan(model, config, filter, fake=True)
    with contextlib.ExitStack() as undo:
        for row in rows:
            if not row.refused:
                undo.callback(unfake, old := model.get_submodule(row.name))
                fake(old, as_linear(old).weight.detach(), config, schedule, conv1d_of(old))
                old.path = row.name
        undo.pop_all()
    return Report(tuple(rows))


@as_made
def dense_(model: nn.Module) -> Report:
    """Makes each sparse layer, real or fake, what it was, with zeros where it was pruned; in place, all or none.

    UnsupportedError: there is none, or one has hooks, which would be lost.
    """
    rows, made = [], {}
    with contextlib.ExitStack() as undo:
        for name, old in list(model.named_modules(remove_duplicate=False)):
            if not isinstance(old, Linear24 | PatternLinear | FakeSparse) or not name:
                continue
            if old not in made:
                refuse_hooked(old, f"{name}: ")
                row = row_of(name, old)
                made[old] = _dense(old)
                rows.append(replace(row, after=row_of(name, made[old]).after))
            put(undo, model, name, made[old])
        undo.pop_all()
    if not rows:
        raise UnsupportedError("no layer of this model is sparse")
    for row, old in zip(rows, made, strict=True):
        leave(old, row.name)
    return Report(tuple(rows))


def put(undo: contextlib.ExitStack, model: nn.Module, name: str, new: nn.Module) -> None:
    """Puts a module into the place of another, which `undo` gives back unless it is told that all is done."""
    undo.callback(model.set_submodule, name, model.get_submodule(name))
    model.set_submodule(name, new)


def converted(new: nn.Module, old: nn.Module, name: str) -> nn.Module:
    new = parallel(new, old) if split(old) else new
    new.path, new.conv1d, new.trained = name, conv1d_of(old), trained_of(old)
    return new.train(old.training)


def _dense(layer: nn.Module) -> nn.Module:
    if isinstance(layer, ParallelLinear24):
        return layer.to_linear().train(layer.training)
    weight = layer.effective().detach() if isinstance(layer, FakeSparse) else layer.to_dense()
    dense = linear_of(weight.contiguous(), None if layer.bias is None else layer.bias.detach().clone(), layer)
    if kind := conv1d_of(layer):
        dense, linear = kind(*weight.shape), dense
        dense.weight, dense.bias = nn.Parameter(weight.t().contiguous(), linear.weight.requires_grad), linear.bias
    return dense.train(layer.training)
