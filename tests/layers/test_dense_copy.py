"""What a state dict has of a packed weight: a copy that refuses to be written, and is a plain tensor in all else."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from blockshock_lib import BlockSparse, Linear24, Sparse24, dense_, sparsify_
from blockshock_lib.errors import UnsupportedError
from tests.layers.ranks import N

WEIGHT = "0.weight"


def made(kind="trained"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(N, N), nn.LayerNorm(N))
    configs = {"trained": Sparse24(frozen=False), "frozen": Sparse24(), "int8": Sparse24(dtype="int8")}
    sparsify_(model, configs.get(kind) or BlockSparse(block=16, sparsity=0.5))
    return model


def write_an_item(held):
    held[0, 0] = 1


def add_in_place(held):
    held += 1


WRITES = {
    "copy_": lambda held: held.copy_(2 * held),
    "item": write_an_item,
    "+=": add_in_place,
    "row": lambda held: held[0].mul_(2),
    "rows": lambda held: [row.mul_(2) for row in held],
    "detach": lambda held: held.detach()[0].mul_(2),
    "compiled": lambda held: torch.compile(lambda held: held.mul_(2), backend="eager")(held),
    "data": lambda held: held.data.t().mul_(2),
    "out": lambda held: torch.mul(torch.ones(N, N), 2, out=held),
    "foreach": lambda held: torch._foreach_mul_([torch.ones(2), held], 2.0),
    "init": nn.init.zeros_,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("kind", ["trained", "frozen", "int8", "blocks"])
def test_a_write_into_a_state_dict_names_the_layer_and_the_way_out(kind, write):
    model = made(kind)
    way = r"dense_\(model\)" if kind in ("int8", "blocks") else "AveragedModel"
    with torch.no_grad(), pytest.raises(UnsupportedError, match=rf"^0.weight .* copy of what .*Linear.*{way}"):
        write(model.state_dict()[WEIGHT])
    with torch.inference_mode(), pytest.raises(UnsupportedError, match=way):
        write(model.state_dict()[WEIGHT])
    model.state_dict()["0.bias"].mul_(2)  # which is the layer's own


def test_what_is_made_of_it_and_what_a_file_holds_is_plain(tmp_path):
    model = made()
    held, dense = model.state_dict()[WEIGHT], model[0].to_dense()
    torch.save({"a": held, "b": held.t()}, file := io.BytesIO())
    file.seek(0)
    save_file(model.state_dict(), tmp_path / "one.safetensors")
    copies = [torch.load(file)["a"], load_file(tmp_path / "one.safetensors")[WEIGHT], pickle.loads(pickle.dumps(held))]
    copies += [copy.deepcopy(held), copy.deepcopy(model.state_dict())[WEIGHT], held.clone(), held + 0]
    for one in copies:
        assert type(one) is torch.Tensor and torch.equal(one, dense)
        one.mul_(2)
    assert np.array_equal(np.asarray(made().state_dict()[WEIGHT]), dense) and (made()[0].to_dense() == dense).all()
    taken = torch.compile(lambda held: torch.zeros(N, N).copy_(held), backend="eager", fullgraph=True)(held)
    assert torch.equal(taken, dense), "a compiled function reads it"
    with pytest.raises(ValueError, match="read-only"):
        held.numpy()[:] = 0
    assert type(held.shape) is torch.Size and type(nn.Parameter(held)) is nn.Parameter
    assert isinstance(nn.Parameter(), nn.Parameter)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_models_of_either_kind_load_it(assign, swap):
    model, plain, x = made(), nn.Sequential(nn.Linear(N, N), nn.LayerNorm(N)), torch.randn(4, N)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        plain.load_state_dict(model.state_dict(), assign=assign)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    model.load_state_dict(model.state_dict(), assign=assign)
    assert type(plain[0].weight) is nn.Parameter
    torch.testing.assert_close(plain(x), model(x))
    plain(x).sum().backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    state = {key: value.requires_grad_() for key, value in model.state_dict().items()}
    for call in (torch.func.functional_call, torch.compile(torch.func.functional_call, backend="eager")):
        y = call(plain, state, (x,))
        torch.testing.assert_close(y, model(x))
    assert torch.autograd.grad(y.square().sum(), state[WEIGHT])[0].any()


def test_a_weight_that_is_computed_for_each_look_refuses_to_be_written():
    model, x = made("int8"), torch.randn(4, N)
    wanted = model(x)
    for write in (lambda weight: weight.mul_(2), lambda weight: weight.data.mul_(2)):
        with torch.no_grad(), pytest.raises(UnsupportedError, match=r"0: PatternLinear.*dense_\(model\)"):
            write(model[0].weight)
    assert torch.equal(model(x), wanted)
    dense_(model)
    model[0].weight.data.mul_(2)


def test_a_layer_without_a_path_is_named_by_its_state():
    layer = Linear24.from_linear(nn.Linear(N, N), mask="magnitude")
    with pytest.raises(UnsupportedError, match=r"^weight of .* copy of what Linear24\(64, 64"):
        layer.state_dict()["weight"].zero_()
