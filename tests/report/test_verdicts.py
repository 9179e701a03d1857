import numpy as np
import pandas as pd
import pytest

from blockshock_lib.report import verdicts
from tests.report import frames
from tests.report.training_frames import training_frame

PAIR = ("row_parallel", "masked_dense", "block_shock")
SMALL = dict(ns=(4096, 8192), bs=(16, 4096), methods=PAIR, repeats=6)
LARGEST = ("block_shock", 8192, 4096)


def times(frame, method, metric="forward_kernel", n=8192, batch=4096):
    keep = (
        frame["method"].eq(method) & frame["metric"].eq(metric) & frame["in_features"].eq(n) & frame["batch"].eq(batch)
    )
    return frame.loc[keep, "value"]


def test_the_ratio_is_the_time_over_divided_by_the_time_under():
    frame = frames.make(**SMALL)
    table = verdicts.ratio(frame, "row_parallel", "block_shock").set_index(["in_features", "batch"])
    medians = [times(frame, name).median() for name in ("row_parallel", "block_shock")]
    row = table.loc[(8192, 4096)]
    assert row["ratio"] == pytest.approx(medians[0] / medians[1], rel=0.02)
    assert row["low"] < row["ratio"] < row["high"]
    assert row["groups"] == 3


def test_an_interval_that_straddles_1_is_never_called_faster():
    rng = np.random.default_rng(0)
    called = []
    for seed in range(60):
        speedup = {LARGEST: rng.uniform(1.1, 1.3)}
        frame = frames.make(**(SMALL | dict(ns=(8192,), bs=(4096,))), speedup=speedup, group_effect=0.02, seed=seed)
        row = verdicts.ratio(frame, "row_parallel", "block_shock").iloc[0]
        verdict = verdicts.h1(frame).verdict
        called.append((row["outcome"], verdict))
        if row["low"] <= 1 <= row["high"]:
            assert row["outcome"] == "undecided"
            assert verdict == "undecided"
    assert {"undecided", "faster"} <= {outcome for outcome, _ in called}, "both sides must be reached"


def test_h1_is_refuted_where_block_shock_is_slower_in_every_cell():
    verdict = verdicts.h1(frames.make(**SMALL))
    assert verdict.verdict == "refuted"
    assert verdict.high < 1
    assert "slower in all 4 cells" in verdict.why


def test_h1_is_supported_where_block_shock_is_faster_in_the_largest_cell():
    verdict = verdicts.h1(frames.make(**SMALL, speedup={LARGEST: 1.5}))
    assert verdict.verdict == "supported"
    assert verdict.low > 1
    assert "8192x8192, B=4096, the largest cell; faster in 1 of 4 cells" in verdict.why


def test_h1_is_undecided_where_only_a_smaller_cell_is_faster():
    verdict = verdicts.h1(frames.make(**SMALL, speedup={("block_shock", 4096, 4096): 1.6}))
    assert verdict.verdict == "undecided"
    assert "1 faster, 3 slower, 0 undecided" in verdict.why


def test_h1_is_undecided_where_one_cell_straddles_1():
    parity = times(frames.make(**SMALL), "block_shock").median() / times(frames.make(**SMALL), "row_parallel").median()
    verdict = verdicts.h1(frames.make(**SMALL, speedup={LARGEST: parity}))
    assert verdict.verdict == "undecided"
    assert verdict.low < 1 < verdict.high


def test_every_one_of_equally_large_cells_must_be_faster():
    frame = frames.make(**SMALL, masks=("checkerboard", "random"), speedup={LARGEST: 1.5})
    assert verdicts.h1(frame).verdict == "supported"
    slow = frame["mask"].eq("random") & frame["method"].eq("block_shock") & frame["unit"].eq("ms")
    frame["value"] = frame["value"].where(~slow, frame["value"] * 2)
    assert verdicts.h1(frame).verdict == "undecided"


def test_h3_is_supported_where_c_is_slower_in_the_largest_cell():
    verdict = verdicts.h3(frames.make(**SMALL))
    assert verdict.verdict == "supported"
    assert verdict.ratio == pytest.approx((0.73 + 0.26) / (0.467 + 0.26), rel=0.1)


@pytest.mark.parametrize("change, why", [({"device": "cpu"}, "CPU"), ({"emulated": True}, "emulated on one GPU")])
def test_cpu_and_emulated_are_undecided_whatever_they_measure(change, why):
    frame = frames.make(**SMALL).assign(**change)
    verdict = verdicts.h1(frame)
    assert verdict.verdict == "undecided"
    assert why in verdict.why
    assert set(verdict.cells["outcome"]) == {"no claim"}
    assert "slower" not in verdict.line and "faster" not in verdict.line


def test_emulated_cells_do_not_count_beside_real_ones():
    real = frames.make(**SMALL)
    fake = frames.make(**(SMALL | dict(ns=(16384,))), emulated=True, speedup={("block_shock", 16384, 4096): 2.0})
    verdict = verdicts.h1(pd.concat([real, fake], ignore_index=True))
    assert verdict.verdict == "refuted"
    assert verdict.ratio == verdicts.h1(real).ratio, "the largest real cell is shown, not the larger emulated one"


