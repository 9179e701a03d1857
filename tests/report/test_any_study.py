"""A frame and the axes of a study are all that the general report asks for."""

from dataclasses import replace

import pytest

from blockshock_lib.report import changes, grid_plots, machine_plots, tables, time_plots, verdicts
from blockshock_lib.studies.linear.methods import METHODS
from tests.report.frames import SORTING, sorting, title, where, words

FIGURES = (time_plots.time_vs_n, grid_plots.ratio_heatmap, machine_plots.roofline)
PEAK = {"peak": "peak_bytes"}


@pytest.fixture(scope="module")
def frame():
    return sorting(groups=3, repeats=4)


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_names_the_studys_methods_and_sizes(figure, frame):
    fig = figure(frame, SORTING)
    assert "no claim" not in words(fig) and "R radix sort" in fig.alt + words(fig)
    assert "forward" not in words(fig) and "Block-Shock" not in words(fig)


def test_sizes_memory_checks_and_kernels_come_from_the_axes(frame):
    speed = tables.speed_table(frame, SORTING)
    assert list(speed.columns[:7]) == ["n", "order", "method", "kernel (ms)", "kernel p10–p90 (ms)", "vs M", "claim"]
    assert tables.correctness_table(frame, SORTING).index.tolist() == [("random",), ("reversed",)]
    memory = tables.memory_table(frame, SORTING, PEAK)
    assert list(memory.columns[:5]) == ["n", "order", "dtype", "method", "peak (GiB)"] and len(memory) == 8
    assert title(machine_plots.memory_bars(frame, SORTING, {"peak_bytes": "Peak"})).startswith(
        "Memory at n=8192, order="
    )
    assert "R radix sort, reversed: 6/6." in grid_plots.check_matrix(frame, SORTING).alt


def test_a_verdict_is_that_of_the_studys_two_methods(frame):
    verdict = verdicts.speed_verdict(frame, SORTING, "S1: radix beats merge.", "merge", "radix")
    assert verdict.line.startswith("S1 refuted: ") and "at n=8192, order=" in verdict.why
    assert "kernel time of the whole sort" in verdict.rule and "largest size" in verdict.rule
    rules = {"race": (lambda rows: verdicts.speed_verdict(rows, SORTING, "S1: x", "merge", "radix"),)}
    failed = frame.assign(value=frame["value"].mask(where(frame, method="radix", metric="check"), 0.0))
    line = verdicts.one_line(failed, SORTING, rules, lambda rows: ["and more"])
    assert line.startswith("race: FAIL · checks: 12 passed, 12 failed") and line.endswith(" · and more")
    assert "not run: R radix sort" in line and "no case holds valid times of both M merge sort and R" in line


def test_two_runs_are_compared_by_the_studys_columns(frame):
    slow = sorting(groups=3, repeats=4, speedup={("block_shock", 4096, 16): 0.1})
    rows = changes.compare(frame, slow, SORTING).rows
    bad = rows[rows["outcome"].eq(changes.REGRESSION)]
    assert set(zip(bad["n"].astype(int), bad["order"], bad["method"], strict=True)) == {(4096, "random", "radix")}
    assert changes.sentence(bad.iloc[0], SORTING).startswith("kernel time of R radix sort at n=4096, order=random: ")
    assert {"n", "order", "b / a"} <= set(changes.readable(rows, SORTING))


def test_methods_that_bring_no_look_differ_in_colour_and_marker_and_keep_theirs():
    axes, names = replace(SORTING), ["merge", "radix", "row_parallel_rs", "block_shock_fp32", "newcomer"]
    looks = {name: axes.look(name) for name in axes.ordered(names)}
    for part in ("colour", "marker"):
        shipped = {getattr(look, part) for look in METHODS.values()}
        assert len({getattr(look, part) for look in looks.values()} - shipped - {"8"}) == len(names)
    assert looks["merge"].label == "M merge sort" and looks["newcomer"].label == "newcomer"
    again = replace(axes)
    assert again.ordered(names[::-1]) and {name: again.look(name) for name in names} == looks
    more = [again.look(str(number)) for number in range(15)]
    assert len({*more, *looks.values()}) == 20 == len({(one.colour, one.marker) for one in (*more, *looks.values())})
