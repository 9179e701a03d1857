"""What BlockShockParallel takes and keeps in a plan of parallelize_module; how it trains: test_compositions.py.

A function of `ctx` is a claim that both ranks check (tests/conftest.py).
"""

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from blockshock_lib import BlockShockLinear, BlockShockParallel
from blockshock_lib.errors import UnsupportedError
from tests.training import mlp


def what_cannot_be_converted_is_refused_and_stays_as_it_was(ctx):
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    square = init_device_mesh("cpu", (1, ctx.world_size), mesh_dim_names=("dp", "tp"))
    normed, sharded, patched = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
    nn.utils.weight_norm(normed)
    parallelize_module(sharded, mesh, ColwiseParallel())
    patched.forward = lambda x: x
    for words, module, where, mask in (
        ("only an nn.Linear", nn.Embedding(64, 64), mesh, "random"),
        ("a mesh of one dimension", nn.Linear(64, 64), square, "random"),
        ("multiple", nn.Linear(62, 64), mesh, "random"),
        ("weight_norm", normed, mesh, "random"),
        ("own forward", patched, mesh, "random"),
        ("its weight is a DTensor", sharded, mesh, "random"),
        ("load them first", nn.Linear(64, 64, device="meta"), mesh, "magnitude"),
    ):
        kind, keys = type(module), set(vars(module))
        with pytest.raises((UnsupportedError, ValueError), match=words):
            BlockShockParallel(mask)._apply(module, where)
        assert type(module) is kind and set(vars(module)) == keys
    tied, block = mlp(), nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(64, 62))})
    tied[2].weight = tied[0].weight
    for words, model, name in (
        ("0: it shares a parameter with 2: give it one of its own", tied, "0"),
        ("mlp.0: ", block, "mlp.*"),
    ):
        with pytest.raises((UnsupportedError, ValueError), match=words):
            parallelize_module(model, mesh, {name: BlockShockParallel()})
        assert not any(isinstance(m, BlockShockLinear) for m in model.modules())


def names_attributes_and_modes_survive_the_change_on_a_slice_of_a_mesh_too(ctx):
    model = mlp().eval()
    model[0].note = "mine"
    model[0].weight.requires_grad_(False)
    mesh = init_device_mesh("cpu", (1, ctx.world_size), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"[02]": BlockShockParallel(dw="full")})
    assert model[0].note == "mine" and not model[0].training and model[0].wgrad_by == "full"
    trains = [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]
    assert trains == [("0.weight", False), ("0.bias", True), ("2.weight", True), ("2.bias", True)]
    assert [p.requires_grad for at in (0, 2) for p in model[at].to_linear().parameters()] == [on for _, on in trains]


def test_on_two_ranks(claim_of_ranks, pair):
    pair.call(claim_of_ranks, seconds=600)


def test_an_option_that_no_layer_has_is_refused():
    with pytest.raises(TypeError, match="produkt"):
        BlockShockParallel(produkt="auto")
