"""One case of the latency phase on one rank: GPT blocks by each schedule over real ranks, checked, then timed.

All schedules run the same weights. A forward, of a prompt or of one token behind a cache, is of all blocks, in the
case's dtype; a training step is whole, embeddings and head too, with weights of fp32 under autocast, as in training.
"""

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blockshock_lib.engine.case_run import CaseRun
from blockshock_lib.engine.study import Check, Problem, Runner
from blockshock_lib.engine.timing import Work
from blockshock_lib.files import seed
from blockshock_lib.layers.gpt import GPT, Cache, GPTConfig, named
from blockshock_lib.layers.gpt.ranks import Silent, Sum
from blockshock_lib.layers.gpt.schedule import Step
from blockshock_lib.studies.gpt import truth
from blockshock_lib.studies.gpt.methods import METHODS
from blockshock_lib.studies.gpt.need import unfit
from blockshock_lib.studies.gpt.params import Case, Params, Training
from blockshock_lib.studies.gpt.problem import CHECKED, LOOSER, GPTProblem

NEGLIGIBLE_LR = 1e-12  # no weight moves, so a timed step can be checked; its time is any rate's


def opened(case: Case, params: Params, **place: Any) -> Problem:
    return (LatencyProblem if case.work else GPTProblem)(case, params, **place)


class LatencyProblem(Problem):
    """`whole`: all weights, on every rank; `shares`: a rank's, a set for each copy."""

    def __init__(self, case: Case, params: Params, **place: Any):
        super().__init__(case, params, **place)
        self.trains, self.ranks, device = case.work == "step", case.ranks, self.device
        config = GPTConfig(case.width, case.heads, case.vocab, case.context, case.layers)
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
            torch.manual_seed(seed(case.seed, "weights", self.repeat))
            whole = GPT(config, "tensor_parallel", case.ranks)
            # Each part shows, at some hundredths of the stream, which all blocks together hardly make larger.
            for name, parameter in whole.named_parameters():
                if parameter.dim() == 1:
                    parameter.data += 0.05 * torch.randn_like(parameter)
                    continue
                std = 1.0 if name == "positions.weight" else parameter.shape[1] ** -0.5
                last = 0.3 * (2 * case.layers) ** -0.5 if name.endswith("out.weight") else 1.0
                torch.nn.init.normal_(parameter, std=std * last)
            self.ids = torch.randint(case.vocab, (case.batch, case.context + 1))
        self.whole = whole.to(torch.float32 if self.trains else self.dtype)
        self.x = (self.whole.tokens(self.ids[:, :-1]) + self.whole.positions.weight[: case.context]).detach()
        # By (rank, copy): ranks that are threads share these.
        self.shares: dict[tuple[int, int], GPT] = {}
        self.optimizers: dict[tuple[int, int], torch.optim.Optimizer] = {}
        self._made: dict[tuple[str, int], tuple] = {}

    def unsupported(self, method: str) -> str:
        return unfit(method, self.case)

    def model(self, method: str, at: int) -> GPT:
        """By the method's schedule, of the weights of copy `at`. The first one is a collective."""
        if (mine := (self.group.rank, at)) not in self.shares:
            first = self.shares.get((self.group.rank, 0))
            self.shares[mine] = copy.deepcopy(first) if first else GPT.of(self.whole, self.group)
            if self.trains:
                cuda, weights = self.device.type == "cuda", self.shares[mine].parameters()
                adam = torch.optim.AdamW(weights, lr=NEGLIGIBLE_LR, betas=Training.betas, fused=cuda, capturable=cuda)
                self.optimizers[mine] = adam
        model = copy.copy(self.shares[mine])
        model.schedule = named(METHODS[method].schedule, self.case.layers)
        return silent(model) if METHODS[method].bound else model

    def autocast(self, half: bool = True) -> torch.autocast:
        half = half and self.trains and self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype, enabled=half, cache_enabled=False)

    def expected(self, method: str) -> tuple[dict, dict]:
        """The truth by the method's equation and the same in the dtype of what is timed, on this rank."""
        if (key := (method, self.group.rank)) not in self._made:
            self._made[key] = tuple(self._by_equation(method, half) for half in (False, True))
        return self._made[key]

    def _by_equation(self, method: str, half: bool) -> dict[str, Tensor]:
        case, bound = self.case, METHODS[method].bound
        steps = named(METHODS[method].schedule, case.layers).steps
        if bound:  # each rank goes on with its own parts, which never land
            steps = [Step(s + 1, len(steps) + 1) for s in range(len(steps))]
        dtype = torch.float32 if self.trains else self.dtype
        state = Cast(self.whole, dtype if half else torch.float64)
        again = partial(checkpoint, truth.partial, use_reentrant=False)  # what a backward needs is cast once more
        streams = partial(truth.streams, state, steps=steps, heads=case.heads, ranks=self.ranks, part=again)
        if not self.trains:
            new = 1 if case.work == "decode" else case.length
            return {"stream": streams(self.x.to(state.dtype))[self.group.rank][:, -new:].flatten(0, 1)}
        ids = self.ids[:1, : CHECKED + 1]
        with torch.enable_grad(), self.autocast(half):
            places = self.whole.positions.weight[: ids.shape[1] - 1].to(state.dtype).detach().requires_grad_()
            stream = streams(state["tokens.weight"][ids[:, :-1]] + places)[self.group.rank]
            logits = truth.logits(state, stream).flatten(0, 1)
            loss = F.cross_entropy(logits.float() if half else logits, ids[:, 1:].flatten())
        (grad,) = torch.autograd.grad(loss, places)
        return {"loss": loss.detach().view(1, 1), "d positions": grad / self.ranks if bound else grad}

    def build(self, method: str) -> Runner:
        return LatencyRunner(self, method)


