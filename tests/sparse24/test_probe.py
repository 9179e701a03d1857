"""The judge of a way to multiply, with faults planted, on the CPU. Real kernels and times: tests/gpu."""

import pytest
import torch

from blockshock_lib.compiled import CompileError
from blockshock_lib.sparse24 import cslt, small
from blockshock_lib.sparse24.probe import Probe, guarded
from blockshock_lib.sparse24.small import Config
from blockshock_lib.sparse24.tuning import BrokenContextError, Setting

from .fake_gpu import install

CPU = torch.device("cpu")
WAYS = [(cslt, Setting()), (small, Config(1, 1, 1, 3, 1))]


@pytest.fixture(autouse=True)
def matmul(monkeypatch):
    return install(monkeypatch)


def probe(rows=16):
    return Probe((128, 192), rows, torch.bfloat16, CPU)


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize(("room", "way"), WAYS)
def test_right_values_have_the_error_of_rounding(room, way, rows):
    one = probe(rows)
    for _ in range(3):
        error = one.check(way)
        assert error.right and abs(error.rms_ratio - 1) < 0.1


def scaled(y, last):
    y *= 1.02


def tile_moved(y, last):
    y[: len(y) // 2, :16] = y[: len(y) // 2, 16:32].clone()


def one_nan(y, last):
    y[0, 0] = torch.nan


def last_product(y, last):
    y.copy_(last[: len(y)])  # as if nothing were written, into memory that holds the product of the call before


def nothing_written(y, last):
    y.fill_(torch.nan)  # what the output held before the call


@pytest.mark.parametrize("fault", [scaled, tile_moved, one_nan, last_product, nothing_written])
@pytest.mark.parametrize(("room", "way"), WAYS)
def test_wrong_values_are_seen_at_every_check(monkeypatch, room, way, fault):
    real, last = room.multiply, [torch.zeros(16, 128, dtype=torch.bfloat16)]

    def planted(x, buffer, shape, way, out=None, bias=None):
        y = real(x, buffer, shape, way, out, bias)
        right = y.clone()
        fault(y, last[-1])
        last.append(torch.cat((right, right))[:16])
        return y

    monkeypatch.setattr(room, "multiply", planted)
    one = probe()
    assert not any(one.check(way).right for _ in range(4))


def test_a_batch_that_is_no_multiple_of_eight_is_tried_on_the_kernel_alone(monkeypatch):
    seen = {Setting: [], Config: []}
    for room, way in WAYS:
        real = room.multiply

        def noting(x, buffer, shape, way, out=None, bias=None, real=real):
            seen[type(way)].append(len(x))
            return real(x, buffer, shape, way, out, bias)

        monkeypatch.setattr(room, "multiply", noting)
        one = probe()
        one.check(way), one.check(way)
    assert seen == {Setting: [16, 16], Config: [13, 16]}


def test_rows_behind_the_output_that_are_written_are_seen(monkeypatch):
    def past_the_end(x, buffer, shape, config, out=None, bias=None):
        if more := -len(x) % 8:
            torch.as_strided(out, (more, shape[0]), (shape[0], 1), len(x) * shape[0]).zero_()
        return real(x, buffer, shape, config, out, bias)

    real, way = small.multiply, WAYS[1][1]
    monkeypatch.setattr(small, "multiply", past_the_end)
    one = probe()
    assert sorted(one.check(way).right for _ in range(2)) == [False, True]  # wrong for 13 rows, right for 16


def test_a_kernel_that_does_not_compile_is_a_refusal():
    with pytest.raises(RuntimeError, match="too many registers"), guarded(CPU):
        raise CompileError("too many registers")


@pytest.mark.parametrize("fault", ["the next kernel fails", "an accelerator's error"])
def test_a_broken_context_is_told_from_a_refusal(monkeypatch, fault):
    def fails(device):
        raise torch.AcceleratorError("CUDA error: an illegal instruction was encountered")

    with pytest.raises(RuntimeError, match="refused"), guarded(CPU):
        raise RuntimeError("refused")
    with pytest.raises(BrokenContextError), guarded(CPU):
        if fault == "an accelerator's error":
            fails(CPU)
        monkeypatch.setattr(torch.cuda, "synchronize", fails)
        raise RuntimeError("CUDA error: internal error when calling `cusparseLtMatmul`")
