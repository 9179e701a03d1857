"""Tuning ahead of a run: what its methods search for by themselves, on the same ranks, and keep on disk."""

import warnings
from collections.abc import Callable
from functools import partial

import torch

from blockshock_lib.comm import Group, local
from blockshock_lib.engine.case_run import CaseRun
from blockshock_lib.engine.experiment import Session, release_cache
from blockshock_lib.files import shown
from blockshock_lib.kernels.tuning import store
from blockshock_lib.ranks import WorkerGroup
from blockshock_lib.ranks.worker import RankContext
from blockshock_lib.studies.linear.params import Case, Params, expand
from blockshock_lib.studies.linear.phases import METRICS
from blockshock_lib.studies.linear.problem import LinearProblem


def tune(params: Params, say: Callable[[str], None]) -> bool:
    """Has the ranks tune every case of the phase; says a line each. Whether there was nothing to be said of any."""
    hardware, limits, done = params.hardware, params.limits, True
    how = {name: getattr(hardware, name) for name in ("device", "backend", "threads", "environment")}
    with WorkerGroup(hardware.processes, **how, start_seconds=limits.start_seconds) as group:
        for case in expand(params):
            told = group.call(tune_case, case, params, seconds=limits.case_seconds)[0]  # rank 0 searches first
            say(f"{case.label}: {'; '.join(told) or 'tuned'}")
            done = done and not told
    say(f"kept in {shown(store.folder())}")
    return done


def tune_case(ctx: RankContext, case: Case, params: Params) -> list[str]:
    """On every rank each method searches as it does in a run; what was warned of, and why one has no right way."""

    def ranked(group: Group) -> list[str]:
        run = CaseRun(LinearProblem(case, params, device=ctx.device, group=group), METRICS)
        session = Session(run, None, (), None, None, ())
        for name in case.methods:
            if not run.problem.unsupported(name):
                run.attempt(name, partial(session.build, name))
        return [f"{row['method']} {row['status']}: {row['reason']}" for row in run.rows]

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with torch.no_grad():
                failed = local.run(case.world_size, ranked)[0] if case.emulated else ranked(Group.of())
        finally:
            release_cache(ctx.device)
    return [*(str(one.message) for one in warned), *failed]
