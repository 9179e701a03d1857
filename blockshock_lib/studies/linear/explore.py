"""Views of the linear study for a notebook that is kept open: each shows itself where it ends a cell."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import ipywidgets as widgets
import pandas as pd

from blockshock_lib.errors import RecordError
from blockshock_lib.kernels.sparse24.mask import MASKS
from blockshock_lib.report import figures, machine_plots
from blockshock_lib.report.figures import byte_text, milliseconds
from blockshock_lib.report.view import View, choice, steps, table
from blockshock_lib.studies.linear.axes import AXES
from blockshock_lib.studies.linear.costs import floor_rows
from blockshock_lib.studies.linear.methods import METHODS
from blockshock_lib.studies.linear.params import WORKLOADS, Case
from blockshock_lib.studies.linear.report.masks import corners, masks_figure

# Multiples of 512, which every method can split over eight ranks.
SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 40960)
BATCHES = (1, 4, 16, 64, 256, 1024, 4096)
# What a floor can be of -> the phase that measures it, and its optimizer.
WORKS = {"a forward": ("phase1", ""), "a forward and dX": ("phase2", "")}
WORKS |= {"a training step, SGD": ("phase3", "sgd"), "a training step, AdamW": ("phase3", "adamw")}


def masks_view(mask: str = "transposable_random", corner: int = 32) -> View:
    """One mask: a corner of so many outputs and inputs, a multiple of 8."""

    def draw(tile_mask: str, tile_corner: int, tile_seed: int) -> str:
        return figures.show(masks_figure(corners([MASKS[tile_mask]], tile_corner, tile_seed))).data

    controls = {
        "tile_mask": choice("mask", MASKS, mask, "how a weight is split into two 2:4 terms"),
        "tile_corner": steps("corner", range(8, 65, 8), corner, "outputs and inputs that are drawn"),
        "tile_seed": steps("seed", range(10), 0, "of the weights, and of the random masks"),
    }
    return View("masks", controls, draw)


def floors_view(
    runs: ModuleType,
    n: int = 4096,
    b: int = 256,
    dtype: str = "bf16",
    mask: str = "checkerboard",
    world_size: int = 2,
    out: Path | None = None,
) -> View:
    """Bytes of every method, its floor and what binds it. `runs`: runs.dry_run; `out`: where it looks."""
    known_machines = sorted(runs.known_machines("linear", out), key=lambda one: -len(one[1]["gpus"]))
    machines = {card["title"]: (device, card) for device, card in known_machines}
    if not machines:
        raise RecordError("no run knows a machine's ceilings; run phase 1, or restore outputs/reference")

    @cache
    def known(title: str, kind: str) -> tuple[Any, str]:
        return runs.known_ceilings("linear", machines[title][0], kind, machine=title, out=out) or (None, "")

    def draw(n, out_features, b, mask, machine, work, **fields) -> str:
        (phase, optimizer), (device, card) = work, machines[machine]
        fields |= dict(phase=phase, optimizer=optimizer, in_features=n, out_features=out_features or n, batch=b)
        fields |= dict(mask=MASKS[mask], workload=WORKLOADS["gaussian"], bias=False)
        # Without training, a layer that recompresses is the same as one that does not.
        fields["methods"] = tuple(name for name in METHODS if optimizer or name != "block_shock_recompress")
        case = Case(**fields, device=device, product="auto", emulated=False, seed=0)
        ceilings, source = known(machine, case.dtype)
        frame = pd.DataFrame(floor_rows(case, card, ceilings))
        about = ("in_features", "out_features", "batch", "mask", "workload", "optimizer", "dtype", "world_size")
        like = {name: frame[name].iloc[0] for name in about}
        metric = f"{frame['work'].iloc[0]}_kernel"
        times, run = runs.measured_times("linear", device, phase, metric, like, machine=machine, out=out)
        return _page(frame.assign(measured=frame["method"].map(times)), source, run)

    controls = {
        "n": steps("N (in features)", SIZES, n, "columns of the weight"),
        "out_features": steps("out features", [("= N", 0), *((str(n), n) for n in SIZES)], 0, "rows of the weight"),
        "b": steps("B", BATCHES, b, "rows of the input: tokens in a batch", "240px"),
        "dtype": choice("dtype", ("bf16", "fp16", "fp32"), dtype, "of weights and inputs", "130px"),
        "mask": choice("mask", MASKS, mask, "how the weight is split into two terms", "230px"),
        "world_size": choice("ranks", (2, 4, 8), world_size, "world size: GPUs or processes", "110px"),
        "machine": choice("ceilings of", machines, next(iter(machines)), "measured by an earlier run", "330px"),
        "work": choice("work", WORKS.items(), WORKS["a forward"], "what the floor is of", "270px"),
    }
    rows = (("n", "out_features", "work"), ("b", "dtype", "mask", "world_size", "machine"))
    return View("floors", controls, draw, rows=rows)


def _page(frame: pd.DataFrame, source: str, run: str) -> str:
    figure = figures.show(machine_plots.floors_figure(frame, AXES, source, run)).data
    takes = byte_text(frame["rank_bytes"].iloc[0])
    note = f"To measure this case takes a rank up to {takes}, the float64 truth included."
    lines = []
    for row in frame.itertuples():
        line = {"method": AXES.label(row.method), "bound by": f"cannot run: {row.unsupported}"}
        if not row.unsupported:
            line |= {what: byte_text(getattr(row, what)) for what in ("weights", "read", "written", "sent")}
            line |= {"floor": milliseconds(row.floor_whole) if row.bound else "unknown", "bound by": row.bound}
            line["measured"] = milliseconds(row.measured) if row.measured > 0 else "–"
        # A number and its unit stay in one line.
        lines.append({what: text if what == "bound by" else text.replace(" ", "\u00a0") for what, text in line.items()})
    columns = ["method", "weights", "read", "written", "sent", "floor", "measured", "bound by"]
    shown = pd.DataFrame(lines, columns=columns if run else [name for name in columns if name != "measured"])
    what = f"Bytes a rank in {AXES.times[frame['work'].iloc[0]].words}, and its floor"
    return f"{figure}{table(shown, what)}<p>{note}</p>"


def live_controls() -> tuple[dict[str, widgets.Widget], object]:
    """The controls of a small run by name, and how their values become the settings of a run of seconds."""

    def settings(phase: str, values: Mapping[str, object]) -> dict[str, object]:
        small = {"sweep.n": [values["n"]], "workload": "gaussian"}
        if phase == "phase0":
            return small | {"sweep.b": [values["b"]]}
        batches = {16, 64, values["b"]} if phase == "phase1" else {values["b"]}
        quick = {"mask": values["mask"], "timing.groups": 1, "timing.samples": 8, "profile": "none"}
        return small | {"sweep.b": sorted(batches)} | quick

    controls = {
        "n": steps("N (in = out)", (128, 256, 512, 1024), 256, "in and out features"),
        "b": steps("B", (16, 64, 256), 256, "rows of the input; 16 and 64 are run too in phase 1", "240px"),
        "mask": choice("mask", list(MASKS), "checkerboard", "of a timed run; a check runs all", "230px"),
    }
    return controls, settings
