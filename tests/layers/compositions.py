"""Compositions with other parts of PyTorch: each is right against the dense model, or refused by a sentence.

A function marked `composition` is a row of the table in docs/compositions.md. Four ranks call it for each of its
methods: it returns where the composition is right, and raises the refusal. What needs no other rank each does alone.
`python -m tests.layers.compositions` proves all of them and writes the table; test_compositions.py refuses a stale one.
"""

import contextlib
import copy
import functools
import io
import itertools
import os
import pickle
import re
import tempfile
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_ as torchs_clip
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from blockshock_lib import BlockShockParallel, checkpoint, clip_grad_norm_
from blockshock_lib.comm import Group
from blockshock_lib.comm import ranks as comm_ranks
from blockshock_lib.errors import BlockShockError, UnsupportedError
from blockshock_lib.files import ROOT
from blockshock_lib.layers import (
    BlockShockLinear,
    ColumnParallelLinear,
    Linear24,
    MaskedDenseLinear,
    PermutedDenseLinear,
    RowParallelLinear,
    guards,
    parts,
    watch,
)
from blockshock_lib.ranks import WorkerGroup
from tests.training import adamw, said_by

PAGE, BEGIN, END = ROOT / "docs" / "compositions.md", "<!-- table:begin -->", "<!-- table:end -->"
F64, CLOSE = torch.float64, {"rtol": 1e-10, "atol": 1e-10}
METHODS = {
    "packed": (BlockShockLinear, {"mask": "checkerboard"}),
    "recompress": (BlockShockLinear, {"mask": "random", "update": "recompress"}),
    "B1": (RowParallelLinear, {}),
    "B2": (ColumnParallelLinear, {}),
    "C": (MaskedDenseLinear, {"mask": "random"}),
    "D": (PermutedDenseLinear, {"mask": "checkerboard"}),
    "Linear24": (Linear24, {"mask": "magnitude"}),
}
"""The table's columns: Block-Shock by its updates, then the other methods."""
SHARED = tuple(METHODS)[:-1]
STYLED = SHARED[:2]  # by BlockShockParallel
FEATURES, BATCH, STEPS = 128, 8, 3
COMPOSITIONS = {}
"""Name -> (what every one of four ranks calls with a method, the methods): the table's rows."""


def composition(name, methods=tuple(METHODS)):
    def add(prove):
        COMPOSITIONS[name] = prove, methods
        return prove

    return add


def dense(seed=0):
    """Two Linears, a norm between them."""
    torch.manual_seed(seed)
    layers = nn.Linear(FEATURES, FEATURES), nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES)
    return nn.Sequential(*layers).to(F64)


def layer_of(linear, method, **changes):
    kind, options = METHODS[method]
    return kind.from_linear(linear, **options | changes)


def converted(model, method, group=None):
    """A copy of `model` whose Linears are layers of the method."""
    how, model = {} if method == "Linear24" else {"process_group": group}, copy.deepcopy(model)
    for name, module in model.named_children():
        if type(module) is nn.Linear:
            setattr(model, name, layer_of(module, method, **how))
    return model


def twins(method, group=None):
    """(a dense model, the same by the method); Linear24's is pruned, and stays so."""
    plain = dense()
    model = converted(plain, method, group)
    for name, module in model.named_children():
        if isinstance(module, Linear24):
            linear, keep = plain.get_submodule(name), module.pattern.mask()
            linear.weight.data *= keep
            linear.weight.register_hook(keep.mul)
    return plain, model


def batch(step, part=slice(None)):
    seed = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, BATCH, FEATURES, generator=seed, dtype=F64)
    return x[part], y[part]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def torchs_clipping(model):
    torchs_clip(model.parameters(), 0.1)


def train(model, optimizer, part=slice(None), steps=range(STEPS), clip=None, closed=False):
    """Steps of training; `closed`: the optimizer itself calls the passes, as LBFGS does."""
    for step in steps:

        def passes(step=step):
            optimizer.zero_grad()
            x, y = batch(step, part)
            loss = (model(x) - y).square().mean()
            loss.backward()
            if clip:
                clip(model)
            return loss

        if closed:
            optimizer.step(passes)
        else:
            passes()
            optimizer.step()


def trains_alike(model, plain, part=slice(None), make=sgd, **how):
    """Both train, `model` on its part of each batch, and are alike; a refusal comes before the dense steps."""
    train(model, make(model), part, **how)
    train(plain, make(plain), **how)
    alike(model, plain)


def weights(model):
    """Whole and plain, by name."""
    return {key.removeprefix("module."): parts.whole(value) for key, value in model.state_dict().items()}


def alike(model, plain, close=1e-10, trained=True):
    """The model's state, on this rank, is the dense model's, which has trained."""
    torch.testing.assert_close(weights(model), weights(plain), rtol=0, atol=close)
    assert not trained or any(one.grad is not None and one.grad.any() for one in plain.parameters())


@functools.cache
def square():
    """Four ranks as dp x tp."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@contextlib.contextmanager
def shared_folder():
    """One folder that all ranks see."""
    with tempfile.TemporaryDirectory() as mine:
        found = [mine]
        dist.broadcast_object_list(found)
        yield found[0]
        dist.barrier()


def all_say(said):
    """The first of the ranks' sentences, on every rank."""
    return next(filter(None, Group.of().gather_objects(said)), "")


