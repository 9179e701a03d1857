"""What the layers of a model are given in calibration: one layer's second moments at a time, layer by layer.

A pass ends at the layer that it is for, and every layer before that one is pruned already, as it will be in use.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blockshock_lib.errors import DataError


class _Reached(Exception):
    """Ends a pass."""


def batches_of(calibration: Iterable[Any] | None) -> list[Any]:
    """ValueError where that is no list of batches."""
    if isinstance(calibration, Mapping | Tensor) or not isinstance(calibration, Iterable | None):
        raise ValueError(f"calibration is one {type(calibration).__name__}: put it into a list, [batch]")
    batches = list(() if calibration is None else calibration)
    if wrong := [one for one in enumerate(batches) if one[1] is None or isinstance(one[1], str)]:
        raise ValueError("batch {} of calibration is {!r}: a batch is what the model takes".format(*wrong[0]))
    return batches


def survey(model: nn.Module, names: Sequence[str], batches: Sequence[Any], full: bool) -> dict[tuple[str, ...], bool]:
    """The layers that are called, in order, together those that are given the same values; whether once a batch.

    DataError names a layer whose inputs are not finite or, if it needs a `full` rank, have fewer rows than features.
    """
    source, last = 0, (None, 0)
    # Of a layer: the batch of each call, and which of the tensors, counted as they come, it is given.
    calls = defaultdict(list)
    rows, features, finite = Counter(), {}, {}

    def look(number: int, name: str, x: Tensor) -> None:
        nonlocal source, last
        if not x.numel():  # an expert that gets no token is not reached
            return
        version = None if x.is_inference() else x._version  # of a tensor that is written in place between two layers
        source, last = source + (version is None or x is not last[0] or version != last[1]), (x, version)
        calls[name].append((number, source))
        features[name] = x.shape[-1]
        rows[name] += x.numel() // x.shape[-1]
        finite[name] = x.isfinite().all() & finite.get(name, True)

    for number, batch in enumerate(batches):
        _passes(model, names, [batch], partial(look, number))
    once = {name for name, of in calls.items() if [number for number, _ in of] == [*range(len(batches))]}
    groups: dict[object, list[str]] = {}
    for name, of in calls.items():
        if not bool(finite[name]):
            raise DataError(f"calibration gives {name!r} inputs that are not finite")
        if full and rows[name] < features[name]:
            wanted = f"{features[name]}, as many as inputs"
            raise DataError(f"calibration gives {name!r} {rows[name]} rows: it takes {wanted}")
        groups.setdefault(tuple(of) if name in once else name, []).append(name)
    return {tuple(group): group[0] in once for group in groups.values()}


def moments(model: nn.Module, name: str, once: bool, batches: Sequence[Any], full: bool) -> Tensor:
    """X^T X [K, K] of a layer's inputs, or its diagonal [K] where not `full`; float32, or float64 for a float64 layer.

    `once`: it is called once in each pass, which then ends there. DataError: sums that are not finite.
    """
    sums = None

    def look(_: str, x: Tensor) -> None:
        nonlocal sums
        x = x.reshape(-1, x.shape[-1]).to(torch.promote_types(x.dtype, torch.float32))
        if sums is None:
            sums = x.new_zeros(x.shape[-1], x.shape[-1]) if full else x.new_zeros(x.shape[-1])
        sums = sums.addmm_(x.t(), x) if full else sums.add_(x.square().sum(0))
        if once and x.numel():
            raise _Reached

    _passes(model, [name], batches, look)
    if not bool(sums.isfinite().all()):
        raise DataError(f"the second moments of what calibration gives {name} are not finite")
    return sums


def _passes(
    model: nn.Module, names: Sequence[str], batches: Sequence[Any], look: Callable[[str, Tensor], None]
) -> None:
    """The model's passes over the batches, in eval mode; `look` is told of every input of these layers."""
    training = {module: module.training for module in model.modules()}
    with contextlib.ExitStack() as stack:
        for name in names:

            def hook(_, args, kwargs, name=name):
                look(name, args[0] if args else next(iter(kwargs.values())))

            handle = model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        stack.callback(lambda: [setattr(module, "training", was) for module, was in training.items()])
        model.eval()
        for batch in batches:
            args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
            with contextlib.suppress(_Reached):
                model(*(args if isinstance(args, tuple | list) else (args,)), **kwargs)
