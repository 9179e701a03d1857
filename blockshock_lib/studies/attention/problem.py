"""One case of the attention study on one rank: its inputs and truths, and the methods that must reach them."""

import hashlib
import math
from collections.abc import Iterator
from functools import cached_property

import torch

from blockshock_lib.engine.case_run import CaseRun
from blockshock_lib.engine.study import Check, Problem, Runner
from blockshock_lib.kernels.attention import backends
from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.layers.attention import ContextParallelAttention
from blockshock_lib.layers.attention.placement import placed
from blockshock_lib.studies.attention import truth
from blockshock_lib.studies.attention.methods import METHODS
from blockshock_lib.studies.attention.params import Case, Params
from blockshock_lib.studies.attention.patterns import made
from blockshock_lib.studies.attention.truth import Made

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PLACEMENT = "zigzag"
# A kernel rounds at other places than plain PyTorch, which shows where gradients cancel: on a CPU right ones were up to
# 2.6 times as wrong at one entry and 2.2 times in a row. The faults that are planted in the tests are tens of times so.
LOOSER = 3.0
NOTHING, NEXT_TO_NOTHING = 1e-12, 0.05  # of values of about 1
TENSORS = ("out", "lse", "dq", "dk", "dv")


class AttentionProblem(Problem):
    """q, k, v and dout are standard normal, each of a seed of its own, the same on every rank."""

    def __init__(self, case: Case, params: Params, **place):
        super().__init__(case, params, **place)
        self.dtype, self.scale = DTYPES[case.dtype], case.head_dim**-0.5
        queries, keys = (case.batch, case.heads, case.q_len), (case.batch, case.kv_heads, case.k_len)
        self.q, self.k, self.v, self.dout = (
            self._drawn(what, (*size, case.head_dim))
            for what, size in zip(("q", "k", "v", "dout"), (queries, keys, keys, queries), strict=True)
        )
        self.pattern = made(case)
        self.lists = self.pattern.lists(case.q_len, case.k_len, case.block, self.device)

    def _drawn(self, what: str, size: tuple[int, ...]) -> torch.Tensor:
        digest = hashlib.sha256(f"{self.case.seed}/{what}/{self.repeat}".encode()).digest()
        draw = torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7]))
        return torch.randn(size, generator=draw, device=self.device).to(self.dtype)

    def _made(self, dtype: torch.dtype) -> Made:
        return truth.attention(self.q, self.k, self.v, self.dout, self.pattern, self.scale, dtype)

    @cached_property
    def truth(self) -> Made:
        return self._made(torch.float64)

    @cached_property
    def baseline(self) -> Made:
        return self._made(self.dtype)

    def prepare(self, method: str) -> None:
        _ = self.truth, self.baseline

    def unsupported(self, method: str) -> str:
        of = METHODS[method]
        if not of.strategy:
            q = self.q.detach().requires_grad_()
            return backends.BACKENDS[of.backend].refuse(Call(q, self.k, self.v, self.pattern, self.lists, self.scale))
        if self.case.q_len != self.case.k_len:
            return "ranks share a sequence of as many queries as keys"
        ranks, heads = self.group.world_size, (self.case.heads, self.case.kv_heads)
        if of.strategy == "heads" and any(count % ranks for count in heads):
            return f"{heads[0]} heads over {heads[1]} cannot be dealt whole to {ranks} ranks"
        try:
            placed(self.lists, ranks, PLACEMENT)
        except ValueError as error:
            return str(error)
        return ""

    def build(self, method: str) -> "AttentionRunner":
        return AttentionRunner(self, method)

    def forget(self) -> None:
        for name in ("truth", "baseline"):
            vars(self).pop(name, None)


class AttentionRunner(Runner):
    """On one device rank 0 works and the others stand by; a strategy works on every rank, on its share."""

    def __init__(self, problem: AttentionProblem, method: str):
        self.problem, self.method, group = problem, METHODS[method], problem.group
        self.active = bool(self.method.strategy) or group.rank == 0
        self.layer, operands = None, (problem.q, problem.k, problem.v, problem.dout)
        if self.method.strategy:
            case = problem.case
            options = {"scale": problem.scale, "block": case.block, "device": problem.device}
            self.layer = ContextParallelAttention(
                *(problem.pattern, case.k_len, group, self.method.strategy, PLACEMENT, self.method.backend), **options
            )
            operands = tuple(map(self.layer.shard, operands))
        *self.operands, self.dout = (x.detach() for x in operands)

    def checks(self, run: CaseRun) -> Iterator[Check]:
        with run.weighed():
            made = run.agree(self._all) if self.layer is None else self._all()
        truth, baseline = self.problem.truth, self.problem.baseline
        for name in TENSORS:
            value, true = (None if made is None else made[name]), getattr(truth, name)
            if name == "lse":
                if self.layer is None and self.method.backend != "sdpa":  # the others are not asked for it
                    yield _logsumexp(value, true, truth.empty)
            elif not true.abs().max() > NOTHING:
                yield _nothing(name, value, true)
            else:
                # Rows are queries or keys of all heads: a wrong one among many is seen.
                flat = [None if x is None else x.flatten(0, 2) for x in (value, getattr(baseline, name), true)]
                yield Check(name, *flat, "" if name == "out" else name, looser=LOOSER)

    def _all(self) -> dict[str, torch.Tensor] | None:
        if not self.active:
            return None
        with torch.enable_grad():
            made = [x.clone().requires_grad_() for x in self.operands]
            if self.layer is not None:
                out, lse = self.layer(*made), None
            else:
                problem, asked = self.problem, self.method.backend != "sdpa"
                call = Call(*made, problem.pattern, problem.lists, problem.scale, asked)
                out, lse = backends.chosen(self.method.backend, call).attend(call)
            grads = torch.autograd.grad(out, made, self.dout)
        found = dict(zip(TENSORS, (out.detach(), lse, *grads), strict=True))
        if self.layer is not None:  # every rank looks at the whole: a share may hold nothing but zeros
            return {name: None if x is None else self.layer.gather(x) for name, x in found.items()}
        return found

    def weigh(self) -> dict[str, float]:
        lists = self.problem.lists
        return {"lists_bytes": lists.bytes, "density": lists.density, "block_density": lists.block_density}


def _logsumexp(lse: torch.Tensor | None, true: torch.Tensor, empty: torch.Tensor) -> Check:
    """Of a query that sees nothing it is -inf, which no ratio of errors can judge."""
    fault = ""
    if lse is not None:
        wrong = int(((lse == -math.inf) != empty).sum())
        fault = f"{wrong} queries without keys, or with some, have another logsumexp" if wrong else ""
        lse = lse.detach().masked_fill(empty, 0) + 1
    return Check("lse", lse, None, true + 1, record=False, fault=fault)


def _nothing(name: str, value: torch.Tensor | None, true: torch.Tensor) -> Check:
    """Where the truth is 0, as the gradient of a softmax over one key, what is made must be next to it."""
    one = None if value is None else torch.ones_like(value)
    far = value is not None and not value.abs().max() <= NEXT_TO_NOTHING
    fault = f"{name} is {value.abs().max():.3g}, must be 0" if far else ""
    return Check(name, one, None, torch.ones_like(true), record=False, fault=fault)
