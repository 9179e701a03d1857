"""gallery_decode on one rank: a model of Llama's shape makes the next token of each sequence, dense and 2:4.

The weights are random, those of the decoder layers 2:4 in every method, so that all compute one function: the dense
methods multiply the zeros too. What came before a token is a cache of random keys and values, of full length in each
call. Embedding, attention, head and the choice of the largest logit are part of the time; what torch.compile takes at a
method's first call is not, and is said as `compile_time`.
"""

import contextlib
import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config
from torch.nn.attention import SDPBackend, sdpa_kernel

from blockshock_lib.engine import roofline
from blockshock_lib.engine.case_run import CaseRun
from blockshock_lib.engine.study import Check, Problem, Sample
from blockshock_lib.engine.timing import copies_past_cache
from blockshock_lib.errors import UnsupportedError, first_line
from blockshock_lib.kernels.attention.sdpa import ORDER
from blockshock_lib.kernels.graph import Clock, guarded
from blockshock_lib.kernels.patterns.pattern import Cost
from blockshock_lib.kernels.patterns.table import PATTERNS
from blockshock_lib.layers import Linear24
from blockshock_lib.layers.pattern_linear import PatternLinear
from blockshock_lib.layers.sparsify import Sparse24, sparsify_
from blockshock_lib.studies.gallery.methods import DECODERS
from blockshock_lib.studies.gallery.params import Case, Params
from blockshock_lib.studies.gallery.problem import GalleryRunner, seed

LOOSER = 2.0  # layers one after another round at other places than float64's
THETA = 500_000.0  # of Llama 3's rotary positions


