"""Tables of phases 2 and 3: what was checked, what a step and its pieces take, what recompression must earn, memory."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd

from blockshock_lib.report import cells, labels, verdicts
from blockshock_lib.report.interval import ratio_interval
from blockshock_lib.report.tables import ABSENT, against_b1, rounded

_GATE = {"error_max_ratio": 2.0, "error_rms_ratio": 1.25}
_WORDS = {"oom": "out of memory", "timeout": "out of time", "unsupported": "unsupported"}
_BOUNDS = {
    "memory": "memory, by formula",
    "2:4 library": "2:4 library",
    "formula": "memory; the 2:4 library was not asked",  # of records older than that bound
}
PIECES = {
    "forward product": ("compute_kernel", "floor_compute"),
    "forward collective": ("reduce_kernel", "floor_reduce"),
    "dX": ("dx_kernel", "floor_dx"),
    "dX collective": ("reduce_dx_kernel", "floor_reduce_dx"),
    "dW": ("dw_kernel", "floor_dw"),
    "optimizer step": ("optimizer_kernel", "floor_optimizer"),
    "re-mask": ("remask_kernel", "floor_remask"),
    "compress": ("compress_kernel", "floor_compress"),
    "refresh": ("refresh_kernel", "floor_refresh"),
}
STAGES = ("re-mask", "compress", "refresh")


def tensor_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Outcome of the check of every tensor, a row a method, and an optimizer where there is one; text only.

    A field covers all cases and groups and says the worst of them. A check stops at the first tensor that fails: those
    after it say "not reached". "W after steps" covers y and dX with the trained weights.
    """
    checks = cells.checks(frame)
    errors = cells.complete(frame)
    errors = errors[errors["metric"].isin(list(_GATE)) & errors["status"].eq("ok")]
    within = (
        errors["value"]
        .le(errors["metric"].map(_GATE))
        .groupby([errors[name] for name in ("run", "case", "group", "method", "detail")])
    )
    passed = within.all()
    # Where nothing was reached, y is what was asked for first.
    tensors = [name for name in labels.TENSORS if name in set(errors["detail"])] or [""]
    by = [*(["optimizer"] if checks["optimizer"].ne("").any() else []), "method"]
    worst: dict[tuple, dict[str, str]] = {}
    for row in checks.to_dict("records"):
        cell = (row["run"], row["case"], row["group"], row["method"])
        said = _tensors_said(row, {t: passed.get((*cell, t)) for t in tensors})
        field = worst.setdefault(tuple(row[name] for name in by), {})
        for tensor, word in said.items():
            field[tensor] = max(field.get(tensor, ABSENT), word, key=_RANK.index)
    order = {name: i for i, name in enumerate([*labels.OPTIMIZERS, *labels.methods_in(checks["method"])])}
    keys = sorted(worst, key=lambda key: [order.get(name, len(order)) for name in key])
    table = pd.DataFrame(
        [[worst[key].get(tensor, ABSENT) for tensor in tensors] for key in keys],
        columns=[labels.TENSORS[tensor] for tensor in tensors],
        dtype=object,
    )
    table.insert(0, "method", [labels.label(key[-1]) for key in keys])
    if len(by) > 1:
        table.insert(0, "optimizer", [labels.optimizer(key[0]) for key in keys])
    return table


# Of a method that ran in some cases and cannot in others its checks are shown; the reasons have a table of their own.
_RANK = (ABSENT, "unsupported", "pass", "not reached", "out of time", "out of memory", "FAIL")


def _tensors_said(row: dict, passed: dict[str, bool | None]) -> dict[str, str]:
    if row["outcome"] in _WORDS or not passed:
        return dict.fromkeys(passed, _WORDS.get(row["outcome"], ABSENT))
    if row["outcome"] == "passed":
        return {tensor: ABSENT if good is None else "pass" for tensor, good in passed.items()}
    named = _NAMED.match(row["reason"])
    if named:
        bad = "weight" if named["after"] else named["tensor"].replace("y", "")
    else:  # the first without an error inside the gate, or the last, whose fault is no error's size
        bad = next((tensor for tensor, good in passed.items() if not good), list(passed)[-1])
    order = list(labels.TENSORS)
    place = order.index(bad)
    return {t: "FAIL" if t == bad else "pass" if order.index(t) < place else "not reached" for t in passed}


# How the reason of a failed check begins: "rank 1: dx: largest error ...", "rank 0: y after 3 steps holds NaN".
_NAMED = re.compile(r"(rank \d+: )?(?P<tensor>y|dx|dw|db|weight)\b(?P<after> after)?")


def how_table(frame: pd.DataFrame) -> pd.DataFrame:
    """How each method's dX is made with each mask, a row a mask, text only: "2:4", "dense masked" or "dense"."""
    rows = cells.valid(frame)
    rows = rows[rows["metric"].eq("dx_kernel")]
    found = rows.groupby(["mask", "method"], sort=False)["detail"].agg(lambda text: ", ".join(sorted(set(text))))
    table = pd.DataFrame(
        ABSENT,
        index=pd.Index(labels.ordered(rows["mask"], labels.MASKS), name="mask"),
        columns=[labels.label(name) for name in labels.methods_in(rows["method"])],
        dtype=object,
    )
    for (mask, method), text in found.items():
        table.loc[mask, labels.label(method)] = text
    return table


