"""A small model that the tests of training, checkpoints and styles share, and what their ranks do with it."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from blockshock_lib import BlockShockParallel, checkpoint
from blockshock_lib.errors import CheckpointError, UnsupportedError

RATE = 0.01


def mlp(seed=0, features=128, wide=128, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, wide), nn.GELU(), nn.Linear(wide, features)).to(dtype)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)


def loss(model, step):
    """The error of predicting fixed targets from the inputs of one step; the same on every rank."""
    first = next(model.parameters())
    seed = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 8, 128, generator=seed, dtype=torch.float64).to(first.dtype)
    return (model(x) - y).square().mean()


def steps(model, optimizer, count, start=0):
    """The losses of `count` steps of training."""
    losses = []
    for step in range(start, start + count):
        optimizer.zero_grad()
        value = loss(model, step)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


# What a rank does: module-level functions that a worker can import


def styled(ctx, seed=0, dtype=torch.float32, **options):
    """An mlp whose Linears share their work as Block-Shock does."""
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    return parallelize_module(mlp(seed=seed, dtype=dtype), mesh, {"[02]": BlockShockParallel(**options)})


def dense_view(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def saved(ctx, folder):
    """A checkpoint after three steps, and the dense view of what was saved."""
    model = styled(ctx)
    optimizer = adamw(model)
    steps(model, optimizer, 3)
    checkpoint.save(folder, model, optimizer, step=3)
    return dense_view(model)


def moved(ctx, source, target, options):
    """Loads a checkpoint into a model with other weights and writes it again."""
    model = styled(ctx, seed=50, **options)
    optimizer = adamw(model)
    checkpoint.save(target, model, optimizer, **checkpoint.load(source, model, optimizer))
    return dense_view(model)


def said_by(fn, *args, kind=UnsupportedError, **options):
    """The words of the refusal, which must come."""
    try:
        fn(*args, **options)
    except kind as error:
        return str(error)
    raise AssertionError("not refused")


def refused_on_one_rank(ctx, folder):
    """Rank 1 alone cannot read."""
    model = styled(ctx)
    with mock.patch.object(torch, "load", side_effect=OSError("planted on rank 1")) if ctx.rank == 1 else nullcontext():
        assert "planted on rank 1" in said_by(checkpoint.load, folder, model, kind=CheckpointError)


def killed_while(ctx, folder, moment):
    """Rank 0 is killed in a save: as tensors are written, before the summary, or between the two renames."""
    model = styled(ctx, seed=50) if ctx.world_size > 1 else mlp(seed=50)
    optimizer = adamw(model)
    steps(model, optimizer, 1)
    place, name = {"writing": (torch, "save"), "summing": (checkpoint, "sha256"), "renaming": (Path, "rename")}[moment]
    right = getattr(place, name)

    def dies(what, *more):
        if moment == "writing":
            right(dict(list(what.items())[:3]), *more)
        elif not isinstance(what, Path) or (moment == "renaming" and not what.name.endswith(".writing")):
            return right(what, *more)
        os.kill(os.getpid(), signal.SIGKILL)

    if ctx.rank == 0:
        setattr(place, name, dies)
    checkpoint.save(folder, model, optimizer, step=99)


def train_on(ctx, folder, until, killed_at=None):
    """The losses and dense weights at step `until`, from the checkpoint in `folder` on, which every fifth writes."""
    model = styled(ctx)
    optimizer, losses = adamw(model), []
    start = checkpoint.load(folder, model, optimizer)["step"] if folder.exists() else 0
    for step in range(start, until):
        if step == killed_at and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        losses += steps(model, optimizer, 1, step)
        if step % 5 == 4:
            checkpoint.save(folder, model, optimizer, step=step + 1)
    return start, losses, dense_view(model)
