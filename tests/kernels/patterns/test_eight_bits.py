"""2:4 in 8 bits: what is quantized, and what its benchmark refuses to time."""

import pytest
import torch

from benchmarks import eight_bits

CPU = torch.device("cpu")


def scaled(x, w, x_scale, w_scale):
    return (x.double() @ w.double() * x_scale * w_scale).bfloat16()


def measured(time=lambda calls: float(len(calls))):
    rows = eight_bits.measure(128, 64, 32, CPU, time)
    return {(row["kind"], row["method"]): row for row in rows}


@pytest.fixture
def library(monkeypatch):
    """cuSPARSELt's ops in float64; `faults` changes a product of one algorithm."""
    faults = {}

    def multiply(weight, x, *, alg_id, split_k, split_k_mode, out_dtype, transpose_result):
        assert transpose_result and x.t().is_contiguous() and split_k == 1
        y = x.t().double() @ weight.double().t()
        return faults.get(alg_id, lambda y: y)(y).to(out_dtype)

    multiplied = lambda x, w, scale_a, scale_b, **how: scaled(x, w, scale_a, scale_b)  # noqa: E731
    monkeypatch.setattr(torch, "_scaled_mm", multiplied)
    monkeypatch.setattr(torch, "_cslt_compress", lambda weight: weight)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", multiply)
    monkeypatch.setattr(eight_bits, "settings", lambda *_: [(1, 1, -1), (0, 1, -1)])
    return faults


@pytest.mark.parametrize(("kind", "most"), [("fp8", 2**-4), ("int8", 0.5 / 127)])
def test_a_row_is_quantized_by_its_own_largest_value(kind, most):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-3], [1], [1e4], [0], [1]])
    values, scale = eight_bits.quantized(x, kind)
    error = (values.double() * scale - x).abs()
    size = x.abs() if kind == "fp8" else x.abs().amax(1, keepdim=True)  # half a step of a float, or of the row
    assert (error <= size * most * 1.01 + scale * 2**-10).all() and values.dtype == eight_bits.KINDS[kind]
    assert values[3].double().eq(0).all() and scale.isfinite().all()


def test_on_a_cpu_the_dense_products_are_right_and_the_sparse_ones_are_refused_by_name():
    found = measured()
    assert [found[kind, "dense"]["status"] for kind in ("bf16", "int8")] == ["ok"] * 2
    assert found["fp8", "dense"]["status"] in ("ok", "unsupported")  # up to torch 2.11 a CPU scales no rows
    for kind in ("fp8", "int8"):
        row = found[kind, "2:4"]
        assert row["status"] == "unsupported" and "_cslt_compress" in row["reason"] and "ms" not in row


def test_the_fastest_right_algorithm_counts_and_one_that_is_wrong_has_no_time(library):
    taken = iter([*[1.0] * 4, 3.0, 3.0, 1.5, 1.5, 3.0, 3.0, 2.0, 2.0, *[1.0] * 2, 3.0, 3.0, 2.0, 2.0])
    found = measured(lambda calls: next(taken))
    assert [found[kind, "2:4"]["ms"] for kind in ("fp8", "int8")] == [2.0, 2.0]
    assert found["int8", "2:4"]["setting"] == (0, 1, -1) and found["fp8", "dense"]["ms"] == 1.5
    library[0] = lambda y: y.index_fill(1, torch.tensor([5]), 0)
    assert {measured()[kind, "2:4"]["setting"] for kind in ("fp8", "int8")} == {(1, 1, -1)}


@pytest.mark.parametrize(
    "fault",
    [
        lambda y: y.roll(1, 0),
        lambda y: y.index_fill(1, torch.tensor([5]), 0),
        lambda y: y.index_fill(0, torch.tensor([5]), torch.nan),
        lambda y: y * 1.03,
    ],
)
def test_planted_faults_are_seen(library, fault):
    library |= {0: lambda y: fault(y.float()), 1: lambda y: fault(y.float())}
    row = measured()["fp8", "2:4"]
    assert row["status"] == "failed" and "RMS error" in row["reason"] and "ms" not in row
