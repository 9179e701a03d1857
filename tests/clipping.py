"""What the ranks of a test of clip_grad_norm_ do; a spawned process imports them by name."""

import copy
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_ as torchs_own

from blockshock_lib import BlockShockLinear, BlockShockParallel, RowParallelLinear, clip_grad_norm_
from blockshock_lib.layers import ShardedLinear
from tests.layers.tasks import built

N, K = 64, 128
INF = float("inf")


class Net(nn.Module):
    """A layer to share, between layers that every rank holds whole; one of these is used twice, one is frozen."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.shared, self.head, self.frozen = (
            nn.LayerNorm(K),
            nn.Linear(K, N),
            nn.Linear(N, N),
            nn.Linear(N, N),
        )
        self.again = self.head
        self.frozen.requires_grad_(False)
        self.to(dtype)

    def forward(self, x):
        return self.again(self.frozen(self.head(self.shared(self.norm(x)))))


def trained(model, share):
    """`model` with gradients; on a rank that stands by, those of the dense model for what is not shared."""
    dense = Net(next(model.parameters()).dtype)
    active = getattr(share, "active", True)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1)).to(model.norm.weight.dtype)
    (model if active else dense)(x).square().sum().backward()
    if not active:
        grads = {name: parameter.grad for name, parameter in dense.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.grad = None if name.startswith("shared") else grads[name]
    return model


def dense_grads(model):
    """The gradients by name, the shared layers' whole; None where this rank stands by."""
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, layer in model.named_modules():
        if isinstance(layer, ShardedLinear):
            grads[f"{name}.weight"] = layer.to_dense(layer.weight.grad if layer.active else None)
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def largest_difference(found, wanted):
    """Relative to the largest entry of each gradient."""
    assert found.keys() == wanted.keys()
    off = [(found[n] - grad).abs().max() / grad.abs().max() for n, grad in wanted.items() if found[n] is not None]
    return max(off).item()


def like_dense(ctx, cases, norm_types):
    """Where the norm or the clipped gradients of a case differ from the dense model's by over 1e-12 of them."""
    wrong = []
    for name, mask, changes in cases:
        dense, model = trained(Net(), None), Net()
        model.shared = built(name, mask, model.shared.weight, model.shared.bias, **changes)
        trained(model, model.shared)
        parameters = [p for one in (dense, model) for p in one.parameters() if p.grad is not None]
        before = [parameter.grad.clone() for parameter in parameters]
        for norm_type in norm_types:
            wanted = torchs_own(dense.parameters(), INF, norm_type).item()
            for part in (0.1, 10.0):  # clipped, and not
                for parameter, grad in zip(parameters, before, strict=True):
                    parameter.grad.copy_(grad)
                torchs_own(dense.parameters(), part * wanted, norm_type)
                norm = clip_grad_norm_(model, part * wanted, norm_type).item()
                off = largest_difference(dense_grads(model), dense_grads(dense))
                if not (off < 1e-12 and abs(norm - wanted) < 1e-12 * wanted):
                    wrong.append(
                        f"{name} {mask} {changes} p={norm_type}: norm {norm} not {wanted}, update off by {off}"
                    )
                if part > 1 and not all(torch.equal(p.grad, g) for p, g in zip(parameters, before, strict=True)):
                    wrong.append(f"{name} {mask} {changes} p={norm_type}: clipped below max_norm")
    return wrong


def two_groups(ctx):
    """(dense norm, norm, largest difference of the gradients) of a layer on all ranks and one on each half of them."""
    half = ctx.world_size // 2
    halves = [dist.new_group(range(half)), dist.new_group(range(half, 2 * half))]
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(K, N), nn.Linear(N, K), nn.Linear(K, N)).double()
    model = copy.deepcopy(dense)
    model[0] = BlockShockLinear.from_linear(model[0], mask="checkerboard")
    model[1] = RowParallelLinear.from_linear(model[1], process_group=halves[ctx.rank // half])
    x = torch.randn(5, K, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for one in (dense, model):
        one(x).square().sum().backward()
    norms = torchs_own(dense.parameters(), 1.0).item(), clip_grad_norm_(model, 1.0).item()
    return *norms, largest_difference(dense_grads(model), dense_grads(dense))


def beside_torchs_styles(ctx, norm_type, dtype):
    """(dense norm, norm, largest difference of the gradients) of a plan with torch's styles and ours."""
    torch.manual_seed(0)
    layers = {
        "norm": nn.LayerNorm(64),
        "up": nn.Linear(64, 128),
        "shock": nn.Linear(128, 128),
        "down": nn.Linear(128, 64),
    }
    dense = nn.Sequential(OrderedDict(layers)).to(dtype)
    model = copy.deepcopy(dense)
    plan = {
        "up": ColwiseParallel(use_local_output=False),
        "shock": BlockShockParallel(),
        "down": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, init_device_mesh("cpu", (ctx.world_size,)), plan)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    for one in (dense, model):
        one(x).square().sum().backward()
    norms = torchs_own(dense.parameters(), 0.5, norm_type).item(), clip_grad_norm_(model, 0.5, norm_type).item()
    return *norms, largest_difference(dense_grads(model), dense_grads(dense))


def not_finite(ctx, norm_type):
    """What rank 1's NaN does on every rank: the norm, the error, and whether the error left the gradients alone."""
    model = Net(torch.float32)
    model.shared = built("block_shock", "checkerboard", model.shared.weight, model.shared.bias)
    trained(model, model.shared)
    if ctx.rank == 1:
        model.shared.weight.grad[3, 5] = float("nan")
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    said = ""
    try:
        clip_grad_norm_(model, 0.1, norm_type, error_if_nonfinite=True)
    except RuntimeError as error:
        said = str(error)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    same = all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, after, strict=True))
    return clip_grad_norm_(model, 0.1, norm_type).item(), said, same


def tied_and_bare(ctx):
    """(norm, wanted) of two modules that share one sharded weight; the norm before there is any gradient."""
    weight = torch.randn(N, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, other = (built("row_parallel", "checkerboard", weight, None) for _ in range(2))
    other.weight = one.weight
    model = nn.Sequential(one, other)
    none = clip_grad_norm_(model, 1.0).item()
    dense = nn.Linear(N, N, bias=False, dtype=torch.float64)
    dense.load_state_dict({"weight": weight})
    x = torch.randn(5, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dense(dense(x)).square().sum().backward()
    model(x).square().sum().backward()
    return none, torchs_own(dense.parameters(), 1.0).item(), clip_grad_norm_(model, 1.0).item()
