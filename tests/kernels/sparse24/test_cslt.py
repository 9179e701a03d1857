"""The calls of the raw ops, against a fake of cuSPARSELt on the CPU. Real values and times: tests/gpu."""

import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import backends, cslt, stock
from blockshock_lib.kernels.sparse24.pattern import Pattern

from .fake_cusparselt import install
from .problems import problem

CSLT = backends.BACKENDS["cslt"]


@pytest.fixture(autouse=True)
def matmul(monkeypatch):
    return install(monkeypatch)


def off_the_boundary(x):
    """The same values, beginning 2 bytes after a 16-byte boundary."""
    moved = torch.empty(x.numel() + 8, dtype=x.dtype)[1 : 1 + x.numel()].view(x.shape)
    assert moved.data_ptr() % 16 == 2
    return moved.copy_(x)


def test_a_slice_and_an_input_off_the_16_byte_boundary_reach_the_raw_op_as_their_copies(monkeypatch, matmul):
    x, weight, mask = problem()
    packed, starts, wide = cslt.pack(weight, mask), [], torch.cat((torch.randn(16, 192).bfloat16(), x), 1)
    wanted = CSLT.linear(x, packed)
    raw = matmul(packed.data[0], wide[:, 192:].t(), transpose_result=True)
    assert not torch.equal(raw, wanted), "the trap is real: the op itself takes the slice and is wrong"
    noting = lambda buffer, dense, **how: starts.append(dense.data_ptr() % 16) or matmul(buffer, dense, **how)  # noqa: E731
    monkeypatch.setattr(torch, "_cslt_sparse_mm", noting)
    for given in (wide[:, 192:], off_the_boundary(x)):
        assert torch.equal(CSLT.linear(given, packed), wanted)
    assert starts == [0, 0]


def test_an_output_off_the_16_byte_boundary_and_an_input_that_does_not_fit_are_refused():
    x, weight, mask = problem()
    packed = cslt.pack(weight, mask)
    with pytest.raises(ValueError, match="out must begin at a multiple of 16 bytes"):
        CSLT.linear(x, packed, off_the_boundary(torch.zeros(16, 128).bfloat16()))
    for wrong in (x[:, :128].contiguous(), x[0], x[:0], x.float()):  # the op would read past its end
        with pytest.raises(ValueError, match=r"the input must be (\[B, 192\]|torch.bfloat16)"):
            CSLT.linear(wrong, packed)


@pytest.mark.parametrize("moved", [False, True])
def test_a_bias_off_the_16_byte_boundary_is_added_after_a_planned_product(monkeypatch, moved):
    x, weight, mask = problem()
    packed, bias, given = cslt.pack(weight, mask), torch.randn(128).bfloat16(), []
    wanted = CSLT.linear(x, packed) + bias

    def planned(x, buffer, shape, setting, out, bias):
        given.append(bias)
        return out.copy_(x @ torch.where(mask, weight, 0).t() + (0 if bias is None else bias))

    monkeypatch.setattr(cslt.plans, "missing", lambda device: "")
    monkeypatch.setattr(cslt.plans, "multiply", planned)
    y = CSLT.linear(x, packed, bias=off_the_boundary(bias) if moved else bias)
    torch.testing.assert_close(y, wanted, rtol=2e-2, atol=2e-2)
    assert (given == [None]) is moved


@pytest.mark.parametrize("name", ["torch", "cslt"])
def test_two_to_the_32_weights_are_multiplied_and_more_are_refused_before_anything_is_made_of_them(name):
    backend = backends.BACKENDS[name]
    assert backend.too_large((65536, 65536)) == backends.BACKENDS["reference"].too_large((65536, 131072)) == ""
    # Without storage: whatever computed with them would fail.
    weight, mask = (torch.empty(65536, 65600, dtype=d, device="meta") for d in (torch.bfloat16, torch.bool))
    pattern = Pattern(torch.empty(16384, 16400, dtype=torch.uint8, device="meta"), None)
    second = stock.compress if name == "torch" else lambda weight: backend.blank(pattern, weight.dtype)
    for make in (lambda: backend.pack(weight, mask), lambda: second(weight)):
        said = rf"{name!r} cannot run: .* 65536x65600 has more than 2\^32 .* wrong values .* more ranks .*reference"
        with pytest.raises(UnsupportedError, match=said):
            make()
