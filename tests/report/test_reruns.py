"""Several runs of one reference, as records frames: what verdicts, tables and the last line make of them."""

import re

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.report import changes, reruns, tables, verdicts
from tests.report.frames import SORTING, sorting

NS, BS = (4096, 8192, 16384, 40960), (16, 256)


def run_of(name, seed, *, effect=0.014, ratio=1.0, time=1.0):
    """A run of 8 cells and two groups; `ratio` slows the shared sort alone, `time` both methods."""
    rng = np.random.default_rng(100 + seed)
    speedup = {("block_shock", n, b): np.exp(rng.normal(0, effect)) / ratio for n in NS for b in BS}
    frame = sorting(ns=NS, bs=BS, run=name, seed=seed, groups=2, repeats=4, noise=0.004, speedup=speedup)
    return frame.assign(value=frame["value"].where(~frame["unit"].eq("ms"), frame["value"] * time))


def reference(*names, **last):
    """Runs of these names; the last one is not like the others."""
    return pd.concat([run_of(n, i, **(last if n == names[-1] else {})) for i, n in enumerate(names)], ignore_index=True)


@pytest.fixture(scope="module")
def three():
    return reference("a", "b", "c")


def test_a_verdict_of_three_runs_is_over_runs_and_of_one_as_it_was(three):
    one, several = (verdicts.ratio(f, SORTING, "whole", "shared") for f in (three[three["run"].eq("a")], three))
    assert set(one["runs"]) == {1} and set(several["runs"]) == {3} and set(several["groups"]) == {6}
    logs = [*reruns.cells(three[three["run"].eq("a")], "whole", "shared", "sort_kernel").values()]
    student = [63.656741 * cell["a"].std(ddof=1) / 2**0.5 for cell in logs]
    assert sorted(np.log(one["high"] / one["ratio"])) == pytest.approx(sorted(student))
    half = several["high"] / several["ratio"] - 1
    assert half.between(0.015, 0.045).all() and (several["next_high"] > several["high"]).all()
    assert (several["next_low"] < several["low"]).all() and (one["next_high"] > one["ratio"] * 1.04).all()


def test_the_last_line_says_how_well_a_run_is_foretold_and_nothing_of_a_single_run(three):
    assert reruns.sentences(three[three["run"].eq("a")], SORTING) == reruns.sentences(three.iloc[:0], SORTING) == []
    line = verdicts.one_line(three, SORTING, {}, own=three[three["run"].eq("c")])
    known = r" times known within (.+?)%, of a further run within (.+?)% \(99%\), the others predicted (.+?) of 48 "
    said = [re.search(f"{kind}{known}", line).groups() for kind in ("3 runs: kernel", "; call")]
    for mean, further, caught in [map(float, one) for one in said]:
        assert 1 < mean < further < 8 and caught >= 45 and "checks: 32 passed" in line, "2 methods, 8 cells, 2 groups"
        assert (f"predicted {caught:g} of 48 ({caught / 48:.1%}), fewer than 97%" in line) == (caught < 47)


def test_kernel_times_are_not_said_to_be_as_uncertain_as_calls(three):
    calls = three["metric"].str.endswith("_call")
    odd = three.assign(
        value=three["value"].where(~calls, three["value"] ** three["run"].map({"a": 1, "b": 1.5, "c": 0.7}))
    )
    sure, loose = (reruns.sentences(frame, SORTING)[0] for frame in (three, odd))
    assert sure.partition("; ")[0] == loose.partition("; ")[0] and sure.partition("; ")[2] != loose.partition("; ")[2]


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({"ratio": 1.03}, r"time of Shares, speed over whole: c -[23]\.\d% against"),
        ({"time": 1.03}, r"time of Sorts alone: c \+[23]\.\d% against"),
    ],
)
def test_a_drift_of_3_percent_in_one_run_is_said_and_one_beyond_what_machines_do_is_an_alarm(planted, said):
    line = verdicts.one_line(reference("a", "b", "c", **planted, effect=0.002), SORTING, {})
    assert "runs differ, by no more than machines do: " in line and re.search(said, line)
    of_two = verdicts.one_line(reference("a", "c", **planted, effect=0.002), SORTING, {})
    assert "runs differ" in of_two and re.search(re.sub(r"c \\?[+-]", "[ac] [+-]", said), of_two)
    ((name, by),) = planted.items()
    line = verdicts.one_line(reference("a", "b", "c", **{name: by**3}, effect=0.002), SORTING, {})
    assert "RUNS LIE APART: " in line and re.search(said.replace("[23]", "[89]"), line)
    line = verdicts.one_line(reference("a", "b", "c", effect=0.002), SORTING, {})
    assert "no drift between runs, the furthest: " in line


def test_the_page_has_both_intervals_of_each_cell_and_a_single_run_says_so(three):
    rules = {"race": (lambda rows: verdicts.speed_verdict(rows, SORTING, "S1: x", "whole", "shared"),)}
    several, one = (verdicts.numbers(f, rules).loc["S1"] for f in (three, three[three["run"].eq("a")]))
    assert several["interval over"] == "3 runs" and one["interval over"].startswith("the groups of one run")
    for row in (several, one):
        assert row["a further run"].startswith("[") and row["a further run"] not in row["largest cell"]
    speed = tables.speed_table(three, SORTING)
    radix = speed[speed["method"].eq("Shares")]
    assert radix["a further run"].str.match(r"\[0\.\d+, \d\.\d+\]").all()
    assert set(speed.loc[speed["method"].eq("Sorts alone"), "a further run"]) == {"–"}


def test_not_applicable_is_a_verdict_any_other_word_is_none_and_no_interval_is_rounded_to_1():
    word = verdicts.Verdict("S1: x", "rule", np.nan, np.nan, np.nan, "not applicable", "nothing was sorted", None)
    assert word.line == "S1 not applicable: nothing was sorted"
    with pytest.raises(ValueError, match="'perhaps' is no verdict; there are supported, refuted"):
        verdicts.Verdict("S1: x", "rule", np.nan, np.nan, np.nan, "perhaps", "", None)
    text = verdicts.interval_text({"ratio": 0.98, "low": 0.96, "high": 0.9987})
    assert text == "0.980x [0.960, 0.999]"


def test_a_rerun_is_judged_by_the_interval_that_predicts_it(three):
    rows = changes.compare(three, run_of("d", 9), SORTING).rows
    times = rows[rows["unit"].eq("ms")]
    assert set(times["outcome"]) == {changes.UNDECIDED} and set(times["groups_a"]) == {6}
    alone = changes.compare(three[three["run"].eq("a")], run_of("d", 9), SORTING).rows
    assert len(alone) == len(rows)
    slow = changes.compare(three, run_of("d", 9, ratio=1.2), SORTING).rows
    bad = slow[slow["outcome"].eq(changes.REGRESSION)]
    assert set(bad["method"]) == {"shared"} and len(bad) == 16, "kernel and call time of 8 cells"
    assert re.match(r"\w+ time of Shares at n=\d+, order=\w+: ", changes.sentence(bad.iloc[0], SORTING))
    inside, asked = reruns.foretold(three, run_of("d", 9), SORTING)
    assert asked == 16 and inside >= 15 and reruns.foretold(three, run_of("d", 9, ratio=1.2), SORTING) == (0, 16)
