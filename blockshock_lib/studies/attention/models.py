"""Whole layers: a model, which is attention between projections, and the hybrid block; and one step of each."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from blockshock_lib.comm import Group
from blockshock_lib.engine.case_run import CaseRun
from blockshock_lib.engine.study import Check, Problem, Runner, Sample
from blockshock_lib.engine.timing import Work
from blockshock_lib.kernels.attention.call import Call, explicit
from blockshock_lib.layers.attention import BlockSparseAttention, ContextParallelAttention, HybridTransformerBlock
from blockshock_lib.layers.attention.hybrid import summed
from blockshock_lib.layers.attention.top_k import TopK, top_k
from blockshock_lib.layers.gpt.ranks import Silent
from blockshock_lib.ranks.worker import use_loopback
from blockshock_lib.studies.attention import scaling, truth
from blockshock_lib.studies.attention.methods import METHODS
from blockshock_lib.studies.attention.works import REPEATS, clocked

START = 2  # steps that hooks sum whole; so the step that is checked is exact
DENSITY = 0.01  # of what top-k sends
LOOSER = 3.0  # as of attention alone


def _fp16(state: SimpleNamespace, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    state.step += bucket.is_last()
    whole = state.step - bucket.is_last() < START
    return (default_hooks.allreduce_hook if whole else default_hooks.fp16_compress_hook)(state.group, bucket)


HOOKS: dict[str, tuple[Callable, Callable]] = {
    "": (lambda group: group, default_hooks.allreduce_hook),
    "fp16": (lambda group: SimpleNamespace(group=group, step=0), _fp16),
    "psgd": (lambda group: PowerSGDState(group, 1, START), powerSGD_hook),
    "top_k": (lambda group: TopK(DENSITY, START, group), top_k),
}


@cache
def _alone(ranks: int) -> dist.ProcessGroup:
    """A group of this rank alone. Collective, once."""
    return [dist.new_group([rank]) for rank in range(ranks)][dist.get_rank()]


@cache
def _host() -> dist.ProcessGroup:
    """A group of all ranks that wait on the host. Collective, once."""
    use_loopback()
    return dist.new_group(backend="gloo")


def exact(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The truth of attention, with its gradients: whole rows of scores in q's dtype."""
    counts = (problem.case.q_len, problem.case.k_len, problem.case.kv_heads)
    at = truth.Places(*(torch.arange(count, device=q.device) for count in counts))

    def made(call: Call, dout: Tensor | None) -> truth.Made:
        return truth.attention(call.q, call.k, call.v, dout, call.pattern, call.scale, call.q.dtype, at)

    forward = lambda call: made(call, None)[:2]  # noqa: E731
    backward = lambda call, dout, *_: made(call, dout)[2:5]  # noqa: E731
    return explicit(forward, backward, Call(q, k, v, problem.pattern, problem.lists, problem.scale))[0]


def unsupported(problem: Problem, of: Any) -> str:
    case, ranks = problem.case, problem.group.world_size
    if case.heads != case.kv_heads or case.q_len != case.k_len:
        return "the layers have as many heads and positions of keys as of queries"
    if of.dealt == "replicas" and (case.device == "cpu" or case.emulated):
        return "DataParallel copies a model to several GPUs of one process"
    if of.dealt in ("batch", "sequence") and problem.group.handle is None:
        return "DDP needs a process group, which ranks that are threads have not"
    if of.dealt in ("batch", "replicas") and case.batch % ranks:
        return f"a batch of {case.batch} cannot be dealt evenly to {ranks} ranks"
    return ""


