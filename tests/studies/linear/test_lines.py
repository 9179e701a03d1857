"""Reference lines: right as what they are, beside B1, and no method; where they cannot run or are wrong, B1 stays."""

import pandas as pd
import pytest
import torch

from blockshock_lib.engine.case_run import judge
from blockshock_lib.runs import records
from blockshock_lib.runs.manifest import REFERENCE
from blockshock_lib.studies.linear import lines
from blockshock_lib.studies.linear.hypotheses import ANSWERS, numbers, words
from blockshock_lib.studies.linear.phases import LINES
from blockshock_lib.studies.linear.report import FIGURES, RESULTS, TABLES, results
from tests.studies.linear import measuring
from tests.studies.linear.measuring import asked, measured, on_ranks, picked, problem
from tests.studies.linear.report.shipped import shipped

TIMES = [f"forward_{line}_call" for line in LINES] + [f"forward_{line}_kernel" for line in LINES if line != "torch"]


def fp8_forward(own, wrong=""):
    """y of a rank, and its check."""
    layer = own.layer("row_parallel")
    if wrong == "the other rank's columns":
        layer.cols = slice(128, 256) if own.group.rank == 0 else slice(0, 128)
    if wrong == "a lost row of W":
        layer.weight[5] = 0
    y = lines.fp8(layer, own.x)()
    y = y.add_(own.bias) if wrong == "the bias twice" else y
    reference = lines.fp8_reference(own, "row_parallel")
    return y, next(own.build("row_parallel").compared({"y": y}, reference, looser=lines.LOOSER))


@torch.no_grad()
def test_fp8_is_the_product_of_what_e4m3_keeps_and_a_few_percent_from_the_true_one():
    own = problem(workload="activation")
    for y, check in on_ranks(own, fp8_forward):
        assert judge(check)[0] == ""
        off = (y - own.reference.y).norm() / own.reference.y.norm()
        assert 0.01 < off < 0.06


@torch.no_grad()
@pytest.mark.parametrize("wrong", ["a lost row of W", "the other rank's columns", "the bias twice"])
def test_a_wrong_fp8_product_is_refused(wrong):
    for _, check in on_ranks(problem(), lambda own: fp8_forward(own, wrong)):
        assert judge(check)[0].startswith("y: ")


def test_what_is_quantized_is_exact_in_bf16_and_within_e4m3():
    t = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).mul(30).to(torch.bfloat16)
    kept, scale = lines.quantized(t)
    assert torch.equal((kept.to(torch.bfloat16) * scale).double(), kept.double() * scale.double())
    assert 128 < kept.float().abs().max() <= 256 and torch.frexp(scale).mantissa == 0.5
    assert ((kept.float() * scale - t.float()).abs() <= 2**-4 * t.float().abs() + 2**-10 * scale).all()


def test_where_one_process_plays_all_ranks_the_rows_of_each_line_that_is_asked_for_say_so():
    rows = measured(asked("phase1"), methods=("row_parallel",))
    for metric in TIMES[: len(LINES)]:
        (row,) = picked(rows, "row_parallel", metric)
        assert (row["status"], row["reason"]) == ("unsupported", "rank 0: one process plays all ranks")
    assert picked(rows, "row_parallel", "forward_kernel")
    rows = measured(asked("phase1", lines=["fp8"]), methods=("row_parallel",))  # one that hangs would end all others
    assert {row["metric"] for row in rows} & set(TIMES) == {"forward_fp8_call"}


def test_lines_are_timed_once_beside_b1_and_a_wrong_one_alone_has_no_time(pair):
    """On two CPU ranks that are told they have fp8, and a fused op that is made of PyTorch's own parts."""
    for rows in pair.call(measuring.lined, seconds=200):
        for metric in TIMES:
            assert len(picked(rows, "row_parallel", metric)) == 2 and not picked(rows, "twin", metric)
        (error,) = picked(rows, "row_parallel", "fp8_error_rms")
        assert 0.01 < error["value"] < 0.06
    for rows in pair.call(measuring.lined, True, seconds=200):
        for metric in TIMES:
            (row,) = picked(rows, "row_parallel", metric)
            assert row["status"] == "failed" and "y: " in row["reason"]
        assert not picked(rows, "row_parallel", "fp8_error_rms")
        assert [row["status"] for row in picked(rows, "row_parallel", "check")] == ["ok"]
        assert len(picked(rows, "row_parallel", "forward_kernel")) == 2


