"""clip_grad_norm_ gives every rank the dense model's norm, and the dense model's clipped update."""

import copy
import math
import subprocess
import sys
from collections import OrderedDict
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_ as torchs_own

from blockshock_lib import BlockShockLinear, BlockShockParallel, RowParallelLinear, clip_grad_norm_
from blockshock_lib.layers import ShardedLinear
from tests import training
from tests.layers.ranks import CASES, K, N, built, draw, in_process

NORMS = [1, 2, math.inf]
F64 = torch.float64


@pytest.fixture(params=["pair", "four"])
def ranks(request):
    group = request.getfixturevalue(request.param)
    return lambda fn, *args: group.call(in_process, fn, *args, seconds=600)


class Net(nn.Module):
    """A layer to share, between layers that every rank holds whole; one of these is used twice, one is frozen."""

    def __init__(self, dtype=F64):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.shared, self.head = nn.LayerNorm(K), nn.Linear(K, N), nn.Linear(N, N)
        self.frozen, self.again = nn.Linear(N, N).requires_grad_(False), self.head
        self.to(dtype)

    def forward(self, x):
        return self.again(self.frozen(self.head(self.shared(self.norm(x)))))


def trained(model):
    """`model` with gradients; on a rank that stands by, those of the dense model for what is not shared."""
    dtype = model.norm.weight.dtype
    run = model if getattr(model.shared, "active", True) else Net(dtype)
    run(draw(5, K, dtype=dtype)).square().sum().backward()
    for name, parameter in model.named_parameters():
        parameter.grad = None if run is not model and name.startswith("shared") else run.get_parameter(name).grad
    return model


def whole_grads(model):
    """The gradients by name, the shared layers' whole; None where this rank stands by."""
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, layer in model.named_modules():
        if isinstance(layer, ShardedLinear):
            grads[f"{name}.weight"] = layer.to_dense(layer.weight.grad if layer.active else None)
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def largest_difference(model, dense):
    """Of the gradients, relative to the largest entry of each."""
    found, wanted = whole_grads(model), whole_grads(dense)
    assert found.keys() == wanted.keys()
    off = [(found[n] - grad).abs().max() / grad.abs().max() for n, grad in wanted.items() if found[n] is not None]
    return max(off).item()


def like_dense(group, cases):
    """The norm and the clipped gradients of each case are the dense model's, to 1e-12 of them."""
    for (name, mask, changes), norm_type in product(cases, NORMS):
        dense, model = trained(Net()), Net()
        model.shared = built(name, mask, model.shared.weight, model.shared.bias, **changes)
        trained(model)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        wanted = torchs_own(dense.parameters(), math.inf, norm_type).item()
        for part in (10.0, 0.1):  # not clipped, and clipped
            torchs_own(dense.parameters(), part * wanted, norm_type)
            norm, told = clip_grad_norm_(model, part * wanted, norm_type).item(), (name, mask, changes, norm_type)
            assert abs(norm - wanted) < 1e-12 * wanted and largest_difference(model, dense) < 1e-12, told
            after = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(map(torch.equal, before, after)) == (part > 1), told


@pytest.mark.long
def test_norm_and_clipped_update_are_the_dense_models_for_every_method(ranks):
    ranks(like_dense, [("dense", "checkerboard", {}), *CASES])


def compared(model, dense, x, max_norm, norm_type=2.0, close=1e-12):
    """The norm and the clipped gradients are the dense model's."""
    for one in (dense, model):
        one(x).square().sum().backward()
    wanted = torchs_own(dense.parameters(), max_norm, norm_type).item()
    assert clip_grad_norm_(model, max_norm, norm_type).item() == pytest.approx(wanted, rel=close)
    assert largest_difference(model, dense) < close


