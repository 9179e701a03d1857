"""2:4 in 8 bits: what is quantized, what multiplies it, what is refused, and what the benchmark does not time."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from benchmarks import eight_bits as benchmark
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.patterns import eight_bits
from blockshock_lib.kernels.patterns.table import PATTERNS
from blockshock_lib.kernels.sparse24.plans import Setting

CPU = torch.device("cpu")
KINDS = list(eight_bits.DTYPES.values())
SPARSE = ["2:4", "2:4, alpha", "2:4, alpha, whole x"]
MS = {0: 2.0, 1: 3.0}  # by algorithm


def normal(*size, dtype=torch.float32, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def measured(library=None):
    def time(calls):
        calls[0]()
        return MS[library.algorithm] if library else 1.0

    return {(row["kind"], row["method"]): row for row in benchmark.measure(128, 64, 32, CPU, time)}


@pytest.fixture
def library(monkeypatch):
    """cuSPARSELt's ops in float64. `wrong`: by algorithm, what it makes of a product; `alpha`: of that."""
    fake = SimpleNamespace(wrong={}, alpha=lambda alpha: alpha, algorithm=0, asked=[])

    def multiply(weight, x, *, out_dtype, transpose_result, alpha=None, alg_id=0, split_k=1, split_k_mode=-1):
        assert transpose_result and x.t().is_contiguous() and x.shape[1] % 16 == 0 and split_k == 1
        assert alpha is None or (alpha.dtype == torch.float32 and alpha.shape == weight.shape[:1])
        fake.algorithm = alg_id
        y = x.t().double() @ weight.double().t() * (1 if alpha is None else fake.alpha(alpha))
        return fake.wrong.get(alg_id, lambda y: y)(y).to(out_dtype)

    def search(weight, x, bias, alpha, out_dtype, transpose_result):
        fake.asked.append((alpha is not None, out_dtype))
        return 1, 1, -1, 2

    def scaled(x, w, scale_a, scale_b, **_):
        return (x.double() @ w.double() * scale_a * scale_b).bfloat16()

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    monkeypatch.setattr(torch, "_cslt_compress", lambda weight: weight.clone())
    monkeypatch.setattr(torch, "_cslt_sparse_mm", multiply)
    monkeypatch.setattr(torch._C, "_cusparselt", SimpleNamespace(mm_search=search), raising=False)
    monkeypatch.setattr(eight_bits, "by_library", lambda device: True)
    monkeypatch.setattr(eight_bits, "by_kernel", eight_bits.quantized)
    return fake


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_quantizes_as_its_oracle(kind, dtype, monkeypatch):
    """By Triton's interpreter, which loses the carry of some fp8 that round up to a power of two; a GPU loses none."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = normal(6, 1000, dtype=dtype) * torch.tensor([1e-3, 1, 50, 0, 1, 1], dtype=dtype)[:, None]
    x[4] = torch.tensor([127, 0.5, 1.5, -2.5, 3.5], dtype=dtype).repeat(200)  # halves go to even
    x[5, 7] = torch.nan
    (values, scales), (wanted, by) = eight_bits.by_kernel(x, kind), eight_bits.quantized(x, kind)
    assert torch.equal(scales[:5], by[:5]) and scales[5].isnan() and by[5].isnan()
    away = (values.view(torch.int8) != wanted.view(torch.int8))[:5].float().mean()
    assert away == 0 if kind == torch.int8 else away < 0.03


def packed(kind, dtype=torch.bfloat16, shape=(128, 192)):
    """(the packed weight, its values, its scales)."""
    weight = normal(*shape, dtype=dtype) * torch.linspace(0.1, 3, shape[0])[:, None].to(dtype)
    mask = PATTERNS["2:4"].mask(weight.float().abs(), 0.5)
    given = eight_bits.quantized(torch.where(mask, weight, 0), kind)
    return eight_bits.EightBits(*given, dtype), *given


def fault(one, values, scales, rows=24):
    """What is wrong with the packed weight's product, in float64 of the quantized operands."""
    x = normal(rows, values.shape[1], dtype=one.dtype, seed=1)
    x *= torch.linspace(0.5, 2, rows)[:, None].to(one.dtype)
    x8, x_scale = eight_bits.quantized(x, values.dtype)
    return eight_bits.off(one.product(x), (x8.double() * x_scale) @ (values.double() * scales).t())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "most"), [(torch.float8_e4m3fn, 2**-4), (torch.int8, 0.5 / 127)])
