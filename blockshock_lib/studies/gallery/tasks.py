"""The GPTs of gallery_accuracy, and what they may learn in a corpus's place: a teacher whose loss none can go below."""

from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockshock_lib.files import seed
from blockshock_lib.layers.sparsify import Sparse24

Pair = tuple[Tensor, Tensor]  # tokens and targets, int64 [B, S]
PEAK = 4.0  # deviation of the teacher's logits, about: flat ones say nothing, and peaked ones leave nothing to learn


class Block(nn.Module):
    """Pre-norm, of plain nn.Linear as users write one; causal self-attention, then an MLP with GPT-2's GELU."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, width] -> the same."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Learned positions, tied head; weights are drawn as GPT-2's, from torch's own generator."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, context: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if ends else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens [B, S] -> logits [B, S, vocab]; with targets [B, S] the mean cross-entropy, in nats."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def drawn(case: Any, what: str) -> GPT:
    """A GPT of the case's shape, equal on every device for a seed."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed(case.seed, what))
        return GPT(case.layers, case.n, case.heads, case.vocab, case.context)


@lru_cache(1)
class Teacher:
    """Tokens are random, and each target is drawn from what a GPT with 2:4 weights says after them: the truth is known,
    2:4 holds it, and its own loss, `self.model`'s on the held-out pairs, is the least that can be reached.
    """

    def __init__(self, case: Any, settings: Any):
        self.case, self.digest, self.count = case, f"teacher-{case.seed}", case.tokens
        self.model = drawn(case, "teacher").eval().requires_grad_(False)
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                module.weight *= Sparse24().keep(module.weight.abs())
                module.weight /= module.weight.std() * module.in_features**0.5
        self.model.tokens.weight *= PEAK / (0.02 * case.n**0.5)
        self.batches = max(1, settings.validation_tokens // (case.batch * case.context))

    @lru_cache(256)  # noqa: B019 - the arms of a seed share their teacher, and learn the same
    def at(self, step: Any) -> Pair:
        draw, shape = torch.Generator().manual_seed(seed(self.case.seed, step)), (self.case.batch, self.case.context)
        tokens = torch.randint(self.case.vocab, shape, generator=draw)
        chances = self.model(tokens).softmax(-1)
        return tokens, chances.flatten(0, 1).multinomial(1, generator=draw).view(shape)

    @cached_property
    def held_out(self) -> list[Pair]:
        return [self.at(f"held out {i}") for i in range(self.batches)]
