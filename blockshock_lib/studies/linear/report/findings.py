"""All phases' records of one machine in one frame: the answer, and what would change it, all else held as measured."""

from functools import partial

import numpy as np
import pandas as pd

from blockshock_lib.report import verdicts
from blockshock_lib.report.tables import ABSENT, rounded
from blockshock_lib.report.verdicts import Verdict
from blockshock_lib.studies.linear.axes import AXES, optimizer_name
from blockshock_lib.studies.linear.hypotheses import HYPOTHESES
from blockshock_lib.studies.linear.report import build, law
from blockshock_lib.studies.linear.report.build import OURS, C, interval, largest, text
from blockshock_lib.studies.linear.report.law import STEPS
from blockshock_lib.studies.linear.report.training import piece_names

CODE = "measured with different code: compare within one"
_STEPS_OVER_B1, _ENDS = {"t3": "packed", "t1": "recompress"}, ("", "_low", "_high")
_FORWARDS, _STEPS = "A, B1 and Block-Shock: make phase1", "B1, T1 and T3: make phase3"


words = partial(verdicts.words, rules=HYPOTHESES)
numbers = partial(verdicts.numbers, rules=HYPOTHESES)


def _missing(what: str) -> pd.DataFrame:
    return pd.DataFrame({"nothing to show": [f"no valid times of {what}"]})


def answer_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a hypothesis: verdict, its ratio in the largest case, what the law says there, why; the code if several."""
    works, found = law.codes(frame), []
    code = {phase: works.get(work, "") for work, phase in law.PHASE.items()}
    for phase, verdict, lacks in verdicts.judged(frame, HYPOTHESES):
        row = {"hypothesis": verdict.name, "verdict": verdict.verdict, "measured": interval(vars(verdict))}
        row |= {"the law says": _law_text(frame, verdict), "why": lacks or verdict.why}
        found.append(row | ({CODE: code[phase]} if works else {}))
    return pd.DataFrame(found).set_index("hypothesis")


def _law_text(frame: pd.DataFrame, verdict: Verdict) -> str:
    # The same quantity as the verdict's, in the same case: of its largest cells the one that its rule takes.
    cases = largest(verdict.cells)
    if cases.empty:
        return ABSENT
    if verdict.name == "H2":
        case = cases.loc[cases["shrink_high"].idxmax(), "case"]
        said = law.step_rows(frame).set_index("case")["predicted_shrink"]
    else:
        case, table = cases.loc[cases["low"].idxmin(), "case"], law.law_rows(frame).set_index("case")
        times_c = (table["a"] + table["reduce"]) / (table["ours"] + table["reduce"])  # C multiplies as much as A
        said = table["predicted"] if verdict.name == "H1" else times_c
    return text([said.get(case, np.nan)], "{:.2f}x")[0]


def law_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`law.law_rows` in words: the law beside the measurement, a row a case, and what is left between the two (%)."""
    table = law.law_rows(frame)
    if table.empty:
        return _missing(_FORWARDS)
    inside = table["predicted"].between(table["low"], table["high"]).map({True: "yes", False: "no"})
    columns = {
        "s": text(table["s"], "{:.2f}"),
        "the law says": text(table["predicted"], "{:.2f}x"),
        "measured": [interval(row) for row in table.to_dict("records")],
        "left (%)": (100 * table["residual"]).round(1),
        "law inside the interval": inside.where(table["low"].gt(0) & table["high"].le(100 * table["low"]), ABSENT),
        "reason of what is left": table["reason"],
        "bound by": table["bound"],
        "ideal": text(table["ideal"], "{:.2f}x"),
    }
    return build.about(table).assign(**columns)


