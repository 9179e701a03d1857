"""What a schedule's dropped sums give back: tables of time, the alpha-beta law, and the loss that they cost."""

from itertools import product

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from blockshock_lib.layers.gpt.schedules import named
from blockshock_lib.report import figures, frames, verdicts
from blockshock_lib.report.figures import INK, MUTED
from blockshock_lib.report.tables import ABSENT, rounded, shown, smallest_first
from blockshock_lib.studies.gpt import gaps
from blockshock_lib.studies.gpt.axes import AXES
from blockshock_lib.studies.gpt.methods import METHODS
from blockshock_lib.studies.gpt.params import COLUMNS, LAYERS

CASE = ["work", "length", "width", "ranks", "link"]
KINDS = ("forward_kernel", "step_kernel")
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Bus bandwidth a GPU in GB/s that a law is asked for: what NVIDIA's and the network's data sheets say, one direction.
LINKS = {"NVLink 4": 450.0, "PCIe 5": 64.0, "400 Gb/s network": 50.0}
RANKS = 8
PARTS = 0.05  # by which a time may differ from its compute and its sums, each measured alone


def ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """`verdicts.ratio` of tensor parallelism's time over each method's, of forwards and steps; a column `method`."""
    found = [
        verdicts.ratio(frame, AXES, gaps.BASELINE, method, kind).assign(method=method)
        for kind in KINDS
        for method in AXES.ordered(frames.complete(frame, AXES)["method"])
        if method != gaps.BASELINE
    ]
    found = [one for one in found if len(one)]
    return pd.concat(found, ignore_index=True) if found else verdicts.ratio(frame, AXES, "", "").assign(method="")


