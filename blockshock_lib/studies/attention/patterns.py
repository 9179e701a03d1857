"""The patterns that the study runs, by name: (case, density) -> pattern."""

from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch

from blockshock_lib.kernels.attention.rules import FAR, Band, Diagonal
from blockshock_lib.layers import attention
from blockshock_lib.layers.attention import Pattern
from blockshock_lib.studies.attention.params import Case, density


def made(case: Case) -> Pattern:
    """The pattern of a case; a density may follow its name: "random 0.05"."""
    return PATTERNS[case.pattern.partition(" ")[0]](case, density(case.pattern))


def dense(pattern: Pattern) -> Pattern:
    """The least dense attention that holds it: causal where no query sees a later key, else full."""
    terms = [term for rule in pattern.rules for term in rule]
    past = all(any(isinstance(atom, Band) and atom.low >= 0 for atom in term) for term in terms)
    return attention.causal() if past else attention.full()


@dataclass(frozen=True)
class Counted:
    """How many of several patterns let a query see a key, in the place of a pattern's rule."""

    patterns: tuple[Pattern, ...]

    def sees(self, *place) -> torch.Tensor:
        return sum(each.sees(*place).int() for each in self.patterns)


def longnet(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Segments and rates of LongNet (arXiv:2307.02486): of 32K positions as there, of others in the same proportion."""
    return tuple(max(1, case.k_len * 2**i // 16) for i in range(5)), (1, 2, 4, 6, 12)


def pairs_of(case: Case) -> tuple[Pattern, ...]:
    """What each pair of a segment and a rate alone lets each head see, as dilated_attention gathers it."""
    return tuple(
        attention.by_head(
            [Pattern((((Diagonal(length, rate, head % rate), Band(0, FAR)),),)) for head in range(case.heads)]
        )
        for length, rate in zip(*longnet(case), strict=True)
    )


def _window(case: Case, share: int) -> Pattern:
    return attention.window(max(1, case.k_len // share))


def _documents(case: Case) -> Pattern:
    """Documents of falling length, the last of one position, each causal."""
    lengths, left = [], case.k_len
    while left > 1:
        lengths.append(left // 2)
        left -= lengths[-1]
    return attention.documents([*lengths, left]) & attention.causal()


def _by_head(case: Case, density: float) -> Pattern:
    """Heads in turn: causal, random blocks, nothing, a window."""
    random = attention.random(density, case.seed, case.block)
    kinds = [attention.causal(), random, attention.random(0.0), _window(case, 5)]
    return attention.by_head([kinds[head % 4] for head in range(case.heads)])


def _blocks(case: Case, share: float) -> Pattern:
    """Whole blocks at random, so many of all, those on the diagonal among them: each row of blocks visits one."""
    blocks = case.k_len // case.block
    others = (share * blocks - 1) / (blocks - 1) if blocks > 1 else 1.0
    return attention.block_diagonal(case.block) | attention.random(min(1.0, max(0.0, others)), case.seed, case.block)


PATTERNS = {
    "full": lambda case, _: attention.full(),
    "causal": lambda case, _: attention.causal(),
    "window": lambda case, _: attention.causal() & _window(case, 5),
    "dilated_window": lambda case, _: attention.dilated_window(max(1, case.k_len // 10), 3),
    "global_local": lambda case, _: attention.global_local(case.block, max(1, case.k_len // 8)),
    "documents": lambda case, _: _documents(case),
    "packed_windows": lambda case, _: _documents(case) & _window(case, 6),
    "block_diagonal": lambda case, _: attention.block_diagonal(2 * case.block),
    "strided": lambda case, _: attention.causal() & attention.strided(4 * case.block, case.block, case.block),
    "random": lambda case, density: attention.random(density, case.seed, case.block),
    "nearly_empty": lambda case, _: attention.random(0.05, case.seed, case.block),  # many rows see nothing
    "pairs": lambda case, _: attention.from_mask(  # single pairs: no block is full
        torch.rand(case.q_len, case.k_len, generator=torch.Generator().manual_seed(case.seed)) < 0.3
    ),
    "by_head": _by_head,
    "blocks": _blocks,
    "longnet": lambda case, _: reduce(or_, pairs_of(case)),
    "quarter": lambda case, _: attention.window(case.k_len // 8 + 1),  # so many keys on either side
}
