"""The Gluon forward needs a Hopper GPU (tests/gpu). Elsewhere: that it compiles for one, and what is said instead."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from blockshock_lib import attention
from blockshock_lib.kernels.attention import gluon
from blockshock_lib.kernels.attention.call import Call

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

COMPILE = """
import contextlib
import torch
import triton
from triton.backends.compiler import GPUTarget
from blockshock_lib import attention
from blockshock_lib.kernels.attention import gluon, gluon_forward
from blockshock_lib.kernels.attention import triton as kernels
from blockshock_lib.kernels.attention.call import Call

class Hopper:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = get_current_stream = lambda self, *_: 0

triton.runtime.driver.set_active(Hopper())
torch.cuda.device_of = lambda x: contextlib.nullcontext()
kernels.forward = lambda call, cuts, splits, made: made  # the Triton kernel is tested by itself
compile, made = gluon_forward.forward.run, []
gluon_forward.forward.run = lambda *a, grid, warmup, **k: made.append(compile(*a, grid=grid, warmup=True, **k))
for dim, density, block, dtype in ((128, 1, 128, torch.bfloat16), (64, 0.1, 128, torch.float16)):
    q, pattern = torch.empty(1, 2, 4096, dim, dtype=dtype), attention.random(density, 0, block)
    call = Call(q, q[:, :1], q[:, :1], pattern, pattern.lists(4096, 4096, block), 1.0)
    gluon.forward(call)
    ptx = made[-1].asm["ptx"]
    print(gluon.warpgroups(call.lists, dim), made[-1].metadata.num_warps, "wgmma" in ptx, "cp.async.bulk.tensor" in ptx)
"""


@pytest.mark.long
def test_both_forms_compile_for_hopper_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    ran = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True)
    # One or two warpgroups, and the four warps of the one that copies.
    assert ran.stdout.splitlines() == ["2 12 True True", "1 8 True True"], ran.stderr[-2000:]


@pytest.mark.parametrize(
    "dim, dtype, block, major, says",
    [
        (64, torch.bfloat16, 128, 8, "Hopper"),
        (96, torch.bfloat16, 128, 9, "64 and 128, not 96"),
        (64, torch.float32, 128, 9, "not torch.float32"),
        (64, torch.bfloat16, 96, 9, "a multiple of 64, not 96"),
        (64, torch.bfloat16, 64, 9, ""),
    ],
)
def test_what_it_cannot_do_is_refused_by_its_reason(dim, dtype, block, major, says, monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = property(lambda self: True)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    q = torch.empty(1, 1, 192, dim, dtype=dtype).as_subclass(OnGpu)
    why = gluon.refuse(Call(q, q, q, None, attention.full().lists(192, 192, block), 1.0))
    assert says in why and bool(why) == bool(says)


def test_without_a_gpu_it_says_so():
    q = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16)
    assert "Hopper" in gluon.refuse(Call(q, q, q, None, attention.full().lists(64), 1.0))


def test_operands_are_copied_only_where_their_rows_are_not_as_tma_takes_them():
    x = torch.empty(2, 100, 4, 64, dtype=torch.bfloat16)
    for fits in (x, x.transpose(1, 2), x[..., :32]):
        assert gluon._aligned(fits) is fits
    for odd in (x[..., 1:], x.transpose(2, 3), x[:, :, :1].expand(2, 100, 4, 64)):
        assert gluon._aligned(odd).is_contiguous() and torch.equal(gluon._aligned(odd).isnan(), odd.isnan())