@pytest.fixture(scope="module")
def run():
    """Of the shipped run, which has no lines; and with fp8 at twice B1's speed, and a fused one that cannot run."""
    frame = shipped("phase1-cuda-before")
    frame = frame[frame["in_features"].eq(4096) & frame["batch"].eq(64) & frame["group"].lt(2)].reset_index(drop=True)
    b1 = frame[frame["method"].eq("row_parallel")]
    kernel = b1[b1["metric"].eq("forward_kernel")]
    fp8 = kernel.assign(metric="forward_fp8_kernel", value=kernel["value"] / 2, detail="")
    fused = kernel.assign(metric="forward_fused_kernel", value=float("nan"), status="unsupported", reason="no NVLink")
    error = kernel.assign(metric="fp8_error_rms", value=0.035, unit="1", repeat=0)
    return frame, pd.concat([frame, fp8, fused.drop_duplicates(["case", "group"]), error], ignore_index=True)


def test_lines_change_no_verdict_answer_table_or_figure_but_those_that_name_them(run):
    plain, lined = run
    for said in (words, numbers, ANSWERS["phase1"]):
        assert str(said(plain)) == str(said(lined))
    for name in ("correctness", "reasons", "errors", "speed", "calls", "energy"):
        pd.testing.assert_frame_equal(TABLES[name](plain), TABLES[name](lined))
    assert FIGURES["which to use"](plain).alt == FIGURES["which to use"](lined).alt
    page, more = RESULTS(plain), RESULTS(lined)
    before, after = more.split("## Reference lines\n")
    assert before + after[after.index("## What a referee") :] == page
    assert f"| {LINES['fp8']} | 64 | 2.00x" in after and LINES["fused"] not in after
    assert "3.50% to 3.50%" in after and "| Block-Shock | 64 | " in after.partition("An eager call")[2]


def test_lines_are_named_as_what_they_are(run):
    plain, lined = run
    table = TABLES["reference lines"](lined)
    fp8, fused = (table[table["method"].eq(LINES[line])] for line in ("fp8", "fused"))
    assert fp8["vs B1"].str.startswith("2.00x").all() and set(fp8["RMS error of y"]) == {"3.50%"}
    assert set(fused["not timed"]) == {"no NVLink"} and len(fp8) == len(fused) == plain["case"].nunique()
    assert TABLES["reference lines"](plain).iloc[0, 0].startswith("not measured: ")
    legend = [text.get_text() for text in FIGURES["time over B1"](lined).legends[0].get_texts()]
    assert LINES["fp8"] in legend and LINES["fused"] not in legend


def test_called_times_are_told_only_where_b1_agrees_with_itself():
    runs = records.load(*(REFERENCE / name for name in ("phase1-cuda", "phase1-cuda-2")))
    assert results._called(runs, "forward_call").startswith(
        "not told from B1: B1 timed twice differs from itself in 4 of"
    )
    assert "in 40 of 40 kernel times, the furthest 1.08x apart and in 24 of 40 call" in results._control(runs)
    b1 = runs[runs["method"].eq("row_parallel")]
    agreeing = pd.concat([runs[runs["method"].ne("twin")], b1.assign(method="twin")], ignore_index=True)
    page = RESULTS(agreeing)
    assert "Called eagerly** Block-Shock is faster than B1 in 4 of 20 cells" in page
    assert "Undecided against B1:** 4096x4096, B=16; 8192x8192, B=64;" in page
    assert "a control | none: B1 was not timed twice" in RESULTS(shipped("phase1-cuda-before"))
