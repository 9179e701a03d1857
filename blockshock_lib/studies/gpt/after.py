"""After training: which syncs of a tensor-parallel GPT can be dropped, and what makes up for them.

As in SPD (arXiv:2502.20727), but with single syncs in the place of blocks: each is dropped alone, which gives its
sensitivity; then they go together, the least sensitive first. What a dropped sync would have summed is summed with the
next one that is kept. Half of them dropped, two things are tried: heads and neurons that work together are dealt to one
rank (head grouping), and each piece between two kept syncs learns by its mean squared error what the trained model
makes there of the same input (block-to-block distillation).
"""

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from blockshock_lib.engine.study import Sample
from blockshock_lib.layers.gpt import GPT, Schedule
from blockshock_lib.layers.gpt.schedule import dropping
from blockshock_lib.layers.gpt.training import Trainer, validate

RATE = 1e-4  # AdamW's in distillation, falling to 0
ROUNDS = 8  # of dealing neurons to heads and heads to neurons


def samples(trainer: Trainer, tokens: int) -> Iterator[Sample]:
    """Sensitivities, losses by how many syncs are dropped, and of half of them with heads grouped and after
    distillation on `tokens`, which goes on in the order of the training's batches.
    """
    model, end = trainer.model, trainer.model.schedule.end
    loss = lambda model, dropped: validate(without(model, dropped), trainer.task.held_out, trainer.autocast)  # noqa: E731
    base = loss(model, ())
    alone = {s: loss(model, (s,)) - base for s in range(end - 1)}  # the last sync feeds the head
    for s, cost in alone.items():
        yield Sample("sensitivity", cost, detail=str(s))
    order = sorted(alone, key=alone.get)
    for count in range(1, end):
        yield Sample("dropped_loss", loss(model, order[:count]), count)
    half = order[: end // 2]
    yield Sample("affinity_loss", loss(by_affinity(model), half), len(half))
    student = distilled(trainer, half, tokens)
    yield Sample("distilled_loss", loss(student, half), len(half))


def without(model: GPT, dropped: tuple[int, ...] | list[int]) -> GPT:
    """The model, with the same parameters, when these sublayers' syncs are dropped."""
    other = copy.copy(model)
    other.schedule = Schedule("dropped", dropping(model.config.layers, set(dropped)))
    return other


def pieces(schedule: Schedule) -> list[tuple[int, int]]:
    """(first sublayer, first after it) of each piece between two places at which all ranks hold the same."""
    ends = [s + 1 for s in range(schedule.end) if all(step.lands <= s + 1 for step in schedule.steps[: s + 1])]
    return list(zip([0, *ends], ends, strict=False))


def distilled(trainer: Trainer, dropped: list[int], tokens: int) -> GPT:
    """A copy of the model whose pieces without all syncs were taught by the model's own."""
    teacher, student = trainer.model, without(copy.deepcopy(trainer.model), dropped)
    taught = [(first, end) for first, end in pieces(student.schedule) if set(range(first, end)) & set(dropped)]
    learning = [p for first, end in taught for module in student.sublayers[first:end] for p in module.parameters()]
    optimizer = torch.optim.AdamW(learning, lr=RATE, weight_decay=0.0, fused=learning[0].is_cuda)
    steps = max(1, tokens // trainer.batch(trainer.steps)[0].numel())
    for step in range(steps):
        x, _ = trainer.batch(trainer.steps + step)
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
        with torch.enable_grad(), trainer.autocast():
            loss = matched(teacher, student, taught, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return student


def matched(teacher: GPT, student: GPT, taught: list[tuple[int, int]], tokens: Tensor) -> Tensor:
    """Mean squared error of the taught pieces over the mean square of what the teacher's pieces add, summed."""
    loss, at = 0.0, 0
    with torch.no_grad():
        x = teacher.tokens(tokens) + teacher.positions.weight[: tokens.shape[1]]
    for first, end in taught:
        with torch.no_grad():
            x = teacher.streamed(x, first=at, end=first)
            right = teacher.streamed(x, first=first, end=end)
        made = student.streamed(x, first=first, end=end)
        loss = loss + F.mse_loss(made.float(), right.float()) / (right - x).float().square().mean()
        x, at = right, end
    return loss


@torch.no_grad()
def by_affinity(model: GPT) -> GPT:
    """The same function with all syncs: in each block those heads and neurons lie on one rank that read most of each
    other. Affinity of head h and neuron j: the norm of up[j] @ out[:, h], what the neuron sees of the head.
    """
    model = copy.deepcopy(model)
    for block in model.blocks:
        attention, mlp, heads = block["attention"], block["mlp"], model.config.heads
        seen = mlp.up.weight * mlp.norm.weight @ attention.out.weight  # [hidden, width]
        affinity = seen.unflatten(1, (heads, -1)).norm(dim=2).T  # [heads, hidden]
        to_heads, to_neurons = grouped(affinity, model.ranks)
        rows = torch.arange(3 * model.config.width, device=seen.device).view(heads, -1)[to_heads].flatten()
        columns = torch.arange(model.config.width, device=seen.device).view(heads, -1)[to_heads].flatten()
        _order(attention.qkv, attention.out, rows, columns)
        _order(mlp.up, mlp.out, to_neurons, to_neurons)
    return model


def grouped(affinity: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Orders of heads and neurons in which each rank's are in one run, from `affinity` [heads, neurons]: in turns the
    neurons go to the rank whose heads they see most, and the heads to that whose neurons see them, ranks equally full.
    """
    of_head = torch.arange(len(affinity), device=affinity.device) * ranks // len(affinity)
    for _ in range(ROUNDS):
        of_neuron = dealt(_by_rank(affinity, of_head, ranks).T)
        of_head = dealt(_by_rank(affinity.T, of_neuron, ranks).T)
    return of_head.argsort(stable=True), of_neuron.argsort(stable=True)


def dealt(wish: Tensor) -> Tensor:
    """The rank of each item, each rank's share equal, from what each item would gain there, [items, ranks]: the item
    with most to lose by its second choice chooses first.
    """
    items, ranks = wish.shape
    best = wish.topk(2, dim=1).values
    room, found = [items // ranks] * ranks, [0] * items
    choices = wish.argsort(dim=1, descending=True).tolist()
    for item in (best[:, 0] - best[:, 1]).argsort(descending=True).tolist():
        found[item] = next(rank for rank in choices[item] if room[rank])
        room[found[item]] -= 1
    return torch.tensor(found, device=wish.device)


def _by_rank(affinity: Tensor, of_row: Tensor, ranks: int) -> Tensor:
    """[ranks, columns]: the rows' affinities, summed by their ranks."""
    return F.one_hot(of_row, ranks).to(affinity.dtype).T @ affinity


def _order(first: torch.nn.Linear, second: torch.nn.Linear, rows: Tensor, columns: Tensor) -> None:
    first.weight.copy_(first.weight[rows])
    first.bias.copy_(first.bias[rows])
    second.weight.copy_(second.weight[:, columns])
