"""The plan with its numbers: a row a case and method, and the cases that cannot fit."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from blockshock_lib.engine.phases import PHASES
from blockshock_lib.engine.roofline import Ceilings
from blockshock_lib.layers.case_costs import CaseCosts
from blockshock_lib.params import Params
from blockshock_lib.plan import Case, expand
from blockshock_lib.predict import costs, memory
from blockshock_lib.predict.earlier import Known, known_ceilings
from blockshock_lib.report.machine_plots import byte_text

COLUMNS = (
    *("case", "label", "in_features", "out_features", "batch", "dtype", "mask", "workload", "world_size", "emulated"),
    *("device", "optimizer", "work", "method", "unsupported", "flops", "bytes_read", "bytes_written", "bytes_sent"),
    *("weight_bytes", "step_bytes", "floor_bytes", "floor_arithmetic", "floor_link", "floor_whole", "bound"),
    *("memory_bytes", "fits"),
)


def plan(params: Params, card: dict, out: Path | None = None) -> pd.DataFrame:
    """A row a (case, method), in the order of the cases: what it moves and holds, its floor and what binds it.

    Columns beside the case's own: `work` (what the phase times: "forward", "pass" or "step"), `unsupported` (why it
    cannot run here; "" when it can), `flops` and bytes a rank of that work (see `Cost`), `weight_bytes` (the fullest
    rank's), `step_bytes` (what a training step holds there; nan where nothing is trained), `floor_bytes`,
    `floor_arithmetic`, `floor_link` and `floor_whole` in ms, `bound`, `memory_bytes` (of the case: the fullest GPU, or
    all processes on a CPU; an upper estimate) and `fits`. Floors are nan where no earlier run knows the ceilings.

    `attrs["ceilings"]` is dtype -> where its ceilings come from (`Known`, or None); `attrs["limit"]` the bytes that
    there are, None where the system does not tell.
    """
    known: dict[str, Known | None] = {}
    rows: list[dict] = []
    limit = None
    for case in expand(params):
        if case.dtype not in known:
            known[case.dtype] = known_ceilings(
                case.device, case.dtype, machine=card["title"], ranks=case.world_size, out=out
            )
        limit = memory.machine_bytes(case, card) if limit is None else limit
        rows += case_rows(case, card, known[case.dtype], limit)
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table.attrs |= {"ceilings": known, "limit": limit}
    return table


def case_rows(case: Case, card: dict, known: Known | None, limit: int | None) -> list[dict]:
    """The rows of one case as `plan` gives them."""
    why = {name: costs.cannot(case, name, card) for name in case.methods}
    can = [name for name in case.methods if not why[name]]
    ceilings = known.ceilings if known else None
    gpu = limit if case.device == "cuda" and limit else 0
    ranks = 1 if case.emulated or case.device == "cuda" else case.world_size
    need = ranks * (memory.rank_bytes(case, can, ceilings, gpu) + memory.PROCESS[case.device])
    about = {name: getattr(case, name) for name in ("in_features", "out_features", "batch", "dtype", "world_size")}
    about |= {"case": case.id, "label": case.label, "mask": case.mask.name, "workload": case.workload.name}
    about |= {"emulated": case.emulated, "device": case.device, "memory_bytes": need}
    about |= {"optimizer": case.optimizer, "work": work(case), "fits": limit is None or need <= limit}
    numbers = {name: _numbers(case, name, ceilings) for name in can}
    return [about | {"method": name, "unsupported": why[name]} | numbers.get(name, {"bound": ""}) for name in why]


def work(case: Case) -> str:
    """The widest work that the case's phase measures: "forward", "pass" (forward and dX) or "step"."""
    phase = PHASES[case.phase]
    return "step" if phase.train else "pass" if phase.backward else "forward"


def _numbers(case: Case, name: str, ceilings: Ceilings | None) -> dict:
    all_of_it = costs.cost(case, name)
    found = {"flops": all_of_it.flops, "bytes_read": all_of_it.read, "bytes_written": all_of_it.written}
    found |= {"bytes_sent": all_of_it.sent, "weight_bytes": all_of_it.weights, "bound": ""}
    if case.optimizer:
        found["step_bytes"] = CaseCosts(case).training_bytes(name).peak
    if ceilings is None:
        return found
    least = costs.floor(costs.pieces(case, name), ceilings)
    return (
        found
        | {f"floor_{part}": getattr(least, part) for part in ("bytes", "arithmetic", "link", "whole")}
        | {"bound": least.bound}
    )


def does_not_fit(params: Params, card: dict) -> list[str]:
    """One sentence a case that cannot fit into this machine's memory; nothing is measured."""
    return sentences(plan(params, card))


def sentences(table: pd.DataFrame) -> list[str]:
    """`does_not_fit` of a table that `plan` made."""
    if table.empty:
        return []
    limit = table.attrs["limit"]
    cases = table[~table["fits"]].drop_duplicates("case")
    return [
        f"{row.label} needs up to {byte_text(row.memory_bytes)} "
        + (
            f"on the fullest GPU, which has {byte_text(limit)}: it cannot be expected to fit."
            if row.device == "cuda"
            else f"for {_processes(row)}, this machine has {byte_text(limit)} free: it cannot be expected to fit."
        )
        for row in cases.itertuples()
    ]


def _processes(row) -> str:
    return "its one process" if row.emulated else f"its {row.world_size} processes"
