"""What `run --dry-run` prints, 120 columns wide: parameters, machine, cases, bytes, time; and what earlier runs know:
seconds of their cases, and the ceilings of a machine. Starts, measures and writes nothing.
"""

import datetime as dt
import pkgutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from blockshock_lib import studies
from blockshock_lib.engine import memory
from blockshock_lib.engine.roofline import Ceilings
from blockshock_lib.engine.study import Need, Phase, Study
from blockshock_lib.errors import ParamsError, RecordError
from blockshock_lib.files import shown
from blockshock_lib.params import RunParams
from blockshock_lib.report import columns, frames
from blockshock_lib.report.axes import CEILING
from blockshock_lib.report.figures import byte_text
from blockshock_lib.runs import manifest, records
from blockshock_lib.runs.machine import admit
from blockshock_lib.runs.run import OUTPUTS, REFERENCE

WIDTH = 120
# A process before it has a case: interpreter, torch and Triton, 0.4 to 0.55 GiB seen; on a GPU CUDA's context, too.
PROCESS = {"cpu": int(0.75 * memory.GIB), "cuda": 2 * memory.GIB}
COMMAND_SECONDS = 8.0  # from the command to the run's first line and from its last to the prompt; in no manifest

_loaded = cache(records.load)  # a completed run changes no more


def dry_run(study: Study, params: RunParams, card: dict, out: Path | None = None) -> str:
    """The text of a dry run on the machine of `card`; `out`: where earlier runs are looked for, or OUTPUTS."""
    cases, groups = study.expand(params), params.timing.groups
    needs = [Need(0, dict.fromkeys(case.methods, "")) for case in cases]
    if study.need:
        needs = [pkgutil.resolve_name(study.need)(case, card) for case in cases]
    alone = [case.world_size == 1 and case.device == "cpu" and not study.phases[case.phase].timed for case in cases]
    lanes = min(sum(alone), params.hardware.processes)  # that run side by side, as runs.measure has them
    sizes = [memory_of(*pair) * (lanes if one else 1) for *pair, one in zip(cases, needs, alone, strict=True)]
    gpus = min((gpu["memory_bytes"] for gpu in card["gpus"]), default=None)
    limit = gpus if params.hardware.device == "cuda" else memory.available()
    time = "not known: no earlier run of this study tells"
    if guess := estimate(study, params, card, out):
        time = f"about {span(guess[0])}: an estimate, scaled from {guess[1]}."
    about = f"cases: {len(cases)}, in {groups} groups of fresh processes: {len(cases) * groups} records. run: methods"
    about += " that can run, of those asked for. memory: an upper estimate of what it, and what runs beside it, need."
    (largest, need), room = max(zip(cases, needs, strict=True), key=lambda pair: pair[1].bytes), []
    if any(sizes):
        there = "on the smallest GPU" if largest.device == "cuda" else "free here"
        there = f"{byte_text(limit)} {there}" if limit else ""
        pairs = [(case.label, size) for case, size in zip(cases, sizes, strict=True) if limit and size > limit]
        room = [f"{one} needs up to {byte_text(size)} of {there}: it cannot be expected to fit." for one, size in pairs]
        end = f"every case fits: at most {byte_text(max(sizes))} of {there} (an upper estimate)."
        room = room or [end if limit else f"up to {byte_text(max(sizes))}; what this machine has for it is not known."]
    tables = _case_lines(cases, needs, sizes, limit), _methods(study, need)
    tables = [textwrap.indent(columns(rows, WIDTH - 2), "  ") for rows in tables]
    blocks = [
        _head(study, params, card),
        _fold("Cases", about),
        tables[0],
        _fold("Methods", f"{'bytes a rank in' if need.held else 'those of'} the largest case, {largest.label}."),
        tables[1],
        _fold("Time", time),
        "\n".join(_fold("" if place else "Memory", text) for place, text in enumerate(room or ["not known."])),
    ]
    return "\n\n".join(blocks)


def memory_of(case: Any, need: Need) -> int:
    """Bytes of a case with its processes: on the fullest GPU, or of all processes on a CPU. 0: not known."""
    ranks = case.world_size if case.emulated or case.device == "cpu" else 1
    processes = 1 if case.emulated or case.device == "cuda" else case.world_size
    return ranks * need.bytes + processes * PROCESS[case.device] if need.bytes else 0


def _head(study: Study, params: RunParams, card: dict) -> str:
    hardware, chosen = params.hardware, params.layers
    files = ["base", study.name, params.phase, f"hardware/{chosen['hardware']}"]
    files += [f"sweeps/{chosen['sweep']}"] if "sweep" in chosen else []
    ranks = f"{hardware.world_size} rank{'s' * (hardware.world_size > 1)}" + " in one process" * hardware.emulated
    lines = [
        _fold(params.phase, f"{study.phases[params.phase].question} A dry run: nothing is started or written."),
        _fold("Parameters", f"params/: {' < '.join(files)} < what is chosen by name < --set"),
        _fold("Machine", f"{card['title']}; {ranks}" + ", no claim about speed" * (hardware.device == "cpu")),
    ]
    try:
        admit(params, card)
    except ParamsError as error:
        lines.append(_fold("", f"This run would be refused here: {error}"))
    return "\n".join(lines)


def _case_lines(cases: Sequence[Any], needs: Sequence[Need], sizes: Sequence[int], limit: int | None) -> list[tuple]:
    lines = [("case", "run", "fits", "memory")]
    for case, need, size in zip(cases, needs, sizes, strict=True):
        can = [not why for why in need.unsupported.values()]
        fits = "?" if limit is None or not size else "yes" if size <= limit else "NO"
        lines.append((case.label, f"{sum(can)}/{len(can)}", fits, byte_text(size) if size else "?"))
    return lines


def _methods(study: Study, need: Need) -> list[tuple]:
    rows = []
    for name, reason in need.unsupported.items():
        held = {what: byte_text(value) for what, value in need.held.get(name, {}).items()}
        rows.append({"method": study.axes.label(name)} | held | {"": f"cannot run: {reason}" if reason else ""})
    names = dict.fromkeys(name for row in rows for name in row if name) | {"": None}
    return [tuple(names), *(tuple(row.get(name, "") for name in names) for row in rows)]


def span(seconds: float) -> str:
    """17.4 -> "17 s", 754 -> "13 min", 9000 -> "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _fold(name: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"{name:<11} ", subsequent_indent=" " * 12, break_long_words=False)


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
