"""The keeping of plans, against a fake of nvmath's bindings. Values and streams: tests/gpu/test_small.py."""

import contextlib
import ctypes
import itertools
import sys
from collections import OrderedDict
from functools import partial, partialmethod
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from blockshock_lib.kernels.sparse24 import plans
from blockshock_lib.kernels.sparse24.plans import Setting

CUDA = torch.device("cuda", 0)


class Library:
    """nvmath.bindings.cusparseLt on the CPU, as far as plans.py calls it. `made`: object -> its making, `freed`: those
    given back, `fails`: what cannot be made, `taken`: what was asked of the allocator, `left`: what is still out.
    """

    class cuSPARSELtError(Exception):
        pass

    Sparsity = SimpleNamespace(SPARSITY_50_PERCENT=0)
    ComputeType = SimpleNamespace(COMPUTE_32F=1)
    MatmulAlg = SimpleNamespace(DEFAULT=0)
    MatmulAlgAttribute = SimpleNamespace(CONFIG_ID="alg_id", SPLIT_K="split_k", SPLIT_K_MODE="split_k_mode")

    def __init__(self):
        self.fails, self.taken, self.left = "", [], []
        self.numbers, self.made, self.freed, self.ran = itertools.count(1), {}, [], []

    def _make(self, name, handle, *args):
        if self.fails == name:
            raise self.cuSPARSELtError(name)
        number = next(self.numbers)
        self.made[number] = (name, args)
        return number

    def get_version(self, handle):
        return 801

    structured_descriptor_init = partialmethod(_make, "weight")
    dense_descriptor_init = partialmethod(_make, "dense")
    matmul_descriptor_init = partialmethod(_make, "product")
    matmul_alg_selection_init = partialmethod(_make, "algorithm")
    matmul_plan_init = partialmethod(_make, "plan")

    def matmul_get_workspace(self, handle, plan):
        return 64

    def matmul_alg_set_attribute(self, handle, thing, attribute, address, size):
        assert (attribute, size) == ("alg_id", 4) and ctypes.c_int.from_address(address).value in (3, 9)

    def _free(self, thing):
        self.freed.append(thing)

    mat_descriptor_destroy = matmul_descriptor_destroy = matmul_alg_selection_destroy = matmul_plan_destroy = _free

    def take(self, size, stream):
        self.taken.append((size, stream))
        self.left.append(len(self.taken))
        return len(self.taken)

    def give_back(self, address):
        self.left.remove(address)

    def matmul(self, handle, plan, alpha, a, b, beta, c, d, workspace, streams, count):
        if self.fails == "matmul":
            raise self.cuSPARSELtError("matmul")
        stream = ctypes.c_void_p.from_address(streams).value
        assert not workspace or workspace in self.left
        self.ran.append(SimpleNamespace(plan=plan, workspace=workspace, stream=stream))


@pytest.fixture
def library(monkeypatch):
    fake = Library()
    monkeypatch.setattr(plans, "_library", lambda: fake)
    monkeypatch.setattr(plans, "_handle", lambda index: 1000)
    monkeypatch.setattr(plans, "_plans", OrderedDict())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the index of a CPU's tensor
    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", fake.take, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", fake.give_back, raising=False)
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
        assert sum(name == "plan" for name, _ in library.made.values()) == count and len(library.ran) == 2 * count


def test_the_library_is_called_on_the_device_of_the_tensors(library, monkeypatch):
    current, seen = partial(mock.patch.object, torch._C, "_cuda_getDevice"), []
    monkeypatch.setattr(torch.cuda, "device", lambda index: current(lambda: index))
    monkeypatch.setattr(library, "matmul", lambda *_: seen.append(torch._C._cuda_getDevice()))
    with current(lambda: 3):
        run()
    assert seen == [None]  # the index of a CPU's tensor


def test_plans_are_bounded_and_the_one_unused_for_longest_is_freed_whole(library, monkeypatch):
    monkeypatch.setattr(plans, "MOST_PLANS", 2)
    run(rows=8), run(rows=16), run(rows=8)
    assert not library.freed
    run(rows=24)
    _, (product, _) = library.made[library.ran[1].plan]
    assert library.ran[1].plan in library.freed and product in library.freed and len(library.freed) == 6
    run(rows=8)
    assert library.ran[-1].plan == library.ran[0].plan


def test_a_refusal_is_a_runtime_error_and_keeps_nothing(library):
    library.fails = "plan"
    with pytest.raises(RuntimeError, match=r"refuses \(9, 1, -1\)"):
        run(setting=Setting(9))
    assert set(library.freed) == set(library.made) and not plans._plans
    library.fails = ""
    run(setting=Setting(9))
    assert len(library.ran) == 1


@pytest.mark.parametrize("fails", ["", "matmul"])
def test_workspace_is_taken_in_the_calls_stream_and_given_back_after_it(library, fails):
    library.fails = fails
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        run()
    assert library.taken == [(64, 77)] and library.left == []  # bytes, stream
    assert [(ran.workspace, ran.stream) for ran in library.ran] == ([] if fails else [(1, 77)])  # held while it runs


def test_no_memory_for_the_workspace_is_told_as_such_and_leaves_the_plan_free(library, monkeypatch):
    none = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", none)
        with pytest.raises(torch.OutOfMemoryError):
            run()
    run()
    assert len(library.ran) == 1


def test_why_products_are_planned_anew_is_said(monkeypatch):
    assert "cpu" in plans.missing(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plans._missing.cache_clear()
    plans._library.cache_clear()
    monkeypatch.setitem(sys.modules, "nvmath.bindings", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert "nvmath-python is not installed" in plans.missing(CUDA)
    plans._missing.cache_clear()
    monkeypatch.setattr(plans, "_library", Library)
    monkeypatch.setattr(plans, "_handle", lambda index: 1000)
    for version, said in (
        (800, "nvmath found cuSPARSELt 801, PyTorch has 800: packed weights need not fit"),
        (801, ""),
    ):
        monkeypatch.setattr(torch.backends.cusparselt, "version", lambda version=version: version)
        assert plans.missing(CUDA) == said
        plans._missing.cache_clear()
