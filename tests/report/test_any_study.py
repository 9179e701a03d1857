"""A frame and the axes of a study are all that the general report asks for."""

from dataclasses import replace

import pytest

from blockshock_lib.report import machine_plots, plots, tables, verdicts
from blockshock_lib.studies.linear.methods import METHODS
from tests.report.frames import SORTING, sorting, where, words

FIGURES = (plots.time_over, plots.ratio_heatmap, machine_plots.roofline, plots.which_to_use)
PEAK = {"peak": "peak_bytes"}


@pytest.fixture(scope="module")
def frame():
    return sorting(groups=3, repeats=4)


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_names_the_studys_methods_and_sizes(figure, frame):
    fig = figure(frame, SORTING)
    assert "no claim" not in words(fig) and "Shares" in fig.alt + words(fig)
    assert "forward" not in words(fig) and "Block-Shock" not in words(fig)


def test_sizes_memory_checks_and_kernels_come_from_the_axes(frame):
    speed = tables.speed_table(frame, SORTING)
    named = ["n", "order", "method", "kernel (ms)", "kernel p10–p90 (ms)", "vs whole", "claim"]
    assert list(speed.columns[:7]) == named
    assert tables.correctness_table(frame, SORTING).index.tolist() == [("random",), ("reversed",)]
    memory = tables.memory_table(frame, SORTING, PEAK)
    assert list(memory.columns[:5]) == ["n", "order", "dtype", "method", "peak (GiB)"] and len(memory) == 8
    assert "Shares, reversed: 6/6." in plots.check_matrix(frame, SORTING).alt


def test_a_verdict_is_that_of_the_studys_two_methods(frame):
    verdict = verdicts.speed_verdict(frame, SORTING, "S1: sharing beats sorting alone.", "whole", "shared")
    assert verdict.line.startswith("S1 refuted: ") and "at n=8192, order=" in verdict.why
    assert "kernel time of the whole sort" in verdict.rule and "largest size" in verdict.rule
    failed = frame.assign(value=frame["value"].mask(where(frame, method="shared", metric="check"), 0.0))
    line = verdicts.one_line(failed, SORTING, {}, lambda rows: ["and more"])
    assert line.startswith("race: FAIL · checks: 12 passed, 12 failed") and line.endswith(" · and more")


def test_methods_that_bring_no_look_differ_in_colour_and_marker_and_keep_theirs():
    axes, names = replace(SORTING), ["whole", "shared", "row_parallel_rs", "block_shock_fp32", "newcomer"]
    looks = {name: axes.look(name) for name in axes.ordered(names)}
    for part in ("colour", "marker"):
        shipped = {getattr(look, part) for look in METHODS.values()}
        assert len({getattr(look, part) for look in looks.values()} - shipped - {"8"}) == len(names)
    assert looks["whole"].label == "Sorts alone" and looks["newcomer"].label == "newcomer"
    again = replace(axes)
    assert again.ordered(names[::-1]) and {name: again.look(name) for name in names} == looks
    more = [again.look(str(number)) for number in range(15)]
    assert len({*more, *looks.values()}) == 20 == len({(one.colour, one.marker) for one in (*more, *looks.values())})
