"""Small models that the tests of sparsify_ share."""

import torch
from torch import nn


class Conv1D(nn.Module):
    """As transformers has it: y = x W + b with W [K, N]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / nx**0.5), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.up, self.down = Conv1D(2 * width, width), nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + torch.tanh(self.q(x)) * self.k(x)
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Two blocks; the head is tied to the embedding, as in many GPTs."""

    def __init__(self, seed=0, width=64):
        torch.manual_seed(seed)
        super().__init__()
        self.embed = nn.Embedding(96, width)
        self.blocks, self.head = nn.Sequential(Block(width), Block(width)), nn.Linear(width, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def state(model):
    """What a conversion that failed must not have touched: the modules, by name, and their values."""
    return dict(model.named_modules()), {key: value.clone() for key, value in model.state_dict().items()}


def same(model, before):
    modules, values = before
    now = model.state_dict()
    return dict(model.named_modules()) == modules and all(torch.equal(now[key], values[key]) for key in values)
