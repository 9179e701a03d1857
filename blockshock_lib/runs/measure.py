"""Parent of a run: cases in, records out, one group of workers reused from case to case.

A case that fails becomes rows that say so, and the next one gets a fresh group.
"""

import contextlib
import json
import math
import os
import pkgutil
import re
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from blockshock_lib import studies
from blockshock_lib.engine.study import Case, Study, row
from blockshock_lib.errors import DeadlineError, RankError, RecordError, first_line
from blockshock_lib.files import sha256
from blockshock_lib.params import RunParams
from blockshock_lib.ranks.group import Lost, WorkerGroup, pack_call
from blockshock_lib.ranks.worker import RankContext
from blockshock_lib.runs import machine, record

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")
# A process that died, or an error after which a process can use its GPU no more.
BROKEN = re.compile(
    r"^(SIG(?!TERM|INT)\w+|Exit): |cuda[ _]?(driver )?error|error \[cuda\]|illegal memory access", re.IGNORECASE
)


def measure(
    ctx: RankContext, study: str, case: Case, params: RunParams, group: int, done: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """One case with every method of it, on one rank: engine.experiment.measure, its traces beside the run's logs."""
    from blockshock_lib.comm import Group
    from blockshock_lib.engine import experiment

    brought = studies.load(study)
    traced = params.profile == "all" or (params.profile == "last" and case == brought.expand(params)[-1])
    traces = ctx.log.parent.parent / "traces" if traced and group == 0 else None
    try:
        problem = pkgutil.resolve_name(brought.problem)
        own = problem(case, params, device=ctx.device, group=Group.of(), repeat=group)
        own.begins, own.state = ctx.emit, ctx.log.parent.parent / "records" / f"{case.id}-{group}.state"
        return experiment.measure(own, params, brought, traces, ctx.emit, done)
    finally:
        # The next case must not run out of memory for what this one left in cycles and in the allocator's cache.
        experiment.release_cache(ctx.device)


def run(
    params: RunParams,
    cases: Sequence[Case],
    folder: Path,
    *,
    task: Callable[..., list[dict[str, Any]]] = measure,
    study: Study,
    run_name: str,
    context: dict[str, Any],
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    finished: Container[tuple[str, int]] = frozenset(),
    group: Callable[..., Any] = WorkerGroup,
    gives_up: bool = False,
) -> None:
    """Measure every case in `params.timing.groups` fresh groups of workers; write one record a case and group. Cases of
    one rank that are not timed run side by side, each on a device of its own. `task`, module-level, runs on every rank;
    it emits rows, and each method that it begins; its last argument is the rows of earlier attempts. `on_event` hears
    of done, total, case, group and status: "running", then "ok", "failed", "oom" or "timeout". `finished`: (case id,
    group) of records that are there. `gives_up`: a case that an earlier attempt began and said nothing of is failed.

    Raises: LaunchError: `task` cannot be sent, or a group cannot start. RecordError: a record cannot be written.
    """
    pack_call(task)
    hardware, seconds = params.hardware, params.limits.case_seconds
    done = sum((case.id, index) in finished for case in cases for index in range(params.timing.groups))
    options = {name: getattr(hardware, name) for name in ("device", "backend", "threads", "environment")}
    options |= dict(logs=folder / "logs", start_seconds=params.limits.start_seconds)
    stopped, turn = threading.Event(), threading.Lock()

    def say(case: Case, index: int, status: str) -> None:
        nonlocal done
        with turn:
            done += status != "running"
            event = {"total": params.timing.groups * len(cases), "done": done}
            on_event(event | {"case": case.label, "group": index, "status": status})

    def lane(cases: Iterator[Case], index: int, stack: contextlib.ExitStack, processes: int, first: int = 0) -> None:
        workers, case, again = None, None, []
        while (case := case if again else next(cases, None)) is not None:
            if stopped.is_set():
                return
            say(case, index, "running")
            if workers is None or not workers.alive:
                workers = stack.enter_context(group(processes, first=first, **options))
            if stopped.is_set():  # while they started: the stack may have ended all before it had these
                return workers.close()
            started = time.monotonic()
            part = Part(folder, case, index, context)
            with machine.Sampler(hardware.device, processes, first) as sampler:
                try:
                    if gives_up and part.silent:
                        raise RecordError("the job has ended in this case before; torchrun's report says why")
                    how = dict(seconds=seconds, on_emit=part.hear, may_lose=study.may_lose(case))
                    rows = kept(study, workers.call(task, study.name, case, params, index, part.rows, **how))
                    broken, again = False, []
                except (RankError, DeadlineError, RecordError) as error:
                    rows, broken = failure_rows(study, case, error, first), True
                    again = left_out(study, case, error, rows, part) if context["code"].get("sources") else []
            if stopped.is_set():  # what another lane raised has ended this one's workers
                return
            if again:
                part.add(again)
                continue
            rows = [one for one in rows if one["method"] not in part.gone]
            rows += [one for one in part.rows if one["method"] in part.gone]
            status = next((s for s in ("failed", "oom", "timeout") if any(r["status"] == s for r in rows)), "ok")
            written = dict(run=run_name, group=index, context=context, seconds=time.monotonic() - started)
            record.write(folder, study=study, case=case, rows=[*rows, *sampler.rows()], **written)
            if not (broken and part.state.exists()):  # else a resumed run goes on from there
                part.remove()
            say(case, index, status)

    for index in range(params.timing.groups):
        left = [case for case in cases if (case.id, index) not in finished]
        alone = [case for case in left if case.world_size == 1 and not study.phases[case.phase].timed]
        lanes = min(len(alone), hardware.processes) if group is WorkerGroup else 0
        with contextlib.ExitStack() as stack:
            lane(iter([case for case in left if not lanes or case.world_size > 1]), index, stack, hardware.processes)
        if not lanes:
            continue
        rest = iter(alone)  # that of a list may be shared by threads
        with ThreadPoolExecutor(lanes) as pool, contextlib.ExitStack() as stack:
            try:
                for one in as_completed([pool.submit(lane, rest, index, stack, 1, first) for first in range(lanes)]):
                    one.result()
            except BaseException:
                stopped.set()
                raise


class Part:
    """`records/<case>-<group>.part`: a line a message, with a digest over it and all before it, synced as it comes. The
    first says what is measured, by which code and where; a file that begins otherwise is begun anew. RecordError: it
    cannot be written. `rows`: what earlier attempts have left; `gone`: the methods that failed in them, `running`: what
    each rank has begun now. `silent`: whether the latest left nothing. `state`: what a problem keeps beside it to go on
    from; that of a file that is begun anew is removed.
    """

    def __init__(self, folder: Path, case: Any, group: int, context: dict[str, Any]):
        self.path = record.path_of(folder, case.id, group).with_suffix(".part")
        self.state = self.path.with_suffix(".state")
        sources = context["code"].get("sources")
        begun = {"case": case.id, "group": group, "machine": context["machine"], "sources": sources}
        self.rows: list[dict[str, Any]] = []
        self.running: dict[int, str] = {}
        self.silent, self._digest, end = False, "", 0
        for message, size, digest in messages(self.path):
            if not end and (message != begun or not sources):
                break
            end, self.silent, self._digest = end + size, message == begun, digest
            self.rows += [] if self.silent else message["rows"]
        self._write(begun, end)
        if not end:
            self.state.unlink(missing_ok=True)
        self.gone = {one["method"] for one in self.rows if (one["metric"], one["status"]) == ("check", "failed")}

    def hear(self, rank: int, said: str | list[dict[str, Any]]) -> None:
        # Rows come from one rank: rank 0 or its heir.
        self.running.update({rank: said}) if isinstance(said, str) else self.add(said)

    def add(self, rows: list[dict[str, Any]]) -> None:
        self._write({"rows": rows})

    def remove(self) -> None:
        for path in (self.path, self.state):
            path.unlink(missing_ok=True)

    def _write(self, message: dict[str, Any], end: int | None = None) -> None:
        text = json.dumps(message)
        self._digest = sha256(self._digest + text)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                if end is not None:
                    file.truncate(end)
                file.write(f"{self._digest} {text}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RecordError(f"{self.path.name} could not be written: {error.strerror or error}") from error


def messages(path: Path) -> Iterator[tuple[dict[str, Any], int, str]]:
    """Each message of a Part's file that is whole, and of all before it; its bytes and digest."""
    digest = ""
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        told, _, text = line.decode(errors="replace").rstrip("\n").partition(" ")
        if told != (digest := sha256(digest + text)) or not line.endswith(b"\n"):
            return
        yield json.loads(text), len(line), digest


def kept(study: Study, answers: list[Any]) -> list[dict[str, Any]]:
    """The rows of the first rank that was not lost, and one for each that was. RecordError where all were."""
    lost = [one for one in answers if isinstance(one, Lost)]
    if len(lost) == len(answers):
        raise RecordError(f"every rank was lost: {first_line(lost[0].reason)}")
    rows = list(next(one for one in answers if not isinstance(one, Lost)))
    rows += [row(study.metrics, "machine", "lost", 1.0, rank=one.rank, detail=first_line(one.reason)) for one in lost]
    record.validate(rows, study.metrics)
    return rows


def left_out(study: Study, case: Case, error: Exception, rows: list[dict], part: Part) -> list[dict[str, Any]]:
    """Of `rows`, by which all methods failed, that of the one that ended its process or broke its GPU's context: the
    case is begun anew without it. None where that is not known, or it is the baseline or the case's first.
    """
    name, why = part.running.get(getattr(error, "rank", -1)), "; the case was begun anew without it"
    if name in {None, case.methods[0], *study.twin, *part.gone} or not BROKEN.search(f"{error.kind}: {error.message}"):
        return []
    return [one | {"reason": one["reason"] + why} for one in rows if (one["method"], one["status"]) == (name, "failed")]


def failure_rows(
    study: Study, case: Case, error: RankError | DeadlineError | RecordError, first: int = 0
) -> list[dict[str, Any]]:
    status, detail, reason = "failed", "", first_line(str(error))
    if isinstance(error, DeadlineError):
        status, detail = "timeout", "logs/rank*.stacks"
    elif isinstance(error, RankError):
        line, detail = first_line(error.message), f"logs/rank{first + error.rank}.log"
        shortages = [text for text in error.message.splitlines() if any(w in text.lower() for w in OUT_OF_MEMORY)]
        if shortages or "OutOfMemory" in error.kind or error.kind == "MemoryError":
            # The line that says how many bytes were asked for is not always the first one.
            status, line = "oom", (shortages or [line])[0].strip()
        reason = f"rank {first + error.rank}: {error.kind}: {line}"
    why = dict(status=status, reason=reason, detail=detail)
    return [row(study.metrics, method, "check", math.nan, **why) for method in case.methods]