class Warned(BlockShockError):
    """The composition was right, and a warning said what else it could be."""


def over_dp(method):
    """(dense twin, model shared by tp, this rank's half of the batch)."""
    dp, tp = square()["dp"], square()["tp"]
    half = slice(dp.get_local_rank() * BATCH // 2, (dp.get_local_rank() + 1) * BATCH // 2)
    return *twins(method, tp.get_group()), half


# Data parallelism over the mesh's other dimension, and over the very ranks of the layer.


@composition("FSDP2 over dp, of dp x tp")
def fsdp2(method):
    for make, options in ((sgd, {}), (adamw, {"reshard_after_forward": False})):
        plain, model, half = over_dp(method)
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=square()["dp"], **options)
        fully_shard(model, mesh=square()["dp"])
        trains_alike(model, plain, half, make)


@composition("FSDP2 over dp, its state saved and loaded: state_dict, torch's DCP, checkpoint.save")
def fsdp2_state(method):
    plain, model, half = over_dp(method)
    fully_shard(model, mesh=square()["dp"])
    made = adamw(plain), adamw(model)
    train(plain, made[0])
    train(model, made[1], half)
    with shared_folder() as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
        checkpoint.save(f"{folder}/own", model, made[1])
        one, _, _ = over_dp(method)
        other = adamw(one)
        checkpoint.load(f"{folder}/own", one, other)  # plain layers read what FSDP2 wrote
        alike(one, plain)
        state, whole = {key: 0 * value for key, value in weights(plain).items()}, StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, state, options=whole)
        assert not any(value.any() for value in weights(model).values())
        dcp.load({"model": state}, checkpoint_id=f"{folder}/dcp")
        set_model_state_dict(model, state, options=whole)
        alike(model, plain)
        _, again, _ = over_dp(method)
        fully_shard(again, mesh=square()["dp"])
        last = adamw(again)
        checkpoint.load(f"{folder}/own", again, last)
    for a, b, c in ((plain, *made[:1], slice(None)), (model, made[1], half), (again, last, half)):
        train(a, b, c, range(STEPS, 2 * STEPS))
    alike(model, plain)
    alike(again, plain)


@composition("FSDP2 over dp: weights written in place, and saved then")
def fsdp2_written(method):
    plain, model, half = over_dp(method)
    for one in (model[0], model[2], model):
        fully_shard(one, mesh=square()["dp"])
    model(batch(0)[0])
    for layer in (model[0], model[2]):  # in the holes too
        own = layer.weight.to_local().data
        own.add_(torch.linspace(0, 1, own.shape[-1]))
    plain.load_state_dict(weights(model))
    x, other = (batch(1)[0][half].requires_grad_() for _ in range(2))
    y, wanted = model(x), plain(other)
    (y.square().sum() + wanted.square().sum()).backward()
    torch.testing.assert_close((y, x.grad), (wanted, other.grad), **CLOSE)


@composition("HSDP, and clip_grad_norm_ of this library")
def hsdp(method):
    plain, model, half = over_dp(method)
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))["replicate", "shard"]
    fully_shard(model, mesh=mesh)
    train(plain, sgd(plain), clip=torchs_clipping)
    train(model, sgd(model), half, clip=lambda one: clip_grad_norm_(one, 0.1))
    alike(model, plain)


@composition("FSDP2 over the ranks of the layer", SHARED)
def fsdp2_same_ranks(method):
    said = said_by(fully_shard, nn.Sequential(twins(method)[1]), mesh=init_device_mesh("cpu", (4,)))
    assert "which share 0.0: " in said
    raise UnsupportedError(said)


composition("HSDP over dp x tp, the ranks of the layer among them", SHARED)(
    lambda way: fully_shard(over_dp(way)[1], mesh=square())
)
composition("FSDP1")(
    lambda way: FullyShardedDataParallel(over_dp(way)[1], square()["dp"].get_group(), device_id=torch.device("cpu"))
)


@composition("DDP over dp")
def ddp(method):
    plain, model, half = over_dp(method)
    run = DistributedDataParallel(model, process_group=square()["dp"].get_group())
    trains_alike(run, plain, half, adamw)


@composition("DDP over dp: gradients accumulated, with and without no_sync")
def ddp_accumulates(method):
    for skip in (True, False):
        plain, model, half = over_dp(method)
        run = DistributedDataParallel(model, process_group=square()["dp"].get_group())
        for one, part in ((plain, slice(None)), (run, half)):
            optimizer = sgd(one)
            for step in range(2 * STEPS):
                if step % 2 == 0:
                    optimizer.zero_grad()
                with one.no_sync() if skip and one is run and step % 2 == 0 else contextlib.nullcontext():
                    x, y = batch(step, part)
                    (one(x) - y).square().mean().backward()
                if step % 2:
                    optimizer.step()
        alike(run, plain)