def step_law_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The same of a training step: s1/f and s3/s1 (the rule of H2), by the law and as measured."""
    table, columns = law.step_rows(frame), {}
    if table.empty:
        return _missing(_STEPS)
    for name, ratio in (("shrink", "s1/f"), ("gain", "s3/s1")):
        columns[f"{ratio}: the law says"] = text(table[f"predicted_{name}"], "{:.2f}x")
        columns[f"{ratio}: measured"] = [interval(row, name) for row in table.to_dict("records")]
    return build.about(table).assign(**columns)


def where_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`law.pieces` of the largest case, ms: a row a (work, method), a column a part."""
    table = build.in_order(largest(law.pieces(frame)), "work", "optimizer", "method")
    if table.empty:
        return _missing("kernel time of its parts: make phase1")
    called, works = piece_names(frame), law.codes(frame)
    found = table[["work", "shape"]].assign(B=table["batch"], optimizer=table["optimizer"].map(optimizer_name))
    found["method"] = table["method"].map(AXES.label)
    for name in (name for name in law.PARTS if table[name].notna().any()):
        found[f"{called.get(name, name)} (ms)"] = text(table[name])
    if found["work"].nunique() > 1 and works:
        found[CODE] = found["work"].map(works)
    return found.drop(columns=[] if found["optimizer"].any() else "optimizer").rename_axis(columns="part")


def needs_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What parity with B1 would take, in words."""
    table = law.law_rows(frame)
    if table.empty:
        return _missing(_FORWARDS)
    columns = {
        "s measured": text(table["s"], "{:.2f}"),
        "s needed": text(table["s_needed"], "{:.2f}", "none: communication alone is too long"),
        "s needed / measured": text(table["s_needed"] / table["s"], "{:.2f}x"),
        "with free communication": text(table["free"], "{:.2f}x"),
        "link for parity with B1": text(table["link"], "any", "none: even free communication loses"),
        "link to beat A on one GPU (GB/s)": text(table["alone"], "{:.0f}", "none: its product alone is slower"),
        "link reached (GB/s)": text(table["bus"], "{:.0f}"),
    }
    return build.about(table).assign(**columns)


def batch_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a size: where the ratio to B1 is highest, where Block-Shock is faster than B1 and C, and undecided B."""
    table, over_c, found = law.law_rows(frame), verdicts.ratio(frame, AXES, C, OURS), []
    for shape, part in table.groupby("shape", sort=False):
        best = part.loc[part["ratio"].idxmax()]
        row = {"shape": shape, "highest ratio to B1": f"{best['ratio']:.2f}x", "at B": int(best["batch"])}
        row["faster than B1"] = _faster(part)
        found.append(row | {"faster than C": _faster(over_c[over_c["case"].isin(part["case"])])})
    return pd.DataFrame(found) if found else _missing(_FORWARDS)


def _faster(table: pd.DataFrame) -> str:
    """ "up to B of about 40, and from B of about 502 on (undecided: B=64)"; "–" where the rival was not measured."""
    if table.empty:
        return ABSENT
    parts = []
    for low, high in stretches(*(table[name].to_numpy(float) for name in ("batch", "ratio"))):
        if low:
            parts.append(f"from B of about {low:.0f} " + ("on" if np.isinf(high) else f"to {high:.0f}"))
        else:
            parts.append("at every measured B" if np.isinf(high) else f"up to B of about {high:.0f}")
    undecided = ", ".join(str(b) for b in table["batch"][~(table["low"].gt(1) | table["high"].lt(1))])
    return (", and ".join(parts) or "at no measured B") + (f" (undecided: B={undecided})" if undecided else "")


def stretches(batch: np.ndarray, ratio: np.ndarray) -> tuple[tuple[float, float], ...]:
    """(from, to) of every stretch of `batch` where `ratio` is above 1, on log scales; 0 or infinity beyond the ends."""
    above, place, level = ratio > 1, np.log(batch), np.log(ratio)
    ends = [0.0] if above[0] else []
    for i in np.flatnonzero(above[1:] != above[:-1]):
        part = level[i] / (level[i] - level[i + 1])
        ends.append(float(np.exp(place[i] + part * (place[i + 1] - place[i]))))
    ends += [np.inf] if above[-1] else []
    return tuple(zip(ends[::2], ends[1::2], strict=True))


def compress_needs(frame: pd.DataFrame) -> pd.DataFrame:
    """The cases of `law.step_pieces` with B1, T1 and T3; `compress` of T1, and `for_t3`, `for_b1`: the compress time at
    which T1's step is as long as theirs; ms.
    """
    table = law.step_pieces(frame).dropna(subset=list(STEPS)).reset_index(drop=True)
    compress = table["t1_compress"].fillna(0.0)
    rest = table["t1"] - compress
    return table.assign(compress=compress, for_t3=table["t3"] - rest, for_b1=table["b1"] - rest)


