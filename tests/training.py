"""A small model that the tests of training, checkpoints and styles share, and what their ranks do with it."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from blockshock_lib import BlockShockLinear, BlockShockParallel, checkpoint
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


def refusals(ctx):
    """(what the style must say, what it says, whether the module is as it was) for each that it cannot convert."""
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    square = init_device_mesh("cpu", (1, ctx.world_size), mesh_dim_names=("dp", "tp"))
    normed, sharded, patched = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
    nn.utils.weight_norm(normed)
    parallelize_module(sharded, mesh, ColwiseParallel())
    patched.forward = lambda x: x
    meta = nn.Linear(64, 64, device="meta")
    found = []
    for words, module, where, mask in (
        ("only an nn.Linear", nn.Embedding(64, 64), mesh, "random"),
        ("a mesh of one dimension", nn.Linear(64, 64), square, "random"),
        ("multiple", nn.Linear(62, 64), mesh, "random"),
        ("weight_norm", normed, mesh, "random"),
        ("own forward", patched, mesh, "random"),
        ("its weight is a DTensor", sharded, mesh, "random"),
        ("load them first", meta, mesh, "magnitude"),
    ):
        kind, keys = type(module), set(vars(module))
        said = said_by((UnsupportedError, ValueError), BlockShockParallel(mask)._apply, module, where)
        found.append((words, said, type(module) is kind and set(vars(module)) == keys))
    tied, block = mlp(), nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(64, 62))})
    tied[2].weight = tied[0].weight
    for words, model, plan in (
        ("0: it shares a parameter with 2: give it one of its own", tied, {"0": BlockShockParallel()}),
        ("mlp.0: ", block, {"mlp.*": BlockShockParallel()}),
    ):
        said = said_by((UnsupportedError, ValueError), parallelize_module, model, mesh, plan)
        found.append((words, said, not any(isinstance(m, BlockShockLinear) for m in model.modules())))
    return found


def kept_apart(ctx):
    """What the change keeps: names, order, attributes, modes, frozen weights; with an option, on a slice of a mesh."""
    model = mlp().eval()
    model[0].note = "mine"
    model[0].weight.requires_grad_(False)
    names = [name for name, _ in model.named_parameters()]
    mesh = init_device_mesh("cpu", (1, ctx.world_size), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"[02]": BlockShockParallel(dw="full")})
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    return model[0].note, model[0].training, model[0].wgrad_by, names, trains


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


def said_by(kind, fn, *args):
    """The words of the error that fn(*args) raises; "" where it does not."""
    try:
        fn(*args)
    except kind as error:
        return str(error)
    return ""


def refused_on_one_rank(ctx, folder):
    """What each says where rank 1 alone cannot read."""
    model = styled(ctx)
    with mock.patch.object(torch, "load", side_effect=OSError("planted on rank 1")) if ctx.rank == 1 else nullcontext():
        return said_by(CheckpointError, checkpoint.load, folder, model)


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