@composition("DDP over the ranks of the layer", SHARED)
def ddp_same_ranks(method):
    model = nn.ModuleDict({"blocks": twins(method)[1]})
    before = [parameter.clone() for parameter in model.parameters()]
    said = said_by(DistributedDataParallel, model)
    assert "which share blocks.0: " in said
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    raise UnsupportedError(said)


@composition("a model that DDP has wrapped, converted then")
def ddp_before(method):
    run = DistributedDataParallel(dense(), process_group=square()["dp"].get_group())
    other = copy.deepcopy(DistributedDataParallel(dense()))  # torch copies one of the default group alone
    said_by(layer_of, other.module[0], method)
    layer_of(run.module[0], method)


# Optimizers, clipping, and torch's own checkpoint of an optimizer


def alone(method, make=sgd, clip=None):
    plain, model = twins(method)
    trains_alike(model, plain, make=make, clip=clip, closed=True)


@composition("SGD, AdamW and torch's other entry-wise optimizers")
def entrywise(method):
    kinds = [*sorted(guards.ENTRYWISE, key=str), functools.partial(torch.optim.AdamW, fused=True)]  # alike on all ranks
    for kind in kinds:  # a look at the model between backward and step hides no step, a fused one neither
        alone(method, lambda one, kind=kind: kind(one.parameters(), lr=0.01), lambda one: one(batch(0)[0]))


composition("LBFGS")(lambda method: alone(method, lambda one: torch.optim.LBFGS(one.parameters(), lr=0.1)))


@composition("Muon, Adafactor")
def muon(method):
    said_by(alone, method, lambda one: torch.optim.Adafactor(one.parameters()))
    alone(method, lambda one: torch.optim.Muon([p for p in one.parameters() if p.dim() > 1]))


@composition("an optimizer that is not torch's (Shampoo, Lion, ...)")
def foreign(method):
    kind = type("Lion", (torch.optim.SGD,), {})
    with warnings.catch_warnings(record=True, action="always") as caught:
        alone(method, lambda one: kind(one.parameters(), lr=0.1))
    said = [str(one.message) for one in caught if "entry by entry" in str(one.message)]
    assert len(said) == 1, said
    raise Warned(said[0])


composition("torch.nn.utils.clip_grad_norm_")(lambda method: alone(method, clip=torchs_clipping))


def optimizer_kept(method, keep):
    """What `keep(model, optimizer, model, optimizer)` writes of one and reads into another goes on as the dense one."""
    plain, model = twins(method)
    made = adamw(plain), adamw(model)
    for one, optimizer in zip((plain, model), made, strict=True):
        train(one, optimizer)
    other = copy.deepcopy(model)
    again = adamw(other)
    keep(model, made[1], other, again)
    for one, optimizer in ((plain, made[0]), (other, again)):
        train(one, optimizer, steps=range(STEPS, 2 * STEPS))
    alike(other, plain)


@composition("optimizer.state_dict(): torch.save on each rank, and torch's DCP of it or of the optimizer")
def optimizer_state(method):
    def each(_, optimizer, __, again):
        torch.save(optimizer.state_dict(), file := io.BytesIO())
        file.seek(0)
        again.load_state_dict(torch.load(file))

    def together(_, optimizer, other, again):
        train(other, again, steps=[0])  # so that there is state to read into
        other.load_state_dict(_.state_dict())
        with shared_folder() as folder:
            dcp.save({"o": optimizer.state_dict(), "stateful": optimizer}, checkpoint_id=f"{folder}/dcp")
            dcp.load({"stateful": again}, checkpoint_id=f"{folder}/dcp")
            state = {"o": again.state_dict()}
            dcp.load(state, checkpoint_id=f"{folder}/dcp")
            again.load_state_dict(state["o"])

    optimizer_kept(method, each)
    optimizer_kept(method, together)


@composition("torch's DCP of the model's state_dict(), read by another mask and by a dense model")
def dcp_model(method):
    _, model = twins(method)
    train(model, sgd(model))
    with shared_folder() as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
        for other in (converted(dense(), "recompress" if method == "packed" else method), dense()):
            dcp.load(state := {"model": other.state_dict()}, checkpoint_id=f"{folder}/dcp")
            other.load_state_dict(state["model"])
            alike(other, model, close=0.0)


