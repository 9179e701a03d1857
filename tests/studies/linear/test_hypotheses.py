"""The verdicts: H1 to H4, and what may be said of phase 2."""

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.report import verdicts
from blockshock_lib.report.verdicts import interval_text, ratio
from blockshock_lib.studies.linear import hypotheses
from blockshock_lib.studies.linear.axes import AXES
from blockshock_lib.studies.linear.hypotheses import HYPOTHESES, h1, h2, h3, h4, numbers, summary, words
from blockshock_lib.studies.linear.report import build
from blockshock_lib.studies.linear.report.law import training_ratios
from tests.report import frames
from tests.studies.linear.report.shipped import faster, shipped


def one_line(frame):
    return verdicts.one_line(frame, AXES, HYPOTHESES, summary)


PAIR = ("row_parallel", "masked_dense", "block_shock")
SMALL = dict(ns=(4096, 8192), bs=(16, 4096), methods=PAIR, repeats=6)
LARGEST = ("block_shock", 8192, 4096)
T1, T3 = "block_shock_recompress", "block_shock"


@pytest.fixture(scope="module")
def three():
    """With an advantage that training may shrink, which the shipped run has not."""
    frame = faster(faster(shipped("phase3-cuda-before"), 3, T3, "forward_kernel"), 4, T3)
    times = ["check", *(f"{work}_{kind}" for work in ("forward", "step") for kind in ("kernel", "call"))]
    return frame[frame["method"].isin(("row_parallel", T3, T1)) & frame["metric"].isin(times)].reset_index(drop=True)


@pytest.mark.parametrize(
    ("speedup", "verdict", "why"),
    [
        ({}, "refuted", "slower in all 4 cells"),
        ({LARGEST: 1.5}, "supported", "8192x8192, B=4096, the largest cell; faster in 1 of 4 cells"),
        ({("block_shock", 4096, 4096): 1.6}, "undecided", "1 faster, 3 slower, 0 undecided"),
        ({LARGEST: None}, "undecided", "0 faster, 3 slower, 1 undecided"),
    ],
    ids=["slower in every cell", "faster in the largest", "faster in a smaller one", "one straddles 1"],
)
def test_h1_is_decided_by_the_largest_cell_and_refuted_by_all(speedup, verdict, why):
    if None in speedup.values():  # as fast as B1
        speedup = {LARGEST: 1 / h1(frames.make(**SMALL)).ratio}
    found = h1(frames.make(**SMALL, speedup=speedup))
    assert found.verdict == verdict and why in found.why
    assert {"refuted": found.high < 1, "supported": found.low > 1}.get(verdict, True)


def test_every_one_of_equally_large_cells_must_be_faster():
    frame = frames.make(**SMALL, masks=("checkerboard", "random"), speedup={LARGEST: 1.5})
    assert h1(frame).verdict == "supported"
    slow = frame["mask"].eq("random") & frame["method"].eq("block_shock") & frame["unit"].eq("ms")
    frame["value"] = frame["value"].where(~slow, frame["value"] * 2)
    assert h1(frame).verdict == "undecided"


CHANGES = [
    (lambda frame: frame.assign(device="cpu"), "CPU"),
    (lambda frame: frame.assign(emulated=True), "emulated on one GPU"),
    (lambda frame: frame[frame["group"].eq(0)], "a single group"),
    (lambda frame: frame[~frame["metric"].str.endswith("_kernel")], "kernel time"),
    *((lambda frame, name=name: frames.fail(frame, name), "no case") for name in ("row_parallel", T3)),
    (lambda frame: frame[frame["metric"].eq("check")], "no case"),
    (lambda frame: pd.DataFrame(), "no case"),
]


@pytest.mark.parametrize("rule", [h1, h2])
@pytest.mark.parametrize("change, why", CHANGES)
def test_what_supports_no_claim_leaves_it_undecided_and_says_why(rule, change, why, three):
    verdict = rule(change(three if rule is h2 else frames.make(**SMALL)))
    assert verdict.verdict == "undecided" and why in verdict.line
    assert verdict.cells.empty == np.isnan(verdict.ratio) == (why == "no case")
    if why in ("CPU", "emulated on one GPU"):
        assert set(verdict.cells["outcome"]) == {"no claim"}
        assert "slower" not in verdict.line and "faster" not in verdict.line


def test_emulated_cells_do_not_count_beside_real_ones():
    real = frames.make(**SMALL)
    fake = frames.make(**(SMALL | dict(ns=(16384,))), emulated=True, speedup={("block_shock", 16384, 4096): 2.0})
    verdict = h1(pd.concat([real, fake], ignore_index=True))
    assert verdict.verdict == "refuted"
    assert verdict.ratio == h1(real).ratio, "the largest real cell is shown, not the larger emulated one"


def test_the_last_line_says_checks_and_verdicts():
    line = one_line(frames.make(**SMALL))
    assert line.startswith("phase1: PASS · checks: 36 passed, 0 failed, 0 unsupported · H1 refuted: ")
    assert "H3 supported" in line
    assert one_line(frames.fail(frames.make(**SMALL), "masked_dense")).startswith("phase1: FAIL")
    assert "H1" not in one_line(frames.make((64,), (16,), device="cpu", timed=False, phase="phase0"))
    nothing = one_line(frames.fail(frames.make(**SMALL), "block_shock", status="unsupported", reason="no GPU"))
    assert "not run: Block-Shock ·" in nothing and "H1 undecided: no case holds valid times" in nothing
    assert one_line(pd.DataFrame()) == "no phase: NOTHING CHECKED · checks: none was made"