class Layer(nn.Module):
    """Pre-norm, grouped queries, rotary positions, SwiGLU; q, k and v are one product, gate and up another."""

    def __init__(self, width: int, mlp: int, heads: int, kv_heads: int, **how: Any):
        super().__init__()
        self.size, self.split = (size := width // heads), (heads, kv_heads, kv_heads)
        self.norm, self.mlp_norm = (nn.RMSNorm(width, eps=1e-5, **how) for _ in range(2))
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * size, bias=False, **how)
        self.out = nn.Linear(width, width, bias=False, **how)
        self.up, self.down = (nn.Linear(*ends, bias=False, **how) for ends in ((width, 2 * mlp), (mlp, width)))

    def forward(self, x: Tensor, turn: Sequence[Tensor], cache: Tensor, slot: Tensor) -> Tensor:
        """x [B, width] -> the same; its keys and values go into this slot of the cache [B, 2 kv_heads, S, size]."""
        heads, kv_heads, _ = self.split
        q, kv = turned(self.qkv(self.norm(x)).unflatten(-1, (-1, self.size)), *turn).split([heads, 2 * kv_heads], 1)
        cache.index_copy_(2, slot, kv[:, :, None])
        # The queries that share a head's keys are rows of one product: [B, kv_heads, heads / kv_heads, size].
        y = F.scaled_dot_product_attention(q.unflatten(1, (kv_heads, -1)), *cache.chunk(2, 1))
        x = x + self.out(y.flatten(1))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, size] at its position: pairs half a head apart turn by an angle each (arXiv:2104.09864), whose sine
    is negative for the first of a pair; cos and sin [heads, size].
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Llama(nn.Module):
    def __init__(self, case: Case, **how: Any):
        super().__init__()
        self.tokens = nn.Embedding(case.vocab, case.n, **how)
        shape = case.n, case.k, case.heads, case.kv_heads
        self.layers = nn.ModuleList(Layer(*shape, **how) for _ in range(case.layers))
        self.norm = nn.RMSNorm(case.n, eps=1e-5, **how)
        self.head = nn.Linear(case.n, case.vocab, bias=False, **how)

    def forward(
        self, tokens: Tensor, caches: Sequence[Tensor], place: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """tokens [B] at `place` [1], int64, and a cache a layer, which is read whole -> logits [B, vocab]. The token
        takes the slot of the oldest: `place` modulo the cache's length. `dtype`: by copies in it.
        """
        wide = (lambda one: copy.deepcopy(one).to(dtype)) if dtype else (lambda one: one)
        x = self.tokens(tokens).to(dtype or self.tokens.weight.dtype)
        (heads, kv_heads, _), size = self.layers[0].split, self.layers[0].size
        angles = place * THETA ** -(torch.arange(0, size, 2, dtype=torch.float64, device=x.device) / size)
        angles = torch.cat([angles.expand(heads + kv_heads, -1), angles.new_zeros(kv_heads, size // 2)])  # 0 of values
        turn = [torch.cat(pair, -1).to(x.dtype) for pair in ([angles.cos()] * 2, [-angles.sin(), angles.sin()])]
        slot = place % caches[0].shape[2]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = wide(layer)(x, turn, cache.to(x.dtype), slot)
        return wide(self.head)(wide(self.norm)(x))


class DecodeProblem(Problem):
    def __init__(self, case: Case, params: Params, **place: Any):
        super().__init__(case, params, **place)
        self.made = {}
        if any(DECODERS[name].compiled for name in case.methods):
            torch.compiler.reset()  # a process measures many cases; past eight models PyTorch compiles none
        how, size = {"dtype": self.dtype, "device": self.device}, case.n // case.heads
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed(case.seed, "decode", self.repeat))
            self.model = Llama(case, **how).requires_grad_(False)
            self.before = torch.randint(case.vocab, (case.batch,), device=self.device)
            caches = torch.randn(case.layers, 2, case.batch, case.kv_heads, case.context + 1, size, **how)
            # Values share a part: the mean of independent ones is near zero, and hides a fault of what follows it.
            caches[:, 1] += torch.randn(case.layers, case.batch, case.kv_heads, 1, size, **how)
        self.caches = [one.transpose(0, 1).flatten(1, 2) for one in caches]  # [B, 2 kv_heads, S, size] each
        self.place = torch.tensor([case.context], device=self.device)
        for linear in linears(self.model.layers):
            linear.weight *= Sparse24().kept(linear.weight)
        self.attention = ORDER if self.device.type == "cpu" else self._attention()

    def _attention(self) -> list[SDPBackend]:
        """The fastest of PyTorch's kernels here, which all methods take: a kernel that does not share out the keys
        leaves most of a GPU idle when one query a head asks for them.
        """
        kv_heads, made, clock = self.case.kv_heads, {}, Clock(self.device)
        q = self.caches[0][:, :kv_heads, : self.case.heads // kv_heads]
        calls = [partial(F.scaled_dot_product_attention, q, *one.chunk(2, 1)) for one in self.caches]
        with contextlib.ExitStack() as stack:
            stack.callback(clock.close)
            for kernel in ORDER:
                # As PyTorch says that it has none for this.
                with contextlib.suppress(RuntimeError), guarded(self.device), sdpa_kernel(kernel):
                    calls[0]()
                    made[kernel] = stack.enter_context(clock.timed(calls))
            times = [{kernel: sample() for kernel, sample in made.items()} for _ in range(3)]  # in turns
        return sorted(made, key=lambda kernel: min(one[kernel] for one in times))[:1] or ORDER

    def unsupported(self, method: str) -> str:
        of = DECODERS[method]
        if of.compiled and copies_past_cache(weights(self.model), self.device) > 1:
            return "so small a model is timed over copies past the cache, and each would be compiled for itself"
        return Linear24.unsupported(None, self.device, self.dtype, product=of.kernel) if of.pattern == "2:4" else ""

    def build(self, method: str) -> "DecodeRunner":
        return DecodeRunner(self, method)

    @cached_property
    def expected(self) -> tuple[Tensor, Tensor]:
        """(truth, baseline)"""
        given = self.before, [one.clone() for one in self.caches], self.place
        return self.model(*given, torch.float64), self.model(*given)


class DecodeRunner(GalleryRunner):
    """Caches are its own, each in storage of its own, into which a compiler writes in place. Weights of one kernel are
    all runners', unless calls rotate over copies past the L2.
    """

    same = 0.0  # share of the next tokens that are the dense model's
    seconds = 0.0  # of the first call of a compiled model

    def __init__(self, problem: DecodeProblem, method: str):
        self.problem, self.name, self.of = problem, method, DECODERS[method]
        key, shared = (self.of.pattern, self.of.kernel), copies_past_cache(weights(problem.model), problem.device) == 1
        if not shared or key not in problem.made:
            problem.made[key] = self._made(shared)
        self.model, self.caches = problem.made[key], [one.clone() for one in problem.caches]
        # The phase's own CUDA graph is around it; a CPU, which has no claim of speed, shows that it is one graph.
        how = {"mode": "max-autotune-no-cudagraphs"} if problem.device.type == "cuda" else {"backend": "aot_eager"}
        self.step = torch.compile(self.model, fullgraph=True, dynamic=False, **how) if self.of.compiled else self.model

    def _made(self, shared: bool) -> Llama:
        parts = self.problem.model.state_dict(keep_vars=True).values() if shared else ()
        model = copy.deepcopy(self.problem.model, {id(one): one for one in parts})
        if self.of.pattern == "2:4":
            sparsify_(model, Sparse24("given", product=self.of.kernel), "layers.*")
        # The head of a 2:4 model is the best dense model's.
        left = [] if self.of.kernel == "linear" else model.named_modules()
        for name, one in [pair for pair in left if isinstance(pair[1], nn.Linear)]:
            packed = PATTERNS["dense"].pack(one.weight, torch.ones_like(one.weight).bool(), kernel="searched")
            model.set_submodule(name, PatternLinear(packed, None, "searched"))
        return model

    def parts(self) -> tuple[str, ...]:
        return ("token",)

    def make(self, part: str) -> tuple[Tensor, Tensor]:
        """Logits [B, vocab] and the next tokens [B]."""
        with sdpa_kernel(self.problem.attention):
            logits = self.step(self.problem.before, self.caches, self.problem.place)
        return logits, logits.argmax(-1)

    def tune(self) -> None:
        for layer in linears(self.model):
            if hasattr(layer, "tune"):
                layer.tune(layer.weight.new_empty(self.problem.case.batch, layer.in_features).normal_())
        if self.of.compiled and not self.seconds:
            start = time.perf_counter()
            try:
                # What it keeps on disk of a graph does not tell one kernel of attention from another.
                with config.patch(enable_autograd_cache=False):
                    self.make("token")[1].tolist()
            except (torch.OutOfMemoryError, torch.AcceleratorError):  # of a kernel, which may be our own
                raise
            except Exception as error:  # of the compiler's own kinds
                why = first_line(getattr(error, "inner_exception", error))
                raise UnsupportedError(f"it cannot be compiled: {why}") from error
            self.seconds = time.perf_counter() - start

    def compared(self, part: str, made: tuple[Tensor, Tensor]) -> Iterator[Check]:
        """The logits; and the greedy tokens, which must be the dense model's wherever its own error leaves no doubt."""
        (truth, base), (logits, tokens) = self.problem.expected, made
        own, doubt = base.argmax(-1), 2 * (base - truth).abs().max()
        self.same = float((tokens == own).double().mean())
        behind = truth.gather(1, own[:, None]) - truth.gather(1, tokens[:, None])
        fault = "a next token is not the dense model's" if bool((behind > doubt).any()) else ""
        depth = 4 * self.problem.case.layers
        yield Check("logits", logits, base, truth, "", looser=LOOSER, fault=fault, depth=depth)

    def samples(self, run: CaseRun, done: Sequence[Mapping[str, Any]]) -> Iterator[Sample]:
        if run.once("attention") and not done:
            yield Sample("attention", 1.0, detail=" or ".join(kernel.name for kernel in self.problem.attention))

    def weigh(self) -> dict[str, float]:
        took = {"compile_time": self.seconds} if self.of.compiled else {}
        return {"packed_bytes": float(weights(self.model)), "greedy": self.same} | took

    def operand_bytes(self) -> int:
        return weights(self.model)

    def facts(self, ceilings: roofline.Ceilings) -> dict[str, float]:
        """Each weight and the cache read once; of the products and of attention the FLOPs, two a multiply and add."""
        case, every = self.problem.case, linears(self.model)
        kept = sum(one.in_features * one.out_features / (2 if isinstance(one, Linear24) else 1) for one in every)
        flops = case.batch * (2 * kept + 4 * case.layers * case.n * (case.context + 1))
        read = weights(self.model) + sum(one.nbytes for one in self.caches)
        return {"floor_token": roofline.compute(Cost(flops, read, 0), ceilings)}


def weights(model: nn.Module) -> int:
    """Bytes that a token reads of the linear layers."""
    held = (one.hold_bytes() if hasattr(one, "hold_bytes") else {"": one.weight.nbytes} for one in linears(model))
    return sum(sum(one.values()) for one in held)


def linears(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if hasattr(one, "in_features")]
