"""Compiling and launching, against a fake of cuda.bindings. Real kernels: tests/gpu."""

import contextlib
import ctypes
import enum
import functools
from unittest import mock

import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels import compiled

CUDA = torch.device("cuda", 0)
LOG = b"error: it is wrong\0"


class Status(enum.IntEnum):
    FINE = 0
    BROKEN = 1
    CUDA_ERROR_INVALID_CONTEXT = 201


def fake_driver():
    made = mock.Mock(launched=[], status=Status.FINE, context="primary", CUresult=Status)
    made.cuModuleLoadData.return_value = made.cuModuleGetFunction.return_value = Status.FINE, "a handle"
    made.cuCtxGetCurrent.side_effect = lambda: (Status.FINE, made.context)
    made.cuCtxSetCurrent.side_effect = lambda context: setattr(made, "context", context)
    made.cuFuncSetAttribute.side_effect = lambda *_: (made.status,)

    def launch(function, *args):
        if made.context is None:
            return (Status.CUDA_ERROR_INVALID_CONTEXT,)
        made.launched.append(args)
        return (made.status,)

    made.cuLaunchKernel.side_effect = launch
    return made


def fake_nvrtc():
    made = mock.Mock(compiled=[], status=Status.FINE)
    made.nvrtcVersion.return_value = Status.FINE, 13, 0
    made.nvrtcCreateProgram.side_effect = lambda source, *_: (Status.FINE, source)
    made.nvrtcGetProgramLogSize.return_value = Status.FINE, len(LOG)
    made.nvrtcGetProgramLog.side_effect = lambda program, log: ctypes.memmove(log, LOG, len(LOG))
    made.nvrtcGetCUBINSize.return_value, made.nvrtcGetCUBIN.return_value = (Status.FINE, 4), (Status.FINE,)

    def compiling(program, count, options):
        made.compiled.append((program.decode(), [o.decode() for o in options]))
        return (made.status,)

    made.nvrtcCompileProgram.side_effect = compiling
    return made


@pytest.fixture
def bindings(monkeypatch):
    driver, nvrtc = fake_driver(), fake_nvrtc()
    monkeypatch.setattr(compiled, "_bindings", lambda: (driver, nvrtc))
    compiled.kernel.cache_clear()
    monkeypatch.setattr(compiled, "unsupported", lambda device: "")
    answers = {"init": None, "get_device_capability": (9, 0), "device": contextlib.nullcontext()}
    for name, answer in (answers | {"current_stream": mock.Mock(), "is_current_stream_capturing": False}).items():
        monkeypatch.setattr(torch.cuda, name, mock.Mock(return_value=answer))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    return driver, nvrtc


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "kernel.cu"
    path.write_text("the source")
    return path


def test_a_kernel_is_compiled_once_for_its_defines_and_its_device(bindings, source):
    _, nvrtc = bindings
    how = dict(prelude="before ", specific=True, ROWS=64)
    one = compiled.kernel(source, "f", device=CUDA, **how)
    assert one is compiled.kernel(source, "f", device=CUDA, **how)
    assert nvrtc.compiled == [("before the source", ["--gpu-architecture=sm_90a", "--std=c++17", "-DROWS=64"])]
    assert one is not compiled.kernel(source, "f", device=torch.device("cuda", 1), **how)
    assert one is not compiled.kernel(source, "f", device=CUDA, ROWS=128)
    assert nvrtc.compiled[-1][1] == ["--gpu-architecture=sm_90", "--std=c++17", "-DROWS=128"]
    assert nvrtc.nvrtcDestroyProgram.call_count == 3


def test_what_the_compiler_says_is_the_error(bindings, source):
    _, nvrtc = bindings
    nvrtc.status = Status.BROKEN
    with pytest.raises(compiled.CompileError, match=r"BROKEN: error: it is wrong$"):
        compiled.kernel(source, "f", device=CUDA)
    assert nvrtc.nvrtcDestroyProgram.call_count == 1


def test_a_launch_passes_pointers_and_numbers_of_their_sizes_on_the_current_stream(bindings, source):
    driver, _ = bindings
    kernel = compiled.kernel(source, "f", device=CUDA)
    x = torch.zeros(8)
    kernel((2, 3, 1), 128, 1024, x, None, 5, compiled.Long(1 << 40))
    (args,) = driver.launched
    values, types = args[-2]
    assert args[:-2] == (2, 3, 1, 128, 1, 1, 1024, 70)
    assert values == (x.data_ptr(), 0, 5, 1 << 40)
    assert types == (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong)


def test_a_kernel_runs_on_its_own_device_when_another_is_current(bindings, source, monkeypatch):
    (driver, _), seen = bindings, []
    kernel = compiled.kernel(source, "f", device=torch.device("cuda", 1))
    current = functools.partial(mock.patch.object, torch._C, "_cuda_getDevice")
    monkeypatch.setattr(torch.cuda, "device", lambda index: current(lambda: index))
    driver.cuLaunchKernel.side_effect = lambda *_: seen.append(torch._C._cuda_getDevice()) or (Status.FINE,)
    kernel((1, 1, 1), 32, 0)
    assert seen == [1] and driver.cuLaunchKernel.call_args.args[8] == 71  # its device, and that one's stream


def test_a_thread_that_has_not_used_cuda_yet_is_given_the_context(bindings, source):
    driver, _ = bindings
    kernel = compiled.kernel(source, "f", device=CUDA)
    driver.context = None
    kernel((1, 1, 1), 32, 0)
    assert driver.context == "primary" and len(driver.launched) == 1


def test_nothing_is_compiled_while_a_graph_is_captured(bindings, source, monkeypatch):
    kernel = compiled.kernel(source, "f", device=CUDA)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert compiled.kernel(source, "f", device=CUDA) is kernel
    with pytest.raises(UnsupportedError, match="'g' cannot be compiled in a CUDA graph's capture"):
        compiled.kernel(source, "g", device=CUDA)


def test_a_refused_launch_is_an_error(bindings, source):
    driver, _ = bindings
    kernel = compiled.kernel(source, "f", device=CUDA)
    driver.status = Status.BROKEN
    with pytest.raises(RuntimeError, match="could not be launched: BROKEN"):
        kernel((1, 1, 1), 32, 0)
    with pytest.raises(RuntimeError, match="100000 bytes of shared memory are refused: BROKEN"):
        kernel((1, 1, 1), 32, 100_000)


def test_why_nothing_can_be_compiled_is_said(monkeypatch):
    assert "'cpu'" in compiled.unsupported(torch.device("cpu"))
    assert "no CUDA device" in compiled.unsupported(CUDA)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lost = (ImportError("no"), "the extra `cuda`"), (RuntimeError("lost\nmore"), "cannot be loaded: lost")
    for found, said in (*lost, (((fake_driver(), fake_nvrtc()),), "")):
        compiled._compiler_missing.cache_clear()
        monkeypatch.setattr(compiled, "_bindings", mock.Mock(side_effect=found))
        assert said in compiled.unsupported(CUDA)
    assert compiled.unsupported(CUDA) == ""
    compiled._compiler_missing.cache_clear()
