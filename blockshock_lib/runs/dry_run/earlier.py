"""What earlier runs know: seconds of their cases, and the ceilings of a machine. Nothing is measured here."""

import datetime as dt
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from blockshock_lib import studies
from blockshock_lib.engine.roofline import Ceilings
from blockshock_lib.engine.study import Phase, Study
from blockshock_lib.errors import ParamsError, RecordError
from blockshock_lib.files import shown
from blockshock_lib.params import RunParams
from blockshock_lib.report import frames
from blockshock_lib.report.axes import CEILING
from blockshock_lib.runs import manifest, records
from blockshock_lib.runs.run import OUTPUTS, REFERENCE

COMMAND_SECONDS = 8.0  # from the command to the run's first line and from its last to the prompt; in no manifest

_loaded = cache(records.load)  # a completed run changes no more


class Earlier(NamedTuple):
    folder: Path
    manifest: dict
    phase: Phase
    machine: str
    hardware: dict
    shipped: bool


def runs(study: str, device: str, *, machine: str = "", out: Path | None = None) -> list[Earlier]:
    """Completed runs of a study on that device kind, the newest first; those of `machine`, then shipped of others."""
    same = (run for run in _every(out) if (run.manifest["study"], run.hardware["device"]) == (study, device))
    fit = [run for run in same if run.machine == machine or run.shipped]
    newest = sorted(fit, key=lambda run: run.manifest["started"], reverse=True)
    return sorted(newest, key=lambda run: (run.machine != machine, run.shipped))


def _every(out: Path | None) -> Iterator[Earlier]:
    places = out or OUTPUTS, REFERENCE
    for folder in sorted({folder.resolve() for place in places for folder in manifest.folders(place)}):
        # A prediction can do without a damaged run, or one of a study that is not here.
        with suppress(RecordError, ParamsError, KeyError, TypeError):
            found = manifest.read(folder)
            title, hardware = found["machine"]["title"], found["params"]["hardware"]
            # What a colleague sent is looked at; predictions rest on what was measured here, or shipped.
            elsewhere = found.get("redrawn_from") or found.get("received")
            if found["status"] == "completed" and not elsewhere and hardware and title:
                phase = studies.of_phase(f"{found['study']}/{found['phase']}").phases[found["phase"]]
                yield Earlier(folder, found, phase, title, hardware, folder.is_relative_to(REFERENCE))


def known_ceilings(
    study: str, device: str, dtype: str, *, machine: str = "", out: Path | None = None
) -> tuple[Ceilings, str] | None:
    """A study's newest ceilings of that machine, else of a shipped run of that device kind, in the asked dtype where it
    has it; and which run measured them, where and how. Medians over a run's fresh groups, each of which measures them
    once and repeats them in each record.
    """
    for run in (run for run in runs(study, device, machine=machine, out=out) if run.phase.timed):
        frame = records.load(run.folder)
        rows = frame[frame["method"].eq(CEILING) & frame["status"].eq("ok") & frame["metric"].isin(Ceilings._fields)]
        same = rows["dtype"].eq(dtype)
        first = rows[same if same.any() else ~same].drop_duplicates(["group", "metric"])
        middle = first.groupby("metric")["value"].median()
        if {"copy_bandwidth", "gemm_rate"} <= set(middle.index):
            how = f"{first['dtype'].iloc[0]}, {run.hardware['world_size']} ranks"
            found = Ceilings(*(float(middle.get(name, 0.0)) for name in Ceilings._fields))
            return found, f"{shown(run.folder)} on {run.machine}, {how}"
    return None


def measured_times(
    study: str,
    device: str,
    phase: str,
    metric: str,
    like: Mapping[str, object],
    *,
    machine: str,
    out: Path | None = None,
) -> tuple[dict[str, float], str]:
    """Method -> median ms of `metric` in the case whose columns are `like`, and the run: the newest of that machine
    and phase that holds it, no emulated one. ({}, "") where none does.
    """
    for run in (run for run in runs(study, device, machine=machine, out=out) if run.machine == machine):
        if run.phase.name == phase and not run.hardware["emulated"]:
            frame = _loaded(run.folder)
            rows = frame[frame[list(like)].eq(pd.Series(like)).all(axis=1)]
            if len(times := frames.samples(rows, frames.time_metric(rows, metric))):
                return times.groupby("method")["value"].median().to_dict(), shown(run.folder)
    return {}, ""


def known_machines(study: str, out: Path | None = None) -> list[tuple[str, dict]]:
    """(device, machine card) of every machine that has timed the study, those of the shipped runs too; GPUs first."""
    timed = [run for run in _every(out) if run.phase.timed and run.manifest["study"] == study]
    found = {(run.hardware["device"], run.machine): run.manifest["machine"] for run in timed}
    return [(device, found[device, title]) for device, title in sorted(found, key=lambda key: (key[0] != "cuda", key))]


def estimate(study: Study, params: RunParams, card: dict, out: Path | None = None) -> tuple[float, str] | None:
    """Seconds from the command to its end, each case as the nearest of an earlier run, and which that is: the newest of
    the study here, of this phase first, else a shipped one.
    """
    found = runs(study.name, params.hardware.device, machine=card["title"], out=out)
    for run in sorted(found, key=lambda run: run.phase.name != params.phase):
        # Its parameters or its times may not be told; one that was resumed did only the rest between start and end.
        with suppress(KeyError, TypeError, ValueError):
            if not run.manifest.get("resumed"):
                where = "this machine" if run.machine == card["title"] else run.machine
                return COMMAND_SECONDS + _scaled(study, params, run), f"{shown(run.folder)}, {where}"
    return None


def _scaled(study: Study, params: RunParams, run: Earlier) -> float:
    started, ended = (dt.datetime.fromisoformat(run.manifest[key]) for key in ("started", "ended"))
    before = study.params.model_validate(run.manifest["params"])
    measured, groups = study.expand(before), before.timing.groups
    each = (ended - started).total_seconds() / groups
    work, known = (
        study.axes.work(pd.DataFrame([study.columns(case.as_dict()) for case in cases])).to_numpy(dtype=float)
        for cases in (study.expand(params), measured)
    )
    told = run.manifest.get("seconds") or {}  # case -> median over the groups; older runs did not note it
    seconds = np.array([told.get(case.id, each / len(measured)) for case in measured])
    rest = max(0.0, each - seconds.sum())  # starts, the notebook
    nearest = np.abs(np.log(work[:, None] / known[None, :])).argmin(axis=1)
    larger = np.maximum(1.0, work / known[nearest])
    samples = 1.0
    if study.phases[params.phase].timed:
        samples = (params.timing.warmup + params.timing.samples) / (before.timing.warmup + before.timing.samples)
    return params.timing.groups * (rest + samples * float((seconds[nearest] * larger).sum()))
