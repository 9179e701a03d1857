"""The keeping of plans, against a fake of nvmath's bindings. Values and streams: tests/gpu/test_small.py."""

import contextlib
import ctypes
import functools
import itertools
import sys
from functools import partial
from unittest import mock

import pytest
import torch

from blockshock_lib.kernels.sparse24 import plans
from blockshock_lib.kernels.sparse24.plans import Setting

CUDA = torch.device("cuda", 0)


MAKERS = "structured_descriptor", "dense_descriptor", "matmul_descriptor", "matmul_alg_selection", "matmul_plan"
REFUSED = ArithmeticError  # in place of the library's own error


def library_of():
    """nvmath.bindings.cusparseLt on the CPU, as far as plans.py calls it; its objects are the numbers 1, 2, 3, ..."""
    made, numbers = mock.MagicMock(cuSPARSELtError=REFUSED), itertools.count(1)
    made.get_version.return_value, made.matmul_get_workspace.return_value = 801, 64
    for name in MAKERS:
        getattr(made, f"{name}_init").side_effect = lambda *_: next(numbers)
    return made


def freed(library):
    return sorted(args[0] for name, args, _ in library.mock_calls if name.endswith("_destroy"))


@pytest.fixture
def library(monkeypatch):
    fake = library_of()
    monkeypatch.setattr(plans, "_library", lambda: fake)
    monkeypatch.setattr(plans, "_handle", lambda index: 1000)
    monkeypatch.setattr(plans, "_plan", functools.lru_cache(plans._Plan))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the index of a CPU's tensor
    for name in ("alloc", "delete"):
        monkeypatch.setattr(torch._C, f"_cuda_cudaCachingAllocator_raw_{name}", getattr(fake, name), raising=False)
    return fake


def run(rows=16, shape=(128, 192), setting=Setting(), x=None):  # noqa: B008
    x = torch.randn(rows, shape[1]).bfloat16() if x is None else x
    out = torch.empty(rows, shape[0], dtype=x.dtype)
    return plans.multiply(x, torch.empty(1), shape, setting, out)


def test_a_plan_is_made_once_for_a_shape_a_batch_a_dtype_a_stride_and_a_setting(library):
    wide, half = torch.randn(16, 384).bfloat16()[:, :192], torch.randn(16, 192).half()
    others = dict(rows=24), dict(shape=(192, 192)), dict(setting=Setting(3)), dict(x=wide), dict(x=half)
    for count, other in enumerate(({}, *others), start=1):
        run(**other), run(**other)
        assert library.matmul_plan_init.call_count == count and library.matmul.call_count == 2 * count


def test_the_library_is_called_on_the_device_of_the_tensors(library, monkeypatch):
    current, seen = partial(mock.patch.object, torch._C, "_cuda_getDevice"), []
    monkeypatch.setattr(torch.cuda, "device", lambda index: current(lambda: index))
    library.matmul.side_effect = lambda *_: seen.append(torch._C._cuda_getDevice())
    with current(lambda: 3):
        run()
    assert seen == [None]  # the index of a CPU's tensor


def test_plans_are_bounded_and_the_one_unused_for_longest_is_freed_whole(library, monkeypatch):
    monkeypatch.setattr(plans, "_plan", functools.lru_cache(2)(plans._Plan))
    run(rows=8), run(rows=16), run(rows=8)
    assert not freed(library)
    run(rows=24), run(rows=8)
    assert freed(library) == [7, 8, 9, 10, 11, 12]  # all of the second plan, whose own number is the last
    assert [call.args[1] for call in library.matmul.mock_calls] == [6, 12, 6, 18, 6]


def test_a_refusal_is_a_runtime_error_and_keeps_nothing(library):
    numbers, given = library.matmul_plan_init.side_effect, []
    library.matmul_alg_set_attribute.side_effect = lambda handle, thing, attribute, address, size: given.append(
        (attribute, ctypes.c_int.from_address(address).value, size)
    )
    library.matmul_plan_init.side_effect = REFUSED
    with pytest.raises(RuntimeError, match=r"refuses \(9, 1, -1\)"):
        run(setting=Setting(9))
    assert freed(library) == [1, 2, 3, 4, 5] and not plans._plan.cache_info().currsize
    library.matmul_plan_init.side_effect = numbers
    run(setting=Setting(9))
    assert library.matmul.call_count == 1 and given == [(library.MatmulAlgAttribute.CONFIG_ID, 9, 4)] * 2


def test_why_products_are_planned_anew_is_said(monkeypatch):
    assert "cpu" in plans.missing(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plans._missing.cache_clear()
    plans._library.cache_clear()
    monkeypatch.setitem(sys.modules, "nvmath.bindings", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert "nvmath-python is not installed" in plans.missing(CUDA)
    plans._missing.cache_clear()
    monkeypatch.setattr(plans, "_library", library_of)
    monkeypatch.setattr(plans, "_handle", lambda index: 1000)
    for version, said in (
        (800, "nvmath found cuSPARSELt 801, PyTorch has 800: packed weights need not fit"),
        (801, ""),
    ):
        monkeypatch.setattr(torch.backends.cusparselt, "version", lambda version=version: version)
        assert plans.missing(CUDA) == said
        plans._missing.cache_clear()


@pytest.mark.parametrize("fails", [None, REFUSED])
def test_workspace_is_taken_in_the_calls_stream_held_while_it_runs_and_given_back_after_it(library, fails):
    streams = []

    def ran(handle, plan, alpha, a, b, beta, c, d, room, stream, count):
        streams.append((room, ctypes.c_void_p.from_address(stream).value))
        if fails:
            raise fails

    library.matmul.side_effect = ran
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        run()
    room = library.alloc.return_value
    assert streams == [(room, 77)] and library.alloc.call_args.args == (64, 77)  # bytes, stream
    assert library.delete.call_args.args == (room,)
    order = [name for name, *_ in library.mock_calls if name in ("alloc", "matmul", "delete")]
    assert order == ["alloc", "matmul", "delete"]