def whole_table(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    """Times of every valid cell, a row a (case, method), smallest case first; `what` is "pass" or "step".

    Kernel time in ms of the slowest rank, p10 to p90 beside it, on a CPU of plain calls in a loop; speed over B1 with
    its 99% interval, and a `claim` only where that excludes 1; rows of the input (tokens) a second; call time; the
    floor's share, 100 * floor / time. Medians, four digits.
    """
    metric = cells.time_metric(frame, f"{what}_kernel")
    table = cells.summary(frame, metric)
    table = table.merge(against_b1(frame, table, metric), on=["case", "method"], how="left")
    table["vs B1"] = table["vs B1"].mask(table["method"].eq("row_parallel"), "1 (itself)").fillna(ABSENT)
    table["claim"] = table["claim"].fillna(ABSENT)
    time = f"{what} (ms)"
    for other in (f"{what}_call", f"floor_{what}"):
        table = _with(table, cells.summary(frame, other), other)
    table["p10–p90"] = [f"{row.p10:.4g}–{row.p90:.4g}" for row in table.itertuples(index=False)]
    table[time] = rounded(table["median"].astype(float))
    table["call (ms)"] = rounded(table.pop(f"{what}_call").astype(float))
    table["tokens/s"] = rounded(1e3 * table["batch"].astype(float) / table["median"].astype(float)).round().astype(int)
    table["of floor (%)"] = (100 * table.pop(f"floor_{what}").astype(float) / table["median"].astype(float)).round(1)
    columns = [time, "p10–p90", "vs B1", "claim", "tokens/s", "call (ms)", "of floor (%)"]
    return shown(table, columns)


def pieces_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Median ms of every piece alone, a row a (case, method), smallest case first, four digits; "–" where a method has
    no such piece. What a step hides of them, or adds, is in the figure.
    """
    table = _pieces(frame)
    return shown(table, [name for name in PIECES if name in table]).rename(columns=piece_names(frame))


def piece_names(frame: pd.DataFrame) -> dict[str, str]:
    """How each of PIECES is called: the forward's collective is timed with the bias added, where there is a bias."""
    biased = cells.complete(frame)["detail"].eq("db").any()
    return {name: f"{name} + bias" if biased and name == "forward collective" else name for name in PIECES}


def _pieces(frame: pd.DataFrame) -> pd.DataFrame:
    found = {name: cells.summary(frame, metric) for name, (metric, _) in PIECES.items()}
    about = [part[[*cells.CASE, "method", "size"]] for part in found.values() if len(part)]
    if not about:
        return pd.DataFrame(columns=[*cells.CASE, "method", "size"])
    table = pd.concat(about).drop_duplicates(["case", "method"])
    for name, part in found.items():
        if len(part):
            table = _with(table, part, name)
            table[name] = [ABSENT if pd.isna(value) else f"{value:.4g}" for value in table[name].astype(float)]
    return table


def stages_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What follows the optimizer, against its floor: a row a (case, method, stage); ms, and time / floor in "x"."""
    found = []
    for name in STAGES:
        metric, floor = PIECES[name]
        table = cells.summary(frame, metric)
        if len(table):
            found.append(_with(table, cells.summary(frame, floor), "floor").assign(stage=name))
    if not found:
        return pd.DataFrame()
    table = pd.concat(found, ignore_index=True)
    table["time (ms)"], table["floor (ms)"] = (rounded(table[name].astype(float)) for name in ("median", "floor"))
    floors = table["floor"].astype(float)
    table["time / floor"] = rounded(table["median"].astype(float) / floors.mask(floors.eq(0)), digits=3)
    return shown(table, ["stage", "time (ms)", "floor (ms)", "time / floor"])


def break_even_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Whether sparsifying pays within one product: t(compress) + t(2:4 product) < t(dense product of the same size)?

    A row a case. The 2:4 product and the compression, of both packed copies, are those of T1, the dense product is C's.
    "dense / (both)" is above 1 where it pays, with its 99% interval; "pays after" counts the products that one
    compression must serve, each a forward or a dX: "never" where the 2:4 product is not the faster one.
    """
    names = {"dense": ("masked_dense", "compute_kernel")}
    names |= {part: ("block_shock_recompress", f"{part}_kernel") for part in ("compute", "compress")}
    sides = {}
    for name, (method, metric) in names.items():
        rows = cells.samples(frame, metric)
        sides[name] = dict(list(rows[rows["method"].eq(method)].groupby("case", sort=False)))
    found = []
    for case in (case for case in sides["dense"] if all(case in side for side in sides.values())):
        groups = {name: cells.groups(side[case]) for name, side in sides.items()}
        shared = [key for key in groups["dense"] if all(key in side for side in groups.values())]
        if not shared:
            continue
        middle = {name: np.array([np.median(side[key]) for key in shared]) for name, side in groups.items()}
        both = middle["compute"] + middle["compress"]
        interval = ratio_interval(list(middle["dense"][:, None]), list(both[:, None]))
        dense, sparse, compress = (float(np.median(middle[name])) for name in ("dense", "compute", "compress"))
        row = sides["dense"][case].iloc[0][cells.CASE].to_dict() | interval._asdict()
        row |= {"dense product (ms)": dense, "2:4 product (ms)": sparse, "compress (ms)": compress}
        row["pays after (products)"] = f"{math.ceil(compress / (dense - sparse))}" if sparse < dense else "never"
        found.append(row)
    table = pd.DataFrame(found)
    if table.empty:
        return table
    table["dense / (both)"] = [verdicts.interval_text(row) for row in table.to_dict("records")]
    pays = np.select([table["low"] > 1, table["high"] < 1], ["yes", "no"], "undecided")
    table["pays within one"] = np.where(cells.kind(table).eq("gpu"), pays, "no claim")
    times = ["dense product (ms)", "2:4 product (ms)", "compress (ms)"]
    table[times] = rounded(table[times])
    table = table.assign(size=cells.size(table), method="block_shock_recompress")
    return shown(table, [*times, "dense / (both)", "pays within one", "pays after (products)"]).drop(columns="method")


def loss_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The loss curves in numbers, a row an (optimizer, method): first and last loss, and the largest distance at any
    step from B1's, which is sharded and rounded as the others are, and from the dense one (A's), each over the loss
    that it is measured from, in %.
    """
    rows = cells.samples(frame, "loss")
    found = []
    for optimizer in labels.ordered(rows["optimizer"], labels.OPTIMIZERS):
        part = rows[rows["optimizer"].eq(optimizer)]
        for _, one in part.groupby("case", sort=True):
            curves = one.pivot_table(index="repeat", columns="method", values="value")
            for method in labels.methods_in(curves):
                curve = curves[method].dropna()
                row = {"optimizer": labels.optimizer(optimizer), "method": labels.label(method), "steps": len(curve)}
                row |= {"first loss": curve.iloc[0], "last loss": curve.iloc[-1]}
                for other, name in (("row_parallel", "B1"), ("dense", "A")):
                    if other in curves and method != other:
                        gap = ((curve - curves[other]).abs() / curves[other]).dropna()
                        row |= {f"largest gap to {name} (%)": 100 * gap.max(), f"{name}: at step": str(gap.idxmax())}
                found.append(row)
    table = rounded(pd.DataFrame(found))
    return table.fillna({name: ABSENT for name in table if name.endswith("at step")})


def largest_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The largest N (a multiple of 4096) that can train on this machine and what bounds it, memory by the method's
    formula or its 2:4 library; a row a (B, optimizer, method). No run tried it.
    """
    rows = cells.valid(frame)
    rows = rows[rows["metric"].eq("largest_n") & rows["detail"].isin(list(_BOUNDS))]
    rows = rows.sort_values("value", kind="stable")
    least = rows.groupby(["batch", "optimizer", "method"])[["value", "detail"]].first()
    keys = [
        (batch, optimizer, method)
        for batch in sorted(rows["batch"].unique())
        for optimizer in labels.ordered(rows["optimizer"], labels.OPTIMIZERS)
        for method in labels.methods_in(rows["method"])
        if (batch, optimizer, method) in least.index
    ]
    return pd.DataFrame(
        {
            "B": [key[0] for key in keys],
            "optimizer": [labels.optimizer(key[1]) for key in keys],
            "method": [labels.label(key[2]) for key in keys],
            "largest N, not tried": [f"{least.loc[key, 'value']:.0f}" for key in keys],
            "bound by": [_BOUNDS[least.loc[key, "detail"]] for key in keys],
        }
    )


def _with(table: pd.DataFrame, part: pd.DataFrame, name: str) -> pd.DataFrame:
    """`table` with the medians of `part`, a `cells.summary`, as column `name`."""
    part = part[["case", "method", "median"]].rename(columns={"median": name})
    return table.merge(part, on=["case", "method"], how="left")


def shown(table: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Rows in the order of size, B, optimizer and method: shape, B, what else differs, method, `columns`."""
    methods = {name: i for i, name in enumerate(labels.methods_in(table["method"]))}
    optimizers = {name: i for i, name in enumerate(labels.OPTIMIZERS)}
    table = table.assign(order=table["method"].map(methods), state=table["optimizer"].map(optimizers))
    table = table.sort_values(["size", "batch", "state", "case", "order"], kind="stable")
    settings = [name for name in cells.FOCUS if table[name].nunique() > 1]
    table["method"], table["optimizer"] = table["method"].map(labels.label), table["optimizer"].map(labels.optimizer)
    table = table.rename(columns={"batch": "B"})[["shape", "B", *settings, "method", *columns]]
    texts = [name for name in columns if table[name].dtype == object]
    return table.fillna(dict.fromkeys(texts, ABSENT)).reset_index(drop=True)