def test_a_row_is_quantized_by_its_own_largest_value(kind, most, dtype):
    x = (normal(5, 64) * torch.tensor([[1e-3], [1], [1e4], [0], [1]])).to(dtype)
    x[4, 7] = torch.nan
    values, scale = eight_bits.quantized(x, kind)
    error = (values.double() * scale - x).abs()[:4]
    size = x.abs() if kind.is_floating_point else x.abs().amax(1, keepdim=True)  # half a step of a float, or of the row
    assert (error <= size[:4] * most * 1.01 + scale[:4] * 2**-10).all() and values.dtype == kind
    assert values[3].double().eq(0).all() and scale[:4].isfinite().all() and scale[4].isnan()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_packed_weight_multiplies_on_a_cpu_and_faults_are_seen(kind, dtype):
    one, values, scales = packed(kind, dtype)
    assert not fault(one, values, scales) and not fault(one, values, scales, rows=1)
    rows, columns = one.shape
    assert one.nbytes == rows * columns // 2 + rows * columns // 8 + 4 * rows
    assert one.quantized().double().equal(values.double())
    assert one.dense().dtype == dtype and one.dense().equal((values.float() * scales).to(dtype))
    for name, plant in (
        ("scales", lambda t: torch.ones_like(t)),  # forgotten
        ("scales", lambda t: t.roll(1, 0)),  # of another row
        ("scales", lambda t: t.mean(0, keepdim=True).expand_as(t)),  # one of all rows
        ("values", lambda t: t.view(torch.int8).roll(1, 0).view(kind)),
        ("metadata", lambda t: t.roll(1, 1)),
    ):
        other = one.copy()
        other.tensors[name] = plant(other.tensors[name])
        assert "RMS error" in fault(other, values, scales), name
    assert not fault(one, values, scales)