def test_h1_and_h3_read_no_forward_of_a_run_that_keeps_what_backward_needs():
    forward = frames.make(**SMALL)
    both = pd.concat([forward, faster(shipped("phase3-cuda-before"), 9, "block_shock", "forward_kernel")])
    for rule in (h1, h3):
        assert rule(both) == rule(forward)


def test_each_phase_speaks_of_its_own_hypotheses():
    forward, step = frames.make(**SMALL), shipped("phase3-cuda-before")
    assert list(numbers(forward).index) == ["H1", "H3", "H4"] and list(numbers(step).index) == ["H2"]
    assert list(numbers(pd.concat([step, forward])).index) == ["H1", "H2", "H3", "H4"]
    pd.testing.assert_frame_equal(words(step), words(shipped("phase3-cuda-before", repeats=2)))
    assert " · H2 not applicable: f lies below 1 in all 6 cases" in one_line(step)


def test_the_line_of_phase_2_gives_the_pass_in_its_largest_cell():
    frame = shipped("phase2-cuda-before")
    row = ratio(frame, AXES, "row_parallel", "block_shock", "pass_kernel").iloc[-1]
    said = f"forward + dX of Block-Shock: {interval_text(row)} of B1's speed at 40960x40960, B=4096, slower"
    assert one_line(frame).endswith(said)
    assert one_line(frame.assign(device="cpu")).endswith("forward + dX against B1: no claim about speed: CPU")
    assert "no case holds" in one_line(frames.fail(frame, "row_parallel"))


def test_h2_is_supported_where_t1_loses_and_t3_does_not_in_the_largest_case_of_every_optimizer(three):
    verdict = h2(three)
    assert verdict.verdict == "supported" and verdict.high < 1
    assert verdict.line.startswith("H2 supported: s1/f ") and "at 40960x40960, B=4096" in verdict.why
    assert "no case" in h2(frames.fail(three, T1)).line
    # A smaller case may differ.
    smaller = h2(faster(three, 5, T1, in_features=4096))
    assert smaller.verdict == "supported" and "4 of 6 cases agree" in smaller.why


def test_h2_is_not_applicable_where_the_forward_has_no_advantage_that_training_could_shrink(three):
    frame = shipped("phase3-cuda-before")
    slow = h2(frame)
    row = slow.cells[slow.cells["in_features"].eq(40960)].sort_values("shrink_high").iloc[-1]
    assert slow.line.startswith("H2 not applicable: f lies below 1 in all 6 cases, no advantage was there to shrink;")
    assert f", s3/f {build.interval(row, 'keep')}, s3/s1 " in slow.why and slow.high == row["shrink_high"]
    assert (h2(three).cells["forward_low"] > 1).all() and "no advantage" not in h2(three).why
    mixed = faster(faster(frame, 3, T3, "forward_kernel", in_features=4096), 4, T3, in_features=4096)
    found = h2(mixed)
    assert found.verdict == "supported", "one case with an advantage is enough to ask"
    assert "at 4096x4096" in found.why and "2 of 2 cases agree" in found.why
    assert "4 cases without an advantage left out" in found.why
    assert found.cells["outcome"].eq("not applicable").sum() == 4


def test_h2_is_not_supported_where_an_advantage_was_not_shown(three, monkeypatch):
    assert h2(three).verdict == "supported"
    monkeypatch.setattr(hypotheses, "training_ratios", lambda frame: training_ratios(frame).assign(forward_low=0.99))
    assert h2(three).verdict == "undecided"


def test_h4_is_about_d():
    both = SMALL | dict(methods=(*PAIR, "permuted_dense"))
    assert h4(frames.make(**both)).verdict == "refuted"
    assert h4(frames.make(**both, speedup={LARGEST: 3})).verdict == "supported"


@pytest.mark.parametrize(
    "verdict, by, method, where",
    [
        ("undecided", 5, T1, {"optimizer": "adamw"}),
        ("refuted", 0.5, T3, {}),  # the advantage goes without recompression too
        ("refuted", 5, T1, {}),  # nothing shrinks
        ("refuted", 0.2, T3, {}),  # and more of it
    ],
)
def test_every_optimizer_counts_with_the_largest_case_that_it_ran(three, verdict, by, method, where):
    less = three[~(three["optimizer"].eq("adamw") & three["in_features"].eq(40960))]
    assert h2(less).verdict == "supported"
    for frame in (three, less):
        found = h2(faster(frame, by, method, **where))
        assert found.verdict == verdict
        assert verdict == "refuted" or found.high > 1, "what is shown is the optimizer that stands in the way"


def test_what_a_group_shares_cancels_in_the_quotients(three):
    lift = three["value"].where(three["unit"].ne("ms"), three["value"] * (1 + three["group"]))
    still, lifted = training_ratios(three), training_ratios(three.assign(value=lift))
    ends = [f"{name}_{end}" for name in ("shrink", "keep", "gain") for end in ("low", "high")]
    assert np.allclose(still[ends], lifted[ends])
