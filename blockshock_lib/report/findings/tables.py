"""Tables of the findings. `frames` maps a setting, machine and all, to its rows; the first is the one to rest on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from blockshock_lib.report import cells, labels, verdicts
from blockshock_lib.report.findings import law, needs, versions
from blockshock_lib.report.findings.law import largest
from blockshock_lib.report.tables import ABSENT, rounded
from blockshock_lib.report.training.tables import piece_names
from blockshock_lib.report.verdicts import Verdict, interval_text

Frames = Mapping[str, pd.DataFrame]
ASKED = {"H1": "phase1", "H2": "phase3", "H3": "phase1"}
CODE = "measured with different code: compare within one"


def judged(frame: pd.DataFrame) -> list[tuple[Verdict, str]]:
    """H1, H2 and H3, and what to do where the phase that they ask for was never measured: "" where it was."""
    phases = set(cells.complete(frame)["phase"])
    found = [verdicts.h1(frame), verdicts.h2(frame), verdicts.h3(frame)]
    return [(v, "" if ASKED[v.name] in phases else _no_record(ASKED[v.name])) for v in found]


def _no_record(phase: str) -> str:
    return f"no record of phase {phase[-1]} yet: make {phase}"


def _is_gpu(frame: pd.DataFrame) -> bool:
    return not cells.no_claim(frame)


def words(frames: Frames) -> pd.DataFrame:
    """The answer in words, a row a hypothesis: its rule, and a column a setting of real GPUs with the verdict. No
    number, and no CPU's: the same on every computer that reads the same GPU records.
    """
    real = {setting: judged(frame) for setting, frame in frames.items() if _is_gpu(frame)}
    claims = judged(pd.DataFrame())
    table = pd.DataFrame(
        {"claim": [v.hypothesis for v, _ in claims], "rule": [v.rule for v, _ in claims]},
    )
    for setting, found in real.items():
        table[setting] = [lacks or v.verdict for v, lacks in found]
    table["on a CPU, or emulated"] = "no claim"
    return table.set_index("claim")


def numbers(frames: Frames) -> pd.DataFrame:
    """The answer in numbers, a row a (setting, hypothesis): verdict, the ratio that the rule asks for in its largest
    case with its 99% interval, what the law makes of the measured s in that case, and why. Where the phases that the
    rules ask for are of different code, the last column names it.
    """
    found = []
    for setting, frame in frames.items():
        works = versions.of_works(frame)
        code = {phase: works.get(work, "") for work, phase in versions.PHASE.items()}
        for verdict, lacks in judged(frame):
            row = {"setting": setting, "hypothesis": verdict.name, "verdict": verdict.verdict}
            row["measured"] = interval_text(pd.Series(dict(ratio=verdict.ratio, low=verdict.low, high=verdict.high)))
            row["the law says"] = _law_text(frame, verdict)
            row["why"] = lacks or verdict.why
            found.append(row | ({CODE: code[ASKED[verdict.name]]} if works else {}))
    return pd.DataFrame(found).fillna("").set_index(["setting", "hypothesis"]) if found else pd.DataFrame()


def _law_text(frame: pd.DataFrame, verdict: Verdict) -> str:
    # The same quantity as the verdict's, in the same case: of its largest cells the one that its rule takes.
    cases = largest(verdict.cells)
    if cases.empty:
        return ABSENT
    if verdict.name == "H2":
        case = cases.loc[cases["shrink_high"].idxmax(), "case"]
        values = law.step_rows(frame).set_index("case")["predicted_shrink"]
    else:
        case = cases.loc[cases["low"].idxmin(), "case"]
        table = law.law_rows(frame).set_index("case")
        times_c = (table["a"] + table["reduce"]) / (table["ours"] + table["reduce"])  # C multiplies as much as A
        values = table["predicted"] if verdict.name == "H1" else times_c
    value = values.get(case, np.nan)
    return ABSENT if np.isnan(value) else f"{value:.2f}x"


def lines(frames: Frames) -> list[str]:
    """The answer: of each setting of real GPUs its name and a line a hypothesis; one line for what makes no claim."""
    found = []
    for setting, frame in frames.items():
        if _is_gpu(frame):
            found += [f"on {setting}", *(f"{v.name} {lacks or f'{v.verdict}: {v.why}'}" for v, lacks in judged(frame))]
    others = [setting for setting, frame in frames.items() if not _is_gpu(frame)]
    return [*found, f"no claim about speed: {'; '.join(others)}"] if others else found


def one_line(frames: Frames) -> str:
    """The line of the manifest and the terminal."""
    passed = failed = 0
    for frame in frames.values():
        good, bad, _, _ = verdicts.check_verdict(frame)
        passed, failed = passed + good, failed + bad
    state = "NOTHING READ" if not frames else "FAIL" if failed else "PASS"
    return " · ".join([f"findings: {state}", f"checks: {passed} passed, {failed} failed", *lines(frames)])


def law_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The law beside the measurement, a row a case: s, the ratio to B1 that the law makes of it with B1's measured
    communication added, the ratio as measured, what is left between the two (%) with its reason, what binds B1's
    product, and the ratio that the best 2:4 kernel could reach there.
    """
    table = law.law_rows(frame)
    if table.empty:
        return _nothing("phase1", "A, B1 and Block-Shock")
    shown = _about(table)
    shown["s"] = table["s"].map("{:.2f}".format)
    shown["the law says"] = table["predicted"].map("{:.2f}x".format)
    shown["measured"] = [interval_text(row) for row in table.to_dict("records")]
    shown["left (%)"] = (100 * table["residual"]).round(1)
    inside = table["predicted"].between(table["low"], table["high"]).map({True: "yes", False: "no"})
    shown["law inside the interval"] = inside.where(table["low"].gt(0) & (table["high"] / table["low"]).le(100), ABSENT)
    shown["reason of what is left"] = table["reason"]
    shown["bound by"] = table["bound"]
    shown["ideal"] = table["ideal"].map("{:.2f}x".format)
    return shown


