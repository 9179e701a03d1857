"""Time saved, its law, its figure and S3, from records whose truth is known."""

import pandas as pd
import pytest

from blockshock_lib import studies
from blockshock_lib.studies.gpt import hypotheses, saved
from blockshock_lib.studies.gpt.methods import METHODS
from tests.studies.gpt.test_reports import ABOUT, BATCH, CONTEXT, GENERAL, STEPS, TRUE, records, told

STUDY = studies.load("gpt")
ALPHA, BETA, COMPUTE = 0.01, 1e-9, 2.0  # ms, ms a byte, ms of all blocks


FASTER = {"spd": 0.8, "grouped_2": 0.5}


def timed(width=384, ranks=4, link="fast", step=FASTER, device="cuda", batch=BATCH, off=1.0):
    """Forwards of two lengths whose time is compute and sums, and steps of 10 ms times `step`; two groups."""
    rows = []
    for work, length in (("prefill", 16), ("prefill", 2048), ("step", batch * CONTEXT)):
        about = GENERAL | ABOUT | {"phase": "gpt_latency", "world_size": ranks, "device": device}
        about |= {"run": "t1", "seed": 0} | {
            "work": work,
            "length": length,
            "link": link,
            "width": width,
            "ranks": ranks,
            "trained": 0,
        }
        about |= {"batch": batch if work == "step" else 1, "recipe": "", "case": f"{work}{length}{width}{link}"}
        for method, count in (("tensor_parallel", 24), ("spd", 12), ("grouped_2", 6), ("ladder", 23)):
            sums = count * (ALPHA + BETA * length * width * 2)
            ms = {"compute_kernel": COMPUTE, "sums_kernel": sums}
            whole = 10 * step.get(method, 1)
            if work == "step":
                ms |= {"step_kernel": whole, "compute_kernel": whole - sums}
            else:
                ms["forward_kernel"] = COMPUTE + sums * (0.25 if method == "ladder" else off)
            for group in (0, 1):
                said = {"check": 1.0} | {name: value * (1 + 1e-4 * group) for name, value in ms.items()}
                rows += [about | {"group": group} | told(method, *each) for each in said.items()]
    return pd.DataFrame(rows)


def both(*more, gap=TRUE, **how):
    losses = pd.concat([records(gap, noise=0.0005), *more])
    return pd.concat([losses, timed(**how)], ignore_index=True)


def test_times_are_their_parts_and_overlap_is_what_is_hidden():
    table = saved.times(timed()).set_index(["work", "length", "method"])
    row = table.loc[("prefill", "16", METHODS["spd"].label)]
    assert row["over its parts"] == pytest.approx(1, abs=1e-3) and row["count"] == 12
    assert row["kernel a block (µs)"] == pytest.approx(1e3 / 12 * (COMPUTE + 12 * ALPHA), rel=1e-2)
    assert row["a token (µs)"] == pytest.approx(1e3 / 16 * (COMPUTE + 12 * ALPHA), rel=1e-2)
    assert table.loc[("prefill", "16", METHODS["ladder"].label), "hidden (%)"] == pytest.approx(75, abs=0.1)
    assert table.loc[("step", str(BATCH * CONTEXT), METHODS["spd"].label), "saved"].startswith("20.0% [")


def test_the_law_is_fitted_to_the_sums_and_says_that_it_extrapolates():
    alpha, beta, worst = saved.law(saved.parts(timed()))
    assert (alpha, beta) == pytest.approx((ALPHA, BETA), rel=1e-3) and worst < 1e-3
    table = saved.extrapolated(timed()).set_index(["length", "link", "method"])
    row = table.loc[("2048", "fast, as measured", METHODS["tensor_parallel"].label)]
    one = ALPHA * 7 / 3 + BETA * (7 / 8) / (3 / 4) * 2048 * 384 * 2
    assert row["a block on 8 (µs)"] == pytest.approx(1e3 / 12 * (COMPUTE / 2 + 24 * one), rel=1e-2)
    assert set(table["kind"]) == {"extrapolated, not measured"}
    slow = table.loc[("2048", "400 Gb/s network", METHODS["spd"].label), "saved (%)"]
    assert slow > table.loc[("2048", "fast, as measured", METHODS["spd"].label), "saved (%)"]