def keep_by_dcp(model, optimizer, other, again, options=None):
    with shared_folder() as folder:
        dcp.save({"o": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=f"{folder}/dcp")
        state = {"o": get_optimizer_state_dict(other, again, options=options)}
        dcp.load(state, checkpoint_id=f"{folder}/dcp")
        set_optimizer_state_dict(other, again, state["o"], options=options)


composition("get_optimizer_state_dict, set_optimizer_state_dict of torch.distributed.checkpoint")(
    lambda method: optimizer_kept(method, keep_by_dcp)
)


@composition("the same with flatten_optimizer_state_dict=True")
def dcp_optimizer_flat(method):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    optimizer_kept(method, functools.partial(keep_by_dcp, options=options))


@composition("the same with full_state_dict=True", SHARED)
def dcp_optimizer_whole(method):
    _, model = twins(method)
    optimizer, options = adamw(model), StateDictOptions(full_state_dict=True)
    train(model, optimizer)
    get_optimizer_state_dict(model, optimizer, options=options)


@composition("torch.amp.GradScaler, an infinity in one rank's gradient")
def scaled(method):
    plain, model = twins(method)
    for one in (plain, model):
        optimizer, scaler = sgd(one), torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = batch(step)
            scaler.scale((one(x) - y).square().mean()).backward()
            if step == 1 and (one is plain or method == "Linear24" or dist.get_rank() == 2):
                one[2].weight.grad.view(-1)[5] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 32
    alike(model, plain)


@composition("ZeroRedundancyOptimizer over the ranks of the layer")
def zero(method):
    alone(method, lambda one: ZeroRedundancyOptimizer(one.parameters(), torch.optim.SGD, lr=0.1))


# What ranks must do alike


@composition("from_linear with another weight on one rank", SHARED)
def unequal_weights(method):
    model = dense()
    with torch.no_grad():
        model[2].weight[3, 5] += dist.get_rank() == 2
    converted(model, method)


@composition("from_linear with another mask on one rank", ("packed", "recompress", "C", "D"))
def unequal_masks(method):
    names = ("uniform_1100", "checkerboard") if method == "D" else ("random", "transposable_random")
    layer_of(dense()[0], method, mask=names[dist.get_rank() == 2])


@composition("an optimizer made before the conversion, by BlockShockParallel", STYLED)
def optimizer_before(method):
    model = dense()
    optimizer = sgd(model)
    train(styled(method, lambda: model), optimizer)


@composition("another seed on each rank: BlockShockParallel, which sends rank 0's weights", STYLED)
def unequal_seeds(method):
    for compiled in (False, True):  # eagerly, and in one graph
        plain, model = dense(), styled(method, lambda: dense(dist.get_rank()))
        if compiled:
            model.compile(fullgraph=True, backend="aot_eager")
        trains_alike(model, plain)


@composition("another seed on each rank, an embedding or dropout before the layer", SHARED)
def unequal_before(method):
    one, other = twins(method)[1], twins(method)[1]
    torch.manual_seed(dist.get_rank())
    said_by(nn.Sequential(nn.Dropout(0.5), one), batch(0)[0])
    nn.Sequential(nn.Embedding(8, FEATURES, dtype=F64), other)(torch.arange(8))


composition("another batch of the same size on each rank", SHARED)(lambda way: twins(way)[1](batch(dist.get_rank())[0]))


@composition("another seed on each rank, dropout behind the layer, or other targets", SHARED)
def unlike_behind(method):
    _, y = batch(dist.get_rank())
    said = said_by(twins(method)[1](batch(0)[0]).sub(y).square().mean().backward)
    model = nn.Sequential(*twins(method)[1], nn.Dropout(0.5))
    torch.manual_seed(dist.get_rank())
    again = said_by(model(batch(0)[0]).sum().backward)
    assert "was given another dy than rank 0" in said and said.partition(": ")[2] == again.partition(": ")[2]
    raise UnsupportedError(said)


@composition("another batch on each rank, of which one channel is large on all", SHARED)
def outlier(method):
    x = torch.randn(64, FEATURES, dtype=F64, generator=torch.Generator().manual_seed(dist.get_rank()))
    x[:, 0] = 60
    twins(method)[1](x)


@composition("a batch of another size on one rank: at the first forward, or at any with BLOCKSHOCK_CHECK=1", SHARED)
def unequal_batches(method):
    _, model = twins(method)
    x = torch.ones(4 + (dist.get_rank() == 3), FEATURES, dtype=F64)
    first = said_by(model, x)
    for _ in range(2):  # a look of the watch right after it makes no rank leave a later pass
        dist.barrier()
        watch._look()
    model(batch(0)[0])
    with mock.patch.object(watch, "CHECK", True):
        assert said_by(model, x) == first
        model[0].chunks = 1 + (dist.get_rank() == 3)
        assert "another chunks than rank 0: set layer.chunks to the same" in said_by(model, batch(0)[0])
    raise UnsupportedError(first)


@composition("batches of another size later, where no collective says so (NCCL)", SHARED)
def unequal_later(method):
    _, model = twins(method)
    for step in range(2):
        model(batch(step)[0])
    alone = {"all_reduce": lambda _, x, *__: x, "all_gather": lambda _, x, *__: x.repeat(4, 1)}
    with mock.patch.multiple(Group, **alone):
        model[0](torch.ones(4 + (dist.get_rank() == 3), FEATURES, dtype=F64))
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(2):
            dist.barrier()
            watch._look()
    assert any("another shape" in str(one.message) for one in caught), caught
    try:
        model(batch(0)[0])
    except UnsupportedError as error:
        raise UnsupportedError(all_say(str(error))) from error
    finally:
        dist.barrier()
        watch._groups.clear()


@composition("a forward, backward, clip_grad_norm_ or GradScaler that one rank does not call: said within 60 s", SHARED)
def pass_left_out(method):
    _, model = twins(method)
    watch._groups.clear()
    model(batch(0)[0])
    store, said = dist.distributed_c10d._get_default_store(), []

    def hear(text, **_):
        said.append(text)
        store.set(f"{method}: {' of '.join(text.split(' of ')[:2])}", "")

    def until_said(rank, what):
        words = f"{method}: ranks [{rank}] of 4 have not called the {what}"
        while dist.get_rank() == rank and not store.check([words]):
            time.sleep(0.01)

    with mock.patch.multiple(watch, PERIOD=0.1, warnings=SimpleNamespace(warn=hear)):
        threading.Thread(target=watch.watch, daemon=True).start()
        until_said(0, "forward")
        y = model(batch(0)[0])
        until_said(1, "backward")
        y.sum().backward()
        until_said(2, "clip_grad_norm_")
        clip_grad_norm_(model, 1.0)
        until_said(3, "GradScaler")
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.unscale_(sgd(model))
    said = sorted(set().union(*Group.of().gather_objects(said)))
    raise Warned(next(one for one in said if "ranks [0] of 4 have not called the forward of" in one))


@composition("state_dict() that one rank does not call: said after 60 s", SHARED)
def left_out(method):
    group, (_, model), said = Group.of(), twins(method), ""
    store, clock = dist.distributed_c10d._get_default_store(), [0.0]

    def sleep(_):
        if not clock[0]:  # the ranks that wait are all there before time passes, so that each misses the same one
            store.add(f"{method}: wait", 1)
            while store.add(f"{method}: wait", 0) < 3:
                time.sleep(0.01)
        clock[0] += 61

    with (
        warnings.catch_warnings(record=True, action="always") as caught,
        mock.patch.object(comm_ranks, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)),
    ):
        if group.rank != 1:
            said = said_by(model.state_dict)
            assert any("ranks [1] of 4 have not called" in str(one.message) for one in caught)
    dist.barrier()
    assert model.state_dict().keys() == dense().state_dict().keys()  # and together it works again
    raise UnsupportedError(all_say(said))


