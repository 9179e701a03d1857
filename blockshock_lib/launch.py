"""Parent of a run: cases in, records out, one group of workers reused from case to case.

A case that fails becomes rows that say so, its group is ended, and the next case gets a fresh one: nothing that a case
does stops the sweep. Only what would stop every case does: a group that cannot start, a record that cannot be written.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockshock_lib import records, worker
from blockshock_lib.errors import DeadlineError, RankError, RecordError, first_line
from blockshock_lib.workers import WorkerGroup, call, pack_call

if TYPE_CHECKING:
    from blockshock_lib.params import Hardware, Params
    from blockshock_lib.plan import Case

__all__ = ["Team", "WorkerGroup", "call", "failure_rows", "run"]

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


class Team:
    """Who measures. This one: children of this process, on this machine; `joined.group` has one of several machines.

    Attributes:
        leads: whether this process writes the records; of the supervisors of one run, one does.
    """

    leads = True

    def group(self, processes: int, **options: Any) -> WorkerGroup:
        """A fresh group; see WorkerGroup for options and errors."""
        return WorkerGroup(processes, **options)

    @contextlib.contextmanager
    def sampler(self, hardware: Hardware) -> Iterator[Callable[[], list[dict[str, Any]]]]:
        """While open, its function gives rows of power, clocks and throttling of the run's GPUs; none on a CPU."""
        if hardware.device != "cuda":
            yield list
            return
        from blockshock_lib.engine.power import Sampler

        with Sampler(hardware.device, hardware.processes) as sampler:
            yield sampler.rows


def run(
    params: Params,
    cases: Sequence[Case],
    folder: Path,
    *,
    measure: Callable[..., list[dict[str, Any]]] = worker.measure,
    run_name: str,
    context: dict[str, Any],
    on_event: Callable[[dict[str, Any]], None] | None = None,
    finished: Container[tuple[str, int]] = frozenset(),
    team: Team | None = None,
) -> None:
    """Measure every case in `params.timing.groups` fresh groups of workers; write one record a case and group.

    Args:
        folder: the run's folder; records go to records/, what the ranks print to logs/.
        measure: module-level `(ctx, case, params, group) -> rows`, run on every rank; rank 0's rows are kept.
        run_name, context: copied into every record; see `records.write`.
        on_event: called before and after each case with done, total, case (its label), group and status: "running",
            then "ok", "failed", "oom" or "timeout".
        finished: (case id, group) of the records that are there already: they are counted as done and not run again.
        team: who measures; left out, children of this process.

    Raises:
        LaunchError: `measure` cannot be sent to a worker, or a group could not start.
        RecordError: a record could not be written.
    """
    pack_call(measure)
    folder, hardware, team = Path(folder), params.hardware, team or Team()
    done, total = 0, params.timing.groups * len(cases)
    waiting = [[case for case in cases if (case.id, index) not in finished] for index in range(params.timing.groups)]

    def tell(status: str) -> None:
        if on_event is not None:
            on_event({"done": done, "total": total, "case": case.label, "group": index, "status": status})

    for index, left in enumerate(waiting):
        group = None
        done += len(cases) - len(left)
        with contextlib.ExitStack() as stack:
            for case in left:
                tell("running")
                if group is None or not group.alive:
                    group = stack.enter_context(
                        team.group(
                            hardware.processes,
                            device=hardware.device,
                            backend=hardware.backend,
                            threads=hardware.threads,
                            logs=folder / "logs",
                            start_seconds=params.limits.start_seconds,
                        )
                    )
                with team.sampler(hardware) as machine_rows:
                    try:
                        rows = group.call(measure, case, params, index, seconds=params.limits.case_seconds)[0]
                        records.validate(rows)
                    except (RankError, DeadlineError, RecordError) as error:
                        rows = failure_rows(case, error)
                status = next((s for s in ("failed", "oom", "timeout") if any(r["status"] == s for r in rows)), "ok")
                rows = [*rows, *machine_rows()]
                if team.leads:
                    records.write(folder, run=run_name, case=case, group=index, rows=rows, context=context)
                done += 1
                tell(status)


def failure_rows(case: Case, error: RankError | DeadlineError | RecordError) -> list[dict[str, Any]]:
    """One row a method of a case that gave no measurement: failed, oom or timeout, and why in one line."""
    status, detail = "failed", ""
    reason = first_line(str(error))
    if isinstance(error, DeadlineError):
        status, detail = "timeout", "logs/rank*.stacks"
    elif isinstance(error, RankError):
        line, detail = first_line(error.message), f"logs/rank{error.rank}.log"
        shortages = [text for text in error.message.splitlines() if any(w in text.lower() for w in OUT_OF_MEMORY)]
        if shortages or "OutOfMemory" in error.kind or error.kind == "MemoryError":
            # The line that says how many bytes were asked for is not always the first one.
            status, line = "oom", (shortages or [line])[0].strip()
        reason = f"rank {error.rank}: {error.kind}: {line}"
    return [
        records.row(method, "check", math.nan, status=status, reason=reason, detail=detail) for method in case.methods
    ]
