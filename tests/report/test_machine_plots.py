import numpy as np
import pandas as pd
import pytest

from blockshock_lib.report import machine_plots
from tests.report import frames


@pytest.fixture(scope="module")
def frame():
    return frames.make((4096, 40960), (16, 4096), repeats=4)


def test_memory_draws_the_largest_case_with_its_formula(frame):
    fig = machine_plots.memory_bars(frame)
    assert fig.texts[0].get_text().replace("\n", " ") == (
        "Block-Shock holds 1.758 GiB of weights, 0.5625 of dense's 3.125 GiB; B1 holds 1.562 GiB"
    )
    weights = fig.axes[0]
    widths = [bar.get_width() for bar in weights.patches]
    ticks = weights.lines[0].get_xdata()
    assert len(widths) == len(frames.METHODS)
    assert np.allclose(widths, ticks)
    peaks = [bar.get_width() for bar in fig.axes[1].patches]
    assert np.all(np.array(peaks) > fig.axes[1].lines[0].get_xdata()), (
        "measured peaks of the factory exceed the formula"
    )


def test_the_peak_is_named_after_what_the_phase_runs(frame):
    for phase, work in (("phase1", "a forward"), ("phase2", "a forward and dX"), ("phase3", "a training step")):
        titles = [ax.get_title(loc="left") for ax in machine_plots.memory_bars(frame.assign(phase=phase)).axes]
        weights = "Weights" if phase == "phase1" else "Weights of the forward"
        assert titles == [weights, f"Peak of {work}"]


@pytest.mark.parametrize("how, held", [("2:4", "3.516 GiB"), ("dense masked", "1.758 GiB")])
def test_the_title_counts_the_packed_copy_that_dx_reads(frame, how, held):
    product = frame[frame["metric"].eq("compute_kernel")].assign(metric="dx_kernel", detail=how)
    fig = machine_plots.memory_bars(pd.concat([frame, product]).assign(phase="phase2"))
    title = fig.texts[0].get_text().replace("\n", " ")
    assert f"Block-Shock holds {held} of weights" in title and ("copy for dX" in title) == (how == "2:4")


def test_a_failed_check_takes_its_bar_away(frame):
    fig = machine_plots.memory_bars(frames.fail(frame, "dense", n=40960, batch=4096))
    assert len(fig.axes[0].patches) == len(frames.METHODS) - 1


def test_rates_are_flops_over_the_products_time(frame):
    points = machine_plots.roofline_points(frame).set_index(["in_features", "batch", "method"])
    point = points.loc[(40960, 4096, "row_parallel")]
    assert point["rate"] == pytest.approx(4096 * 40960**2 / 10.0e-3 / 1e12, rel=0.02)
    assert point["rate_low"] < point["rate"] < point["rate_high"]
    moved = 40960**2 + 2 * 2 * 4096 * 40960
    assert point["intensity"] == pytest.approx(4096 * 40960**2 / moved)


def test_the_roof_is_the_lower_of_bandwidth_and_gemm_rate(frame):
    found = machine_plots.ceilings(frame)
    roof = next(line for line in machine_plots.roofline(frame).axes[0].lines if line.get_linestyle() == "-")
    x, y = np.array(roof.get_xdata()), np.array(roof.get_ydata())
    assert np.allclose(y, np.minimum(found["copy_bandwidth"] * x / 1e3, found["gemm_rate"]))


@pytest.mark.parametrize("scale", [1, 1e-3])
def test_the_labels_of_the_roof_lie_inside_the_axes_with_three_digits(scale):
    frame = frames.make((4096,), (256,), repeats=4)
    ceiling = frame["method"].eq("ceiling")
    slow = frame.assign(value=frame["value"].mask(ceiling, frame["value"] * scale * 1.0001))
    fig = machine_plots.roofline(slow)
    fig.draw_without_rendering()
    found = machine_plots.ceilings(slow)
    labels = {text.get_text(): text.get_window_extent() for text in fig.axes[0].texts}
    for name, unit in (("gemm_rate", "TFLOP/s"), ("copy_bandwidth", "GB/s")):
        text = next(text for text in labels if unit in text)
        assert float(text.split()[-2]) == pytest.approx(found[name], rel=5e-3)
        box, axes = labels[text], fig.axes[0].bbox
        assert axes.x0 <= box.x0 and box.x1 <= axes.x1 and axes.y0 <= box.y0 and box.y1 <= axes.y1


@pytest.mark.parametrize(
    "value, text", [(3.125 * 2**30, "3.125 GiB"), (2**20, "1 MiB"), (1536, "1.5 KiB"), (12, "12 B")]
)
def test_bytes_are_written_in_the_nearest_unit(value, text):
    assert machine_plots.byte_text(value) == text
