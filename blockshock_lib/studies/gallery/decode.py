"""gallery_decode on one rank: a model of Llama's shape makes the next token of each sequence, dense and 2:4.

The weights are random, those of the decoder layers 2:4 in every method, so that all compute one function: the dense
methods multiply the zeros too. What came before a token is a cache of random keys and values, of full length in each
call. Embedding, attention, head and the choice of the largest logit are part of the time.
"""

import copy
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockshock_lib.engine import roofline
from blockshock_lib.engine.study import Check, Problem
from blockshock_lib.engine.timing import copies_past_cache
from blockshock_lib.kernels.patterns.pattern import Cost
from blockshock_lib.kernels.patterns.table import PATTERNS
from blockshock_lib.layers import Linear24
from blockshock_lib.layers.pattern_linear import PatternLinear
from blockshock_lib.layers.sparsify import Sparse24, sparsify_
from blockshock_lib.studies.gallery.methods import DECODERS
from blockshock_lib.studies.gallery.params import Case, Params
from blockshock_lib.studies.gallery.problem import DTYPES, GalleryRunner, seed

LOOSER = 2.0  # layers one after another round at other places than float64's
THETA = 500_000.0  # of Llama 3's rotary positions


class Layer(nn.Module):
    """Pre-norm, grouped queries, rotary positions, SwiGLU; q, k and v are one product, gate and up another."""

    def __init__(self, width: int, mlp: int, heads: int, kv_heads: int, **how: Any):
        super().__init__()
        self.size = size = width // heads
        self.split, self.turns = (heads, kv_heads, kv_heads), (heads + kv_heads, kv_heads)
        self.norm, self.mlp_norm = (nn.RMSNorm(width, eps=1e-5, **how) for _ in range(2))
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * size, bias=False, **how)
        self.out = nn.Linear(width, width, bias=False, **how)
        self.up, self.down = (nn.Linear(*ends, bias=False, **how) for ends in ((width, 2 * mlp), (mlp, width)))

    def forward(self, x: Tensor, turn: Sequence[Tensor], cache: Tensor, place: int) -> Tensor:
        """x [B, width] at `place` -> the same; writes its keys and values into the cache [2, B, kv_heads, S, size]."""
        qk, v = self.qkv(self.norm(x)).unflatten(-1, (-1, self.size)).split(self.turns, 1)
        q, k = turned(qk, *turn).split(self.split[:2], 1)
        cache[0, :, :, place], cache[1, :, :, place] = k, v
        past = cache[..., : place + 1, :]
        y = F.scaled_dot_product_attention(q[:, :, None], *past, enable_gqa=True)
        x = x + self.out(y.flatten(1))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, size] at its position: pairs half a head apart turn by an angle each (arXiv:2104.09864)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Llama(nn.Module):
    def __init__(self, case: Case, **how: Any):
        super().__init__()
        self.tokens = nn.Embedding(case.vocab, case.n, **how)
        shape = case.n, case.k, case.heads, case.kv_heads
        self.layers = nn.ModuleList(Layer(*shape, **how) for _ in range(case.layers))
        self.norm = nn.RMSNorm(case.n, eps=1e-5, **how)
        self.head = nn.Linear(case.n, case.vocab, bias=False, **how)

    def forward(self, tokens: Tensor, caches: Tensor, place: int, dtype: torch.dtype | None = None) -> Tensor:
        """tokens [B] at `place`, caches of all layers -> logits [B, vocab]; `dtype`: by copies in it."""
        wide = (lambda one: copy.deepcopy(one).to(dtype)) if dtype else (lambda one: one)
        x, size = self.tokens(tokens).to(dtype or self.tokens.weight.dtype), self.layers[0].size
        angles = place * THETA ** -(torch.arange(0, size, 2, dtype=torch.float64, device=x.device) / size)
        turn = [fn(angles).to(x.dtype) for fn in (torch.cos, torch.sin)]  # of all layers
        for layer, cache in zip(self.layers, caches, strict=True):
            x = wide(layer)(x, turn, cache.to(x.dtype), place)
        return wide(self.head)(wide(self.norm)(x))