@pytest.mark.parametrize(("rows", "refused"), [(1, False), (16, True)])
def test_a_column_is_judged_by_itself_where_it_is_long_enough_not_to_have_cancelled(rows, refused):
    truth = torch.randn(rows, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    truth[:, 3] *= 1e-5
    y = truth + 1e-5 * truth.square().mean().sqrt()  # nothing beside all others
    assert bool(eight_bits.off(y, truth)) is refused
    assert eight_bits.off(1.02 * truth, truth), "all of it"
    y = truth.clone()
    y[:, truth.abs().sum(0).argmax()] = 0
    assert eight_bits.off(y, truth), "a column that is lost is seen in one row, too"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_library_applies_the_scales_of_a_weight_where_it_can(library, kind, dtype):
    one, values, scales = packed(kind, dtype)
    assert one.fused is (dtype == torch.bfloat16) and not fault(one, values, scales)
    assert one.quantized().double().equal(values.double())
    for plant in (torch.ones_like, lambda alpha: alpha.roll(1), lambda alpha: alpha.mean()):
        library.alpha = plant
        other, *_ = packed(kind, dtype)
        assert not other.fused and not fault(other, values, scales)
        assert fault(one, values, scales) or not one.fused


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_library_multiplies_it_wrongly_it_is_refused_but_not_for_a_lack_of_memory(library, kind):
    library.wrong[0] = lambda y: y.index_fill(1, torch.tensor([5]), 0)
    with pytest.raises(UnsupportedError, match=r"does not multiply 2:4 in torch.*, leave out dtype=: RMS error"):
        packed(kind)

    def raises(error):
        raise error

    library.wrong[0] = lambda y: raises(RuntimeError("CUDA error: operation not supported"))
    with pytest.raises(UnsupportedError, match="leave out dtype=: CUDA error: operation not supported"):
        packed(kind)
    library.wrong[0] = lambda y: raises(torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        packed(kind)
    library.wrong.clear()
    zeros = torch.zeros(64, 64).to(kind), torch.ones(64, 1), torch.bfloat16
    assert not eight_bits.EightBits(*zeros).product(normal(3, 64, dtype=torch.bfloat16)).any()


def test_tuned_it_takes_the_librarys_pick_for_the_batch_unless_that_is_wrong(library):
    one, values, scales = packed(torch.int8)
    one.tune(normal(24, 192, dtype=torch.bfloat16))
    assert one.chosen == {32: Setting(1, 1, -1)} and library.asked == [(True, torch.bfloat16)]
    assert not fault(one, values, scales) and library.algorithm == 1
    library.wrong[1] = lambda y: y * 1.05
    other, *_ = packed(torch.int8, torch.float16)
    other.tune(normal(3, 192, dtype=torch.float16))
    assert other.chosen == {16: Setting()} and library.asked[1:] == [(False, torch.int32)]


def test_on_a_cpu_the_dense_products_are_right_and_the_sparse_ones_are_refused_by_name():
    found = measured()
    assert [found["bf16", name]["status"] for name in ("dense", "2:4")] == ["ok"] * 2
    for kind in ("fp8", "int8"):
        assert found[kind, "2:4, layer"]["status"] == "ok"
        for name in ("dense", "dense, whole x and W"):  # up to torch 2.11 a CPU scales no rows
            assert found[kind, name]["status"] == "ok" or kind == "fp8"
        for name in SPARSE:
            row = found[kind, name]
            assert row["status"] == "unsupported" and "_cslt_compress" in row["reason"] and "ms" not in row


def test_the_fastest_right_algorithm_counts_and_one_that_is_wrong_has_no_time(library):
    found = measured(library)
    for kind in ("fp8", "int8"):
        for name in SPARSE:
            row = found[kind, name]
            assert (row["setting"], row["ms"], row["scaled ms"]) == ((0, 1, -1), 2.0, 2.0)
    library.wrong[0] = lambda y: y.index_fill(1, torch.tensor([5]), 0)
    assert {measured(library)[kind, name]["setting"] for kind in ("fp8", "int8") for name in SPARSE} == {(1, 1, -1)}


@pytest.mark.parametrize(
    "plant",
    [
        lambda y: y.roll(1, 0),
        lambda y: y.index_fill(1, torch.tensor([5]), 0),
        lambda y: y.index_fill(0, torch.tensor([5]), torch.nan),
        lambda y: y * 1.03,
    ],
)
def test_planted_faults_are_seen(library, plant):
    library.wrong |= {0: plant, 1: plant}
    found = measured(library)
    for name in SPARSE:
        row = found["fp8", name]
        assert row["status"] == "failed" and "RMS error" in row["reason"] and "ms" not in row
    assert found["fp8", "2:4, layer"]["status"] == "unsupported" and found["int8", "dense"]["status"] == "ok"


def test_a_library_that_takes_no_alpha_or_one_scale_of_it_loses_those_rows_alone(library):
    def refuses(alpha):
        raise RuntimeError("CUDA error: operation not supported when calling `cusparseLtMatmulPlanInit`")

    for plant, status in ((refuses, "unsupported"), (lambda alpha: alpha.mean(), "failed")):
        library.alpha = plant
        found = measured(library)
        for kind in ("fp8", "int8"):
            rows = [found[kind, name]["status"] for name in ("2:4", *SPARSE[1:], "2:4, layer")]
            assert rows == ["ok", status, status, "ok"]