def test_the_figure_of_the_study_takes_both_phases_and_says_what_is_missing():
    fig = STUDY.figures["gap over time saved"](both())
    assert "SPD saves 20.0%" in fig.alt and "track 2 saves 50.0%" in fig.alt
    for frame, said in (
        (records(), "make gpt_latency"),
        (timed(), "make gpt_training"),
        (both(width=768), "384 wide on 4 ranks were trained"),
        (both(ranks=2), "this was not timed"),
    ):
        assert said in saved.gap_over_time_saved(frame).alt
    for other in ({}, {"layers": 2}, {"heads": 6}, {"dtype": "fp32"}, {"batch": 16}, {"work": "prefill"}):
        frame = pd.concat([records(TRUE, noise=0.0005), timed().assign(**other)], ignore_index=True)
        assert ("as trained" in saved.gap_over_time_saved(frame).axes[0].get_title(loc="left")) is (not other)


def test_each_trained_width_has_gaps_of_its_own_and_another_those_of_the_widest():
    wide = records({"tensor_parallel": 0.0, "spd": 0.7}, noise=0.0005, run="r2").assign(width=768)
    frame = pd.concat([records(TRUE, noise=0.0005), wide, *(timed(width=w) for w in (384, 768, 96))], ignore_index=True)
    fig = saved.gap_over_time_saved(frame)
    heights = [{round(float(y), 1) for line in ax.lines for y in line.get_ydata()} for ax in fig.axes]
    assert "768 wide: SPD saves 20.0%" in fig.alt and [0.7 in each for each in heights] == [True, False, True]
    assert "at other widths gaps are those of the widest" in fig.texts[-1].get_text()


SAME = {"tensor_parallel": 0.0, "spd": 0.0, "grouped_2": 0.0}


# In as much time as 100 steps of SPD take, tensor parallelism makes 80, of track 2 50: there its loss was .5 higher.
@pytest.mark.parametrize(
    "given, how, verdict",
    [
        # Half its cosine behind it tensor parallelism is far above: that decides nothing.
        ({}, {}, "undecided"),
        # One that ended in fewer steps, its rate fallen, and is lower than both, refutes.
        ({"steps": 48, "gap": {"tensor_parallel": -0.1}}, {}, "refuted"),
        # One of as many steps or more that is higher than a schedule supports; one of fewer does not.
        ({"steps": 84, "gap": {"tensor_parallel": 0.1}}, {"gap": SAME}, "supported"),
        ({"steps": 76, "gap": {"tensor_parallel": 0.1}}, {"gap": {"tensor_parallel": 0, "spd": 0}}, "undecided"),
        # A schedule that is no faster has tensor parallelism's own end against it, nothing is cut off at it.
        ({}, {"step": {"spd": 1.01, "grouped_2": 1.0}}, "refuted"),
        # What overlaps wins, and decides nothing.
        ({}, {"gap": SAME | {"ladder": -1.0}, "step": FASTER | {"ladder": 0.5}}, "undecided"),
        # The step is timed at the trained batch, on real GPUs, and on as many ranks.
        ({"steps": 84, "gap": {"tensor_parallel": 0.1}}, {"gap": SAME, "batch": BATCH // 4}, "undecided"),
        ({"steps": 84, "gap": {"tensor_parallel": 0.1}}, {"gap": SAME, "device": "cpu"}, "undecided"),
        ({"steps": 84, "gap": {"tensor_parallel": 0.1}}, {"gap": SAME, "ranks": 2}, "undecided"),
    ],
)
def test_s3_is_judged_by_its_rule(given, how, verdict):
    more = [records(**{"noise": 0.0005, "run": "r2"} | given)] if given else []
    found = hypotheses.s3(both(*more, **how), "fast")
    assert found.verdict == verdict, found.why
    assert ("no training step of this very shape" in found.why) == bool({"batch", "device", "ranks"} & set(how))
    assert ("ladder overlaps, apart" in found.why) == ("ladder" in how.get("step", {}))


def test_s3_says_how_long_tensor_parallelism_must_be_trained_to_support_it():
    why = hypotheses.s3(both(), "fast").why
    assert f"train TP alone on {(STEPS * 0.8 + 1) * BATCH * CONTEXT:.0f} tokens" in why
    assert "no training step of this very shape" in hypotheses.s3(both(), "slow").why


def test_s3_waits_for_losses():
    assert hypotheses.s3(timed(), "fast").why == "no arm was trained to its end"