def parts(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a (case, method), ms: `kernel`, `call`, `compute` (without sums), `sums` (alone, one after the other),
    `exposed` = kernel - compute, and `count` of its sums in one direction.
    """
    names = {f"{work} {kind}": f"{work}_{kind}" for work in ("forward", "step") for kind in ("kernel", "call")}
    table = frames.medians(frame, AXES, **names, compute="compute_kernel", sums="sums_kernel")
    for kind in ("kernel", "call"):
        table[kind] = table[f"forward {kind}"].fillna(table[f"step {kind}"])
    table["exposed"] = table["kernel"] - table["compute"]
    table["count"] = [
        0 if METHODS[row.method].bound else len(named(METHODS[row.method].schedule, row.layers).syncs)
        for row in table.itertuples()
    ]
    return table.dropna(subset="kernel")


def times(frame: pd.DataFrame) -> pd.DataFrame:
    """Microseconds of a block and of a token (all blocks, over the new tokens), a row a (case, method), kernel time.
    "sums are": awaited, by the fastest way that was measured, or begun beside a sublayer, by NCCL alone. "over its
    parts": time / (compute + sums alone), within 5% of 1 where nothing overlaps; "hidden (%)": of its sums. "saved": of
    tensor parallelism's time, with a 99% interval over so many `runs`, or the groups of one.
    """
    table = parts(frame)
    if table.empty:
        return pd.DataFrame({"times": ["none was measured"]})
    saved = {(row["case"], row["method"]): row for row in ratios(frame).to_dict("records")}
    cells = [saved.get(key) for key in zip(table["case"], table["method"], strict=True)]
    each, tokens = 1e3 / table["layers"], table["length"].mask(table["work"].eq("decode"), 1)
    made = {f"{name} a block (µs)": rounded(table[name] * each) for name in ("kernel", "call", "compute", "sums")}
    made["a token (µs)"] = rounded(1e3 * table["kernel"] / tokens)
    made["sums are"] = ["beside" if overlaps(method) else "awaited" for method in table["method"]]
    made["over its parts"] = over_parts(table).round(3)
    made["hidden (%)"] = (100 * (1 - table["exposed"] / table["sums"])).round(1)
    made["saved"] = [saving_text(row) if row else ABSENT for row in cells]
    made["runs"] = [row["runs"] if row else ABSENT for row in cells]
    made["note"] = frames.no_claim(table)
    return shown(smallest_first(table.assign(**made), AXES, *CASE[:2]), AXES, [*CASE, "method", "count", *made])


def over_parts(table: pd.DataFrame) -> pd.Series:
    return table["kernel"] / (table["compute"] + table["sums"])


def overlaps(method: str) -> bool:
    return any(sync.overlap for sync in named(METHODS[method].schedule, LAYERS).syncs)


def summary(frame: pd.DataFrame) -> list[str]:
    """Sentences at the end of a run's verdict line: what was trained, and which times are not their parts'."""
    rows, table = gaps.finals(frame), parts(frame)
    said = [f"{rows['method'].nunique()} schedules trained with {rows['seed'].nunique()} seeds"] if len(rows) else []
    table = table.assign(over=over_parts(table)).dropna(subset="over")
    table = table[~table["method"].map(overlaps).astype(bool) & frames.kind(table).eq("gpu")]
    off = table[(table["over"] - 1).abs().gt(PARTS)]
    each = [
        f"{AXES.short(row.method)} {row.work} {row.length}, {row.width} wide, {row.ranks} ranks {row.over:.3f}x"
        for row in off.itertuples()
    ]
    if len(table):
        held = (
            f"{len(table) - len(off)} of {len(table)} times that await their sums are within {PARTS:.0%} of their parts"
        )
        said.append("; ".join([held, *each]))
    return said


def saving_text(row: dict) -> str:
    """ "12.0% [11.2, 12.9]" of the baseline's time."""
    ends = f" [{100 - 100 / row['low']:.1f}, {100 - 100 / row['high']:.1f}]" if row["low"] > 0 else " [no interval]"
    return f"{100 - 100 / row['ratio']:.1f}%" + ends


def law(table: pd.DataFrame) -> tuple[float, float, float]:
    """(alpha ms, beta ms a byte, worst relative deviation) of t = alpha + beta bytes, of single sums of `parts` of
    tensor parallelism, by least squared relative deviations; neither is below 0. NaN with fewer than two sizes.
    """
    one = table[table["method"].eq(gaps.BASELINE) & table["work"].ne("step")].dropna(subset="sums")
    size = sent(one).to_numpy(float)
    ms = (one["sums"] / one["count"]).to_numpy(float)
    if len(set(size)) < 2:
        return np.nan, np.nan, np.nan
    both = np.stack([np.ones_like(size), size], 1) / ms[:, None]
    alpha, beta = np.linalg.lstsq(both, np.ones(len(ms)))[0]
    if min(alpha, beta) < 0:  # the one that fits alone
        alpha, beta = (0.0, both[:, 1].sum() / (both[:, 1] ** 2).sum()) if alpha < 0 else (1 / both[:, 0].mean(), 0.0)
    return float(alpha), float(beta), float(np.abs((alpha + beta * size) / ms - 1).max())


def sent(table: pd.DataFrame) -> pd.Series:
    """Bytes of the partial result that a sum of a forward adds up."""
    return table["length"].mask(table["work"].eq("decode"), 1) * table["width"] * table["dtype"].map(BYTES)


def extrapolated(frame: pd.DataFrame) -> pd.DataFrame:
    """NOT MEASURED: microseconds of a block on 8 ranks and on other links by the alpha-beta law of the measured sums.
    A ring: alpha grows with n - 1, bytes with (n - 1) / n; compute is shared ideally, and what overlapped stays hidden.
    """
    table, found = parts(frame), []
    table = table[table["work"].ne("step")].dropna(subset=["compute", "sums"])
    for (ranks, link), part in table.groupby(["ranks", "link"]):
        alpha, beta, worst = law(part)
        links = {f"{link}, as measured": beta * 2 * (RANKS - 1) / RANKS / (2 * (ranks - 1) / ranks)}
        links |= {name: 2 * (RANKS - 1) / RANKS / rate / 1e6 for name, rate in LINKS.items()}
        for row, (name, slope) in product(part.to_dict("records"), links.items() if alpha == alpha else ()):
            one = alpha * (RANKS - 1) / (ranks - 1) + slope * float(sent(pd.DataFrame([row])).iloc[0])
            share = min(max(row["exposed"] / row["sums"], 0.0), 1.0)
            ms = row["compute"] * ranks / RANKS + share * row["count"] * one
            found.append(row | {"asked": name, "ms": ms, "worst": worst})
    if not found:
        return pd.DataFrame({"extrapolated": ["it takes the sums of two sizes"]})
    table = smallest_first(pd.DataFrame(found), AXES, "work", "length", "asked")
    base = table[table["method"].eq(gaps.BASELINE)].set_index(["case", "asked"])["ms"]
    over = [base.get(key, np.nan) for key in zip(table["case"], table["asked"], strict=True)]
    made = {
        f"a block on {RANKS} (µs)": rounded(1e3 * table["ms"] / table["layers"]),
        "saved (%)": (100 * (1 - table["ms"] / over)).round(1),
        "law off by at most (%)": (100 * table["worst"]).round(1),
        "kind": "extrapolated, not measured" + f"; {frames.no_claim(table)}" * bool(frames.no_claim(table)),
    }
    columns = ["work", "length", "width", "asked", "method", *made]
    return shown(table.assign(**made), AXES, columns).rename(columns={"asked": "link"})


def joined(frame: pd.DataFrame) -> tuple[list[pd.DataFrame], pd.DataFrame, str]:
    """(losses of each width that was timed on as many ranks, the widest first, their times, what is missing)."""
    trained, saved = gaps.settings(gaps.finals(frame)), ratios(frame)
    if not trained or saved.empty:
        lack = "no times here: make gpt_latency" if trained else "no losses of two schedules here: make gpt_training"
        return [], saved, f"{lack}, and load its records beside these"
    timed, places = set(zip(saved["ranks"], saved["width"], strict=True)), {}
    for rows in trained:  # of one width that of most arms is first
        places.setdefault((rows["ranks"].iloc[0], rows["width"].iloc[0]), rows)
    if found := [place for place in places if place in timed]:
        ranks = found[0][0]
        return [places[place] for place in found if place[0] == ranks], saved[saved["ranks"].eq(ranks)], ""
    asked = " and ".join(f"{width} wide on {ranks} ranks" for ranks, width in places)
    return [], saved, f"{asked} were trained, and this was not timed: --set 'latency.widths=[{next(iter(places))[1]}]'"


def gap_over_time_saved(frame: pd.DataFrame) -> Figure:
    """Each schedule's loss gap over the share of tensor parallelism's time that it saves, at the widths and ranks that
    were trained, and at other widths as panels: of training steps, else of the longest prompt. The line: the frontier.
    """
    (trained, saved, missing), title = joined(frame), "Loss gap over time saved"
    if missing:
        return figures.empty(title, missing)
    saved = saved[saved["link"].eq(sorted(saved["link"])[0])]
    work = "step" if saved["work"].eq("step").any() else "prefill"
    saved = saved[saved["work"].eq(work)]
    saved = saved[saved["length"].eq(saved.groupby("width")["length"].transform("max"))]
    losses, panels = {rows["width"].iloc[0]: rows for rows in trained}, []
    for width, part in saved.groupby("width"):
        own = losses.get(width, trained[0])
        part = part.merge(gaps.table(own)[["method", "gap"]], on="method")
        panels += [(width, own, part)] if len(part) else []
    if not panels:
        return figures.empty(title, "no schedule was both trained and timed")
    said = [
        f"{width} wide: {AXES.short(row['method'])} saves {saving_text(row)}: {row['gap']} nats."
        for width, _, part in panels
        for row in part.to_dict("records")
    ]
    with figures.drawing(
        *(3.6 * len(panels) + 1.6, 3.4, title, frames.no_claim(saved)),
        f"{work}, {saved['ranks'].iloc[0]} ranks, {saved['link'].iloc[0]} link",
        alt=" ".join(said),
        note=f"Trained: {'; '.join(map(gaps.size_of, trained))}; at other widths gaps are those of the widest. Bars: "
        f"99% intervals, of a gap where {gaps.LEAST} seeds tell. Line: no other schedule saves as much for less.",
        columns=len(panels),
        sharey=len(trained) == 1,
    ) as (fig, grid):
        for ax, (width, own, part) in zip(grid[0], panels, strict=True):
            points = sorted((100 - 100 / row.ratio, row.gap.mean) for row in part.itertuples())
            best = [(x, y) for x, y in points if not any(a >= x and b <= y and (a, b) != (x, y) for a, b in points)]
            ax.step(*zip(*best, strict=True), where="pre", color=MUTED, linewidth=1)
            for row in part.itertuples():
                look, x = AXES.look(row.method), 100 - 100 / row.ratio
                across = [[x - 100 + 100 / row.low], [100 - 100 / row.high - x]] if row.low > 0 else None
                up = None if np.isnan(row.gap.low) else row.gap.half
                kind = dict(color=look.colour, marker=look.marker, linestyle="", capsize=2, label=look.label)
                ax.errorbar(x, row.gap.mean, up, across, markerfacecolor="none" if up is None else look.colour, **kind)
            ax.axhline(0, color=INK, linewidth=0.8)
            arm, shape = own.iloc[0], [*COLUMNS, "dtype"]
            alike = work == "step" and part["layers"].eq(LAYERS).all() and (part[shape] == arm[shape]).all(axis=None)
            what = f"{width} wide, {part['length'].iloc[0]} tokens" + ", as trained" * bool(alike)
            ax.set(xlabel="time saved (%)", title=what)
            ax.grid(True)
        grid[0, 0].set_ylabel("loss gap (nats)")
        most = max(grid[0], key=lambda ax: len(ax.get_legend_handles_labels()[0]))
        grid[0, -1].legend(*most.get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    return fig


def answer(frame: pd.DataFrame) -> str:
    """The answer of the latency phase in a sentence: the most that any schedule surely saves in any case."""
    table = ratios(frame)
    table = table[~table["method"].map(lambda name: METHODS[name].bound).astype(bool)] if len(table) else table
    if table.empty:
        return "Not answered: no case holds valid times beside tensor parallelism."
    if why := frames.no_claim(table):
        return f"Not answered here ({why})."
    known = table["low"].gt(0).any()
    best = table.loc[table["low" if known else "ratio"].idxmax()].to_dict()
    where = f"{best['work']} {best['length']}, {best['width']} wide, {best['ranks']} ranks, {best['link']} link"
    said = f"up to {saving_text(best)} of tensor parallelism's is saved, by {AXES.short(best['method'])} ({where})."
    return f"Time: {said}" if known else f"Time: no claim, for an interval is missing; by the points {said}"