def test_a_failed_check_removes_its_cell_and_is_counted_in_the_reason():
    frame = frames.make(**SMALL, speedup={LARGEST: 1.5})
    assert verdicts.h1(frame).verdict == "supported"
    verdict = verdicts.h1(frames.fail(frame, "block_shock", n=8192, batch=4096))
    assert verdict.verdict == "refuted"
    assert len(verdict.cells) == 3
    assert "1 case without valid times of both left out" in verdict.why


def test_call_time_alone_supports_no_claim_on_a_gpu():
    verdict = verdicts.h1(frames.make(**SMALL, kernel=False))
    assert verdict.verdict == "undecided"
    assert "kernel time" in verdict.why


def test_one_group_of_processes_is_undecided():
    verdict = verdicts.h1(frames.make(**SMALL, groups=1))
    assert verdict.verdict == "undecided"
    assert "a single group" in verdict.why


def test_nothing_measured_is_undecided():
    for frame in (pd.DataFrame(), frames.make((64,), (16,), device="cpu", timed=False, groups=1)):
        verdict = verdicts.h1(frame)
        assert verdict.verdict == "undecided"
        assert "no case" in verdict.why
        assert verdict.cells.empty


def test_the_bootstrap_is_deterministic():
    frame = frames.make(**SMALL)
    first, again = (verdicts.ratio(frame, "row_parallel", "block_shock") for _ in range(2))
    shuffled = verdicts.ratio(frame.sample(frac=1, random_state=1), "row_parallel", "block_shock")
    pd.testing.assert_frame_equal(first, again)
    pd.testing.assert_frame_equal(first, shuffled)


def test_the_text_of_an_interval_never_rounds_to_1():
    text = verdicts.interval_text({"ratio": 0.98, "low": 0.96, "high": 0.9987})
    assert text == "0.980x [0.960, 0.999]"


def test_checks_are_counted_once_a_case_group_and_method():
    frame = frames.make((256, 512), (16,), device="cpu", groups=2, timed=False)
    assert verdicts.check_verdict(frame)[:3] == (6 * 2 * 2, 0, 2 * 2)
    broken = frames.fail(frame, "dense", n=256)
    broken = frames.fail(broken, "block_shock", n=512, status="oom", reason="asked for 3 GiB")
    passed, failed, unsupported, line = verdicts.check_verdict(broken)
    assert (passed, failed, unsupported) == (20, 2, 4)
    assert line == "checks: 20 passed, 2 failed, 2 out of memory, 4 unsupported"


def test_the_last_line_says_checks_and_verdicts():
    line = verdicts.one_line(frames.make(**SMALL))
    assert line.startswith("phase1: PASS · checks: 36 passed, 0 failed, 0 unsupported · H1 refuted: ")
    assert "H3 supported" in line
    assert verdicts.one_line(frames.fail(frames.make(**SMALL), "masked_dense")).startswith("phase1: FAIL")
    assert "H1" not in verdicts.one_line(frames.make((64,), (16,), device="cpu", timed=False, phase="phase0"))
    nothing = verdicts.one_line(frames.fail(frames.make(**SMALL), "block_shock", status="unsupported", reason="no GPU"))
    assert "not run: Block-Shock ·" in nothing and "H1 undecided: no case holds valid times" in nothing
    assert verdicts.one_line(pd.DataFrame()) == "no phase: NOTHING CHECKED · checks: none was made"


def test_h1_and_h3_read_no_forward_of_a_run_that_keeps_what_backward_needs():
    forward = frames.make(**SMALL)
    both = pd.concat([forward, training_frame(ns=(16384,), speedup={("block_shock", "forward_kernel"): 9})])
    for rule in (verdicts.h1, verdicts.h3):
        assert rule(both) == rule(forward)


def test_each_phase_speaks_of_its_own_hypotheses():
    small = dict(ns=(4096,), bs=(256,), methods=("row_parallel", "block_shock", "block_shock_recompress"))
    forward, step = frames.make(**SMALL), training_frame(**small)
    assert list(verdicts.numbers(forward).index) == ["H1", "H3"]
    assert list(verdicts.numbers(step).index) == ["H2"]
    assert list(verdicts.numbers(pd.concat([step, forward])).index) == ["H1", "H2", "H3"]
    pd.testing.assert_frame_equal(verdicts.words(step), verdicts.words(training_frame(**small, seed=5)))
    line = verdicts.one_line(step)
    assert line.startswith("phase3: PASS · checks: 18 passed, 0 failed, 0 unsupported · H2 supported: s1/f ")


def test_the_line_of_phase_2_gives_the_pass_in_its_largest_cell():
    small = dict(phase="phase2", ns=(4096, 16384), bs=(256,), methods=("row_parallel", "block_shock"))
    frame = training_frame(**small)
    row = verdicts.ratio(frame, "row_parallel", "block_shock", "pass_kernel").iloc[-1]
    said = f"forward + dX of Block-Shock: {verdicts.interval_text(row)} of B1's speed at 16384x16384, B=256, slower"
    assert verdicts.one_line(frame).endswith(said)
    assert verdicts.one_line(frame.assign(device="cpu")).endswith("forward + dX against B1: no claim about speed: CPU")
    assert "no case holds" in verdicts.one_line(frames.fail(frame, "row_parallel"))
