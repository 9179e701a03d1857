"""The timeline of the profiled calls: what each rank did, and when."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from blockshock_lib.report import cells, figures, labels
from blockshock_lib.report.figures import FAINT, INK, MUTED
from blockshock_lib.report.timeline.tables import EXPOSED, IDLE, exposed, stretches
from blockshock_lib.report.timeline.traces import COMMUNICATION, COMPUTE

# Lane of a rank's line (from, height), face and hatch. Told apart without colour by lane and hatch.
_LOOKS = {
    IDLE: (-0.4, 0.8, "#F0F0F0", "...."),
    COMPUTE: (0.02, 0.38, "#0072B2", ""),
    COMMUNICATION: (-0.4, 0.38, "#F5D48A", ""),
    EXPOSED: (-0.4, 0.38, "#E69F00", "/////"),
}
_WORDS = {
    COMPUTE: "compute (lower lane)",
    EXPOSED: "communication, exposed",
    COMMUNICATION: "communication under compute",
    IDLE: "idle",
}
_CLOCKS = {
    "shared": "The ranks share one clock; drawn is the time in which all of them were in their profiled calls.",
    "own": "The files give no common clock: each rank starts at its own first work.",
    "one rank": "One rank was traced.",
}


def timeline(work: pd.DataFrame, frame: pd.DataFrame | None = None, method: str = "") -> Figure:
    """Compute, communication and idle time of every rank in the profiled calls, a panel a method.

    Args:
        work: rows of `traces.read`. Of several cases the one that took longest is drawn.
        frame: the run's records, which know the shape of the case and whether one GPU played several ranks.
        method: the only method to draw; "": all of them.
    """
    name = f"Timeline of {labels.label(method)}" if method else "Timeline of the profiled calls"
    attrs, damaged = work.attrs, work.attrs.get("damaged", [])
    work = work[work["method"].eq(method)] if method else work
    if work.empty:
        why = f"all {len(damaged)} traces are damaged" if damaged else "this run holds no traces"
        return figures.empty(name, why)
    took = work.groupby("case", sort=False)["duration_ms"].sum()
    case = took.idxmax()
    work = work[work["case"].eq(case)]
    work.attrs = attrs  # the clocks
    parts, table = stretches(work), exposed(work)
    methods = list(dict.fromkeys(work["method"]))
    ranks = {name: sorted(parts.loc[parts["method"].eq(name), "rank"].unique()) for name in methods}
    lines = sum(map(len, ranks.values()))
    with figures.theme():
        fig = figures.canvas(
            9.6,
            0.75 + 0.38 * len(methods) + 0.3 * lines,
            _title(table, methods),
            figures.subtitle(*_setting(work, frame, case), _others(len(took) - 1)),
            _alt(table),
            " ".join(filter(None, [_note(attrs, case, methods), _skipped(damaged)])),
        )
        axes = fig.subplots(
            len(methods), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [len(r) for r in ranks.values()]}
        )[:, 0]
        for ax, one in zip(axes, methods, strict=True):
            _panel(ax, parts[parts["method"].eq(one)], ranks[one])
            ax.set_title(f"{labels.label(one)}: {_share(table, one)}", fontsize=9)
        axes[-1].set_xlabel("time (ms)")
        axes[-1].set_xlim(0)
        drawn = set(parts["kind"])
        handles = [
            Patch(facecolor=_LOOKS[kind][2], hatch=_LOOKS[kind][3], edgecolor="#555555", linewidth=0.3, label=words)
            for kind, words in _WORDS.items()
            if kind in drawn and (kind != COMMUNICATION or _hidden(table))
        ]
        fig.legend(handles=handles, loc="outside right center", fontsize=8)
    return fig


def _panel(ax: Axes, parts: pd.DataFrame, ranks: list[int]) -> None:
    zero = parts["start_ms"].min()
    for kind, (below, height, face, hatch) in _LOOKS.items():
        for (rank, counted), rows in parts[parts["kind"].eq(kind)].groupby(["rank", "counted"]):
            bars = list(zip(rows["start_ms"] - zero, rows["end_ms"] - rows["start_ms"], strict=True))
            look = dict(facecolor=face, hatch=hatch, edgecolor="#7A5200" if kind == EXPOSED else FAINT, linewidth=0)
            ax.broken_barh(bars, (ranks.index(rank) + below, height), alpha=1 if counted else 0.3, **look)
    for rank, rows in parts[parts["counted"]].groupby("rank"):
        if parts["rank"].eq(rank).sum() > len(rows):  # a lead-in was drawn
            met, place = rows["start_ms"].min() - zero, ranks.index(rank)
            ax.plot([met, met], [place - 0.48, place + 0.48], color=INK, linewidth=1)
    ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks], fontsize=8)
    ax.set_ylim(len(ranks) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", colors=MUTED)
    ax.spines["left"].set_visible(False)


def _mean(table: pd.DataFrame, method: str, kind: str) -> float:
    """Share of the ranks' spans, %."""
    rows = table[table["method"].eq(labels.label(method))]
    return float(100 * rows[f"{kind} (ms)"].sum() / rows["span (ms)"].sum())


