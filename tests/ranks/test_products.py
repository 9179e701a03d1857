"""In a rank on a CPU without the instructions, 16-bit floats are multiplied in float32; all else is torch's."""

import pytest
import torch

from blockshock_lib.ranks import products

CALLS = {
    "mm": ((5, 7), (7, 3)),
    "bmm": ((2, 5, 7), (2, 7, 3)),
    "addmm": ((5, 3), (5, 7), (7, 3)),
    "baddbmm": ((2, 5, 3), (2, 5, 7), (2, 7, 3)),
}


def made(ctx, name, dtype, scales=None):
    """(product, product into a tensor, gradient of the last operand) in a rank, of numbers that float32 holds."""
    torch.manual_seed(0)
    args = [torch.randn(shape).to(dtype) for shape in CALLS[name]]
    fn = getattr(torch, name)
    y = fn(*args, **(scales or {}))
    into = fn(*args, **(scales or {}), out=torch.empty_like(y))
    args[-1].requires_grad_()
    fn(*args).backward(torch.ones_like(y))
    return y, into, args[-1].grad


@pytest.mark.parametrize("name", CALLS)
def test_a_product_of_16_bit_floats_is_that_of_float32_rounded_once(pair, name):
    for dtype in (torch.bfloat16, torch.float16):
        scales = {"beta": 0.5, "alpha": 2} if "add" in name else {}
        for y, into, gradient in pair.call(made, name, dtype, scales, seconds=60):
            torch.manual_seed(0)
            args = [torch.randn(shape).to(dtype).float() for shape in CALLS[name]]
            args[-1].requires_grad_()
            exact = getattr(torch, name)(*args, **scales)
            getattr(torch, name)(*args).sum().backward()
            assert y.dtype == dtype and torch.equal(y, exact.detach().to(dtype)) and torch.equal(y, into)
            assert torch.equal(gradient, args[-1].grad.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_other_products_are_torchs_own(pair, dtype):
    torch.manual_seed(0)
    a, b = (torch.randn(shape).mul(8).to(dtype) for shape in CALLS["mm"])
    assert all(torch.equal(y, a @ b) for y in pair.call(multiplied, a, b, seconds=60))


def multiplied(ctx, a, b, out=None):
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)


@pytest.mark.parametrize("into", [None, torch.float32])
def test_operands_that_torch_refuses_are_refused(pair, into):
    a, b = torch.ones(5, 7, dtype=torch.bfloat16), torch.ones(7, 3, dtype=torch.bfloat16 if into else torch.float32)
    with pytest.raises(Exception, match="dtype"):
        pair.call(multiplied, a, b, None if into is None else torch.empty(5, 3, dtype=into), seconds=60)


def test_a_result_of_another_shape_is_resized_and_not_broadcast(pair):
    a, b = torch.ones(1, 7, dtype=torch.bfloat16), torch.ones(7, 3, dtype=torch.bfloat16)
    assert all(
        y.shape == (1, 3) for y in pair.call(multiplied, a, b, torch.empty(4, 3, dtype=torch.bfloat16), seconds=60)
    )


def test_a_cpu_with_the_instructions_keeps_torchs_products(monkeypatch):
    for kind in ("bf16", "fp16"):
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", lambda: True)
    monkeypatch.setattr(products, "_replace", lambda *_: pytest.fail("a product was replaced"))
    products.widen()
