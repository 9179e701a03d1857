"""Tables and figures of phases 2 and 3."""

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.studies.linear.axes import AXES
from blockshock_lib.studies.linear.report import FIGURES, TABLES, law
from tests.report import frames
from tests.report.frames import words
from tests.studies.linear.report.shipped import shipped

ALL = ("pieces", "dW", "order", "step memory")
# Those of a step that say something of speed or bytes, then the others.
SPEED = ("where", "step memory", "step over B1", "step time over N")
DRAWN = (*SPEED, "loss")


@pytest.fixture(scope="module")
def phase3():
    return shipped("phase3-cuda", repeats=2)


def test_tables_of_both_optimizers_say_which(phase3):
    for name in ("step", "step memory"):
        table = TABLES[name](phase3)
        assert table.shape[1] <= 20, "pandas would leave columns out"
        assert (
            set(table["optimizer"]) == {"SGD", "AdamW"}
            and not table.duplicated(["shape", "B", "optimizer", "method"]).any()
        )


def test_a_step_has_no_time_of_its_parts_beside_it(phase3):
    table = TABLES["step"](phase3).set_index(["optimizer", "shape", "method"])
    held = table.loc[("SGD", "4096x4096", "Block-Shock")]
    cell = phase3[phase3["in_features"].eq(4096) & phase3["optimizer"].eq("sgd") & phase3["method"].eq("block_shock")]
    for name in ("kernel", "call"):
        groups = cell[cell["metric"].eq(f"step_{name}") & cell["rank"].eq(-1)].groupby("group")["value"].median()
        assert held[f"{name} (ms)"] == pytest.approx(np.exp(np.log(groups).mean()), rel=1e-3)
    assert not {"compute (ms)", "reduce (ms)", "exposed communication (ms)"} & set(table)


@pytest.mark.parametrize("name", [*ALL, "step"])
def test_no_records_of_training_give_an_empty_table(name, phase3):
    for frame in (pd.DataFrame(), phase3.iloc[:0]):
        assert len(TABLES[name](frame)) == 0
    TABLES[name](frames.make((4096,), (16,), groups=1, repeats=1))


@pytest.mark.parametrize("name", DRAWN)
def test_no_data_gives_a_figure_that_says_so(name, phase3):
    nothing = frames.make((4096,), (16,), groups=1, repeats=1)
    nothing = nothing[~nothing["unit"].isin(["ms", "B"])]
    failed = phase3
    for method in AXES.methods:
        failed = frames.fail(failed, method)
    for frame in (pd.DataFrame(), phase3.iloc[:0], nothing, failed):
        assert "nothing to draw" in words(FIGURES[name](frame))


@pytest.mark.parametrize("name", SPEED)
def test_cpu_and_emulated_figures_say_that_they_make_no_claim(name, phase3):
    assert "no claim about speed: CPU" in words(FIGURES[name](phase3.assign(device="cpu")))
    assert "no claim about speed: emulated" in words(FIGURES[name](phase3.assign(emulated=True)))
    assert "no claim" not in words(FIGURES[name](phase3))


@pytest.mark.parametrize("name", ("where", "step over B1", "step time over N", "loss"))
def test_optimizers_never_share_a_panel(name, phase3):
    found = list(filter(None, (ax.get_title(loc="left") for ax in FIGURES[name](phase3).axes)))
    assert any("SGD" in one for one in found) and any("AdamW" in one for one in found)
    assert all(("SGD" in one) != ("AdamW" in one) for one in found)


def test_the_parts_of_a_work_are_those_that_it_has(phase3):
    of_pass = law.pieces(shipped("phase2-cuda"))
    assert set(of_pass["work"]) == {"pass"} and of_pass[["dW", "compress"]].isna().all(axis=None)
    assert of_pass[["forward product", "dX"]].notna().any().all()
    masks = pd.concat([phase3, phase3.assign(mask="random", case=phase3["case"] + "r")], ignore_index=True)
    assert "1 other setting not drawn" in FIGURES["where"](masks).alt
    both = FIGURES["where"](pd.concat([shipped("phase2-cuda"), phase3], ignore_index=True))
    assert [word in both.alt for word in ("pass B1", "step SGD B1", "step AdamW B1", "forward B1")] == [True] * 3 + [
        False
    ]
