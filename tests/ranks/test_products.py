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


def made(ctx, name, dtype, scales):
    """In a rank: (product, product into a tensor, gradient of the last operand) of `dtype` and of float32, and whether
    the product is ours. The numbers are the same.
    """
    torch.manual_seed(0)
    args, fn = [torch.randn(shape).to(dtype) for shape in CALLS[name]], getattr(torch, name)
    found = []
    for given in (args, [one.float() for one in args]):
        y = fn(*given, **scales)
        into = fn(*given, **scales, out=torch.empty_like(y))
        given[-1].requires_grad_()
        fn(*given).sum().backward()
        found.append((y, into, given[-1].grad))
    return *found, "products.py" in torch._C._dispatch_dump(f"aten::{name}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_a_product_of_16_bit_floats_is_that_of_float32_rounded_once(pair, name, dtype):
    ops = torch.ops.mkldnn
    supported = {torch.bfloat16: ops._is_mkldnn_bf16_supported(), torch.float16: ops._is_mkldnn_fp16_supported()}
    scales = {"beta": 0.5, "alpha": 2} if "add" in name else {}
    for ours, exact, replaced in pair.call(made, name, dtype, scales, seconds=60):
        assert replaced != all(supported.values())
        for mine, other in zip(ours, exact, strict=True):
            assert mine.dtype == dtype and (supported[dtype] or torch.equal(mine, other.to(dtype)))


def test_a_cpu_with_the_instructions_keeps_torchs_products(monkeypatch):
    for kind in ("bf16", "fp16"):
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", lambda: True)
    monkeypatch.setattr(products, "_replace", lambda *_: pytest.fail("a product was replaced"))
    products.widen()
