"""Gaps, verdicts, tables and figures of trained losses, from records whose truth is known."""

import re

import numpy as np
import pandas as pd
import pytest

from blockshock_lib import load, studies
from blockshock_lib.layers.gpt import GPT, GPTConfig
from blockshock_lib.report import changes
from blockshock_lib.runs.manifest import REFERENCE
from blockshock_lib.studies.gpt import gaps, hypotheses, plots, report
from blockshock_lib.studies.gpt.methods import METHODS
from blockshock_lib.studies.gpt.params import weights
from tests.report.frames import row

STUDY = studies.load("gpt")
TRUE = {"tensor_parallel": 0.0, "spd": 0.004, "grouped_2": 0.07, "grouped_3": 0.15, "grouped_4": 0.4, "grouped_6": 0.6}
STEPS, BATCH, CONTEXT = 100, 64, 512
ABOUT = {"heads": 12, "vocab": 8192, "context": CONTEXT, "ranks": 4, "batch": BATCH, "trained": STEPS * BATCH * CONTEXT}
ABOUT |= {"work": "", "layers": 12, "length": 0, "link": "fast"}
GENERAL = {"phase": "gpt_training", "device": "cuda", "emulated": False, "world_size": 1, "dtype": "bf16", "group": 0}


def records(gap=TRUE, seeds=4, width=384, noise=0.001, dropped=0.01, distilled=0.0, run="r1", steps=STEPS, **of):
    """Losses 4 + gap at the end, 4.5 + gap halfway; a seed's own effect, far above the noise, is shared by its arms.
    `of`: the corpus and the recipe.
    """
    draw, rows = np.random.default_rng(0), []
    of = {"corpus": "c0", "recipe": ""} | of
    for seed in range(seeds):
        shared = np.random.default_rng([1, seed]).normal(scale=0.05)
        for method, more in gap.items():
            last = 4 + more + shared + draw.normal(scale=noise)
            said = [("check", 1), ("corpus", 1e8, 0, of["corpus"]), ("bytes_per_token", 3.5)]
            said += [("token_rate", 1e6), ("gemm_rate", 500)]
            said += [("validation_loss", last + 0.5, steps // 2), ("validation_loss", last, steps)]
            if method == "tensor_parallel":
                said += [("sensitivity", 0.001 * s, 0, str(s)) for s in range(23)]
                taught = last + distilled + draw.normal(scale=noise)
                said += [("dropped_loss", last + dropped, 12), ("distilled_loss", taught, 12)]
            about = GENERAL | ABOUT | {"width": width, "trained": steps * BATCH * CONTEXT, "run": run, "seed": seed}
            about |= {"recipe": of["recipe"], "case": f"{run}{method}{seed}{width}{of}{steps}", "seconds": 1.0}
            rows += [about | told(method, *each) for each in said]
    return pd.DataFrame(rows)


def told(method, metric, value, repeat=0, detail=""):
    return row(method, metric, "", value, repeat, detail=detail) | {"code": ""}


def test_a_gap_is_paired_by_seed_so_that_what_a_seed_does_cancels():
    rows = gaps.finals(records())
    (of_one,) = gaps.settings(rows)
    found = {row.method: row.gap for row in gaps.table(of_one).itertuples()}
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


def test_the_share_of_the_dense_rate_is_that_of_six_flop_a_weight_and_token():
    # 12 x (12 x 384^2 + 13 x 384) + 2 x 384 + 8192 x 384 weights, at 1e6 tokens a second beside 500 TFLOP/s.
    frame = records().assign(work="", layers=12, length=0, link="fast")
    timed = frame[frame["metric"].eq("gemm_rate")].assign(case="timed", method="ceiling")  # trains nothing: no row
    found = report.rates(pd.concat([frame, timed]))["of a GEMM's rate"].tolist()
    assert found == [f"{6 * 24_440_832 * 1e6 / 500e12:.1%}"] * len(TRUE)
    model = GPT(GPTConfig(16, 4, 300, 8), "spd", 2)
    assert weights(16, 300) == sum(p.numel() for p in model.parameters()) - 8 * 16


@pytest.mark.parametrize("differs", ["corpus", "recipe"])
def test_losses_of_two_corpora_or_recipes_are_never_compared(differs):
    two = pd.concat([records({"tensor_parallel": 0}, **{differs: "c0"}), records({"spd": -1}, **{differs: "c1"})])
    assert set(gaps.setting(gaps.finals(two))[differs]) == {"c0"}
    assert report.answer(two).startswith("Not answered")
    alone = report.losses(two).xs(METHODS["spd"].label, level="schedule").filter(regex="gap|base").astype(str)
    assert set(alone.to_numpy().flat) == {"–"}, "an arm without its baseline has no gap, and none is written as NaN"


def test_the_setting_of_most_arms_with_enough_seeds_comes_first_and_an_arm_cut_off_is_left_out():
    both = pd.concat([records({"tensor_parallel": 0, "spd": 0}), records(width=768, seeds=3)])
    assert set(gaps.setting(gaps.finals(both)).width) == {384}
    assert set(gaps.setting(gaps.finals(pd.concat([records(), records(width=768)]))).width) == {768}
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


def test_each_size_is_judged_and_the_widest_that_holds_all_arms_decides():
    """At 124M a few arms are trained: they decide S1 and S4, and take neither S2, S5 nor a table from 25M."""
    few = {"tensor_parallel": 0.0, "spd": 0.05}
    both = pd.concat([records(TRUE | {"spd": 0.01}), records(few, width=768, dropped=0.05)])
    said = {judge: judge(both) for judge in (hypotheses.s1, hypotheses.s2, hypotheses.s4, hypotheses.s5)}
    assert [one.verdict for one in said.values()] == ["refuted", "supported", "refuted", "supported"]
    assert said[hypotheses.s1].why.startswith("768 wide") and "; beside it 384 wide" in said[hypotheses.s1].why
    assert said[hypotheses.s2].why.startswith("384 wide") and "; beside it 768 wide" in said[hypotheses.s2].why
    table = report.losses(both)
    assert [name.split()[0] for name in dict.fromkeys(table.index.get_level_values("GPT"))] == ["768", "384"]
    assert len(table) == len(few) + len(TRUE)
    assert len(plots.gap_over_syncs(both).axes) == 2
    assert hypotheses.s2(records(few, width=768)).verdict == "undecided"


def test_two_recipes_of_one_size_that_differ_decide_nothing_and_are_named():
    one, two = records(TRUE | {"spd": 0.05}, recipe="r1", run="a"), records(TRUE, recipe="r2", run="b")
    for order in ([one, two], [two, one]):
        found = hypotheses.s1(pd.concat(order))
        assert found.verdict == "undecided" and all(f"3.28M tokens, recipe r{i}: SPD" in found.why for i in (1, 2))
    assert len(set(report.losses(pd.concat([one, two])).index.get_level_values("GPT"))) == 2
    alike = hypotheses.s1(pd.concat([one, one.assign(run="c", case=one["case"] + "c", recipe="r3")]))
    assert alike.verdict == "refuted"


def test_what_was_not_trained_is_no_number_and_hides_nothing_that_was():
    why = hypotheses.s2(records({name: gap for name, gap in TRUE.items() if name != "grouped_6"})).why
    assert "nan" not in why and "2 syncs not trained" in why and "from 6 syncs on all lie above 0" in why
    why = hypotheses.s5(records({name: gap for name, gap in TRUE.items() if name != "grouped_2"})).why
    assert "nan" not in why and "; 6 syncs not trained, predicted within 2%" in why


def test_what_a_trained_model_loses_is_of_that_very_model():
    again = records({"tensor_parallel": -0.03}, run="r2")
    both = pd.concat([records(), again[again.metric.ne("dropped_loss")]])
    rows = gaps.finals(both)
    assert gaps.after(both, rows, "dropped_loss").empty, "the newer model's loss is no measure of the older's"


def test_validations_that_few_seeds_have_tell_no_tokens():
    curve = gaps.curves(records({"tensor_parallel": 0}, noise=0.0))
    more = curve[curve.seed.eq(0) & curve.repeat.eq(STEPS)].assign(repeat=STEPS // 4, value=0.0)
    assert gaps.steps_to(pd.concat([curve, more]), 4.2) == gaps.steps_to(curve, 4.2)


def test_the_count_that_leaves_the_noise_is_the_first_from_which_on_all_do():
    why = hypotheses.s2(records(TRUE | {"spd": 0.05, "grouped_2": 0.0, "grouped_3": 0.1})).why
    assert "from 4 syncs on all lie above 0" in why


def test_tokens_to_the_same_loss_are_paired_with_the_baseline_of_the_arms_own_seeds():
    """Seeds that only the baseline has, far worse, must not make the arm look quick."""
    frame = records(noise=0.0, seeds=8)
    own = frame[frame.method.eq("tensor_parallel") | frame.seed.lt(4)]
    worse = own.method.eq("tensor_parallel") & own.seed.ge(4) & own.metric.eq("validation_loss")
    own = own.assign(value=own.value + 0.4 * worse)
    found = report.losses(own).xs(METHODS["grouped_2"].label, level="schedule").iloc[0]
    assert float(found["tokens over baseline's"].rstrip("x")) == pytest.approx(100 / 93, abs=0.006)
    last = own[own.method.eq("grouped_2") & own.repeat.eq(STEPS)].value
    assert found["loss (nats)"] == pytest.approx(last.mean(), abs=1e-4)


def test_tables_say_gaps_in_nats_and_bits_and_the_smallest_that_shows():
    table = report.losses(records())
    row = table.xs(METHODS["grouped_2"].label, level="schedule").iloc[0]
    assert row["all-reduces a forward"] == 6 and row["seeds"] == 4 and row["gap (nats)"].startswith("+0.0697 [")
    mean, low, high = map(float, re.findall(r"[+-][\d.]+", row["gap (bits/byte)"]))
    assert mean == pytest.approx(0.07 / np.log(2) / 3.5, abs=1e-3) and low < mean < high
    # The baseline's loss falls by 0.5 over the last half, so that it had this arm's 7 of 100 steps earlier.
    assert float(row["tokens over baseline's"].rstrip("x")) == pytest.approx(100 / 93, abs=0.006)
    low = float(str(row["gap (nats)"]).split("[")[1].split(",")[0]) - 0.0697  # t(3) at 90% over t(3) at 99.5%: 0.2804
    assert row["smallest gap to show (nats)"] == pytest.approx(-low * 1.2804, abs=2e-4)
    # Losses on the training text are those of the first two arms, 1 nat apart.
    told = records({"tensor_parallel": 0.0, "spd": 0.07})
    last = told[told.metric.eq("validation_loss") & told.repeat.eq(STEPS)]
    more = last.assign(metric="train_loss", value=last.method.eq("spd").astype(float) + last.seed)
    assert report.losses(pd.concat([told, more]))["gap on training text (nats)"].iloc[-1] == "+1 [+1, +1]"


ENOUGH = "of 24 all-reduces a forward can go for a loss less than 0.01 nats over tensor parallelism's"


@pytest.mark.parametrize(
    "gap, noise, said",
    [
        ({"spd": 0.0, "grouped_2": 0.07}, 0.001, f"12 {ENOUGH}: SPD "),
        ({"spd": -0.05, "grouped_2": -0.03}, 0.001, f"18 {ENOUGH}: track 2 -0.029"),
        ({"spd": 0.07, "grouped_2": 0.0}, 0.001, f"18 {ENOUGH}: "),
        # What no seed tells is no claim.
        ({"spd": 0.0, "grouped_2": 0.0}, 0.3, "Down to 6 of 24 all-reduces a forward for at most"),
        ({"spd": 0.07, "parallel": 0.0}, 0.001, f"12 {ENOUGH}: parallel "),
    ],
)
def test_the_answer_claims_no_more_than_the_intervals_exclude(gap, noise, said):
    answer = report.answer(records({"tensor_parallel": 0} | gap, noise=noise))
    assert answer.startswith(said)
    assert answer.endswith("; not shown for 12 by SPD.") == (said == f"18 {ENOUGH}: ")


def test_a_mean_below_the_cost_is_not_shown_while_its_interval_reaches_above():
    said = report.answer(records({"tensor_parallel": 0, "spd": -0.3, "grouped_2": -0.3}, noise=0.3))
    assert "nats, the 99% end of" in said and "less than 0.01 is shown for no count (" in said, said


def test_what_shows_that_the_code_runs_or_costs_in_every_arm_says_so():
    assert report.answer(records(width=64)).startswith("Not answered here: it shows that the code runs (64 wide")
    assert report.answer(records(noise=0.0005)).startswith("None for nothing: SPD costs least")


def test_figures_say_what_they_show_and_an_empty_frame_says_so():
    frame = records()
    assert "track 6 costs most" in plots.gap_over_syncs(frame).alt
    assert "SPD ends at 3.99" in plots.loss_over_tokens(frame).alt
    assert "sublayer 22 is worth most" in plots.dropped(frame).alt
    for name in ("gap over syncs", "loss over tokens", "dropped syncs"):
        assert STUDY.figures[name](pd.DataFrame()).alt


def test_labels_say_how_many_syncs_twelve_layers_make():
    for name, method in METHODS.items():
        assert re.search(rf"\b{gaps.syncs(name)}\b", method.label), method.label
    assert METHODS[gaps.BASELINE].label.endswith("24 all-reduces a forward")
    assert STUDY.axes.setting({"vocab": 8192, "layers": 12, "link": "fast"}) == "vocabulary of 8192, 12 layers"


def test_an_arm_finds_its_like_in_a_run_of_more_seeds():
    many = load(REFERENCE / "gpt_training-cuda-later")
    for own in ("tensor_parallel", "spd"):
        few = many[many["seed"].eq(8) & many["method"].eq(own)]
        assert changes.pairs(*changes.cases((many, few), STUDY.axes)) == dict.fromkeys(few["case"], few["case"].iloc[0])
