"""What `run --dry-run` prints: parameters, machine, cases, records, floors, memory and time, 120 columns wide."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pandas as pd

from blockshock_lib.errors import ParamsError
from blockshock_lib.machine import admit
from blockshock_lib.params import FOLDERS, Params
from blockshock_lib.predict import duration
from blockshock_lib.predict.table import plan, sentences
from blockshock_lib.report import labels
from blockshock_lib.report.cells import WORK
from blockshock_lib.report.machine_plots import byte_text
from blockshock_lib.report.time_plots import milliseconds

WIDTH = 120


def dry_run(params: Params, card: dict, out: Path | None = None) -> str:
    """The text of a dry run; starts no process and makes no folder.

    Args:
        params: validated parameters.
        card: the machine card (`machine.probe`).
        out: where earlier runs are looked for; default the project's outputs.
    """
    table = plan(params, card, out)
    known = table.attrs["ceilings"]
    cases, groups = table["case"].nunique(), params.timing.groups
    guess = duration.estimate(params, card, {dtype: k.ceilings if k else None for dtype, k in known.items()}, out)
    held = "what a training step holds" if table["step_bytes"].notna().any() else "weights held"
    about = (
        f"{_s(cases, 'case')} in {_s(groups, 'group')} of fresh processes: {_s(cases * groups, 'record')}. Bytes are a "
        f"rank's, of the lowest to the highest method: {held}, moved (read and written) and sent in "
        f"{WORK[table['work'].iloc[0]]}. run: the methods that can run, of those asked for. memory: the most that the "
        "case needs at once, an upper estimate."
    )
    blocks = [
        _head(params, card, table, cases, groups),
        f"{_fold('Cases', about)}\n\n{_cases(table)}",
        _methods(table, known),
        _fold(
            "Time",
            f"about {span(guess.seconds)}, and likely between {span(guess.low)} and {span(guess.high)}: an "
            f"estimate, {guess.why}.",
        ),
        "\n".join(_fold("Memory" if not i else "", text) for i, text in enumerate(sentences(table) or [_fits(table)])),
    ]
    return "\n\n".join(blocks)


def _head(params: Params, card: dict, table: pd.DataFrame, cases: int, groups: int) -> str:
    files = [
        "base.yaml",
        *(f"{FOLDERS[kind]}/{params.layers[kind]}.yaml" for kind in FOLDERS if params.layers.get(kind)),
    ]
    hardware = params.hardware
    place = "GPU" if hardware.device == "cuda" else "CPU process"
    ranks = f"{hardware.world_size} ranks in one process" if hardware.emulated else _s(hardware.world_size, place)
    lines = [
        _fold(params.phase, "a dry run: nothing is started, nothing is written"),
        _fold("Parameters", f"params/: {' < '.join(files)} < --set"),
        _fold("Machine", f"{card['title']}; {ranks}" + (", no claim about speed" if hardware.device == "cpu" else "")),
    ]
    if params.optimizers:
        lines.append(_fold("Training", _training(params)))
    try:
        admit(params, card)
    except ParamsError as error:
        lines.append(_fold("", f"This run would be refused here: {error}"))
    return "\n".join(lines)


def _training(params: Params) -> str:
    each = [
        f"{labels.optimizer(name)} (learning rate {getattr(params.learning_rates, name):g})"
        for name in params.optimizers
    ]
    curve = f"; loss over {_s(params.loss_steps, 'step')} in the smallest case of each" if params.loss_steps else ""
    return f"{', '.join(each)}; Block-Shock's dW: {params.dw}{curve}"


def _cases(table: pd.DataFrame) -> str:
    """A line for all cases that differ in their mask alone and run the same methods; every mask is named."""
    lines = []
    yes = "?" if table.attrs["limit"] is None else "yes"
    for _, one in table.groupby("case", sort=False):
        can = one[one["unsupported"].eq("")]
        moved = can["bytes_read"] + can["bytes_written"]
        first = one.iloc[0]
        lines.append(
            {
                "out x in": f"{first['out_features']}x{first['in_features']}",
                "B": str(first["batch"]),
                "dtype": first["dtype"],
                "workload": first["workload"],
                **({"optimizer": labels.optimizer(first["optimizer"])} if first["optimizer"] else {}),
                "run": f"{len(can)}/{len(one)}",
                **(
                    {"step holds": _range(can["step_bytes"])}
                    if first["optimizer"]
                    else {"weights": _range(can["weight_bytes"])}
                ),
                "moved": _range(moved),
                "sent": _range(can["bytes_sent"]),
                "memory": byte_text(first["memory_bytes"]),
                "fits": yes if first["fits"] else "NO",
                "mask": first["mask"],
            }
        )
    frame = pd.DataFrame(lines)
    if "optimizer" in frame and frame["workload"].nunique() == 1:
        frame = frame.drop(columns="workload")  # named above, and the line is full
    keys = [name for name in frame.columns if name not in ("mask", "memory")]
    # The mask moves the estimate of memory by its scratch alone: one line tells the larger.
    merged = frame.groupby(keys, sort=False).agg({"memory": "last", "mask": ", ".join}).reset_index()
    return columns(merged[[*keys[:-1], "memory", "fits", "mask"]])


def _methods(table: pd.DataFrame, known: dict) -> str:
    """Bytes and floor of every method in the largest case, of several optimizers the one that holds most."""
    size = table["in_features"].astype(float) * table["out_features"] * table["batch"]
    largest = table[size.eq(size.max())]
    most = largest.assign(held=largest["step_bytes"].fillna(0)).sort_values("held", kind="stable")
    one = table[table["case"].eq(most["case"].iloc[-1])]
    source = known[one["dtype"].iloc[0]]
    rows = [
        {
            "method": labels.label(row.method),
            "weights": byte_text(row.weight_bytes),
            **({"step holds": byte_text(row.step_bytes)} if row.optimizer else {}),
            "read": byte_text(row.bytes_read),
            "written": byte_text(row.bytes_written),
            "sent": byte_text(row.bytes_sent),
            "floor": milliseconds(row.floor_whole) if row.bound else "unknown",
            "bound by": row.bound,
        }
        if not row.unsupported
        else {"method": labels.label(row.method), "weights": f"cannot run: {row.unsupported}"}
        for row in one.itertuples()
    ]
    whence = "No earlier run knows this machine's ceilings, so no floor is told."
    if source:
        whence = f"Floors by the ceilings of {source.source}" + (f" ({source.note})." if source.note else ".")
    what = WORK[one["work"].iloc[0]]
    title = _fold("Methods", f"{what} in the largest case, {one['label'].iloc[0]}, a rank. {whence}")
    step = ["step holds"] if one["optimizer"].iloc[0] else []
    frame = pd.DataFrame(rows, columns=["method", "weights", *step, "read", "written", "sent", "floor", "bound by"])
    return f"{title}\n\n{columns(frame.astype(object).where(frame.notna(), ''))}"


def columns(frame: pd.DataFrame) -> str:
    """Text in columns as wide as they need; the last one is folded, and a line without further columns runs on."""
    frame = frame.astype(str)
    wide = [
        max([len(name), *(len(row[i]) for row in frame.itertuples(index=False) if any(row[i + 1 :]))])
        for i, name in enumerate(frame.columns[:-1])
    ]
    lines = []
    for row in [tuple(frame.columns), *frame.itertuples(index=False)]:
        head = "  " + "".join(f"{text:<{w}}  " for text, w in zip(row, wide, strict=False))
        room = max(24, WIDTH - len(head))
        first, *more = textwrap.wrap(row[-1], room, break_long_words=False) or [""]
        lines += [head + first, *(" " * len(head) + text for text in more)]
    return "\n".join(line.rstrip() for line in lines)


def _fits(table: pd.DataFrame) -> str:
    limit, most = table.attrs["limit"], table["memory_bytes"].max()
    if limit is None:
        return f"up to {byte_text(most)}; what this machine has for it is not known."
    where = "of the smallest GPU's" if table["device"].iloc[0] == "cuda" else "of the free"
    return f"every case fits: at most {byte_text(most)} {where} {byte_text(limit)} (an upper estimate)."


def _range(values: pd.Series) -> str:
    """65536 .. 131072 -> "64–128 KiB", three digits each; "none" where no method can run."""
    if values.empty:
        return "none"
    low, high = (_short(byte_text(value)) for value in (values.min(), values.max()))
    if low == high:
        return low
    number, unit = low.split()
    return f"{number if unit == high.split()[1] or number == '0' else low}–{high}"


def _short(text: str) -> str:
    number, unit = text.split()
    return f"{number if len(number) < 4 else f'{float(number):.3g}'} {unit}" if float(number) < 1000 else text


def span(seconds: float) -> str:
    """17.4 -> "17 s", 754 -> "13 min", 9000 -> "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _s(count: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def _fold(name: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"{name:<12}", subsequent_indent=" " * 12, break_long_words=False)
