import re

import pandas as pd
import pytest

from blockshock_lib import records
from blockshock_lib.manifest import ROOT
from blockshock_lib.predict import scaling
from blockshock_lib.report import cells
from blockshock_lib.report.findings import law, tables, versions
from tests.report import frames
from tests.report.training_frames import training_frame

GPU, CPU = "2x GPU", "CPU"
TABLES = ("law_table", "step_law_table", "where_table", "needs_table", "batch_table", "compress_table")


@pytest.fixture(scope="module")
def first():
    return frames.make((4096, 8192, 16384), (16, 64, 256, 4096), groups=3, repeats=4)


@pytest.fixture(scope="module")
def both(first):
    return pd.concat([first, training_frame((16384,), (4096,), groups=3, repeats=2)], ignore_index=True)


@pytest.fixture(scope="module")
def cpu():
    return frames.make((256,), (16,), device="cpu", groups=3, repeats=4, kernel=True)


def test_each_hypothesis_has_its_verdict_by_setting(both, cpu):
    table = tables.numbers({GPU: both, CPU: cpu})
    assert list(table.loc[GPU, "verdict"]) == ["refuted", "supported", "supported"]
    assert list(table.loc[CPU, "verdict"]) == ["undecided"] * 3


def test_the_laws_figure_stands_beside_the_measured_one(both):
    table = tables.numbers({GPU: both}).loc[GPU]
    for name in ("H1", "H3"):
        said, found = (float(table.loc[name, column].split("x")[0]) for column in ("the law says", "measured"))
        assert said == pytest.approx(found, rel=0.06)
    steps = law.step_rows(both)
    row = steps.loc[steps["shrink_high"].idxmax()]
    assert table.loc["H2", "the law says"] == f"{row['predicted_shrink']:.2f}x"


def test_without_phase_3_the_answer_on_training_says_what_to_make(first):
    told = "no record of phase 3 yet: make phase3"
    assert tables.numbers({GPU: first}).loc[(GPU, "H2"), "why"] == told
    assert tables.words({GPU: first})[GPU].iloc[1] == told
    assert f"H2 {told}" in tables.one_line({GPU: first})


def test_the_words_are_the_same_with_and_without_a_cpus_records(both, cpu):
    with_cpu, alone = tables.words({GPU: both, CPU: cpu}), tables.words({GPU: both})
    assert with_cpu.equals(alone) and CPU not in with_cpu.columns
    assert set(tables.words({CPU: cpu})["on a CPU, or emulated"]) == {"no claim"}


def test_the_words_hold_no_number_of_a_measurement(both, first):
    other = frames.make((4096, 8192, 16384), (16, 64, 256, 4096), groups=3, repeats=4, seed=7)
    assert tables.words({GPU: first}).equals(tables.words({GPU: other}))


def test_a_cpu_makes_no_claim_in_the_line(both, cpu):
    line = tables.one_line({GPU: both, CPU: cpu})
    assert "PASS" in line and f"on {GPU}" in line and f"no claim about speed: {CPU}" in line
    assert line.count("H1") == 1, "a CPU has no verdict"


def test_a_failed_check_is_in_the_line(both):
    assert "FAIL" in tables.one_line({GPU: frames.fail(both, "dense", n=4096)})


def test_nothing_read_is_said():
    assert "NOTHING READ" in tables.one_line({}) and tables.numbers({}).empty


@pytest.mark.parametrize("name", TABLES)
def test_a_table_without_its_times_says_what_to_make(name):
    (said,) = getattr(tables, name)(pd.DataFrame())["nothing to show"]
    assert "make phase" in said


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_a_row_a_case_and_no_hole(name, both):
    table = getattr(tables, name)(both)
    assert len(table) >= 2 and "nothing to show" not in table and not table.isna().any().any()


def test_no_interval_is_not_taken_for_one_that_holds_the_law():
    alone = frames.make((4096,), (16,), groups=1, repeats=4)
    assert set(tables.law_table(alone)["law inside the interval"]) == {"–"}


def test_the_optimizer_is_shown_apart(both):
    assert list(tables.compress_table(both)["optimizer"]) == ["SGD", "AdamW"]


def test_every_number_of_the_plan_is_called_a_prediction(first):
    plan = scaling.plan(first, "2x NVIDIA H200")
    larger, others = tables.larger_table(plan.larger), tables.others_table(plan.others)
    assert sum("PREDICTED" in name for name in larger) == 3 and (larger["ratio (PREDICTED)"].str.endswith("x")).all()
    assert all("PREDICTED" in name for name in others.columns.drop(["two of", "N", "published rates"]))
    assert others["published rates"].ne("").all()


def test_the_backtest_ends_with_its_median_and_its_largest_error(first):
    table = tables.backtest_table(scaling.plan(first, "2x NVIDIA H200").backtest)
    assert len(table) == 13 and table["N"].iloc[-1] == "median / largest"
    largest = table["ratio, error (%)"].iloc[:-1].astype(float).abs().max()
    assert float(table["ratio, error (%)"].iloc[-1].split("/")[1]) == pytest.approx(largest)


def test_without_a_model_its_tables_say_so():
    none = scaling.plan(pd.DataFrame(), "2x NVIDIA H200")
    for table in (
        tables.backtest_table(none.backtest),
        tables.model_table(none),
        tables.larger_table(none.larger),
        tables.others_table(none.others),
    ):
        assert list(table) == ["nothing to show"]


def test_a_rival_that_is_beaten_lost_to_and_beaten_again_is_told_so():
    shipped = records.load(ROOT / "outputs" / "reference" / "phase1-cuda")
    told = tables.batch_table(shipped).set_index("shape")["faster than C"]
    forward = cells.summary(shipped, "forward_kernel").set_index(["shape", "batch", "method"])["median"]
    over = {
        b: forward["4096x4096", b, "masked_dense"] / forward["4096x4096", b, "block_shock"] for b in (64, 256, 1024)
    }
    assert over[64] > 1 > over[256] and over[1024] > 1, "these records show no such thing any more"
    assert re.fullmatch(r"up to B of about \d{3}, and from B of about \d{3} on", told["4096x4096"])
    assert told["40960x40960"] == "at every measured B"


@pytest.mark.parametrize(
    "faster, undecided, text",
    [
        ((), (), "at no measured B"),
        (((64.0, 512.0),), (256,), "from B of about 64 to 512 (undecided: B=256)"),
        (None, (), "–"),
    ],
)
def test_a_stretch_is_told_in_words(faster, undecided, text):
    assert tables._stretches(faster, undecided) == text


def test_forward_and_step_of_different_code_are_marked(both, monkeypatch):
    assert tables.CODE not in tables.where_table(both) and tables.CODE not in tables.numbers({GPU: both})
    monkeypatch.setattr(versions, "of_works", lambda frame: {"forward": "new", "step": "old"})
    table = tables.where_table(both)
    assert list(table[tables.CODE]) == ["new" if work == "forward" else "old" for work in table["work"]]
    assert list(tables.numbers({GPU: both})[tables.CODE]) == ["new", "old", "new"]


def test_a_measured_case_stands_beside_its_prediction(first):
    plan = scaling.plan(first, "2x NVIDIA H200")
    table = tables.larger_table(plan.larger)
    assert table["ratio of medians measured"].ne("–").equals(table["GPUs"].eq(2))
