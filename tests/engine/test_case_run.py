"""The gate passes what rounding allows and nothing else."""

import math

import pytest
import torch

from blockshock_lib.engine import case_run
from blockshock_lib.engine.case_run import errors, judge
from blockshock_lib.engine.study import Check


def refusal(made, baseline, truth, what="y"):
    return judge(Check(what, made, baseline, truth))[0]


@pytest.fixture
def product():
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(16, 256, generator=g).bfloat16(), torch.randn(128, 256, generator=g).bfloat16()
    return x @ w.t(), x.double() @ w.double().t()


def test_the_baseline_itself_passes_with_ratio_one_and_errors_are_relative_to_the_rms_of_the_truth(product):
    y, truth = product
    reason, found = judge(Check("y", y, y, truth))
    assert reason == "" and found["error_max_ratio"] == found["error_rms_ratio"] == 1
    ten = torch.full((4, 4), 10.0, dtype=torch.float64)
    assert errors(one_value(ten, 11.0), ten) == pytest.approx((0.1, 0.025)), "(largest, RMS)"


def one_value(y, value):
    y = y.clone()
    y[3, -1] = value
    return y


WRONG = {
    "one entry is off": (lambda y, truth: one_value(y, truth[3, -1] + 3 * (y - truth).abs().max()), "largest error"),
    "one entry is NaN": (lambda y, truth: one_value(y, math.nan), "y holds NaN or Inf"),
    "one entry is infinite": (lambda y, truth: one_value(y, -math.inf), "y holds NaN or Inf"),
    "all are half": (lambda y, truth: y * 0.5, "y: largest error"),
    "a shape": (lambda y, truth: y[:, :64], "y is (16, 64)"),
    "a dtype": (lambda y, truth: y.float(), "float32"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused_and_named(product, what):
    change, reason = WRONG[what]
    assert reason in refusal(change(*product), *product)


def test_a_small_error_everywhere_fails_by_the_rms_alone(product):
    y, truth = product
    reason = refusal(((y.double() - truth) * 1.4 + truth).float(), y.float(), truth)
    assert "RMS error" in reason and "largest" not in reason


@pytest.mark.parametrize("factor", [0.5, math.nan])
def test_a_baseline_that_is_as_wrong_as_the_method_excuses_nothing_and_an_exact_one_allows_nothing(product, factor):
    y, truth = product
    assert "baseline itself is wrong" in refusal(y, y * factor, truth)
    assert refusal(y * factor, y * factor, truth)
    truth, exact = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2)
    assert refusal(exact, exact, truth) == "" and refusal(exact + 1e-6, exact, truth)


def test_errors_are_the_same_in_chunks(product, monkeypatch):
    y, truth = product
    whole = errors(y, truth)
    lines = case_run.worst_line(y * 1.01, y, truth)
    monkeypatch.setattr(case_run, "CHUNK", 3 * truth.shape[1])
    assert errors(y, truth) == pytest.approx(whole)
    assert case_run.worst_line(y * 1.01, y, truth) == (pytest.approx(lines[0]), lines[1])
    assert errors(one_value(y, math.nan), truth) == (math.inf, math.inf)


def test_without_a_baseline_it_must_be_the_truth_up_to_a_few_roundings(product):
    y, _ = product
    assert refusal(y * 1.001, None, y) == "" and "is off by inf" in refusal(y * math.nan, None, y)
    assert refusal(y * 1.05, None, y, "dw").startswith("dw is off by")


def product_of(k, b=64, some=8):
    """(y [b, 40960] in bf16, truth, y with one dropped weight): `some` rows of W [40960, k], in turns."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(b, k, generator=g).bfloat16()
    w = (torch.randn(some, k, generator=g) * k**-0.5).bfloat16()
    lost = w.clone()
    lost[3, (w[3].abs() - k**-0.5).abs().argmin()] = 0  # as large as most
    y, truth = ((x.to(kind) @ w.to(kind).t()).repeat(1, 40960 // some) for kind in (torch.float32, torch.float64))
    wrong = y.clone()
    wrong[:, 3] = x.float() @ lost[3].float()
    return y.bfloat16(), truth, wrong.bfloat16()


def test_one_dropped_weight_of_40960_squared_fails_by_its_column(monkeypatch):
    y, truth, wrong = product_of(40960)
    reason = refusal(wrong, y, truth)
    assert refusal(y, y, truth) == "" and "RMS error of column 3 is" in reason and "largest" not in reason, reason
    assert "row 3 is" in refusal(wrong.t(), y.t(), truth.t())
    monkeypatch.setattr(case_run, "LINE", math.inf)
    assert refusal(wrong, y, truth) == "", "without a look at each column it is not seen"


@pytest.mark.parametrize("b", [1, 4, 16, 256])
def test_rounding_alone_fails_no_line_also_where_tokens_differ_in_size(b):
    g = torch.Generator().manual_seed(b)
    size = torch.logspace(-2, 2, b)[:, None] if b > 1 else 1.0
    halves = [torch.randn(b, 20480, generator=g, dtype=torch.float64) * size for _ in range(2)]

    def summed():  # as the sums of two ranks' kernels that add in another order
        noise = [1e-4 * size * torch.randn(b, 20480, generator=g) for _ in halves]
        return sum((half + off).bfloat16() for half, off in zip(halves, noise, strict=True))

    reason, found = judge(Check("y", summed(), summed(), sum(halves)))
    assert reason == "" and 0 < found["error_line_ratio"] < 1


def test_a_line_of_larger_values_may_be_as_much_more_wrong_and_no_more():
    draw = torch.Generator().manual_seed(0)
    truth = torch.randn(64, 256, generator=draw, dtype=torch.float64)
    truth[7] *= 4
    noise = 1e-3 * torch.randn(2, 64, 256, generator=draw, dtype=torch.float64)
    baseline = truth + noise[0]
    right = truth + noise[1]
    right[7] = truth[7] + 4 * noise[1][7]  # rounding is relative; the baseline's was kind there
    assert case_run.worst_line(right, baseline, truth)[0] < 1
    wrong = right.clone()
    wrong[8] = truth[8] + 4 * noise[1][8]  # of no larger values
    over, name = case_run.worst_line(wrong, baseline, truth)
    assert over > 1 and name == "row 8"
