"""A small model that the tests of training, checkpoints and styles share, and what their ranks do with it."""

import copy
import os
import signal
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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


def trained(ctx, options):
    """The losses and the dense weights after five steps of AdamW in float64, and what became of the modules."""
    model = styled(ctx, seed=ctx.rank, dtype=torch.float64, **options)
    losses = steps(model, adamw(model), 5)
    return losses, dense_view(model), [type(module).__name__ for module in model]


def beside_torchs_styles(ctx):
    """Gradients of a plan with torch's styles before and after Block-Shock, which gets a sharded DTensor."""
    torch.manual_seed(0)
    layers = {"up": (64, 128), "shock": (128, 128), "down": (128, 64)}
    dense = nn.Sequential(OrderedDict((name, nn.Linear(*sizes).double()) for name, sizes in layers.items()))
    model = copy.deepcopy(dense)
    plan = {
        "u*": ColwiseParallel(use_local_output=False),
        "sh?ck": BlockShockParallel(mask="random"),
        "down": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, init_device_mesh("cpu", (ctx.world_size,)), plan)
    x = torch.randn(4, 64, dtype=torch.float64)
    found = {}
    for name, one in (("dense", dense), ("styled", model)):
        mine = x.clone().requires_grad_()
        y = one(mine)
        y.square().sum().backward()
        full = {key: parameter.grad for key, parameter in one.named_parameters()}
        full = {key: grad.full_tensor() if isinstance(grad, DTensor) else grad for key, grad in full.items()}
        if name == "styled":
            full["shock.weight"] = one.shock.to_dense(full["shock.weight"])
        found[name] = {"y": y.detach(), "x": mine.grad, **full}
    return found


def refusals(ctx):
    """What the style says to what it cannot convert, and whether the module is as it was."""
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    square = init_device_mesh("cpu", (1, ctx.world_size), mesh_dim_names=("dp", "tp"))
    hooked, sharded = nn.Linear(64, 64), nn.Linear(64, 64)
    hooked.register_forward_hook(lambda *_: None)
    parallelize_module(sharded, mesh, ColwiseParallel())
    asked = {
        "type": (nn.Embedding(64, 64), mesh),
        "mesh": (nn.Linear(64, 64), square),
        "sizes": (nn.Linear(62, 64), mesh),
        "hooks": (hooked, mesh),
        "twice": (sharded, mesh),
        "meta": (nn.Linear(64, 64, device="meta"), mesh),
    }
    said = {}
    for name, (module, where) in asked.items():
        kind, keys = type(module), set(vars(module))
        try:
            BlockShockParallel()._apply(module, where)
        except (UnsupportedError, ValueError) as error:
            said[name] = (str(error), type(module) is kind and set(vars(module)) == keys)
    parallelize_module(linear := nn.Linear(64, 64), square["tp"], BlockShockParallel())
    return said | {"slice": type(linear).__name__}


def compiled(ctx):
    """Largest differences of y and of the gradients between the compiled and the eager mlp."""
    found = []
    for compile_it in (False, True):
        torch._dynamo.reset()
        model = styled(ctx)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compile_it else model
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = run(x)
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())])
    return [(a - b).abs().max().item() for a, b in zip(*found, strict=True)]


def kept_apart(ctx):
    """What the change keeps: names, order of parameters, attributes, eval mode, frozen weights."""
    model = mlp()
    model[0].note = "mine"
    model[0].weight.requires_grad_(False)
    model.eval()
    names = [name for name, _ in model.named_parameters()]
    parallelize_module(model, init_device_mesh("cpu", (ctx.world_size,)), {"[02]": BlockShockParallel()})
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    return model[0].note, model[0].training, names, trains


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


def plain_dcp(ctx, folder):
    """torch's own save and load, without this library's: what the README says of state_dict."""
    model = styled(ctx)
    steps(model, adamw(model), 2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    other = styled(ctx, seed=50, mask="random")
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    return dense_view(model), dense_view(other)


def without_dense_view(ctx, folder):
    """What is said of an optimizer whose state is no tensor of its weight's shape."""
    model = styled(ctx)
    optimizer = torch.optim.Adafactor(model.parameters())
    steps(model, optimizer, 1)
    try:
        checkpoint.save(folder, model, optimizer)
    except UnsupportedError as error:
        return str(error)


def refused_on_one_rank(ctx, folder):
    """Rank 1 alone cannot read: both say so, and none hangs."""
    model, read = styled(ctx), checkpoint.stored.read_metadata

    def fails(*_):
        raise OSError("planted on rank 1")

    if ctx.rank == 1:
        checkpoint.stored.read_metadata = fails
    try:
        checkpoint.load(folder, model)
    except CheckpointError as error:
        return str(error)
    finally:
        checkpoint.stored.read_metadata = read


def killed_while(ctx, folder, moment):
    """Rank 0 is killed in a save: as tensors are written, before the summary, or between the two renames."""
    model = styled(ctx, seed=50) if ctx.world_size > 1 else mlp(seed=50)
    optimizer = adamw(model)
    steps(model, optimizer, 1)

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    if ctx.rank == 0 and moment == "writing":
        torch.distributed.checkpoint.filesystem._write_item = die
    if ctx.rank == 0 and moment == "summing":
        checkpoint._digests = die
    if ctx.rank == 0 and moment == "renaming":
        rename = Path.rename

        def die_after_one(path, target):
            if path.name.endswith(".writing"):
                die()
            return rename(path, target)

        Path.rename = die_after_one
    checkpoint.save(folder, model, optimizer, step=99)


def killed_in_training(ctx, folder, until, at):
    """Trains with a checkpoint every five steps until rank 1 is killed before step `at`."""
    model = styled(ctx)
    optimizer = adamw(model)
    for step in range(until):
        if step == at and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        steps(model, optimizer, 1, step)
        if step % 5 == 4:
            checkpoint.save(folder, model, optimizer, step=step + 1)


def resumed(ctx, folder, until):
    """The losses and dense weights at step `until`, from the checkpoint in `folder` or, without one, from the start."""
    model = styled(ctx)
    optimizer = adamw(model)
    start = checkpoint.load(folder, model, optimizer)["step"] if folder else 0
    return start, steps(model, optimizer, until - start, start), dense_view(model)