class LatencyRunner(Runner):
    def __init__(self, problem: LatencyProblem, method: str):
        self.problem, self.name, self.bound = problem, method, METHODS[method].bound
        self.place(0)

    def place(self, at: int) -> None:
        """Takes the weights of copy `at`, and fills a cache of its own."""
        problem, self.at = self.problem, at
        self.model, self.cache, self.x = problem.model(self.name, at), None, problem.x
        if problem.case.work == "decode":
            self.cache, self.x = Cache(problem.case.context), problem.x[:, -1:]
            self.model.streamed(problem.x[:, :-1], self.cache)

    def tune_together(self) -> None:
        if not self.bound:
            self.problem.group.tune(self.x.numel() * self.problem.dtype.itemsize, self.problem.device)

    def call(self, model: GPT) -> tuple[Tensor, ...]:
        """What is timed: a step on all its tokens, or the stream of a forward's new tokens, [S, W]."""
        if self.problem.trains:
            return self.step(model, self.problem.ids)
        if self.cache is not None:
            self.cache.length = self.problem.case.length
        return (model.streamed(self.x, self.cache).flatten(0, 1),)

    def step(self, model: GPT, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and the gradient of positions, to which all others have led; the optimizer has made its step."""
        optimizer = self.problem.optimizers[self.problem.group.rank, self.at]
        optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad(), self.problem.autocast():
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        model.sum_gradients()
        optimizer.step()
        return loss.detach().view(1, 1), model.positions.weight.grad

    def checks(self, run: CaseRun) -> Iterator[Check]:
        """Of a step a few positions; what all of its tokens give is what a timed one must give again."""
        if self.problem.trains:
            ids = self.problem.ids[:1, : CHECKED + 1]
            loss, grad = self.step(self.model, ids)
            yield from self.compared((loss, grad[: ids.shape[1] - 1]))
        with run.weighed():
            made = self.call(self.model)
        if self.problem.trains:
            self.again = [x.to(self.problem.dtype).double() for x in made]  # what a step gave when it was admitted
        else:
            yield from self.compared(made)

    def compared(self, made: Sequence[Tensor]) -> Iterator[Check]:
        """A step's in the dtype in which it multiplies, by which it is judged."""
        (true, baseline), depth = self.problem.expected(self.name), 2 * self.problem.case.layers
        for name, mine in zip(true, made, strict=True):
            plain = None if name == "loss" else baseline[name].to(self.problem.dtype)  # one number has no ratio
            held = mine.to(self.problem.dtype), plain, true[name], "" if name == "stream" else name
            yield Check(name, *held, looser=LOOSER, depth=depth)

    def recheck(self, made: tuple[Tensor, ...]) -> Iterator[Check]:
        if not self.problem.trains:
            yield from self.compared(made)
            return
        for name, mine, then in zip(("loss", "d positions"), made, self.again, strict=True):
            yield Check(f"{name} of what was timed", mine.to(self.problem.dtype), None, then)

    def operand_bytes(self) -> int:
        """Of a forward; a step's weights, gradients and moments are beyond any cache."""
        kept = self.cache.held.values() if self.cache else ()
        held = [*kept, *(p for module in self.model.sublayers for p in module.parameters())]
        return 0 if self.problem.trains else sum(x.nbytes for x in held)

    def works(self, run: CaseRun, copies: Sequence["LatencyRunner"]) -> list[Work]:
        """The whole as kernels and as calls; the same with its sums left out; and these alone, in a row."""
        for at, one in enumerate(copies[1:], 1):
            one.place(at)
        kind = "step" if self.problem.trains else "forward"
        calls = [partial(one.call, one.model) for one in copies]
        found = [Work(f"{kind}_kernel", calls, recheck=self.recheck, heavy=True, traced=True)]
        found += [Work(f"{kind}_call", calls, eager=True)]
        if not self.bound and self.problem.ranks > 1:
            quiet = [partial(one.call, silent(one.model)) for one in copies]
            found += [Work("compute_kernel", quiet), self.sums()]
        return found

    def sums(self) -> Work:
        """The schedule's sums, each awaited before the next: of a step those of its backward too, and of gradients."""
        problem, both = self.problem, (False, True) if self.problem.trains else (False,)
        whole = torch.randn(self.x.shape, device=problem.device).to(problem.dtype).flatten(0, 1)
        # A forward makes its products where they are added up; a step, which wants gradients, copies them there.
        room = None if problem.trains else problem.group.buffer(*whole.shape, whole.dtype, whole.device)
        own = whole.clone()
        every = [Sum(problem.group, sync.overlap > 0) for _ in both for sync in self.model.schedule.syncs]
        split = self.model._split()
        shared = sum(p.numel() for p in self.model.parameters() if id(p) not in split) if problem.trains else 0
        bucket = torch.randn(shared, device=problem.device)

        def restart() -> None:  # what is added up in place time after time grows to infinity
            for place in (own, room):
                if place is not None:
                    place.copy_(whole)
            bucket.normal_()

        def run() -> None:
            for one in every:
                one.begin(own if one.overlapped or room is None else room)
                one.wait()
            if shared:
                problem.group.all_reduce(bucket)

        return Work("sums_kernel", [run], before=restart)


class Cast(dict):
    """Weights in another dtype, each as it is asked for and kept nowhere: in float64 all at once would not fit."""

    def __init__(self, whole: GPT, dtype: torch.dtype):
        self.weights, self.dtype = dict(whole.named_parameters()), dtype

    def __missing__(self, name: str) -> Tensor:
        return self.weights[name].detach().to(self.dtype)


def silent(model: GPT) -> GPT:
    """The same weights and schedule, without sums."""
    other = copy.copy(model)
    other.group = Silent(model.group.rank, model.group.world_size)
    return other