def _share(table: pd.DataFrame, method: str) -> str:
    return f"exposed communication {_mean(table, method, EXPOSED):.0f}%, idle {_mean(table, method, IDLE):.0f}%"


def _title(table: pd.DataFrame, methods: list[str]) -> str:
    chosen = "block_shock" if "block_shock" in methods else methods[0]
    return f"{labels.label(chosen)}: {_mean(table, chosen, EXPOSED):.0f}% of the time is exposed communication"


def _hidden(table: pd.DataFrame) -> bool:
    return bool((table["communication (ms)"] - table["exposed (ms)"]).gt(0).any())


def _setting(work: pd.DataFrame, frame: pd.DataFrame | None, case: str) -> list[str]:
    about = cells.complete(frame) if frame is not None else pd.DataFrame(columns=["case"])
    about = about[about["case"].eq(case)].head(1)
    if about.empty:
        on_cpu = work["device"].eq("cpu").any()
        return [cells.NO_CLAIM["cpu"] if on_cpu else "", f"{work['rank'].nunique()} ranks, profiled calls"]
    row = about.iloc[0]
    return [cells.no_claim(about), f"{row['shape']}, B={row['batch']}", cells.setting(row)]


def _others(count: int) -> str:
    return f"{count} other case{'s' * (count > 1)} not drawn" if count else ""


def _note(attrs: dict, case: str, methods: list[str]) -> str:
    clocks = {name: attrs.get("clock", {}).get((case, name), "own") for name in methods}
    kinds = set(clocks.values()) - {"one rank"} or {"one rank"}
    said = [_CLOCKS[kind] for kind in _CLOCKS if kind in kinds]
    if len(kinds) > 1:
        said.append(f"Without one: {', '.join(labels.style(name).short for name in methods if clocks[name] == 'own')}.")
    if kinds != {"one rank"}:
        said.append("Pale, and not counted: until the ranks first met, at the end of the first collective.")
        said.append("Communication holds the time that a rank waits for another to arrive.")
    return " ".join(said)


def _skipped(damaged: list[str]) -> str:
    return f"{len(damaged)} damaged trace{'s' * (len(damaged) > 1)} left out." if damaged else ""


def _alt(table: pd.DataFrame) -> str:
    said = [
        f"{row['method']} rank {row['rank']}: {row['span (ms)']:.3g} ms, compute {row['compute (%)']:.0f}%, exposed "
        f"communication {row['exposed (%)']:.0f}%, idle {row['idle (%)']:.0f}%."
        for row in table.to_dict("records")
    ]
    return " ".join(["Bars along time, a line a rank.", *said])