def step_law_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The same of a training step: s1/f and s3/s1 (the rule of H2), by the law and as measured."""
    table = law.step_rows(frame)
    if table.empty:
        return _nothing("phase3", "B1, T1 and T3")
    shown = _about(table)
    for name, text in (("shrink", "s1/f"), ("gain", "s3/s1")):
        shown[f"{text}: the law says"] = [_times(value) for value in table[f"predicted_{name}"]]
        shown[f"{text}: measured"] = [verdicts.quotient_text(row, name) for _, row in table.iterrows()]
    return shown


def where_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Where the time goes in the largest case: a row a (work, method), a column a part, ms; "–" where there is none.
    The last of them is how much longer a step's parts take one by one than the step: below 0, the step is longer. Where
    forward and step were measured with different code, a further column names it.
    """
    parts = largest(law.pieces(frame))
    if parts.empty:
        return _nothing("phase1", "kernel time of its parts")
    keys = ["work", "shape", "batch", "optimizer", "method"]
    wide = parts.pivot_table(index=keys, columns="part", values="ms", sort=False).reset_index()
    order = {name: i for i, name in enumerate([*labels.OPTIMIZERS, *labels.methods_in(wide["method"])])}
    wide = wide.sort_values(
        ["work", "optimizer", "method"], key=lambda c: c.map(order).fillna(-1) if c.name != "work" else c
    )
    names, called = [name for name in parts["part"].drop_duplicates() if name in wide], piece_names(frame)
    shown = wide[["work", "shape"]].assign(B=wide["batch"], optimizer=wide["optimizer"].map(labels.optimizer))
    shown["method"] = wide["method"].map(labels.label)
    for name in names:
        shown[f"{called.get(name, name)} (ms)"] = [ABSENT if pd.isna(v) else f"{v:.4g}" for v in wide[name]]
    works = versions.of_works(frame)
    if wide["work"].nunique() > 1 and works:
        shown[CODE] = wide["work"].map(works)
    return shown.drop(columns=[] if shown["optimizer"].any() else "optimizer").reset_index(drop=True)


