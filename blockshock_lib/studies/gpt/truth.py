"""A schedule's equation, term by term and rank by rank, from whole weights: what the layers are held to."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from blockshock_lib.layers.gpt.schedule import Schedule, Step

State = Mapping[str, Tensor]


def norm(x: Tensor, state: State, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])


def attention(x: Tensor, state: State, name: str, heads: int) -> Tensor:
    """Before the output product, [B, S, W], by a softmax over a mask."""
    size = x.shape[-1] // heads
    made = torch.einsum("bsw,hjdw->jhbsd", x, state[f"{name}.qkv.weight"].view(heads, 3, size, -1))
    q, k, v = made + state[f"{name}.qkv.bias"].view(heads, 3, size).transpose(0, 1)[:, :, None, None]
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    made = ((q @ k.mT) / size**0.5).masked_fill(later, -torch.inf).softmax(-1) @ v
    return made.permute(1, 2, 0, 3).flatten(2)


def hidden(x: Tensor, state: State, name: str) -> Tensor:
    return F.gelu(x @ state[f"{name}.up.weight"].T + state[f"{name}.up.bias"], approximate="tanh")


def partial(x: Tensor, state: State, s: int, heads: int, ranks: int, rank: int) -> Tensor:
    """Rank's part of sublayer s for what it reads, x [B, S, W], without the bias."""
    name = f"blocks.{s // 2}.{('attention', 'mlp')[s % 2]}"
    x = norm(x, state, f"{name}.norm")
    inside = hidden(x, state, name) if s % 2 else attention(x, state, name, heads)
    mine = slice(rank * inside.shape[-1] // ranks, (rank + 1) * inside.shape[-1] // ranks)
    return inside[..., mine] @ state[f"{name}.out.weight"][:, mine].T


def scheduled(state: State, tokens: Tensor, schedule: Schedule, heads: int, ranks: int) -> Tensor:
    """The logits of a schedule by the equation of layers/gpt/schedule.py, term by term and rank by rank."""
    embedded = state["tokens.weight"][tokens] + state["positions.weight"][: tokens.shape[1]]
    return logits(state, streams(state, embedded, schedule.steps, heads, ranks)[0])


def logits(state: State, x: Tensor) -> Tensor:
    return norm(x, state, "norm") @ state["tokens.weight"].T


def streams(
    state: State, embedded: Tensor, steps: Sequence[Step], heads: int, ranks: int, part: Callable[..., Tensor] = partial
) -> list[Tensor]:
    """What the end reads, by rank. A part that lands behind the end is never summed. `part`: calls `partial`."""
    made = []
    for s in range(len(steps) + 1):
        reads = []
        for rank in range(ranks):
            x = embedded
            for t, step in enumerate(steps[:s]):
                name = f"blocks.{t // 2}.{('attention', 'mlp')[t % 2]}.out.bias"
                x = x + state[name] if step.own <= s else x
                if step.lands <= s:
                    x = x + step.late(ranks) * sum(made[t])
                elif step.own <= s:
                    x = x + made[t][rank]
            reads.append(x)
        if s < len(steps):
            made.append([part(x, state, s, heads, ranks, rank) for rank, x in enumerate(reads)])
    return reads
