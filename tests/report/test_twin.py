"""The baseline timed twice says what a run cannot tell apart, and is a method nowhere."""

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.report import frames, reruns, tables, verdicts
from blockshock_lib.report.axes import TWIN
from tests.report.frames import SORTING, sorting

SWEEP = dict(ns=(4096, 8192, 16384, 40960), bs=(16, 256), groups=3, repeats=4)


def with_twin(off=1.0, at=None, spread=0.0):
    """A run of 8 cells whose baseline was timed once more, `off` times as slow `at` a size; `spread` by cell."""
    frame = sorting(**SWEEP)
    again = sorting(**SWEEP, seed=5)
    again = again[again["method"].eq("whole")].assign(method=TWIN, case=again["case"])
    again["case"] = frame.loc[frame["method"].eq("whole"), "case"].to_numpy()
    rng = np.random.default_rng(3)
    factors = {case: np.exp(rng.normal(0, spread)) for case in again["case"].unique()}
    slower = again["case"].map(factors) * np.where(again["n"].eq(at), off, 1.0)
    again["value"] = again["value"].where(~again["unit"].eq("ms"), again["value"] * slower)
    return pd.concat([frame, again], ignore_index=True)


def test_a_twin_that_is_the_same_says_so_and_a_difference_is_named():
    (said,) = verdicts.twin_sentences(with_twin(), SORTING)
    assert said.startswith("whole again differs from whole in 0 of 8 cells; smallest difference to claim: ")
    other = with_twin(1.2, 8192)
    (said,) = verdicts.twin_sentences(other, SORTING)
    assert "differs from whole in 2 of 8 cells (0.8" in said and "8192" in said
    assert verdicts.twin_sentences(other.assign(emulated=True), SORTING) == []
    assert said in (line := verdicts.one_line(other, SORTING, {})) and "checks: 48 passed" in line
    old = sorting(**SWEEP)
    assert "again" not in verdicts.one_line(old, SORTING, {}) and verdicts.twin_sentences(old.iloc[:0], SORTING) == []
    assert np.isnan(verdicts.twin(old, SORTING)[1])


def test_the_smallest_difference_is_what_two_equal_methods_show_in_99_of_100_cells():
    wide, narrow = (verdicts.twin(with_twin(spread=spread), SORTING)[1] for spread in (0.03, 0.0))
    assert 0.05 < wide < 0.2 and 0 < narrow < 0.03
    again = with_twin(spread=0.03).replace({"method": {TWIN: "again"}})
    cells = reruns.cells(again, "whole", "again", "sort_kernel")
    logs = [run.mean() for cell in cells.values() for run in cell.values()]
    assert np.log1p(wide) == pytest.approx(3.355387 * np.sqrt(np.mean(np.square(logs)))), "t of 8 degrees of freedom"


def test_it_is_no_method_in_any_table():
    frame = with_twin()
    assert TWIN not in SORTING.ordered(frame["method"]) and TWIN not in set(frames.valid(frame)["method"])
    for drawn in (tables.speed_table, tables.correctness_table, tables.error_table):
        pd.testing.assert_frame_equal(drawn(frame, SORTING), drawn(sorting(**SWEEP), SORTING))


def test_energy_is_shown_over_the_baselines_where_it_was_measured():
    frame = sorting(**SWEEP)
    assert tables.energy_table(frame, SORTING)["energy"].tolist() == ["none was measured"]
    kernel, drawn = frame[frame["metric"].eq("sort_kernel")], []
    for metric, unit, value in (("energy", "J", None), ("power", "W", 600.0), ("sm_clock", "MHz", 1400.0)):
        more = kernel.assign(metric=metric, unit=unit, detail="sort_kernel", rank=-1 if metric == "energy" else 0)
        if value is None:
            more["value"] = np.where(more["method"].eq("whole"), 2.0, 3.0) * (1 + 1e-3 * more["group"])
        else:
            more["value"] = value
        drawn += [more, more.assign(detail="product_by_kernel cslt", value=77.0)]
    table = tables.energy_table(pd.concat([frame, *drawn], ignore_index=True), SORTING)
    radix = table[table["method"].eq(SORTING.label("shared"))]
    assert radix["over whole's"].str.startswith("1.50x [1.5").all() and radix["energy (J)"].between(3, 3.01).all()
    assert set(table["power (W a GPU)"]) == {600} and set(table["SM clock (MHz)"]) == {1400} and len(table) == 16
