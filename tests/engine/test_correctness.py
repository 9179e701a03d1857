"""The gate passes what rounding allows and nothing else."""

import math

import pytest
import torch

from blockshock_lib.engine.correctness import Check, Errors, errors, gate, strays, worst


@pytest.fixture
def product():
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(16, 256, generator=g).bfloat16(), torch.randn(128, 256, generator=g).bfloat16()
    return x @ w.t(), x.double() @ w.double().t()


def test_the_baseline_itself_passes_with_ratio_one(product):
    y, truth = product
    check = gate(y, y, truth)
    assert check.reason == "" and check.max_ratio == 1 and check.rms_ratio == 1


def test_errors_are_relative_to_the_rms_of_the_truth():
    truth = torch.full((4, 4), 10.0, dtype=torch.float64)
    y = truth.clone()
    y[0, 0] += 1
    assert errors(y, truth) == pytest.approx(Errors(max=0.1, rms=0.025))


def test_one_entry_three_baseline_errors_off_fails_by_the_largest_error(product):
    y, truth = product
    worst = (y.double() - truth).abs().max()
    bad = y.float()
    bad[0, 0] = truth[0, 0] + 3 * worst
    check = gate(bad.bfloat16(), y, truth)
    assert "largest error" in check.reason and "RMS" not in check.reason


def test_a_small_error_everywhere_fails_by_the_rms(product):
    y, truth = product
    off = (y.double() - truth) * 1.4 + truth
    check = gate(off.float(), y.float(), truth)
    assert "RMS error" in check.reason and "largest" not in check.reason


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_single_non_finite_entry_fails(product, value):
    y, truth = product
    bad = y.clone()
    bad[3, 5] = value
    assert gate(bad, y, truth).reason == "y holds NaN or Inf"


def test_a_baseline_of_nan_excuses_nothing(product):
    y, truth = product
    assert "baseline" in gate(y, torch.full_like(y, math.nan), truth).reason
    assert gate(torch.full_like(y, math.nan), torch.full_like(y, math.nan), truth).reason


def test_wrong_shape_or_dtype_is_named(product):
    y, truth = product
    assert "(16, 64)" in gate(y[:, :64], y, truth).reason
    assert "float32" in gate(y.float(), y, truth).reason


def test_an_exact_baseline_allows_no_error():
    truth = torch.ones(2, 2, dtype=torch.float64)
    exact = torch.ones(2, 2)
    assert gate(exact, exact, truth).reason == ""
    assert gate(exact + 1e-6, exact, truth).reason


def test_a_baseline_that_is_as_wrong_as_the_method_excuses_nothing(product):
    y, truth = product
    half = y * 0.5
    check = gate(half, half, truth)
    assert check.max_ratio == 1 and "baseline itself is wrong" in check.reason


def test_errors_are_the_same_in_chunks(product, monkeypatch):
    y, truth = product
    whole = errors(y, truth)
    monkeypatch.setattr("blockshock_lib.engine.correctness.CHUNK", 3 * truth.shape[1])
    assert errors(y, truth) == pytest.approx(whole)
    y[-1, -1] = math.nan
    assert errors(y, truth) == Errors(math.inf, math.inf)


def test_a_refusal_names_its_tensor(product):
    y, truth = product
    assert gate(y * 1.5, y, truth, "dx").reason.startswith("dx: largest error")
    assert gate(y * math.nan, y, truth, "dw").reason == "dw holds NaN or Inf"
    assert gate(y[:1], y, truth, "db").reason.startswith("db is (1, 128)")


def test_the_worst_of_several_ranks_counts():
    right, wrong = Check(Errors(1, 4), 1, 2, ""), Check(Errors(3, 2), 5, 1, "dx: off")
    assert worst([right, wrong]) == Check(Errors(3, 4), 5, 2, "dx: off") and worst([]).reason == ""


def test_what_was_admitted_is_told_from_what_strays(product):
    y, _ = product
    assert strays(y, y.clone()) == "" and strays(y * 1.001, y) == ""
    assert strays(y * 1.05, y).startswith("is off by") and strays(y * math.nan, y).startswith("is off by inf")
