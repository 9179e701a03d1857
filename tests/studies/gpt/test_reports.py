"""Gaps, verdicts, tables and figures of trained losses, from records whose truth is known."""

import re

import numpy as np
import pandas as pd
import pytest

from blockshock_lib import studies
from blockshock_lib.studies.gpt import gaps, hypotheses, plots, report
from blockshock_lib.studies.gpt.methods import METHODS

STUDY = studies.load("gpt")
TRUE = {"tensor_parallel": 0.0, "spd": 0.004, "grouped_2": 0.07, "grouped_3": 0.15, "grouped_4": 0.4, "grouped_6": 0.6}
STEPS, BATCH, CONTEXT = 100, 64, 512
ABOUT = {"heads": 12, "vocab": 8192, "context": CONTEXT, "ranks": 4, "batch": BATCH, "trained": STEPS * BATCH * CONTEXT}
GENERAL = {"phase": "gpt_training", "device": "cuda", "emulated": False, "world_size": 1, "dtype": "bf16", "group": 0}


def records(gap=TRUE, seeds=4, width=384, corpus="c0", noise=0.001, dropped=0.01, distilled=0.0, run="r1"):
    """Losses 4 + gap at the end, 4.5 + gap halfway; a seed's own effect, far above the noise, is shared by its arms."""
    draw, rows = np.random.default_rng(0), []
    for seed in range(seeds):
        shared = draw.normal(scale=0.05)
        for method, more in gap.items():
            last = 4 + more + shared + draw.normal(scale=noise)
            said = [
                ("check", 1, 0, ""),
                ("corpus", 1e8, 0, corpus),
                ("bytes_per_token", 3.5, 0, ""),
                ("token_rate", 1e6, 0, ""),
            ]
            said += [("validation_loss", last + 0.5, STEPS // 2, ""), ("validation_loss", last, STEPS, "")]
            if method == "tensor_parallel":
                said += [("sensitivity", 0.001 * s, 0, str(s)) for s in range(23)]
                said += [
                    ("dropped_loss", last + dropped, 12, ""),
                    ("distilled_loss", last + distilled + draw.normal(scale=noise), 12, ""),
                ]
            about = (
                GENERAL
                | ABOUT
                | {"width": width, "run": run, "case": f"{run}{method}{seed}{width}{corpus}", "method": method}
            )
            for metric, value, repeat, detail in said:
                own = {"metric": metric, "value": value, "repeat": repeat, "detail": detail, "seed": seed}
                rows.append(
                    about | own | {"unit": "", "rank": -1, "status": "ok", "reason": "", "code": "", "seconds": 1.0}
                )
    return pd.DataFrame(rows)


def test_a_gap_is_paired_by_seed_so_that_what_a_seed_does_cancels():
    rows = gaps.finals(records())
    found = {row.method: row.gap for row in gaps.table(gaps.setting(rows)).itertuples()}
    for method, true in TRUE.items():
        if method != "tensor_parallel":
            assert found[method].low < true < found[method].high and found[method].half < 0.01
    assert rows[rows.method.eq("spd")].value.std() > 0.02


def test_fewer_seeds_are_points_without_an_interval():
    gap = gaps.gap([0.1, 0.2, 0.3])
    assert gap.mean == pytest.approx(0.2) and np.isnan(gap.low) and str(gap) == "+0.2 (3 seeds)"
    # Student's t(3) at 99.5% is 5.8409.
    low, high = gaps.gap([0.0, 0.1, 0.2, 0.3])[1:3]
    assert high - low == pytest.approx(2 * 5.8409 * np.std([0, 1, 2, 3], ddof=1) / 10 / 2, rel=1e-4)


def test_losses_of_two_corpora_are_never_compared():
    two = pd.concat([records({"tensor_parallel": 0}, corpus="c0"), records({"spd": -1}, corpus="c1")])
    assert set(gaps.setting(gaps.finals(two)).corpus) == {"c0"}
    assert report.answer(two).startswith("Not answered")


def test_the_widest_setting_with_enough_seeds_is_judged_and_an_arm_cut_off_is_left_out():
    both = pd.concat([records(), records(width=768, seeds=2)])
    assert set(gaps.setting(gaps.finals(both)).width) == {384}
    cut = records()
    cut = cut[~(cut.method.eq("spd") & cut.metric.eq("validation_loss") & cut.repeat.eq(STEPS))]
    assert "spd" not in set(gaps.finals(cut).method)


CASES = [
    (hypotheses.s1, {}, "supported"),
    (hypotheses.s1, {"gap": TRUE | {"spd": 0.05}}, "refuted"),
    (hypotheses.s1, {"seeds": 3}, "undecided"),
    (hypotheses.s1, {"width": 64}, "not applicable"),
    (hypotheses.s2, {}, "supported"),
    (hypotheses.s2, {"gap": TRUE | {"grouped_4": 0.1}}, "refuted"),
    (hypotheses.s2, {"gap": {name: TRUE[name] for name in ("tensor_parallel", "spd")}}, "undecided"),
    (hypotheses.s4, {}, "supported"),
    (hypotheses.s4, {"dropped": 0.05}, "refuted"),
    (hypotheses.s4, {"distilled": 0.01}, "refuted"),
    (hypotheses.s4, {"seeds": 2}, "undecided"),
    (hypotheses.s5, {"gap": TRUE | {"spd": 0.01}}, "supported"),
    (hypotheses.s5, {"gap": TRUE | {"grouped_4": 0.2}}, "refuted"),
    (hypotheses.s5, {"gap": TRUE | {"spd": 0.01, "grouped_2": 0.065}}, "supported"),
]


@pytest.mark.parametrize("judge, change, expected", CASES)
def test_a_hypothesis_is_judged_by_its_rule(judge, change, expected):
    verdict = judge(records(**change))
    assert verdict.verdict == expected, verdict.why


def test_tables_say_gaps_in_nats_and_bits_and_the_smallest_that_shows():
    table = report.losses(records())
    row = table.loc[METHODS["grouped_2"].label]
    assert row["syncs"] == 6 and row["seeds"] == 4 and row["gap (nats)"].startswith("+0.0695 [")
    assert float(row["gap (bits/byte)"]) == pytest.approx(0.07 / np.log(2) / 3.5, abs=1e-3)
    # The baseline's loss falls by 0.5 over the last half, so that it had this arm's 7 of 100 steps earlier.
    assert float(row["tokens over baseline's"].rstrip("x")) == pytest.approx(100 / 93, abs=0.006)
    assert report.answer(records({"tensor_parallel": 0, "spd": 0.0, "grouped_2": 0.07})).startswith(
        "From 24 down to 12: SPD"
    )
    assert report.answer(records()).startswith("None for nothing: SPD costs least")


def test_figures_say_what_they_show_and_an_empty_frame_says_so():
    frame = records()
    assert "track 6 costs most" in plots.gap_over_syncs(frame).alt
    assert "SPD ends at 4.0" in plots.loss_over_tokens(frame).alt
    assert "sublayer 22 is worth most" in plots.dropped(frame).alt
    for name in ("gap over syncs", "loss over tokens", "dropped syncs"):
        assert STUDY.figures[name](pd.DataFrame()).alt


def test_labels_say_how_many_syncs_twelve_layers_make():
    for name, method in METHODS.items():
        assert re.search(rf"\b{gaps.syncs(name)}\b", method.label), method.label