# Parts of a model


def styled(method, make=dense):
    """A model whose Linears are Block-Shock layers of all ranks, by the style."""
    options = METHODS[method][1]
    return parallelize_module(make(), init_device_mesh("cpu", (4,)), {"[02]": BlockShockParallel(**options)})


composition("from_linear of a layer that is packed or sharded already")(lambda way: layer_of(twins(way)[1][0], way))
composition("from_linear of a Conv1D of transformers")(lambda way: layer_of(type("Conv1D", (nn.Module,), {})(), way))


@composition("from_linear of a weight that another module holds too, as a head's is an embedding's")
def tied_before(method):
    model = dense()
    model[2].weight = model[0].weight
    layer_of(model[2], method)


def ways_in(method):
    """What makes a layer of this method of a Linear: by the style too, where it may."""
    by_style = lambda linear: styled(method, lambda: nn.ModuleDict({"0": linear}))  # noqa: E731
    return (*[by_style] * (method in STYLED), lambda linear: layer_of(linear, method))


@composition("a hook of the weight or bias of what is converted, by BlockShockParallel too")
def hooked_weight(method):
    for convert in ways_in(method):
        for name, kind in itertools.product(("bias", "weight"), ("hook", "post_accumulate_grad_hook")):
            getattr(getattr(linear := dense()[0], name), f"register_{kind}")(lambda grad: None)
            said = said_by(convert, linear)
            assert type(linear) is nn.Linear and f"its {name} has hooks" in said, said
    raise UnsupportedError(said)


@composition("a buffer, parameter or module beside the weight and bias of what is converted, by BlockShockParallel too")
def more_than_a_weight(method):
    one = nn.Parameter(torch.ones(1, dtype=F64))
    for convert in ways_in(method):
        for add, more in (("module", nn.Identity()), ("parameter", one), ("buffer", one.detach())):
            getattr(linear := dense()[0], f"register_{add}")("scale", more)
            said = said_by(convert, linear)
            assert type(linear) is nn.Linear and "than weight and bias, and scale would be lost" in said, said
    raise UnsupportedError(said)


@composition("a model on the meta device, its weights loaded later, by BlockShockParallel", STYLED)
def from_meta(method):
    plain = dense()
    model = styled(method, lambda: dense().to("meta"))
    assert all(bool(p.isnan().any()) for one in (model[0], model[2]) for p in one.parameters())
    model[1].to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    trains_alike(model, plain)


@composition("a module with hooks, by BlockShockParallel", STYLED)
def hooked(method):
    plain, seen = dense(), []
    model = copy.deepcopy(plain)
    for one in (plain, model):
        one[0].register_forward_pre_hook(lambda *_: seen.append("before"))
        one[0].register_forward_hook(lambda _, args, y: 2 * y)
        one[0].register_full_backward_hook(lambda *args: seen.append("backward"))
    model[0].register_state_dict_post_hook(lambda *_: seen.append("state"))
    styled(method, lambda: model)
    trains_alike(model, plain)
    assert seen == [*["before", "backward"] * 2 * STEPS, "state"]
    torch.testing.assert_close(model[0](input=batch(0)[0]), plain[0](batch(0)[0]), **CLOSE)


