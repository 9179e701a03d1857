"""What the GPTs of gallery_accuracy learn: a corpus, or a teacher whose loss no student can go below."""

import hashlib
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from blockshock_lib.layers.gpt import corpus, shards
from blockshock_lib.layers.sparsify import Sparse24
from blockshock_lib.studies.gallery.model import GPT

Pair = tuple[Tensor, Tensor]  # tokens and targets, int64 [B, S]
PEAK = 4.0  # deviation of the teacher's logits, about: flat ones say nothing, and peaked ones leave nothing to learn


def seed(*parts: Any) -> int:
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:7])


def drawn(case: Any, what: str) -> GPT:
    """A GPT of the case's shape, equal on every device for a seed."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed(case.seed, what))
        return GPT(case.layers, case.n, case.heads, case.vocab, case.context)


class Text:
    def __init__(self, case: Any, settings: Any):
        self.corpus = corpus.chosen(settings.data, settings.task, case.vocab)
        self.digest, self.count = self.corpus.digest, self.corpus.tokens["train"]
        self.order = shards.Batches(self.corpus.read("train"), case.batch, case.context, case.seed)
        asked = min(settings.validation_tokens, self.corpus.tokens["val"] - case.context)
        self.held_out = shards.fixed(self.corpus.read("val"), asked, case.batch, case.context)

    def at(self, step: int) -> Pair:
        return self.order.at(step)


class Teacher:
    """Tokens are random, and each target is drawn from what a GPT with 2:4 weights says after them: the truth is known,
    2:4 holds it, and its own loss, `self.model`'s on the held-out pairs, is the least that can be reached.
    """

    def __init__(self, case: Any, settings: Any):
        self.case, self.digest, self.count = case, f"teacher-{case.seed}", case.tokens
        self.model = drawn(case, "teacher").eval()
        with torch.no_grad():
            for module in self.model.modules():
                if isinstance(module, nn.Linear):
                    module.weight *= Sparse24().keep(module.weight.abs())
                    module.weight /= module.weight.std() * module.in_features**0.5
            self.model.tokens.weight *= PEAK / (0.02 * case.n**0.5)
        self.batches = max(1, settings.validation_tokens // (case.batch * case.context))

    @torch.no_grad()
    def at(self, step: Any) -> Pair:
        draw, shape = torch.Generator().manual_seed(seed(self.case.seed, step)), (self.case.batch, self.case.context)
        tokens = torch.randint(self.case.vocab, shape, generator=draw)
        chances = self.model(tokens).softmax(-1)
        return tokens, chances.flatten(0, 1).multinomial(1, generator=draw).view(shape)

    @cached_property
    def held_out(self) -> list[Pair]:
        return [self.at(f"held out {i}") for i in range(self.batches)]
