"""What would have to change for the answer to change: records frame in, numbers out. All else is held as measured."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from blockshock_lib.report import cells, labels, verdicts
from blockshock_lib.report.findings import versions
from blockshock_lib.report.findings.law import NAME, STEPS, law_rows, pieces
from blockshock_lib.report.training.ratios import training_ratios


def needs(frame: pd.DataFrame) -> pd.DataFrame:
    """What parity with B1 would take, a row a case of `law_rows`, all else held as measured.

    `s_needed`: s at which the forwards are equal, with the communication that Block-Shock exposes held; nan where that
    alone is longer than B1's forward. `free`: the ratio if communication cost nothing. `link`: the bus bandwidth at
    which the ratio is 1; nan where there is none: in a forward both send the same bytes, so that a slower link brings
    the ratio towards 1 and never across. `alone`: the bus bandwidth (GB/s) from which Block-Shock on all ranks beats A
    on one GPU; nan where its product alone does not. `bus`: the bandwidth reached.
    """
    table = law_rows(frame)
    if table.empty:
        return table.assign(**dict.fromkeys(("s_needed", "free", "link", "alone", "bus"), np.nan))
    left = table["b1_forward"] - (table["ours_forward"] - table["ours"])
    table["s_needed"] = (table["a"] / left / (table["world_size"].astype(float) / 2)).where(left > 0)
    table["free"] = table["b1"] / table["ours"]
    table["link"] = np.where(table["free"] >= 1, 0.0, np.nan)
    sent = cells.summary(frame, "bytes_sent")
    sent = sent[sent["method"].eq("block_shock")].set_index("case")["median"]
    moved = table["case"].map(sent)
    table["bus"] = moved / table["reduce"] / 1e6
    spare = table["a_forward"] - table["ours"]
    table["alone"] = (moved / spare / 1e6).where(spare > 0)
    return table


def batch_needs(frame: pd.DataFrame) -> pd.DataFrame:
    """By size, a row each: the highest ratio to B1, `best`, and at which B; `b1_faster` and `c_faster`: the `stretches`
    of B where the speed over B1, and over C, is above 1, None where C was not measured; `b1_open` and `c_open`: the
    measured B whose 99% interval holds 1.
    """
    table = law_rows(frame)
    over_c = verdicts.ratio(frame, "masked_dense", "block_shock")
    found = []
    for (shape, size), part in table.groupby(["shape", "size"], sort=False):
        part = part.sort_values("batch")
        best = part.loc[part["ratio"].idxmax()]
        row = dict(shape=shape, size=size, best=best["ratio"], at=int(best["batch"]))
        both = {"b1": part, "c": over_c[over_c["case"].isin(part["case"])].sort_values("batch")}
        for short, one in both.items():
            row[f"{short}_faster"] = stretches(*(one[name].to_numpy(float) for name in ("batch", "ratio")))
            row[f"{short}_open"] = tuple(int(b) for b in one["batch"][~(one["low"].gt(1) | one["high"].lt(1))])
        found.append(row)
    ends = [f"{short}_{name}" for short in ("b1", "c") for name in ("faster", "open")]
    return pd.DataFrame(found, columns=["shape", "size", "best", "at", *ends])


def stretches(batch: np.ndarray, ratio: np.ndarray) -> tuple[tuple[float, float], ...] | None:
    """(from, to) of every stretch where `ratio` is above 1, between batches on logarithmic scales: from 0 where it is
    so at the first batch, to infinity where it is at the last. None without any batch.
    """
    if not len(batch):
        return None
    above, place, level = ratio > 1, np.log(batch), np.log(ratio)
    ends = [] if not above[0] else [0.0]
    for i in np.flatnonzero(above[1:] != above[:-1]):
        part = level[i] / (level[i] - level[i + 1])
        ends.append(float(np.exp(place[i] + part * (place[i + 1] - place[i]))))
    ends += [np.inf] if above[-1] else []
    return tuple(zip(ends[::2], ends[1::2], strict=True))


def compress_needs(frame: pd.DataFrame) -> pd.DataFrame:
    """What recompression may cost, a row a (case, optimizer) of phase 3 with B1, T1 and T3: medians of their steps,
    `compress` and `remask` of T1, and `for_t3`, `for_b1`: the compress time at which T1's step is as long as theirs,
    all else held; below 0 where even free compression would not do.
    """
    rows = cells.complete(frame)
    rows = rows[rows["phase"].eq("phase3")]
    step = cells.summary(rows, cells.time_metric(rows, "step_kernel"))
    names = {method: short for short, method in STEPS.items()}
    about = [*cells.CASE, "size"]
    wide = step[step["method"].isin(list(names))].assign(method=lambda t: t["method"].map(names))
    columns = [*about, *STEPS, "compress", "remask", "for_t3", "for_b1"]
    if set(wide["method"]) != set(STEPS):
        return pd.DataFrame(columns=columns)
    table = wide.drop_duplicates("case")[about]
    for short in STEPS:
        part = wide[wide["method"].eq(short)].rename(columns={"median": short})
        table = table.merge(part[["case", short]], on="case")
    for name in ("compress", "remask"):
        part = cells.summary(rows, f"{name}_kernel")
        part = part[part["method"].eq(STEPS["t1"])].rename(columns={"median": name})
        table = table.merge(part[["case", name]], on="case", how="left").fillna({name: 0.0})
    rest = table["t1"] - table["compress"]
    table["for_t3"], table["for_b1"] = table["t3"] - rest, table["b1"] - rest
    order = {name: i for i, name in enumerate(labels.OPTIMIZERS)}
    table = table.assign(order=table["optimizer"].map(order)).sort_values(["size", "batch", "order"], kind="stable")
    return table[columns].reset_index(drop=True)


class Parts(NamedTuple):
    """What `what_if` reckons with: `needs`, `compress_needs`, `pieces` and `training_ratios` of a frame, and `works`,
    the code that measured each work where that differs (`versions.of_works`).
    """

    law: pd.DataFrame
    steps: pd.DataFrame
    pieces: pd.DataFrame
    ratios: pd.DataFrame
    works: dict[str, str]

    @classmethod
    def of(cls, frame: pd.DataFrame) -> Parts:
        found = (needs(frame), compress_needs(frame), pieces(frame), training_ratios(frame))
        return cls(*found, versions.of_works(frame))


def what_if(parts: Parts, s: float = 0.0, link: float = 0.0, compress: float = 1.0) -> pd.DataFrame:
    """Speed over B1 if some numbers were others, a row a (case, work, method): CASE columns, `size`, `work` ("forward"
    or "step"), `method`, `ratio` of medians as measured, `then`, and `low` and `high`: the ends of the measured 99%
    interval, moved by the factor that `then` is moved by.

    Args:
        s: of every 2:4 product, over the dense one of its size; 0: as measured.
        link: bus bandwidth in GB/s of every collective, without latency; 0: as measured, infinite: free.
        compress: factor on T1's compress time.

    Times change by what their parts change: a step's collectives are taken not to be hidden by anything.
    `attrs["works"]` is `Parts.works`.
    """
    law, about = parts.law, [*cells.CASE, "size"]
    slower = law["reduce"] * ((law["bus"] / link if link else 1.0) - 1)
    ours = law["ours_forward"] + slower + law["ours"] * ((law["s"] / s if s else 1.0) - 1)
    ratio = law["b1_forward"] / law["ours_forward"]
    then = (law["b1_forward"] + slower) / ours
    ends = {end: then * law[end] / law["ratio"] for end in ("low", "high")}
    found = [law[about].assign(work="forward", method="block_shock", ratio=ratio, then=then, **ends)]
    measured = parts.ratios.set_index("case")
    for row in parts.steps.to_dict("records"):
        here = parts.pieces[parts.pieces["case"].eq(row["case"])]
        by = {(one.method, one.part): one.ms for one in here.itertuples(index=False)}
        after = {short: row[short] + _step_change(by, method, row, s, link) for short, method in STEPS.items()}
        after["t1"] += row["compress"] * (compress - 1)
        for short in ("t3", "t1"):
            one = {name: row[name] for name in about} | dict(work="step", method=STEPS[short])
            one |= dict(ratio=row["b1"] / row[short], then=after["b1"] / after[short])
            name = _RATIO[short]
            for end in ("low", "high"):
                one[end] = one["then"] * measured[f"{name}_{end}"][row["case"]] / measured[name][row["case"]]
            found.append(pd.DataFrame([one]))
    filled = [part for part in found if len(part)]
    table = pd.concat(filled, ignore_index=True) if filled else found[0]
    table.attrs["works"] = parts.works
    return table


_RATIO = {"t3": "packed", "t1": "recompress"}


def _step_change(by: dict, method: str, row: dict, s: float, link: float) -> float:
    """ms that a step of `method` gets longer by, with products at `s` and collectives at `link`."""
    change, ranks = 0.0, row["world_size"]
    product = by.get((method, NAME["compute_kernel"]), 0.0)
    if s and product and method != STEPS["b1"]:
        now = by.get(("dense", NAME["compute_kernel"]), np.nan) / product / (ranks / 2)
        change += (product + by.get((method, NAME["dx_kernel"]), 0.0)) * (now / s - 1)
    # Of 16-bit values, [B, out_features] forward and [B, in_features] backward.
    for metric, features in (("reduce_kernel", "out_features"), ("reduce_dx_kernel", "in_features")):
        ms = by.get((method, NAME[metric]), 0.0)
        if link and ms:
            passes = 1 if (method, metric) in _GATHERED else 2
            sent = passes * 2 * row["batch"] * row[features] * (ranks - 1) / ranks
            change += sent / link / 1e6 - ms
    return change


# All-gathers, each of which sends half the bytes of an all-reduce. B1's ranks hold different columns of dX, to be put
# side by side; the two terms of Block-Shock each give a partial sum of all of it.
_GATHERED = {(STEPS["b1"], "reduce_dx_kernel")}