class LayerRunner(Runner):
    """One step is a forward and a backward of x [batch, positions, width], in which x wants its gradient too."""

    layer = None  # of ranks, to replay: DDP has hooks of its own

    def __init__(self, problem: Problem, method: str):
        self.problem, self.name, self.method = problem, method, METHODS[method]
        self.group, dealt = problem.group, self.method.dealt
        self.active = bool(dealt) or self.group.rank == 0
        self.works_here = self.active and (dealt != "replicas" or self.group.rank == 0)
        used = range(self.group.world_size) if dealt == "replicas" and self.works_here else ()
        self.held = {device: torch.cuda.memory_allocated(device) for device in used}  # before there is a model
        self.ranks, self.x = None, problem.q.transpose(1, 2).flatten(2)
        self.dout = problem.dout.transpose(1, 2).flatten(2)
        self.module = self._made()
        if dealt == "batch":
            self.x, self.dout = (x.chunk(self.group.world_size)[self.group.rank] for x in (self.x, self.dout))
        if self.ranks is not None:
            self.x, self.dout = (self.ranks.shard(x, 1) for x in (self.x, self.dout))
        self.x, self.called = self.x.detach().clone().requires_grad_(), self.module
        if dealt in ("batch", "sequence"):
            self.called = self.module.distributed(self.group.handle)
            make, hook = HOOKS[self.method.hook]
            self.called.register_comm_hook(make(self.group.handle), hook)
        elif dealt == "replicas":
            self.called = nn.DataParallel(self.module, list(range(self.group.world_size)))

    def _made(self, whole: bool = False) -> nn.Module:
        """The module, of the same weights on every rank; `whole`: of one rank."""
        problem, case = self.problem, self.problem.case
        width, options = case.heads * case.head_dim, {"backend": problem.backend(self.name), "block": case.block}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(case.seed)
            if self.method.layer == "block":
                group = self.group if self.method.dealt and not whole else Group()
                module = HybridTransformerBlock(width, case.heads, problem.pattern, group, **options)
            else:
                if self.method.dealt == "sequence" and not whole:
                    given = problem.pattern, case.k_len, self.group, "ring", "zigzag"
                    self.ranks = ContextParallelAttention(*given, **options, device=problem.device)
                ranks = None if whole else self.ranks
                module = BlockSparseAttention(problem.pattern, None, ranks, options, None, width, case.heads)
        return module.to(problem.device, problem.dtype)

    def alone(self, fn: Callable[[], Any]) -> Callable[[], Any]:
        """fn, in which DataParallel uses the GPUs of all ranks: the others wait on the host, for a collective would
        wait on their GPUs and take a share of them.
        """

        def call() -> Any:
            made = fn() if self.works_here else None
            torch.cuda.synchronize()
            dist.barrier(_host())
            return made

        return call if self.method.dealt == "replicas" else fn

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.called(self.x)

    def step(self) -> tuple[Tensor, Tensor]:
        """(out, the gradient of x), of this rank's share; parameters have theirs."""
        self.called.zero_grad(set_to_none=True)
        self.x.grad = None
        with torch.enable_grad():
            out = self.called(self.x)
            torch.autograd.backward(out, self.dout)
        return out.detach(), self.x.grad

    def whole(self, x: Tensor) -> Tensor:
        if self.ranks is not None:
            return self.ranks.gather(x, 1)
        return self.group.all_gather(x.contiguous()) if self.method.dealt == "batch" else x

    def checks(self, run: CaseRun) -> Iterator[Check]:
        for device in self.held:
            torch.cuda.reset_peak_memory_stats(device)
        with run.weighed():
            made = self.alone(self.step)() if self.active else None
        peaks = [torch.cuda.max_memory_allocated(device) - held for device, held in self.held.items()]
        self.peaks = tuple(peaks) or (run.peak,)
        # DDP's gradients are means over the ranks, of one process those of the whole batch.
        times = self.group.world_size if self.method.dealt in ("batch", "sequence") else 1
        weight = self.module.qkv.weight.grad if made and self.method.layer == "model" else None
        yield from self.compared(made, *([] if weight is None else [weight * times]))

    def compared(self, made: tuple | None, *weight: Tensor) -> Iterator[Check]:
        """Out and the gradient of x, and that of the weight where it is given on all ranks that work."""
        dtypes = torch.float64, self.problem.dtype  # the truth, and plain PyTorch in the case's
        true, baseline = self.problem.once(self.method.layer, lambda: [self._plain(dtype) for dtype in dtypes])
        made = None if made is None else (*map(self.whole, made), *weight)
        for place, (name, right) in enumerate(true.items()):
            value = None if made is None or place == len(made) else made[place]
            each = (None if x is None else x.flatten(0, -2) for x in (value, baseline[name], right))
            yield Check(name or "out", *each, name, looser=LOOSER)

    def _plain(self, dtype: torch.dtype) -> dict[str, Tensor]:
        module = self._made(whole=True).to(dtype)

        def attend(x: Tensor) -> Tensor:  # of a block
            q, k, v = (one(x).unflatten(2, (-1, module.size)).transpose(1, 2) for one in (module.q, module.k, module.v))
            return module.out(exact(self.problem, q, k, v).transpose(1, 2).flatten(2))

        model = self.method.layer == "model"
        module.attend = partial(exact, self.problem) if model else attend
        x = self.problem.q.transpose(1, 2).flatten(2).to(dtype).requires_grad_()
        with torch.enable_grad():
            out = module(x)
            torch.autograd.backward(out, self.problem.dout.transpose(1, 2).flatten(2).to(dtype))
        found = {"": out.detach(), "dx": x.grad}
        return found | ({"dw": module.qkv.weight.grad} if model else {})

    def samples(self, run: CaseRun, done: Sequence[Mapping[str, Any]]) -> Iterator[Sample]:
        if done:
            return
        yield from scaling.samples(self)
        if self.method.dealt == "replicas":
            for step in range(REPEATS):  # what its calls pay beside DataParallel, for the other ranks to stand by
                yield Sample("wait_call", clocked(self.problem.device, self.alone(lambda: None))[0], step)
        if self.method.dealt == "batch":
            hook = self._hook(self.group.handle)
            for _ in range(START):
                exact = hook().clone()
            made, size = scaling.sent(self.group.world_size, hook)
            yield Sample("sent_bytes", size)
            yield Sample("gradient_error", ((made - exact).norm() / exact.norm()).item())

    def _hook(self, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        """The hook on all gradients as one of DDP's buckets: what it asks of one."""
        with self.called.no_sync():  # a rank's own gradients
            self.step()
        flat = torch.cat([one.grad.flatten() for one in self.module.parameters()])
        (make, hook), own = HOOKS[self.method.hook], flat.clone()
        state, given = make(group), [one.shape for one in self.module.parameters()]
        views = own.split([shape.numel() for shape in given])
        views = [part.view(shape) for part, shape in zip(views, given, strict=True)]
        fixed = {"buffer": own, "index": 0, "is_last": True, "gradients": views}
        bucket = SimpleNamespace(**{name: lambda value=value: value for name, value in fixed.items()})

        def call() -> Tensor:
            own.copy_(flat)
            return hook(state, bucket).wait()

        return call

    def works(self, run: CaseRun, copies: Sequence["LayerRunner"]) -> list[Work]:
        found = [
            Work("forward_call", [self.alone(self.forward)], eager=True),
            Work("step_call", [self.alone(self.step)], eager=True, heavy=True, traced=True, recheck=self.compared),
        ]
        if self.method.dealt == "batch":
            alone = self._hook(_alone(self.group.world_size))
            for _ in range(START + 1):
                alone()
            found.append(Work("compress_call", [alone], eager=True))
        return found + (self._pieces() if self.method.layer == "block" else [])

    def _pieces(self) -> list[Work]:
        """Of a forward: both sublayers without their sums, and the two sums alone."""
        own, x = copy.copy(self.module), self.x.detach()
        own.group = Silent(self.group.rank, self.group.world_size) if self.method.dealt else Group()
        found = {"attention": lambda: own.attend(x), "mlp": lambda: own.mlp(x)}
        if self.method.dealt:
            found["reduce"] = lambda: [summed(x, self.group) for _ in range(2)]
        return [Work(f"{name}_call", [torch.no_grad()(call)], eager=True) for name, call in found.items()]
