from types import SimpleNamespace

import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.sparse24 import Pattern, cslt_tune, masks, product, small, tuned

CPU = torch.device("cpu")


def problem(n=128, k=192, b=24, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    mask = masks.make(SimpleNamespace(family="random", pattern=""), (n, k), seed=seed)
    return torch.randn(b, k, generator=generator).to(dtype), weight, mask


def passes_gate(y, x, weight, mask):
    """The gate of every correctness check: at most 2x the largest and 1.25x the RMS error of a plain product."""
    kept = torch.where(mask, weight, 0)
    truth = x.double() @ kept.double().t()
    ours, plain = (y.double() - truth).abs(), ((x @ kept.t()).double() - truth).abs()
    rms = ours.square().mean().sqrt() <= 1.25 * plain.square().mean().sqrt()
    return bool(y.isfinite().all() and ours.max() <= 2 * plain.max() and rms)


def test_the_table_names_each_backend_after_its_key():
    assert {name: backend.name for name, backend in product.BACKENDS.items()} == {
        "reference": "reference",
        "torch": "torch",
        "cslt": "cslt",
        "small": "small",
        "tuned": "tuned",
    }


def test_small_and_tuned_multiply_what_cslt_packs():
    cslt = product.BACKENDS["cslt"]
    for name, own in (("small", small), ("tuned", tuned)):
        row = product.BACKENDS[name]
        assert (row.pack, row.blank, row.pack_both, row.pack_magnitude, row.too_large) == (
            *(cslt.pack, cslt.blank, cslt.pack_both, cslt.pack_magnitude),
            cslt.too_large,
        )
        assert row.linear is own.linear
    assert product.BACKENDS["small"].unsupported is small.unsupported
    assert product.BACKENDS["tuned"].unsupported is cslt.unsupported
    assert (
        product.BACKENDS["small"].tune is cslt_tune.tune_small and product.BACKENDS["tuned"].tune is cslt_tune.tune_any
    )


@pytest.mark.parametrize(("name", "device", "chosen"), [("auto", "cpu", "reference"), ("auto", "cuda:1", "tuned")])
def test_auto_is_the_tuned_product_on_a_gpu_and_the_reference_elsewhere(name, device, chosen):
    assert product.choose(name, device) is product.BACKENDS[chosen]


def test_a_named_backend_is_never_replaced_by_another():
    assert product.choose("torch", CPU).name == "torch"
    with pytest.raises(ValueError, match="auto, reference, torch, cslt"):
        product.choose("cuslt", CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seed", range(5))
def test_the_reference_product_is_right(dtype, seed):
    x, weight, mask = problem(dtype=dtype, seed=seed, b=1 + 7 * seed)
    backend = product.BACKENDS["reference"]
    assert backend.unsupported(CPU, dtype) == ""
    packed = backend.pack(weight, mask)
    backend.tune(x, packed)
    y = backend.linear(x, packed)
    assert y.dtype == dtype and y.shape == (len(x), 128) and y.is_contiguous()
    assert passes_gate(y, x, weight, mask)


def test_a_column_slice_of_a_wider_input_is_multiplied_as_its_copy():
    x, weight, mask = problem()
    wide = torch.randn(len(x), 3 * 192).to(x.dtype)
    wide[:, 192:384] = x
    packed = product.BACKENDS["reference"].pack(weight, mask)
    part = wide[:, 192:384]
    assert not part.is_contiguous()
    assert torch.equal(
        product.BACKENDS["reference"].linear(part, packed), product.BACKENDS["reference"].linear(x, packed)
    )


def test_values_written_into_a_blank_give_the_packed_weight():
    x, weight, mask = problem()
    weight.masked_fill_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) < 0.3, 0)
    backend = product.BACKENDS["reference"]
    blank = backend.blank(Pattern.of(mask), weight.dtype)
    blank.values.copy_(weight[mask].view_as(blank.values))
    for ours, packed in zip(blank.data, backend.pack(weight, mask).data, strict=True):
        assert torch.equal(ours, packed)
    assert passes_gate(backend.linear(x, blank), x, weight, mask)


@pytest.mark.parametrize("fault", ["swapped group", "shifted metadata", "stale copy", "other term"])
def test_the_gate_catches_a_planted_fault(fault):
    x, weight, mask = problem()
    backend = product.BACKENDS["reference"]
    packed = backend.pack(weight, ~mask if fault == "other term" else mask)
    values, metadata = packed.data
    if fault == "swapped group":
        values[3, 4:8] = values[3, [6, 7, 4, 5]]
    if fault == "shifted metadata":
        metadata[3] = metadata[3].roll(1)
    if fault == "stale copy":
        weight = weight + 1 / 8
    assert not passes_gate(backend.linear(x, packed), x, weight, mask)


def test_packed_bytes_are_those_of_the_storage_each_counted_once():
    _, weight, mask = problem()
    packed = product.BACKENDS["reference"].pack(weight, mask)
    assert packed.nbytes == weight.nbytes * 9 // 16
    buffer = torch.zeros(1000, dtype=torch.uint8)
    views = product.Packed("x", (1, 1), torch.uint8, (buffer[:10], buffer[500:]))
    assert views.nbytes == 1000  # a view holds its whole storage, and both are one


def test_values_are_a_view_that_the_product_reads():
    x, weight, mask = problem()
    backend = product.BACKENDS["reference"]
    packed = backend.pack(torch.zeros_like(weight), mask)
    assert packed.values.shape == (128, 96) and packed.values.data_ptr() == packed.data[0].data_ptr()
    packed.values.copy_(weight[mask].view(128, 96))
    assert torch.equal(backend.linear(x, packed), backend.linear(x, backend.pack(weight, mask)))


def test_an_input_that_does_not_fit_is_refused():
    x, weight, mask = problem()
    backend = product.BACKENDS["reference"]
    packed = backend.pack(weight, mask)
    for wrong in (x[:, :64], x[0], x[:0], x.float()):
        with pytest.raises(ValueError, match="the input must be"):
            backend.linear(wrong, packed)


@pytest.mark.parametrize("name", ["torch", "cslt", "tuned"])
def test_gpu_backends_say_why_they_cannot_run_here(name):
    backend = product.BACKENDS[name]
    assert "device type 'cpu'" in backend.unsupported(CPU, torch.bfloat16)
    assert "1:2 pattern" in backend.unsupported(torch.device("cuda"), torch.float32)
    assert "float64" in backend.unsupported(torch.device("cuda"), torch.float64)
    _, weight, mask = problem()
    with pytest.raises(UnsupportedError, match=r"cannot run: .*device type 'cpu'"):
        backend.pack(weight, mask)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is meant")
@pytest.mark.parametrize("name", ["torch", "cslt", "tuned"])
def test_a_missing_gpu_is_a_reason_and_no_crash(name):
    assert product.BACKENDS[name].unsupported(torch.device("cuda"), torch.bfloat16) == "no CUDA device is available"