@composition("nn.TransformerEncoderLayer in eval mode")
def encoder(method):
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(FEATURES, 2, FEATURES, batch_first=True, dtype=F64).eval()
    model = converted(plain, method)
    if method == "Linear24":
        for name in ("linear1", "linear2"):
            setattr(plain, name, model.get_submodule(name).to_linear())
    x, pad = batch(0)[0].view(2, BATCH // 2, FEATURES), torch.arange(BATCH // 2).expand(2, -1) > 2
    for one_pad in (None, pad):
        with torch.no_grad():
            found, wanted = (
                nn.TransformerEncoder(one, 1, enable_nested_tensor=False).eval()(x, src_key_padding_mask=one_pad)
                for one in (model, plain)
            )
        torch.testing.assert_close(found[:, :3], wanted[:, :3], **CLOSE)


@composition("torch.func.functional_call")
def called_with_other_weights(method):
    kept = []
    for one in twins(method):
        other = {name: (2 * p if p.dim() > 1 else p + 1).detach() for name, p in one.named_parameters()}
        late = one(x := batch(0)[0].requires_grad_())
        lent = torch.func.functional_call(one, other, x)
        late.sum().backward()  # after another weight was in use: with the weight of its own forward
        kept.append((lent, x.grad, one(x)))
    torch.testing.assert_close(*kept, **CLOSE)


@composition("torch.func.grad, jvp, vmap")
def transformed(method):
    model, x = twins(method)[1][0], batch(0)[0]
    said_by(torch.func.grad(lambda x: model(x).sum()), x)
    said_by(torch.func.jvp, model, (x,), (x,))
    y = model(x.requires_grad_())
    said_by(torch.func.vmap(lambda dy: torch.autograd.grad(y, x, dy)), torch.ones(2, *y.shape, dtype=F64))
    torch.func.vmap(model)(x.view(2, -1, FEATURES))


composition("torch.export")(lambda way: torch.export.export(twins(way)[1], (batch(0)[0],), strict=False))
composition("torch.jit.trace, as ONNX takes it")(lambda way: torch.jit.trace(twins(way)[1], batch(0)[0]))
composition("torch.jit.script")(lambda way: torch.jit.script(twins(way)[1]))
composition("torch.fx")(lambda way: torch.fx.symbolic_trace(twins(way)[1]))


@composition("the state of a dense model's AdamW, loaded into that of the layers")
def dense_states(method):
    plain, model = twins(method)
    made, ours = (torch.optim.AdamW(one.parameters()) for one in (plain, model))
    train(plain, made, steps=[0])
    ours.load_state_dict(made.state_dict())


@composition("weights written through their .data, in place (an EMA swapped in and out), or set")
def written_by_data(method):
    plain, model = twins(method)
    for one in (plain, model):
        made = sgd(one)
        train(one, made, steps=[0])
        mean = [p.detach() / 2 for p in one.parameters()]
        train(one, made, steps=[1])
        own = [p.detach().clone() for p in one.parameters()]
        one.seen = []
        for values in (mean, own):
            for p, value in zip(one.parameters(), values, strict=True):
                p.data.copy_(value)
            x = batch(2)[0].requires_grad_()
            one.seen += [y := one(x), torch.autograd.grad(y.sum(), x)[0]]
        train(one, made, steps=[2])
        lent = [p.data * 2 for p in one.parameters()]
        for p, buffer in zip(one.parameters(), lent, strict=True):
            p.data = buffer
        one.seen.append(one(batch(3)[0]))
        for buffer in lent:  # of which a weight may be a part, as of a flat buffer of all
            buffer.mul_(0.7)
        x = batch(4)[0].requires_grad_()
        one.seen += [y := one(x), torch.autograd.grad(y.sum(), x)[0]]
        one[2].weight = nn.Parameter(one[2].weight.detach().clone())
        for _ in range(2):
            x = batch(5)[0].requires_grad_()
            one.seen += [y := one(x), torch.autograd.grad(y.sum(), x)[0]]
            one[2].weight.data.mul_(2)
    torch.testing.assert_close(model.seen, plain.seen, **CLOSE)
    alike(model, plain)


@composition("a dense weight set in the place of a layer's")
def set_dense(method):
    twins(method)[1][0].weight = nn.Parameter(dense(1)[0].weight.detach())


@composition("torch.func.functional_call of a state_dict(), a dense tensor set as a weight's data")
def lent_dense(method):
    model, x = twins(method)[1], batch(0)[0]
    said = said_by(torch.func.functional_call, model, model.state_dict(), x)
    model[0].weight.data = dense()[0].weight.detach()
    assert said_by(model, x) == said_by(model.state_dict) == said
    raise UnsupportedError(said)


@composition("weights written in place before the first step or behind one, as noise is, and stepped then or not")
def noisy(method):
    for before, after in ((0, 0), (0, 1), (1, 0), (1, 1)):
        (plain, model), x = twins(method), batch(1)[0]
        train(model, sgd(model), steps=range(before))
        for layer in (model[0], model[2]):  # by column, or a norm behind it would not see the holes
            layer.weight.detach().add_(torch.linspace(0, 1, layer.weight.shape[-1]))
        for _ in range(after):
            sgd(model).step()
        y = model(x)
        plain.load_state_dict(weights(model))
        torch.testing.assert_close(y, plain(x), **CLOSE)


@composition("a weight or bias that is not trained, of what is converted")
def partly_frozen(method):
    plain = dense()
    plain[0].weight.requires_grad_(False)
    plain[2].bias.requires_grad_(False)
    model = converted(plain, method)
    for one in (model, nn.Sequential(model[0].to_linear(), model[1], model[2].to_linear())):
        assert [p.requires_grad for p in one.parameters()] == [p.requires_grad for p in plain.parameters()]
    if method != "Linear24":  # which prunes
        trains_alike(model, plain)


@composition("a forward in inference mode of a copy, and training it then")
def inferred(method):
    plain, model = twins(method)
    model = copy.deepcopy(model)
    with torch.inference_mode():
        model(batch(0)[0])
    trains_alike(model, plain)


@composition("a gradient's gradient, of torch.autograd.grad(create_graph=True)")
def twice(method):
    x = batch(0)[0].requires_grad_()
    torch.autograd.grad(twins(method)[1](x).sum(), x, create_graph=True)


@composition("torch.autograd.forward_ad, with and without a backward to come")
def forward_mode(method):
    model, x = twins(method)[1], batch(0)[0]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with torch.no_grad():
            said = said_by(model, dual)
        assert said == said_by(model, dual)
    raise UnsupportedError(said)


@composition("torch.nn.utils.prune, weight_norm, spectral_norm, parametrize")
def made_anew(method):
    utils, model = nn.utils, twins(method)[1]
    for make in (utils.spectral_norm, utils.weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)):
        said = said_by(make, copy.deepcopy(model[0]))
    for make in (utils.parametrizations.weight_norm, utils.parametrizations.spectral_norm):
        assert said_by(make, model[0]) == said
    alike(model, twins(method)[0], trained=False)
    raise UnsupportedError(said)


