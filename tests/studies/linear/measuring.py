"""Cases of the linear study measured in this process, their ranks as threads; and what two spawned ranks measure."""

import copy
from unittest import mock

import torch

from blockshock_lib import params
from blockshock_lib.comm import Group, local
from blockshock_lib.engine import experiment
from blockshock_lib.layers import RowParallelLinear
from blockshock_lib.studies.linear import STUDY, lines
from blockshock_lib.studies.linear.problem import LinearProblem
from tests.cases import case, picked

CPU = torch.device("cpu")
QUICK = {"timing.samples": 2, "timing.warmup": 1, "timing.min_sample_ms": 0.01, "profile": "none"}


def load(phase: str = "phase1", hardware: str = "cpu", n=(), b=(), **settings):
    """The parameters of a phase: sizes and batches to sweep over, and settings whose keys may have __ for a dot."""
    given = {key.replace("__", "."): value for key, value in settings.items()}
    given |= {f"sweep.{key}": [*sizes] for key, sizes in (("n", n), ("b", b)) if sizes}
    return params.load(STUDY, phase, given, choose={"hardware": hardware})


def asked(phase: str, hardware: str = "cpu", **settings):
    return load(phase, hardware, **QUICK | settings)


def problem(params=None, repeat=0, on=CPU, **changes) -> LinearProblem:
    return LinearProblem(case(**changes), params, device=on, repeat=repeat)


def rows_of(own: LinearProblem, traces=None) -> list[dict]:
    return experiment.measure(own, own.params, STUDY, traces)


def measured(params, **changes) -> list[dict]:
    """The rows of a case on threads: not its run's smallest one unless that is said."""
    smallest = changes.pop("smallest", False)
    own = problem(params, **{"phase": params.phase} | changes)
    own.smallest = smallest
    return rows_of(own)


def details(rows, metric, method):
    return [row["detail"] for row in picked(rows, method, metric)]


def on_ranks(own: LinearProblem, fn) -> list:
    """fn(the problem on a rank) for every rank, as threads."""

    def ranked(group):
        mine = copy.copy(own)
        mine.group = group
        return fn(mine)

    return local.run(own.case.world_size, ranked)


METHODS = ("dense", "row_parallel", "block_shock", "permuted_dense")


@torch.no_grad()
def by_torch(ctx) -> bool:
    """Whether PyTorch's own row-parallel layer gives B1's y, and all of it."""
    layer = RowParallelLinear(torch.eye(128), torch.arange(128.0), group=Group.of())
    x = torch.arange(256.0).view(2, 128)
    y = lines.rowwise(layer, x)()
    return type(y) is torch.Tensor and torch.equal(y, layer.multiply(x))


def on_two_ranks(
    ctx, features: int = 128, dtype: str = "fp32", methods: tuple[str, ...] = METHODS, phase="phase1", **changes
) -> list[dict]:
    """The rows of a batch of 2048, on one of two spawned ranks."""
    fields = dict(in_features=features, out_features=features, batch=2048, dtype=dtype, device=ctx.device.type)
    one = case(phase=phase, methods=methods, emulated=False, bias=False, **fields | changes)
    own = LinearProblem(one, asked(phase), device=ctx.device, group=Group.of())
    return rows_of(own)


def lined(ctx, wrong: bool = False) -> list[dict]:
    """The rows of B1 and its reference lines where this machine is said to have what they need; `wrong`: they are 0."""

    def scattered(a, b, op, dim, name):
        whole = a @ b
        torch.distributed.all_reduce(whole)
        return whole.chunk(ctx.world_size)[ctx.rank].contiguous()

    def zero(make):
        return lambda *given: lambda forward=make(*given): forward().mul_(not wrong)  # noqa: B008

    one = case(phase="phase1", methods=("row_parallel",), emulated=False)
    import torch._inductor.lowering  # asks all of PyTorch's operators what they are, before one is replaced

    with (
        mock.patch.object(lines, "unsupported", lambda *_: ""),
        mock.patch.dict(lines.MAKERS, {line: zero(make) for line, make in lines.MAKERS.items()}),
        mock.patch.object(torch.ops.symm_mem, "fused_matmul_reduce_scatter", scattered),
    ):
        return rows_of(LinearProblem(one, asked("phase1"), device=ctx.device, group=Group.of()))


def backward_on_two_ranks(ctx, features: int, dtype: str, mask: str) -> dict[str, list[dict]]:
    """Phase -> its rows, of all that have a backward."""
    every = ("row_parallel", "column_parallel", "block_shock", "block_shock_torch")
    steps = dict(phase="phase3", optimizer="sgd", methods=(*every, "block_shock_recompress"))
    asked_for = (dict(phase="phase2", methods=every), steps)
    return {one["phase"]: on_two_ranks(ctx, features, dtype, mask=mask, **one) for one in asked_for}
