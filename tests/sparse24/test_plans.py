"""The keeping of plans, against a fake of nvmath's bindings. Values and streams: tests/gpu/test_small.py."""

import contextlib
import sys
from collections import OrderedDict

import pytest
import torch

from blockshock_lib.sparse24 import plans
from blockshock_lib.sparse24.tuning import Setting

from .fake_nvmath import Library

CUDA = torch.device("cuda", 0)


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


def run(rows=16, shape=(128, 192), setting=Setting(), bias=None, x=None):  # noqa: B008
    x = torch.randn(rows, shape[1]).bfloat16() if x is None else x
    out = torch.empty(rows, shape[0], dtype=x.dtype)
    return plans.multiply(x, torch.empty(1), shape, setting, out, bias), x


def test_a_plan_is_made_once_for_a_shape_a_batch_a_dtype_a_stride_and_a_setting(library):
    def plans_made():
        return sum(name == "plan" for name, _ in library.made.values())

    run(), run()
    assert plans_made() == 1 and len(library.ran) == 2
    wide = torch.randn(16, 384).bfloat16()
    others = [dict(rows=24), dict(shape=(192, 192)), dict(setting=Setting(3)), dict(x=wide[:, :192])]
    others.append(dict(x=torch.randn(16, 192).half()))
    for count, other in enumerate(others, start=2):
        run(**other), run(**other)
        assert plans_made() == count


def test_the_product_is_told_what_it_multiplies(library):
    out, x = run()
    (ran,) = library.ran
    assert ran.numbers == [1.0, 0.0] and ran.stream == 77 and ran.count == 1
    assert ran.b == x.data_ptr() and ran.c == ran.d == out.data_ptr()
    _, (product, _) = library.made[ran.plan]
    _, (op_a, op_b, w, b, c, d, _) = library.made[product]
    assert (op_a, op_b) == (0, 1) and c == d
    assert library.made[w][1][:3] == (128, 192, 192)
    assert library.made[b] == ("dense", (16, 192, 192, 16, 14, 2))  # rows, columns, stride; by rows
    assert library.made[c] == ("dense", (128, 16, 128, 16, 14, 1))  # y^T, by columns


def test_of_a_setting_what_differs_from_the_default_is_set(library):
    def attributes(setting):
        run(setting=setting)
        _, (_, algorithm) = library.made[library.ran[-1].plan]
        return library.attributes.get(algorithm, {})

    assert attributes(Setting()) == {}
    assert attributes(Setting(7)) == {"alg_id": 7}
    assert attributes(Setting(7, -1)) == {"alg_id": 7, "split_k": -1}
    assert attributes(Setting(0, 4, 2)) == {"split_k": 4, "split_k_mode": 2}


def test_a_bias_is_read_where_it_lies_now(library):
    first, second = torch.randn(128).bfloat16(), torch.randn(128).bfloat16()
    for bias in (first, second, first):
        run(bias=bias)
        _, (product, _) = library.made[library.ran[-1].plan]
        assert library.attributes[product] == {"bias": bias.data_ptr()}


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


def test_a_refusal_to_run_is_a_runtime_error_and_leaves_the_plan_free(library):
    library.fails = "matmul"
    with pytest.raises(RuntimeError, match=r"refuses to run \(9, 1, -1\): matmul"):
        run(setting=Setting(9))
    library.fails = ""
    run(setting=Setting(9))
    assert len(library.ran) == 1 and not library.freed


@pytest.mark.parametrize("fails", ["", "matmul"])
def test_workspace_is_taken_in_the_calls_stream_and_given_back_after_it(library, fails):
    library.fails = fails
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        run()
    assert library.taken == [(64, 77)] and library.left == []  # bytes, stream
    assert [ran.workspace for ran in library.ran] == ([] if fails else [1])  # while it runs it is held


def test_a_plan_that_needs_no_workspace_takes_none(library, monkeypatch):
    monkeypatch.setattr(library, "matmul_get_workspace", lambda handle, plan: 0)
    run()
    assert not library.taken and library.ran[0].workspace == 0


def test_no_memory_for_the_workspace_is_told_as_such_and_leaves_the_plan_free(library, monkeypatch):
    def none(size, stream):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", none)
        with pytest.raises(torch.OutOfMemoryError):
            run()
    run()
    assert len(library.ran) == 1


def test_the_library_is_called_on_the_device_of_the_tensors(library, monkeypatch):
    current = [3]

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    def matmul(*args):
        assert current[-1] is None  # the index of a CPU's tensor

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1])
    monkeypatch.setattr(library, "matmul", matmul)
    run()
    assert current == [3] and plans._plans


@pytest.mark.parametrize(
    ("x", "fits"),
    [
        (torch.zeros(8, 192).bfloat16(), True),
        (torch.zeros(8, 384).bfloat16()[:, 192:], True),
        (torch.zeros(8, 388).bfloat16()[:, :192], False),  # rows at 8 bytes
        (torch.zeros(8, 384).bfloat16()[:, 4:196], False),  # begins at 8 bytes
        (torch.zeros(192, 8).bfloat16().t(), False),
        (torch.zeros(1, 192).bfloat16().expand(8, 192), False),
    ],
)
def test_an_input_fits_where_its_rows_begin_at_16_bytes(x, fits):
    assert plans.fits(x) is fits


def test_why_products_are_planned_anew_is_said(monkeypatch):
    assert "cpu" in plans.missing(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plans._missing.cache_clear()
    monkeypatch.setitem(sys.modules, "nvmath.bindings", None)
    plans._library.cache_clear()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert "nvmath-python is not installed" in plans.missing(CUDA)
    plans._missing.cache_clear()
    monkeypatch.setattr(plans, "_library", Library)
    monkeypatch.setattr(plans, "_handle", lambda index: 1000)
    monkeypatch.setattr(torch.backends.cusparselt, "version", lambda: 800)
    assert plans.missing(CUDA) == "nvmath found cuSPARSELt 801, PyTorch has 800: packed weights need not fit"
    plans._missing.cache_clear()
    monkeypatch.setattr(torch.backends.cusparselt, "version", lambda: 801)
    assert plans.missing(CUDA) == ""
    plans._missing.cache_clear()


def test_what_passes_costs_the_plan_only_while_it_lasts(monkeypatch):
    capturing, failing = [True], ["CUSPARSE_STATUS_ALLOC_FAILED"]

    def handle(index):
        assert not capturing, "the library waits for the stream, which ends the capture"
        if failing:
            raise Library.cuSPARSELtError(failing[0])
        return 1000

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(plans, "_library", Library)
    monkeypatch.setattr(plans, "_handle", handle)
    monkeypatch.setattr(torch.backends.cusparselt, "version", lambda: 801)
    plans._missing.cache_clear()
    assert "while a CUDA graph is captured" in plans.missing(CUDA)
    capturing.clear()
    assert plans.missing(CUDA) == "nvmath cannot use cuSPARSELt: CUSPARSE_STATUS_ALLOC_FAILED"
    failing.clear()
    assert plans.missing(CUDA) == ""
    capturing.append(True)
    assert plans.missing(CUDA) == "", "a plan that is there serves in a capture"
    plans._missing.cache_clear()