@composition("a process that a rank forks, as Hogwild may", SHARED)
def forked(method):
    model, (read, write) = twins(method)[1], os.pipe()
    if not (child := os.fork()):
        try:
            os.write(write, said_by(model, batch(0)[0]).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    raise UnsupportedError(os.read(read, 999).decode())


@composition("one layer used twice")
def used_twice(method):
    plain, model = (nn.Sequential(*one, one[0], one[2]) for one in twins(method))
    trains_alike(model, plain)


@composition("one layer's weight set as another's", ("packed", "recompress", "B1", "B2", "C", "D"))
def tied(method):
    plain, model = twins(method)
    for one in (plain, model):
        one[2].load_state_dict(one[0].state_dict())
        one[2].weight = one[0].weight
    trains_alike(model, plain)


@composition("copy.deepcopy, and training the copy")
def copied(method):
    plain, model = twins(method)
    other = copy.deepcopy(model)
    trains_alike(other, plain)
    alike(model, twins(method)[0], trained=False)


@composition("pickle, torch.save of the model")
def pickled(method):
    plain, model = twins(method)
    trains_alike(pickle.loads(pickle.dumps(model)), plain)


@composition("an average of the weights (EMA by AveragedModel)")
def averaged(method):
    kept = []
    for one in twins(method):
        mean, optimizer = AveragedModel(one, multi_avg_fn=get_ema_multi_avg_fn(0.9)), sgd(one)
        for step in range(STEPS):
            train(one, optimizer, steps=[step])
            mean.update_parameters(one)
        kept.append((mean.module, mean(batch(0)[0])))
    alike(kept[1][0], kept[0][0], trained=False)
    torch.testing.assert_close(kept[1][1], kept[0][1], **CLOSE)


@composition("an average written into a state_dict(), as timm's ModelEma does, or another write in place")
def averaged_in_state(method):
    model = twins(method)[1]
    mean = copy.deepcopy(model)
    said = said_by(lambda: model.state_dict()["0.weight"][:5].mul_(2))
    for mine, value in zip(mean.state_dict().values(), model.state_dict().values(), strict=True):
        assert said_by(mine.copy_, 0.5 * mine + 0.5 * value) == said
        alike(mean, model, close=0.0, trained=False)
        raise UnsupportedError(said)


@composition("weights that a collective over dp writes, as dist.broadcast(parameter)")
def broadcast_over_dp(method):
    dp, tp = square()["dp"].get_group(), square()["tp"].get_group()
    plain, model = twins(method, tp)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + dp.rank())
    model(batch(0)[0].requires_grad_()).sum().backward()  # what is kept of the weights is made now
    model.zero_grad()
    for at, parameter in enumerate(model.parameters()):
        dist.broadcast(parameter.detach() if at % 2 else parameter.requires_grad_(False), group=dp, group_src=0)
        parameter.requires_grad_()
    trains_alike(model, plain)


@composition("PeriodicModelAverager over the ranks of the layer", SHARED)
def averaged_over_parts(method):
    model = twins(method)[1]
    train(model, sgd(model), steps=[0])
    PeriodicModelAverager(period=1).average_parameters(model.parameters())


@composition("activation checkpointing, reentrant or not, and selective, which keeps matrix products")
def checkpointed(method):
    class Recomputed(nn.Sequential):
        def forward(self, x):
            x.requires_grad_()
            for layer in self:
                x = recompute(layer, x, **self.how)
            return x

    products = functools.partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    )
    for how in ({"use_reentrant": True}, {}, {"context_fn": products}):
        plain, model = twins(method)
        run = Recomputed(*model)
        run.how = {"use_reentrant": False} | how
        for layer in model:
            layer.chunks = 2  # where it is one of several ranks' layers
        trains_alike(run, plain)


