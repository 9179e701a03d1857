"""What the ranks of the tests of autocast and of empty batches do; a spawned process imports them by name."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers.tasks import K, N, built

BF16 = torch.bfloat16


class MLP(nn.Module):
    """As in a GPT: a norm in float32, then shared layers in the dtype that they are converted to."""

    def __init__(self, name, mask, dtype=BF16, **changes):
        super().__init__()
        torch.manual_seed(0)
        up, down = nn.Linear(K, N), nn.Linear(N, K)
        self.norm = nn.LayerNorm(K)
        self.up = built(name, mask, up.weight.detach().to(dtype), up.bias.detach().to(dtype), **changes)
        self.down = built(name, mask, down.weight.detach().to(dtype), None, **changes)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _same(a, b):
    """Bit for bit, or wrong in a few bits of 16 where a compiler fused what stands between the layers."""
    return a.dtype == b.dtype and torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2e-2)


def under_autocast(ctx, cases, backend):
    """What differs, under autocast to bf16, between a model and what its layers give without it.

    Args:
        backend: of torch.compile; "" for none.
    """
    wrong = []
    seed = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(2, 4, K, generator=seed) for _ in range(2))
    for name, mask, changes in cases:
        for dtype in (BF16, torch.float32):
            model = MLP(name, mask, dtype, **changes)
            by_hand = copy.deepcopy(model)
            mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            run = torch.compile(model, fullgraph=True, backend=backend) if backend else model
            with torch.autocast("cpu", dtype=BF16):
                y = run(mine)
                y.backward(dy)
            hidden = F.gelu(by_hand.up(by_hand.norm(theirs).to(dtype)))
            z = theirs + by_hand.down(hidden)
            z.backward(dy)
            pairs = {"y": (y, z), "dx": (mine.grad, theirs.grad)}
            pairs |= {n: (p.grad, by_hand.get_parameter(n).grad) for n, p in model.named_parameters()}
            for what, (a, b) in pairs.items():
                exact = torch.equal(a, b) or bool(backend)
                if not (exact and _same(a, b) and b.abs().max() > 0):
                    wrong.append(f"{name} {mask} {changes} {dtype} {backend}: {what}")
            torch._dynamo.reset()
    return wrong


def kept_dtypes(ctx, name):
    """Dtypes of y and of the gradient of x, by the dtype of x, of a bf16 layer under autocast to float16 and bf16."""
    seen = {}
    layer = MLP(name, "checkerboard").up
    for to in (torch.float16, BF16):
        for dtype in (torch.float16, BF16, torch.float32, torch.float64):
            x = torch.ones(3, K, dtype=dtype, requires_grad=True)
            with torch.autocast("cpu", dtype=to):
                y = layer(x)
            y.sum().backward()
            seen[to, dtype] = y.dtype, x.grad.dtype, layer.weight.grad.dtype
    return seen


def empty_batches(ctx, cases, backend):
    """What differs from nn.Linear for batches without a row, and whether the layer computes as before afterwards."""
    wrong = []
    for name, mask, changes in cases:
        model = MLP(name, mask, torch.float64, **changes).up
        linear = nn.Linear(K, N, dtype=torch.float64)
        run = torch.compile(model, fullgraph=True, backend=backend) if backend else model
        linear.load_state_dict(model.state_dict())
        for shape in ((0, K), (2, 0, K), (3, K)):
            found = []
            for one, call in ((model, run), (linear, linear)):
                one.zero_grad()
                x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
                y = call(x)
                y.square().sum().backward()
                weight = one.weight.grad if one is linear else one.to_dense(one.weight.grad)
                found.append({"y": y, "dx": x.grad, "dw": weight, "db": one.bias.grad})
            for what, wanted in found[1].items():
                got = found[0][what]
                if not (got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-10, atol=1e-10)):
                    wrong.append(f"{name} {mask} {changes} {backend} {shape}: {what} {list(got.shape)}")
        with torch.no_grad():
            if run(torch.ones(0, K, dtype=torch.float64)).shape != (0, N):
                wrong.append(f"{name} {mask} {changes} {backend}: y without gradients")
        torch._dynamo.reset()
    return wrong