class DecodeProblem(Problem):
    def __init__(self, case: Case, params: Params, **place: Any):
        super().__init__(case, params, **place)
        self.dtype = DTYPES[case.dtype]
        how, size = {"dtype": self.dtype, "device": self.device}, case.n // case.heads
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed(case.seed, "decode", self.repeat))
            self.model = Llama(case, **how).requires_grad_(False)
            self.before = torch.randint(case.vocab, (case.batch,), device=self.device)
            self.caches = torch.randn(case.layers, 2, case.batch, case.kv_heads, case.context + 1, size, **how)
            # Values share a part: the mean of independent ones is near zero, and hides a fault of what follows it.
            self.caches[:, 1] += torch.randn(case.layers, case.batch, case.kv_heads, 1, size, **how)
        for linear in linears(self.model.layers):
            linear.weight *= Sparse24().kept(linear.weight)

    def unsupported(self, method: str) -> str:
        of = DECODERS[method]
        return Linear24.unsupported(None, self.device, self.dtype, product=of.kernel) if of.pattern == "2:4" else ""

    def build(self, method: str) -> "DecodeRunner":
        return DecodeRunner(self, method)

    @cached_property
    def expected(self) -> tuple[Tensor, Tensor]:
        """(truth, baseline)"""
        given = self.before, self.caches.clone(), self.case.context
        return self.model(*given, torch.float64), self.model(*given)


class DecodeRunner(GalleryRunner):
    """What is packed is its own; the other weights are the problem's, unless calls rotate over copies past the L2."""

    same = 0.0  # share of the next tokens that are the dense model's

    def __init__(self, problem: DecodeProblem, method: str):
        self.problem, self.name = problem, method
        shared = copies_past_cache(weights(problem.model), problem.device) == 1
        parts = problem.model.state_dict(keep_vars=True).values() if shared else ()
        self.model, self.caches = copy.deepcopy(problem.model, {id(one): one for one in parts}), problem.caches.clone()
        of = DECODERS[method]
        if of.pattern == "2:4":
            sparsify_(self.model, Sparse24("given", product=of.kernel), "layers.*")
        # The head of a 2:4 model is the best dense model's.
        left = [] if of.kernel == "linear" else self.model.named_modules()
        for name, one in [pair for pair in left if isinstance(pair[1], nn.Linear)]:
            packed = PATTERNS["dense"].pack(one.weight, torch.ones_like(one.weight).bool(), kernel="searched")
            self.model.set_submodule(name, PatternLinear(packed, None, "searched"))

    def parts(self) -> tuple[str, ...]:
        return ("token",)

    def make(self, part: str) -> tuple[Tensor, Tensor]:
        """Logits [B, vocab] and the next tokens [B]."""
        logits = self.model(self.problem.before, self.caches, self.problem.case.context)
        return logits, logits.argmax(-1)

    def tune(self) -> None:
        for layer in linears(self.model):
            if hasattr(layer, "tune"):
                layer.tune(layer.weight.new_empty(self.problem.case.batch, layer.in_features).normal_())

    def compared(self, part: str, made: tuple[Tensor, Tensor]) -> Iterator[Check]:
        """The logits; and the greedy tokens, which must be the dense model's wherever its own error leaves no doubt."""
        (truth, base), (logits, tokens) = self.problem.expected, made
        own, doubt = base.argmax(-1), 2 * (base - truth).abs().max()
        self.same = float((tokens == own).double().mean())
        behind = truth.gather(1, own[:, None]) - truth.gather(1, tokens[:, None])
        fault = "a next token is not the dense model's" if bool((behind > doubt).any()) else ""
        depth = 4 * self.problem.case.layers
        yield Check("logits", logits, base, truth, "", looser=LOOSER, fault=fault, depth=depth)

    def weigh(self) -> dict[str, float]:
        return {"packed_bytes": float(weights(self.model)), "greedy": self.same}

    def operand_bytes(self) -> int:
        return weights(self.model)

    def facts(self, ceilings: roofline.Ceilings) -> dict[str, float]:
        """Each weight and the cache read once; of the products and of attention the FLOPs, two a multiply and add."""
        case, every = self.problem.case, linears(self.model)
        kept = sum(one.in_features * one.out_features / (2 if isinstance(one, Linear24) else 1) for one in every)
        flops = case.batch * (2 * kept + 4 * case.layers * case.n * (case.context + 1))
        return {"floor_token": roofline.compute(Cost(flops, weights(self.model) + self.caches.nbytes, 0), ceilings)}


def weights(model: nn.Module) -> int:
    """Bytes that a token reads of the linear layers."""
    held = (one.hold_bytes() if hasattr(one, "hold_bytes") else {"": one.weight.nbytes} for one in linears(model))
    return sum(sum(one.values()) for one in held)


def linears(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if hasattr(one, "in_features")]
