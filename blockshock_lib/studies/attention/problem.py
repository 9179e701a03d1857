"""One case of the attention study on one rank: its inputs and truths, and the methods that must reach them."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from blockshock_lib import files
from blockshock_lib.engine.case_run import CaseRun
from blockshock_lib.engine.roofline import Ceilings
from blockshock_lib.engine.study import Check, Problem, Runner, Sample
from blockshock_lib.engine.timing import Work
from blockshock_lib.errors import BlockShockError
from blockshock_lib.kernels.attention import backends, flex, tune
from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.kernels.attention.lists import BlockLists
from blockshock_lib.layers.attention import ContextParallelAttention, Pattern, causal, dilated_attention
from blockshock_lib.layers.attention.placement import placed
from blockshock_lib.studies.attention import models, scaling, truth, works
from blockshock_lib.studies.attention.methods import METHODS
from blockshock_lib.studies.attention.params import Case, Params
from blockshock_lib.studies.attention.patterns import Counted, dense, longnet, made, pairs_of
from blockshock_lib.studies.attention.phases import PHASES
from blockshock_lib.studies.attention.truth import Made

# A kernel rounds at other places than plain PyTorch, which shows where gradients cancel: on a CPU right ones were up to
# 2.6 times as wrong at one entry and 2.2 times in a row. The faults that are planted in the tests are tens of times so.
LOOSER = 3.0
NOTHING, NEXT_TO_NOTHING = 1e-12, 0.05  # of values of about 1
TENSORS = ("out", "lse", "dq", "dk", "dv")


class AttentionProblem(Problem):
    """q, k, v and dout are standard normal, each of a seed of its own, the same on every rank."""

    lists_timed = False  # those of a case are timed once

    def __init__(self, case: Case, params: Params, **place):
        super().__init__(case, params, **place)
        self.phase = PHASES[case.phase]
        if self.device.type == "cuda":
            works.compile_anew()
        self.scale = case.head_dim**-0.5
        queries, keys = (case.batch, case.heads, case.q_len), (case.batch, case.kv_heads, case.k_len)
        self.q, self.k, self.v, self.dout = (
            torch.randn((*size, case.head_dim), generator=self._seeded(what), device=self.device).to(self.dtype)
            for what, size in zip(("q", "k", "v", "dout"), (queries, keys, keys, queries), strict=True)
        )
        self.pattern = made(case)
        self.least = dense(self.pattern)
        self.lists = self.lists_of(self.pattern)
        self.places = truth.places(case.q_len, case.k_len, case.kv_heads, self._seeded("places", "cpu"), self.device)
        self._made: dict[bool | str, tuple] = {}

    def _seeded(self, what: str, device: str = "") -> torch.Generator:
        return torch.Generator(device or self.device).manual_seed(files.seed(self.case.seed, what, self.repeat))

    def lists_of(self, pattern: Pattern) -> BlockLists:
        return pattern.lists(self.case.q_len, self.case.k_len, self.case.block, self.device)

    def asked(self, method: str) -> Pattern:
        """What the method computes; of LongNet's gathered segments what each computes."""
        of = METHODS[method]
        return causal() if of.gathered else self.least if of.dense else self.pattern

    def expected(self, method: str) -> tuple[Made, Made]:
        """The truth and the baseline of what the method computes, at `places`."""
        pattern, gathered = self.asked(method), METHODS[method].gathered
        own = "gathered" if gathered else pattern.rules != self.pattern.rules
        pattern = Counted(pairs_of(self.case)) if gathered else pattern
        given, dtypes = (self.q, self.k, self.v, self.dout, pattern, self.scale), (torch.float64, self.dtype)
        return self.once(own, lambda: tuple(truth.attention(*given, dtype, self.places) for dtype in dtypes))

    def once(self, what: bool | str, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once for the methods of a case."""
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]

    def prepare(self, method: str) -> None:
        self.expected(method)

    def refusal(self, method: str, grad: bool, lse: bool = False) -> str:
        """Why its backend cannot do this on one device; "" where it can."""
        pattern, row = self.asked(method), backends.BACKENDS.get(METHODS[method].backend)
        with torch.set_grad_enabled(grad):
            return row.refuse(self.call(pattern, self.lists_of(pattern), grad, lse)) if row else ""

    def call(self, pattern: Pattern, lists: BlockLists, grad: bool, lse: bool = False) -> Call:
        q, k, v = (x.detach().requires_grad_(grad) for x in (self.q, self.k, self.v))
        return Call(q, k, v, pattern, lists, self.scale, lse)

    def unsupported(self, method: str) -> str:
        of = METHODS[method]
        if of.tuned and self.device.type == "cpu":
            return "its settings are searched for on GPUs only"
        if of.gathered and self.case.pattern != "longnet":
            return "it is one pattern, LongNet's"
        if of.layer and (why := models.unsupported(self, of)):
            return why
        # Without gradients a method's forward is timed, alone.
        why = "" if of.layer or (of.strategy and of.backend == "auto") else self.refusal(method, not self.phase.timed)
        if why or not (of.strategy or of.layer):
            return why
        if self.case.q_len != self.case.k_len:
            return "ranks share a sequence of as many queries as keys"
        ranks, heads = self.group.world_size, (self.case.heads, self.case.kv_heads)
        if "heads" in (of.strategy, of.dealt) and any(count % ranks for count in heads):
            return f"{heads[0]} heads over {heads[1]} cannot be dealt whole to {ranks} ranks"
        try:
            placed(self.lists, ranks if of.strategy or of.dealt == "sequence" else 1, of.placement)
        except ValueError as error:
            return str(error)
        return ""

    def backend(self, method: str) -> str:
        """By name. What is timed over ranks and on one alone takes the same."""
        of = METHODS[method]
        if not self.phase.timed or self.phase.lists or of.backend != "auto":
            return of.backend
        return self.once("kernel", lambda: scaling.kernel(self))

    def tune(self) -> None:
        """On rank 0: kernels for this very problem, forward alone and with gradients; where it was done, nothing."""
        if not self.case.tuned or self.device.type != "cuda" or self.group.rank:
            return
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                if tune.is_kept(call := self.call(self.pattern, self.lists, grad)):
                    continue
                try:
                    backends.tuned(call, self.params.tune_seconds)
                except BlockShockError as error:  # what is not tuned runs at its defaults, and the record says so
                    warnings.warn(str(error), stacklevel=2)

    def build(self, method: str) -> Runner:
        return models.LayerRunner(self, method) if METHODS[method].layer else AttentionRunner(self, method)

    def forget(self) -> None:
        if not self.phase.timed:  # what is timed is checked again
            self._made = {}


class AttentionRunner(Runner):
    """On one device rank 0 works and the others stand by; a strategy works on every rank, on its share."""

    def __init__(self, problem: AttentionProblem, method: str):
        self.problem, self.name, self.method, group = problem, method, METHODS[method], problem.group
        self.active = bool(self.method.strategy) or group.rank == 0
        self.layer, operands = None, (problem.q, problem.k, problem.v, problem.dout)
        self.pattern = problem.asked(method)
        self.lists = problem.lists_of(self.pattern)
        self.lacks = "" if self.method.strategy else problem.refusal(method, True)  # why it has no gradients
        # A layer over ranks is not asked for it.
        self.gives_lse = not self.method.strategy and not problem.refusal(method, not self.lacks, True)
        if self.method.backend == "sdpa" and not self.method.gathered:
            self.gives_lse = False  # with it other operators would run than those that are timed
        self.first_ms, self.peaks = 0.0, (None,)  # of its first call; bytes of this rank, as of run.peak
        self.backend = problem.backend(method)
        if self.method.strategy:
            case = problem.case
            options = {"scale": problem.scale, "block": case.block, "device": problem.device}
            self.layer = ContextParallelAttention(
                *(self.pattern, case.k_len, group, self.method.strategy, self.method.placement, self.backend),
                **options,
            )
            operands = tuple(map(self.layer.shard, operands))
        *self.operands, self.dout = (x.detach() for x in operands)

    def attend(self, operands: Sequence[torch.Tensor], lse: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.layer is not None:
            return self.layer(*operands), None
        if self.method.gathered:
            case, options = self.problem.case, (True, self.backend, self.problem.scale, True)
            return dilated_attention(*operands, *longnet(case), *options, block=case.block)
        call = Call(*operands, self.pattern, self.lists, self.problem.scale, lse)
        if self.method.tuned:
            return flex.attend(call, mode="max-autotune-no-cudagraphs")
        return backends.chosen(self.backend, call).attend(call)

    def tune(self) -> None:
        if self.method.backend in ("auto", "triton"):
            self.problem.tune()

    def kernel(self) -> str:
        """The backend that runs, and how its kernels are cut."""
        with torch.enable_grad():
            call = self.problem.call(self.pattern, self.lists, not self.lacks)
            row = backends.chosen(self.backend, call)
            here = self.problem.case.tuned and tune.is_kept(call)  # the search may have failed
        cuts = getattr(row, "cuts", {}).values()
        each = [f"{cut.kernel} {cut.block_m}x{cut.block_n}, {cut.warps} warps, {cut.stages} stages" for cut in cuts]
        return "; ".join([backends.name_of(row), *each, *["tuned here"] * here])

    def checks(self, run: CaseRun) -> Iterator[Check]:
        with run.weighed():
            made = run.agree(self._all) if self.layer is None else self._all()
        shared = 0 if self.layer is None else self.layer.shared_bytes(self.operands[1])
        self.peaks = (None if run.peak is None else run.peak + shared,)
        yield from self.compared(self.whole(made))

    def compared(self, made: Mapping[str, torch.Tensor] | None, names: Sequence[str] = TENSORS) -> Iterator[Check]:
        """Those of `names` that the method gives, at the places that are compared; NaN and Inf count anywhere."""
        true, baseline = self.problem.expected(self.name)
        at = self.problem.places
        for name in names:
            if not (self.gives_lse if name == "lse" else name == "out" or not self.lacks):
                continue
            value, right = (None if made is None else made[name]), getattr(true, name)
            size, fault = 0, ""
            if value is not None:
                size = value.numel() if at.sampled else 0
                fault = "" if name == "lse" or value.isfinite().all() else f"{name} holds NaN or Inf"
                value = value[:, at.heads][:, :, at.keys] if name in ("dk", "dv") else value[:, :, at.rows]
            if name == "lse":
                yield _logsumexp(value, right)
            elif not right.abs().max() > NOTHING:
                yield _nothing(name, value, right)
            else:
                # Rows are queries or keys of all heads: a wrong one among many is seen.
                flat = [None if x is None else x.flatten(0, 2) for x in (value, getattr(baseline, name), right)]
                detail = "" if name == "out" else name
                yield Check(name, *flat, detail, sampled=size, fault=fault, looser=LOOSER)

    def _all(self) -> dict[str, torch.Tensor] | None:
        if not self.active:
            return None
        with torch.set_grad_enabled(not self.lacks), works.beta(self.method):
            # A layer's share was copied when it was dealt; on one rank a copy of what all have is weighed as its own.
            *made, dout = (x.detach() if self.layer is not None else x.clone() for x in (*self.operands, self.dout))
            made = [x.requires_grad_(not self.lacks) for x in made]
            self.first_ms, (out, lse) = works.clocked(self.problem.device, lambda: self.attend(made, self.gives_lse))
            grads = (None,) * 3 if self.lacks else torch.autograd.grad(out, made, dout)
        return dict(zip(TENSORS, (out.detach(), lse, *grads), strict=True))

    def whole(self, made: Mapping[str, torch.Tensor] | None) -> Mapping[str, torch.Tensor] | None:
        """Every rank looks at the whole: a share may hold nothing but zeros."""
        if self.layer is None or made is None:
            return made
        return {name: None if x is None else self.layer.gather(x) for name, x in made.items()}

    def weigh(self) -> dict[str, float]:
        if self.method.dense or self.method.gathered:
            return {}
        lists = self.problem.lists
        return {"lists_bytes": lists.bytes, "density": lists.density, "block_density": lists.block_density}

    def samples(self, run: CaseRun, done: Sequence[Mapping[str, Any]]) -> Iterator[Sample]:
        if not self.problem.phase.timed or done:
            return
        if self.method.name in ("auto", "triton", "alone"):
            yield Sample("kernel", 1.0, detail=self.kernel())
        if not self.problem.phase.lists:
            yield from scaling.samples(self)
            return
        yield Sample("first_call", self.first_ms)
        if not self.method.dense and not self.problem.lists_timed:
            self.problem.lists_timed = True
            yield from works.list_times(self.problem)

    def operand_bytes(self) -> int:
        return sum(x.nbytes for x in self.operands)

    def works(self, run: CaseRun, copies: Sequence["AttentionRunner"]) -> list[Work]:
        found = works.of(run, copies, self.problem.phase.works)
        return found + (scaling.parts(run, copies) if self.layer is not None else [])

    def facts(self, ceilings: Ceilings) -> dict[str, float]:
        if self.method.gathered:  # what its parts visit is in no list of the case
            return {}
        return works.floors(self, ceilings)


def _logsumexp(lse: torch.Tensor | None, true: torch.Tensor) -> Check:
    """Of a query that sees nothing it is -inf, which no ratio of errors can judge."""
    empty, fault = true == -math.inf, ""
    if lse is not None:
        wrong = int(((lse == -math.inf) != empty).sum())
        fault = f"{wrong} queries without keys, or with some, have another logsumexp" if wrong else ""
        lse = lse.detach().masked_fill(empty, 0) + 1
    return Check("lse", lse, None, true.masked_fill(empty, 0) + 1, record=False, fault=fault)


def _nothing(name: str, value: torch.Tensor | None, true: torch.Tensor) -> Check:
    """Where the truth is 0, as the gradient of a softmax over one key, what is made must be next to it."""
    one = None if value is None else torch.ones_like(value)
    far = value is not None and not value.abs().max() <= NEXT_TO_NOTHING
    fault = f"{name} is {value.abs().max():.3g}, must be 0" if far else ""
    return Check(name, one, None, torch.ones_like(true), record=False, fault=fault)