def needs_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What parity with B1 would take, a row a case, all else held as measured: s, against the s that was measured; the
    ratio if communication cost nothing, and the link at which the ratio is 1; and the link from which Block-Shock on
    all GPUs beats dense A on one, against the bandwidth that was reached.
    """
    table = needs.needs(frame)
    if table.empty:
        return _nothing("phase1", "A, B1 and Block-Shock")
    shown = _about(table)
    shown["s measured"] = table["s"].map("{:.2f}".format)
    shown["s needed"] = [
        "none: communication alone is too long" if np.isnan(v) else f"{v:.2f}" for v in table["s_needed"]
    ]
    shown["s needed / measured"] = (table["s_needed"] / table["s"]).map(_times)
    shown["with free communication"] = table["free"].map("{:.2f}x".format)
    none = "none: even free communication loses"
    shown["link for parity with B1"] = [none if np.isnan(link) else "any" for link in table["link"]]
    never = "none: its product alone is slower"
    shown["link to beat A on one GPU (GB/s)"] = [never if np.isnan(v) else f"{v:.0f}" for v in table["alone"]]
    shown["link reached (GB/s)"] = table["bus"].map("{:.0f}".format)
    return shown


def batch_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The batches at which things change, a row a size: where the ratio to B1 is highest, and every stretch of B in
    which Block-Shock is faster than B1, and than C; its ends lie between measured batches on logarithmic scales. The
    measured B whose 99% interval holds 1 are named as undecided.
    """
    table = needs.batch_needs(frame)
    if table.empty:
        return _nothing("phase1", "A, B1 and Block-Shock")
    return pd.DataFrame(
        {
            "shape": table["shape"],
            "highest ratio to B1": table["best"].map("{:.2f}x".format),
            "at B": table["at"],
            "faster than B1": [_stretches(*both) for both in zip(table["b1_faster"], table["b1_open"], strict=True)],
            "faster than C": [_stretches(*both) for both in zip(table["c_faster"], table["c_open"], strict=True)],
        }
    )


def _stretches(faster: tuple[tuple[float, float], ...] | None, undecided: tuple[int, ...]) -> str:
    """((0, 40), (502, inf)) -> "up to B of about 40, and from about 502 on"; None: the rival was not measured."""
    if faster is None:
        return ABSENT
    parts = []
    for low, high in faster:
        if not low and np.isinf(high):
            parts.append("at every measured B")
        elif not low:
            parts.append(f"up to B of about {high:.0f}")
        else:
            parts.append(f"from B of about {low:.0f} " + ("on" if np.isinf(high) else f"to {high:.0f}"))
    text = ", and ".join(parts) or "at no measured B"
    return text + (f" (undecided: B={', '.join(map(str, undecided))})" if undecided else "")


def compress_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What compression may take in T1's step, all else held, for it to be as fast as T3 and as B1; ms."""
    table = needs.compress_needs(frame)
    if table.empty:
        return _nothing("phase3", "B1, T1 and T3")
    shown = _about(table)
    for name, text in (
        ("t1", "T1's step (ms)"),
        ("t3", "T3's (ms)"),
        ("b1", "B1's (ms)"),
        ("compress", "compress (ms)"),
    ):
        shown[text] = rounded(table[name].astype(float))
    for name, rival in (("for_t3", "T3"), ("for_b1", "B1")):
        none = "none: even free compression loses"
        shown[f"allowed for parity with {rival} (ms)"] = [none if v <= 0 else f"{v:.4g}" for v in table[name]]
    return shown


def backtest_table(table: pd.DataFrame) -> pd.DataFrame:
    """The model's predictions of measured cases, each without the cases of its own N, and their errors in %; a last row
    gives the median and the largest of the errors' sizes.
    """
    if table.empty:
        return _nothing("phase1", "three sizes on real GPUs")
    errors = {"b1_error": "B1's time, error (%)", "block_shock_error": "Block-Shock's time, error (%)"}
    errors |= {"error": "ratio, error (%)"}
    shown = pd.DataFrame({"N": table["n"].astype(str), "B": table["batch"].astype(str)})
    shown["ratio of medians predicted"], shown["ratio of medians measured"] = (
        table[name].map("{:.2f}x".format) for name in ("predicted", "ratio")
    )
    for name, text in errors.items():
        shown[text] = (100 * table[name]).map("{:+.1f}".format)
    last = {name: f"{100 * table[name].abs().median():.1f} / {100 * table[name].abs().max():.1f}" for name in errors}
    shown.loc[len(shown)] = ["median / largest", "", "", "", *last.values()]
    return shown


