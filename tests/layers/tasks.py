"""Functions that the ranks of a test run; a spawned process imports them by name."""

from __future__ import annotations

import copy

import torch
from torch import nn

from blockshock_lib.comm import Group
from blockshock_lib.layers.sharded import ShardedLinear
from blockshock_lib.methods import METHODS
from blockshock_lib.params import Mask

N, K, B = 64, 128, 3


def built(name: str, mask: str, weight: torch.Tensor, bias: torch.Tensor | None, **changes) -> ShardedLinear:
    """This rank's layer of a method, trainable."""
    overlap = changes.pop("overlap", True)
    options = METHODS[name].options("reference", frozen=False) | changes
    layer = METHODS[name].load()(weight, bias, mask=Mask.named(mask), group=Group.of(), **options)
    layer.overlap = overlap
    return layer


def problem(dtype=torch.float64) -> tuple[torch.Tensor, ...]:
    """W, b, x, dy: the same on every rank."""
    seed = torch.Generator().manual_seed(0)
    shapes = ((N, K), (N,), (B, K), (B, N))
    return tuple(torch.randn(*shape, generator=seed, dtype=torch.float64).to(dtype) for shape in shapes)


class FromDense(torch.autograd.Function):
    """A layer's weight as a function of the dense W; its adjoint is the dense view, summed over the ranks. A rank that
    stands by has W itself, and the working ranks' gradient of it.
    """

    @staticmethod
    def forward(ctx, dense, layer):
        ctx.layer = layer
        return layer.from_dense(dense) if layer.active else dense.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.layer.to_dense(grad.contiguous() if ctx.layer.active else None), None


def check_gradients(ctx, cases):
    """gradcheck of every case in lockstep, wrt x, the dense W and b. Returns what failed."""
    failed = []
    w, bias, x, _ = problem()
    for name, mask, changes in cases:
        layer = built(name, mask, w, bias, **changes)

        def fn(x, w, b, layer=layer):
            weight = FromDense.apply(w, layer)
            if not layer.active:
                return nn.functional.linear(x, weight, b)
            return torch.func.functional_call(layer, {"weight": weight, "bias": b}, (x,))

        inputs = [t.clone().requires_grad_() for t in (x, w, bias)]
        torch.manual_seed(1)  # the fast check's directions must be the same on every rank
        try:
            torch.autograd.gradcheck(fn, inputs, fast_mode=True)
        except Exception as error:
            failed.append(f"{name} {mask} {changes}: {type(error).__name__}: {error}")
    return failed


def train(ctx, cases, optimizer, steps):
    """Trains each case and a plain dense layer alike; returns the largest difference of their weights and biases."""
    w, bias, _, _ = problem()
    worst = {}
    for name, mask, changes in cases:
        ours = built(name, mask, w, bias, **changes)
        dense = nn.Linear(K, N, dtype=torch.float64)
        dense.load_state_dict({"weight": w, "bias": bias})
        made = [_optimizer(optimizer, model) for model in (ours, dense)]
        for step in range(steps):
            seed = torch.Generator().manual_seed(step)
            x, goal = (torch.randn(B, n, generator=seed, dtype=torch.float64) for n in (K, N))
            for model, opt in zip((ours, dense), made, strict=True):
                opt.zero_grad()
                (model(x) - goal).square().mean().backward()
                opt.step()
        moved = (dense.weight - w).abs().max().item()
        off = max((ours.to_dense() - dense.weight).abs().max().item(), (ours.bias - dense.bias).abs().max().item())
        worst[f"{name} {mask} {changes}"] = (off, moved)
    return worst


def _optimizer(name, model):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=name == "adamw fused")


class Block(nn.Module):
    """Two sharded layers and what a model has around them."""

    def __init__(self, name, mask, **changes):
        super().__init__()
        seed = torch.Generator().manual_seed(3)
        up, down = (torch.randn(n, k, generator=seed) * k**-0.5 for n, k in ((N, K), (K, N)))
        self.up = built(name, mask, up, torch.ones(N), **changes)
        self.down = built(name, mask, down, None, **changes)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def compiled(ctx, cases, backend):
    """Trains a compiled block and the same block eagerly, three steps; returns what differs."""
    wrong = []
    for name, mask, changes in cases:
        eager = Block(name, mask, **changes)
        model = copy.deepcopy(eager)
        fast = torch.compile(model, fullgraph=True, backend=backend)
        for step in range(3):
            seed = torch.Generator().manual_seed(step)
            xs = [torch.randn(2, B, K, generator=seed).requires_grad_()]
            xs.append(xs[0].detach().clone().requires_grad_())
            for one, run, x in ((eager, eager, xs[0]), (model, fast, xs[1])):
                one.zero_grad()
                run(x).square().mean().backward()
                torch.optim.SGD(one.parameters(), lr=0.1).step()
            pairs = {"dX": (xs[0].grad, xs[1].grad)}
            pairs |= {n: (p.grad, dict(model.named_parameters())[n].grad) for n, p in eager.named_parameters()}
            for what, (a, b) in pairs.items():
                if not (torch.allclose(a, b, rtol=1e-5, atol=1e-7) and a.abs().max() > 1e-5):
                    wrong.append(f"{name} {mask} {changes} step {step}: {what}")
        torch._dynamo.reset()
    return wrong


def round_trip(ctx, cases):
    """Saves each case's dense view, changes the layer, loads it back; what differs, bit for bit, or was shared."""
    wrong = []
    w, bias, x, _ = problem(torch.bfloat16)
    w[0, :4] = torch.tensor([-0.0, 0.0, float("nan"), float("inf")])
    for name, mask, changes in cases:
        layer = built(name, mask, w, bias, **changes)
        saved = layer.state_dict()
        if not torch.equal(saved["weight"].view(torch.int16), w.view(torch.int16)) or list(saved) != ["weight", "bias"]:
            wrong.append(f"{name} {mask} {changes}: saved another weight")
        plain = nn.Linear(K, N, dtype=torch.bfloat16)
        plain.load_state_dict(saved)
        other = torch.randn(N, K, generator=torch.Generator().manual_seed(9)).bfloat16()
        layer.load_state_dict({"weight": other, "bias": bias})
        if not torch.equal(layer.to_dense(), other):
            wrong.append(f"{name} {mask} {changes}: loaded another weight")
        fresh = built(name, mask, other, bias, **changes)
        x.requires_grad = True
        grads = []
        for one in (layer, fresh):
            x.grad = None
            y = one(x)
            y.sum().backward()
            grads += [y.detach(), x.grad]
        if not (torch.equal(grads[0], grads[2]) and torch.equal(grads[1], grads[3])):
            wrong.append(f"{name} {mask} {changes}: computes with the weight from before the load")
    return wrong


def lent_weights(ctx, update):
    """Whether a layer, once other weights were lent to it, computes and trains with its own again."""
    w, bias, x, dy = problem()
    layer = built("block_shock", "transposable_random", w, bias, update=update)
    before, own = layer(x).detach(), layer.weight.detach().clone()
    other = layer.from_dense(torch.randn(N, K, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    x.requires_grad = True
    late = layer(x)
    lent = torch.func.functional_call(layer, {"weight": other}, (x,))
    late.backward(dy)  # after another weight was in use: with the weight of its own forward
    return {
        "lent": not torch.equal(lent, before),
        "own again": torch.equal(layer(x), before) and torch.equal(layer.weight, own),
        "gradient": torch.allclose(x.grad, dy @ w, rtol=1e-10, atol=1e-10),
    }