@composition("a write in place behind it, as nn.ReLU(inplace=True) or +=, also of x with more dimensions")
def written_behind(method):
    class Written(nn.Sequential):
        def forward(self, x):
            for at, layer in enumerate(self):
                y = layer(x if at else x.unflatten(0, (2, -1)))
                y += 1
                x = nn.functional.relu(y, inplace=True).reshape(x.shape)
            return x

    plain, model = twins(method)
    trains_alike(Written(*model), Written(*plain))


@composition("ColwiseParallel before, RowwiseParallel after", SHARED)
def beside_styles(method):
    plain = nn.Sequential(dense(), dense(), dense())
    model = nn.Sequential(dense(), converted(dense(), method), dense())
    plan = {"0.2": ColwiseParallel(output_layouts=Replicate()), "2.0": RowwiseParallel(input_layouts=Replicate())}
    model = parallelize_module(model, init_device_mesh("cpu", (4,)), plan)
    trains_alike(model, plain, make=adamw)


@composition("ColwiseParallel on the layer itself", SHARED)
def under_styles(method):
    model = twins(method)[1]
    try:
        parallelize_module(model, init_device_mesh("cpu", (4,)), {"0": ColwiseParallel()})
    except NotImplementedError as error:
        raise UnsupportedError("by torch itself: its styles take nn.Linear and nn.Embedding alone") from error


@composition("distribute_module of torch over the layer's ranks", SHARED)
def distributed(method):
    model = distribute_module(twins(method)[1], init_device_mesh("cpu", (4,)))
    with torch.no_grad():
        model(batch(0)[0])


@composition("pipeline stages (GPipe), two of two ranks each", SHARED)
def pipeline(method):
    mesh, (plain, model) = square(), twins(method, square()["tp"].get_group())
    number = mesh["dp"].get_local_rank()
    cut = 1 if method == "B1" else 2  # torch sends contiguous tensors alone: no dX of B1, no y of B2
    part = model[:cut] if number == 0 else model[cut:]
    if number:  # what a pipeline passes to learn the shapes is uninitialised

        def other_values(_, inputs):
            hook.remove()
            inputs[0].detach().fill_(dist.get_rank())

        hook = part.register_forward_pre_hook(other_values)
    stage = PipelineStage(part, number, 2, torch.device("cpu"), group=mesh["dp"].get_group())
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.MSELoss())
    train(plain, sgd(plain))
    optimizer = sgd(part)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        schedule.step(x) if number == 0 else schedule.step(target=y)
        optimizer.step()
    found, wanted = weights(part), weights(plain)
    torch.testing.assert_close(found, {key: wanted[key] for key in found}, **CLOSE)


@composition("checkpoint.save of pipeline stages", SHARED)
def pipeline_saved(method):
    model = twins(method, square()["tp"].get_group())[1]
    with shared_folder() as folder:
        part = nn.Sequential(model[0], model[1]) if dist.get_rank() < 2 else model
        said = said_by(checkpoint.save, f"{folder}/c", part)
        assert not list(Path(folder).iterdir())
    raise UnsupportedError(said)


def cell(prove, method):
    """What this rank found: "right", "refused: ..." or "warned: ...", or what went wrong."""
    try:
        prove(method)
    except Warned as error:
        return f"warned: {error}"
    except BlockShockError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"
    return "right"


def cells(ctx, name):
    """A row on this rank: method -> cell."""
    prove, methods = COMPOSITIONS[name]
    with warnings.catch_warnings(action="ignore"):
        return {method: cell(prove, method) for method in methods}


def proven(group, name):
    """(the row of the table, the sentence under it or "") as all ranks of a WorkerGroup find them."""
    found, *_ = ranks = group.call(cells, name, seconds=600)
    for method in found:
        kinds = {rank[method].partition(":")[0] for rank in ranks}
        assert len(kinds) == 1 and "wrong" not in kinds, f"{name}, {method}: {[rank[method] for rank in ranks]}"
    kinds = [found[method].partition(":")[0] if method in found else "" for method in METHODS]
    sentence = next((one.partition(": ")[2] for one in found.values() if one != "right"), "")
    sentence = re.sub(r"rank \d of 4, mask", "rank 0 of 4, mask", re.sub(r"for \d+ s:", "for 60 s:", sentence))
    return f"| {name} | {' | '.join(kinds)} |", f"- **{name}:** {sentence}" * bool(sentence)


def table(group):
    rows, sentences = zip(*(proven(group, name) for name in COMPOSITIONS), strict=True)
    head = f"| composition | {' | '.join(METHODS)} |\n|{' --- |' * (len(METHODS) + 1)}"
    return "\n".join((head, *rows, "", *filter(None, sentences)))


def main():
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    with WorkerGroup(4) as group:
        PAGE.write_text(f"{before}{BEGIN}\n{table(group)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    from tests.layers import compositions  # by the name that ranks import it by

    compositions.main()
