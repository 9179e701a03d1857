"""A run on several machines: one supervisor a rank, of which rank 0's opens the run, writes it and draws it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from blockshock_lib import launch, ownership, params, plan, records, workbook
from blockshock_lib.errors import Interrupted, ParamsError
from blockshock_lib.joined import cards
from blockshock_lib.joined.environment import Place
from blockshock_lib.joined.group import JoinedTeam
from blockshock_lib.joined.meeting import Meeting
from blockshock_lib.run import CACHE

LOG_BYTES = 1 << 20  # of the end of a log
TRACE_BYTES = 64 << 20


def execute(
    phase: str,
    place: Place,
    *,
    hardware: str = "auto",
    settings: Mapping[str, object] | None = None,
    resume: str = "",
    out: Path = workbook.OUTPUTS,
    root: Path = params.PARAMS,
) -> workbook.Outcome:
    """Measures a phase with the ranks of this job, then draws the notebook from the records into the run's folder.

    Every supervisor calls it, and gets the same outcome. Only rank 0's writes: the run's folder, with the other ranks'
    logs and traces in it. Arguments are those of `workbook.execute`; hardware.world_size is the job's size.

    Raises: what `workbook.open_run` raises, on rank 0; on the others Interrupted with the same words. Interrupted on
        all, within about ten seconds, when a supervisor is lost; the run can be resumed.
    """
    # The handler comes second: in Meeting's connect, which waits outside Python, it would not be heard.
    with Meeting(place) as meeting, _ended_by_sigterm():
        hellos = meeting.gather(cards.hello(place))
        team = JoinedTeam(meeting, hellos[place.rank]["gpu"])
        card = cards.joined(hellos)
        if not meeting.leads:
            _follow(meeting, team)
            return meeting.share()
        asked = dict(resume=resume) if resume else _asked(phase, hardware, settings, card, meeting.size, root)
        run = workbook.open_run(phase, **asked, out=out, root=root, card=card)
        finished = run.finished() if run.resumes else set()
        meeting.share({"params": run.params.model_dump(mode="json"), "finished": finished, "name": run.name})
        run.measure(progress=False, team=team)
        for files in meeting.gather([], everyone=False):
            for name, data in files:
                records.write_atomic(run.folder / name, data)
        return meeting.share(workbook.draw(run))


def _asked(phase: str, hardware: str, settings: Any, card: dict, size: int, root: Path) -> dict[str, Any]:
    # The hardware and settings of a new run whose ranks are those of this job; ParamsError for what they cannot be.
    if hardware == "auto":
        hardware = "cuda" if card["gpus"] else "cpu"
    asked = dict(hardware=hardware, settings={**(settings or {}), "hardware.world_size": size})
    effective = params.load(phase, asked["settings"], choose={"hardware": hardware}, root=root)
    if effective.hardware.emulated:
        raise ParamsError(
            f"hardware: {hardware} plays all ranks in one process, {size} were started; choose cuda or cpu"
        )
    return asked


def _follow(meeting: Meeting, team: JoinedTeam) -> None:
    # What a supervisor does whose rank is not 0: the same calls in the same order, and nothing on disk that stays.
    told = meeting.share()
    asked = params.Params.model_validate(told["params"])
    os.environ.setdefault("BLOCKSHOCK_CACHE", str(CACHE))
    with ownership.scratch() as scratch:
        folder = scratch / "run"
        launch.run(
            asked, plan.expand(asked), folder, run_name=told["name"], context={}, finished=told["finished"], team=team
        )
        meeting.gather(_files(folder), everyone=False)


def _files(folder: Path) -> list[tuple[str, bytes]]:
    """Logs (their ends) and traces of a rank, by their place in the run's folder."""
    found = []
    for kind, limit in (("logs", LOG_BYTES), ("traces", TRACE_BYTES)):
        for path in sorted(folder.glob(f"{kind}/*")):
            data = path.read_bytes()
            if kind == "logs":
                data = data[-limit:]
            if len(data) <= limit:
                found.append((f"{kind}/{path.name}", data))
    return found


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    # torchrun and SLURM end a job with it: the ranks, the manifest and the other supervisors shall hear of it.
    def stop(*_) -> None:
        raise Interrupted("the job was ended from outside (SIGTERM)")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
