"""Bytes, and the predicted floor of every method, for one product that is asked for by its controls."""

from __future__ import annotations

import html
from functools import cache
from pathlib import Path

import pandas as pd

from blockshock_lib import predict
from blockshock_lib.errors import RecordError
from blockshock_lib.explore import controls
from blockshock_lib.explore.view import View, table
from blockshock_lib.params import METHOD_NAMES, Mask, Workload
from blockshock_lib.plan import Case
from blockshock_lib.predict.table import COLUMNS, case_rows
from blockshock_lib.report import figures, floor_plots, labels
from blockshock_lib.report.cells import WORK
from blockshock_lib.report.machine_plots import byte_text
from blockshock_lib.report.time_plots import milliseconds

WORKLOAD = Workload(name="gaussian", distribution="gaussian")
WORKS = {
    "a forward": ("phase1", ""),
    "a forward and dX": ("phase2", ""),
    "a training step, SGD": ("phase3", "sgd"),
    "a training step, AdamW": ("phase3", "adamw"),
}
"""What a floor can be of -> the phase that measures it, and its optimizer."""


def floors_view(
    n: int = 4096, b: int = 256, dtype: str = "bf16", mask: str = "checkerboard", world_size: int = 2
) -> None:
    """Weight and traffic bytes of every method, its predicted floor, and whether bytes, arithmetic or the link bind it.

    Of a forward, of a forward and dX, or of a training step.

    Args:
        n: in and out features; `square` unticked, they are chosen apart.
        b: rows of the input.
        dtype, mask, world_size: as parameters name them.
    """
    make(n, b, dtype, mask, world_size).show()


def make(
    n: int = 4096,
    b: int = 256,
    dtype: str = "bf16",
    mask: str = "checkerboard",
    world_size: int = 2,
    out: Path | None = None,
) -> View:
    """The view of `floors_view`, not yet displayed; `out` is where earlier runs are looked for."""
    masks = controls.shipped_masks()
    machines = {card["title"]: (device, card) for device, card in predict.known_machines(out)}
    if not machines:
        raise RecordError("no run knows a machine's ceilings; run phase 1, or restore outputs/reference")

    @cache
    def known(title: str, kind: str, ranks: int) -> predict.Known | None:
        return predict.known_ceilings(machines[title][0], kind, machine=title, ranks=ranks, out=out)

    def draw(n, square, in_features, out_features, b, dtype, mask, world_size, machine, work) -> str:
        size = (n, n) if square else (in_features, out_features)
        case = _case(work, size, b, dtype, masks[mask], world_size, machines[machine][0])
        found = known(machine, dtype, world_size)
        rows = case_rows(case, machines[machine][1], found, None)
        return _page(pd.DataFrame(rows, columns=list(COLUMNS)), found)

    kinds = ("bf16", "fp16", "fp32")
    found = {
        "n": controls.steps("N (in = out)", controls.SIZES, n, "in and out features of a square weight"),
        "square": controls.check("square", True, "untick to choose in and out features apart"),
        "in_features": controls.steps("in features", controls.SIZES, n, "columns of the weight"),
        "out_features": controls.steps("out features", controls.SIZES, n, "rows of the weight"),
        "b": controls.steps("B", controls.BATCHES, b, "rows of the input: tokens in a batch", "240px"),
        "dtype": controls.choice("dtype", kinds, dtype, "of weights and inputs", "130px"),
        "mask": controls.choice("mask", masks, mask, "how the weight is split into two terms", "230px"),
        "world_size": controls.choice("ranks", (2, 4, 8), world_size, "world size: GPUs or processes", "110px"),
        "machine": controls.choice(
            "ceilings of", machines, next(iter(machines)), "measured by an earlier run", "330px"
        ),
        "work": controls.choice("work", WORKS.items(), WORKS["a forward"], "what the floor is of", "270px"),
    }
    rows = (("n", "square", "in_features", "out_features", "work"), ("b", "dtype", "mask", "world_size", "machine"))
    view = View("floors", found, draw, rows=rows)
    found["square"].observe(lambda _: _show_sides(found), "value")
    _show_sides(found)
    return view


def _show_sides(found: dict) -> None:
    square = found["square"].value
    for name in ("n", "in_features", "out_features"):
        found[name].layout.display = "" if (name == "n") == square else "none"


def _case(
    work: tuple[str, str], size: tuple[int, int], b: int, dtype: str, mask: Mask, world_size: int, device: str
) -> Case:
    phase, optimizer = work
    # Without training, a layer that recompresses is the same as one that does not.
    methods = tuple(name for name in METHOD_NAMES if optimizer or name != "block_shock_recompress")
    fields = dict(phase=phase, methods=methods, in_features=size[0], out_features=size[1], batch=b, dtype=dtype)
    fields |= dict(optimizer=optimizer)
    fields |= dict(bias=False, mask=mask, workload=WORKLOAD, product="auto", device=device, world_size=world_size)
    return Case(**fields, emulated=False, seed=0)


def _page(frame: pd.DataFrame, found: predict.Known | None) -> str:
    source = f"{found.source} on {found.machine}" if found else ""
    note = f"Ceilings {html.escape(found.note)}. " if found and found.note else ""
    figure = figures.show(floor_plots.floors_figure(frame, source)).data
    need = byte_text(frame["memory_bytes"].iloc[0])
    where = "on the fullest GPU" if frame["device"].iloc[0] == "cuda" else "for all processes"
    memory = f"To measure this case takes up to {need} {where}, the float64 truth included."
    what = f"Bytes a rank in {WORK[frame['work'].iloc[0]]}, and its floor"
    return f"{figure}{table(bytes_table(frame), what)}<p>{note}{memory}</p>"


def bytes_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What each method holds and moves on a rank, as text; a method that cannot run has its reason at the end."""
    lines = []
    for row in frame.itertuples():
        line = {"method": labels.label(row.method)}
        if row.unsupported:
            lines.append(line | {"bound by": f"cannot run: {row.unsupported}"})
            continue
        names = {"weights": "weight_bytes", "read": "bytes_read", "written": "bytes_written", "sent": "bytes_sent"}
        line |= {short: byte_text(getattr(row, name)) for short, name in names.items()}
        floor = milliseconds(row.floor_whole) if row.bound else "unknown"
        lines.append(line | {"floor": floor, "bound by": row.bound})
    return pd.DataFrame(lines, columns=["method", "weights", "read", "written", "sent", "floor", "bound by"])