def two_groups(group):
    """A layer on all ranks and one on each half of them."""
    half = group.world_size // 2
    halves = [dist.new_group(range(half)), dist.new_group(range(half, 2 * half))]
    dense = training.mlp(features=K, dtype=F64)
    model = copy.deepcopy(dense)
    model[0] = BlockShockLinear.from_linear(model[0], mask="checkerboard")
    model[2] = RowParallelLinear.from_linear(model[2], process_group=halves[group.rank // half])
    compared(model, dense, draw(5, K, dtype=F64), 0.01)


def beside_torchs_styles(group, norm_type, dtype, close):
    """A plan with torch's styles before and after Block-Shock, which gets a sharded DTensor."""
    sizes = {"up": (64, 128), "shock": (128, 128), "down": (128, 64)}
    layers = {"norm": nn.LayerNorm(64)} | {name: nn.Linear(*size) for name, size in sizes.items()}
    torch.manual_seed(0)
    dense = nn.Sequential(OrderedDict(layers)).to(dtype)
    plan = {
        "u*": ColwiseParallel(use_local_output=False),
        "sh?ck": BlockShockParallel(mask="random"),
        "down": RowwiseParallel(input_layouts=Replicate()),
    }
    model = parallelize_module(copy.deepcopy(dense), init_device_mesh("cpu", (group.world_size,)), plan)
    compared(model, dense, draw(4, 64, dtype=dtype), 0.5, norm_type, close)


GIVEN = [(two_groups,)]
GIVEN += [(beside_torchs_styles, norm, *how) for norm in NORMS for how in ((F64, 1e-12), (torch.float32, 1e-5))]


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: given[0].__name__)
def test_beside_other_groups_and_torchs_styles_the_gradients_are_the_dense_models(given, ranks):
    ranks(*given)


def not_finite(group, norm_type):
    model = Net(torch.float32)
    model.shared = built("block_shock", "checkerboard", model.shared.weight, model.shared.bias)
    trained(model)
    if group.rank == 1:
        model.shared.weight.grad[3, 5] = float("nan")
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    before = [grad.clone() for grad in grads]
    assert "non-finite" in training.said_by(clip_grad_norm_, model, 0.1, norm_type, True, kind=RuntimeError)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, grads, strict=True))
    assert math.isnan(clip_grad_norm_(model, 0.1, norm_type))


@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_a_nan_on_one_rank_is_seen_by_all_and_can_be_an_error(norm_type, ranks):
    ranks(not_finite, norm_type)


def tied_and_bare(group):
    weight = draw(N, N, dtype=F64)
    one, other = (built("row_parallel", "checkerboard", weight, None) for _ in range(2))
    other.weight = one.weight
    model, dense = nn.Sequential(one, other), nn.Linear(N, N, bias=False, dtype=F64)
    assert clip_grad_norm_(model, 1.0) == 0.0
    dense.load_state_dict({"weight": weight})
    x = draw(5, N, dtype=F64)
    dense(dense(x)).square().sum().backward()
    model(x).square().sum().backward()
    assert clip_grad_norm_(model, 1.0).item() == pytest.approx(torchs_own(dense.parameters(), 1.0).item(), rel=1e-12)


def test_a_tied_weight_counts_once_and_no_gradient_is_no_norm(ranks):
    ranks(tied_and_bare)


@pytest.mark.parametrize("norm_type", [0, -1, math.nan])
def test_a_norm_that_zeros_would_change_is_refused(norm_type):
    with pytest.raises(ValueError, match="norm_type must be over 0"):
        clip_grad_norm_(nn.Linear(2, 2), 1.0, norm_type)
    with pytest.raises(ValueError, match="model is the module"):
        clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)


@pytest.mark.parametrize("norm_type", NORMS)
def test_a_norm_of_16_bit_gradients_is_not_rounded_to_16_bits(norm_type):
    model = nn.Linear(256, 64, bias=False, dtype=torch.bfloat16)
    model.weight.grad = draw(64, 256, dtype=torch.bfloat16)
    wanted = torch.linalg.vector_norm(model.weight.grad.double(), norm_type).item()
    assert clip_grad_norm_(model, 1e9, norm_type).item() == pytest.approx(wanted, rel=1e-5)


def test_a_total_norm_that_was_imported_before_this_library_is_refused_too():
    script = (
        "from torch.nn.utils import get_total_norm",
        "from blockshock_lib.layers import guards",
        "guards._shared = lambda *_: {0: __import__('torch').nn.Linear(1, 1)}",  # as of a gradient that ranks share
        "guards.describe = repr",
        "get_total_norm([])",
    )
    made = subprocess.run([sys.executable, "-c", "\n".join(script)], capture_output=True, text=True, check=False)
    assert "sees this rank's share of the gradient of Linear" in made.stderr