def compress_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What compression may take in T1's step for it to be as fast as T3 and as B1; ms."""
    table = compress_needs(frame)
    if table.empty:
        return _missing(_STEPS)
    names = {"t1": "T1's step (ms)", "t3": "T3's (ms)", "b1": "B1's (ms)", "compress": "compress (ms)"}
    columns = {title: rounded(table[name]) for name, title in names.items()}
    for name, rival in (("for_t3", "T3"), ("for_b1", "B1")):
        allowed = table[name].where(table[name] > 0)
        columns[f"allowed for parity with {rival} (ms)"] = text(allowed, none="none: even free compression loses")
    return build.about(table).assign(**columns)


class WhatIf:
    """Speed over B1 if some numbers of `frame` were others."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.law, self.works = law.law_rows(frame), law.codes(frame)
        ratios = law.training_ratios(frame).set_index("case")[
            [f"{n}{e}" for n in _STEPS_OVER_B1.values() for e in _ENDS]
        ]
        self.steps = compress_needs(frame).join(ratios, on="case")

    def __call__(self, s: float = 0.0, link: float = 0.0, compress: float = 1.0) -> pd.DataFrame:
        """A row a (case, `work`, method): `ratio` of medians as measured, `then`, and `low` and `high`: the ends of the
        measured 99% interval, moved by the factor that `then` is moved by. `attrs["works"]` is what `law.codes` says.

        `s` is of every 2:4 product, `link` the bus bandwidth in GB/s of every collective, without latency; 0: as
        measured. `compress` is a factor on T1's compress time. Times change by what their parts change: a step's
        collectives are taken not to be hidden by anything.
        """
        table, steps, about = self.law, self.steps, [*AXES.case_columns, "size"]
        slower = table["reduce"] * ((table["bus"] / link if link else 1.0) - 1)
        ours = table["ours_forward"] + slower + table["ours"] * ((table["s"] / s if s else 1.0) - 1)
        ratio, then = table["b1_forward"] / table["ours_forward"], (table["b1_forward"] + slower) / ours
        ends = {end: then * table[end] / table["ratio"] for end in ("low", "high")}
        forwards, found = table[about].assign(work="forward", method=OURS, ratio=ratio, then=then, **ends), []
        after = {short: steps[short] + _step_change(steps, short, s, link) for short in STEPS}
        after["t1"] += steps["compress"] * (compress - 1)
        for short, name in _STEPS_OVER_B1.items():
            then = after["b1"] / after[short]
            ends = {end: then * steps[f"{name}_{end}"] / steps[name] for end in ("low", "high")}
            one = steps[about].assign(work="step", method=STEPS[short], ratio=steps["b1"] / steps[short], then=then)
            found.append(one.assign(**ends))
        table = pd.concat([forwards, pd.concat(found).sort_index(kind="stable")], ignore_index=True)
        table.attrs["works"] = self.works
        return table


def _step_change(steps: pd.DataFrame, short: str, s: float, link: float) -> pd.Series:
    """ms that the step of `short` gets longer by, with products at `s` and collectives at `link`."""
    change, ranks = pd.Series(0.0, steps.index), steps["world_size"].astype(float)
    if s and short != "b1":
        product = steps[f"{short}_compute"]
        now = steps["a_compute"] / product / (ranks / 2)
        change += (product + steps[f"{short}_dx"].fillna(0.0)) * (now / s - 1)
    # Of 16-bit values, [B, out_features] forward and [B, in_features] backward.
    for stem, features in (("reduce", "out_features"), ("reduce_dx", "in_features")) if link else ():
        # B1 gathers its dX, half the bytes of an all-reduce: its ranks hold different columns, to be put side by side;
        # the two terms of Block-Shock each give a partial sum of all of it.
        passes = 1 if (short, stem) == ("b1", "reduce_dx") else 2
        sent = passes * 2 * steps["batch"] * steps[features] * (ranks - 1) / ranks / link / 1e6
        change += (sent - steps[f"{short}_{stem}"]).fillna(0.0)
    return change
