"""What `run --dry-run` prints, 120 columns wide: parameters, machine, cases, bytes, time. Starts and writes nothing."""

import pkgutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockshock_lib.engine import memory
from blockshock_lib.engine.study import Need, Study
from blockshock_lib.errors import ParamsError
from blockshock_lib.params import RunParams
from blockshock_lib.report import columns
from blockshock_lib.report.figures import byte_text
from blockshock_lib.runs.dry_run.earlier import estimate
from blockshock_lib.runs.machine import admit

WIDTH = 120
# A process before it has a case: interpreter, torch and Triton, 0.4 to 0.55 GiB seen; on a GPU CUDA's context, too.
PROCESS = {"cpu": int(0.75 * memory.GIB), "cuda": 2 * memory.GIB}


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
        memory = byte_text(size) if size else "?"
        lines.append((case.label, f"{sum(can)}/{len(can)}", fits, memory))
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