def model_table(plan) -> pd.DataFrame:
    """The fitted numbers of a `predict.scaling.Plan`, a row a kernel or link, and the share (%) of the published rate
    that each is.
    """
    if plan.model is None:
        return pd.DataFrame({"nothing to show": [plan.why]})
    model, gpu = plan.model, plan.gpu
    rows = [
        ("dense product", model.dense, gpu.dense),
        ("2:4 product, few rows", model.few, gpu.sparse / 2),
        ("2:4 product, many rows", model.many, gpu.sparse / 2),
    ]
    shown = [
        {
            "part": name,
            "rate (TFLOP/s of kept weights)": f"{kernel.rate:.0f} ({100 * kernel.rate / peak:.0f}%)"
            if np.isfinite(kernel.rate)
            else "bytes alone bind",
            "bandwidth (GB/s)": f"{kernel.bandwidth:.0f} ({100 * kernel.bandwidth / gpu.memory:.0f}%)",
            "overhead or latency (ms)": f"{kernel.overhead:.4f}",
        }
        for name, kernel, peak in rows
    ]
    link = f"{model.link.bandwidth:.0f} ({100 * model.link.bandwidth / gpu.link:.0f}%)"
    last = {"part": "all-reduce", "rate (TFLOP/s of kept weights)": ABSENT, "bandwidth (GB/s)": link}
    return pd.DataFrame([*shown, last | {"overhead or latency (ms)": f"{model.link.latency:.4f}"}])


def larger_table(table: pd.DataFrame) -> pd.DataFrame:
    """PREDICTION: the forward of B1 and Block-Shock on more GPUs of the measured kind; beside it, where the very case
    was measured, what was measured.
    """
    if table.empty:
        return _nothing("phase1", "enough cases on real GPUs")
    shown = pd.DataFrame({"GPUs": table["ranks"], "machines": table["machines"], "N": table["n"], "B": table["batch"]})
    shown["B1 (ms, PREDICTED)"], shown["Block-Shock (ms, PREDICTED)"] = (
        rounded(table[n], 3) for n in ("b1", "block_shock")
    )
    shown["ratio (PREDICTED)"] = table["ratio"].map("{:.2f}x".format)
    if table["measured"].notna().any():
        shown["ratio of medians measured"] = table["measured"].map(_times)
    shown["of B1's time communication (%)"] = (100 * table["link_share"]).round().astype(int)
    return shown


def others_table(table: pd.DataFrame) -> pd.DataFrame:
    """PREDICTION: speed of Block-Shock's forward over B1's on two of other GPUs, a row a GPU, a column a batch."""
    if table.empty:
        return _nothing("phase1", "enough cases on real GPUs")
    wide = table.pivot_table(index=["gpu", "n"], columns="batch", values="ratio", sort=False)
    shown = wide.map("{:.2f}x".format).rename(columns=lambda b: f"B={b} (PREDICTED)").reset_index()
    shown = shown.rename(columns={"gpu": "two of", "n": "N"}).rename_axis(columns=None)
    return shown.assign(
        **{"published rates": shown["two of"].map(dict(zip(table["gpu"], table["source"], strict=True)))}
    )


def _about(table: pd.DataFrame) -> pd.DataFrame:
    # The columns that tell a case from the others.
    shown = table[["shape"]].assign(B=table["batch"])
    for name in cells.FOCUS:
        if table[name].nunique() > 1:
            shown[name] = table[name].map(labels.optimizer) if name == "optimizer" else table[name]
    return shown


def _times(value: float) -> str:
    return ABSENT if np.isnan(value) else f"{value:.2f}x"


def _nothing(phase: str, what: str) -> pd.DataFrame:
    """A table that says what is missing."""
    return pd.DataFrame({"nothing to show": [f"no valid times of {what}: make {phase}"]})
