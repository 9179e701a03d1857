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
    made = mock.Mock(CUresult=Status)
    made.cuModuleLoadData.return_value = made.cuModuleGetFunction.return_value = Status.FINE, "a handle"
    made.cuCtxGetCurrent.return_value = Status.FINE, "primary"
    made.cuLaunchKernel.return_value = made.cuFuncSetAttribute.return_value = (Status.FINE,)
    return made


def fake_nvrtc():
    made = mock.Mock()
    made.nvrtcVersion.return_value = Status.FINE, 13, 0
    made.nvrtcCreateProgram.return_value = Status.FINE, "a program"
    made.nvrtcCompileProgram.return_value = made.nvrtcGetCUBIN.return_value = (Status.FINE,)
    made.nvrtcGetProgramLogSize.return_value, made.nvrtcGetCUBINSize.return_value = (0, len(LOG)), (0, 4)
    made.nvrtcGetProgramLog.side_effect = lambda program, log: ctypes.memmove(log, LOG, len(LOG))
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


def test_a_kernel_is_compiled_once_for_its_defines_and_device_or_the_compilers_words_are_the_error(bindings, source):
    _, nvrtc = bindings
    compiling = nvrtc.nvrtcCompileProgram
    how = dict(prelude="before ", specific=True, ROWS=64)
    one = compiled.kernel(source, "f", device=CUDA, **how)
    assert one is compiled.kernel(source, "f", device=CUDA, **how)
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17", b"-DROWS=64"]
    compiling.assert_called_once_with("a program", 3, options)
    assert nvrtc.nvrtcCreateProgram.call_args.args[0] == b"before the source"
    assert one is not compiled.kernel(source, "f", device=torch.device("cuda", 1), **how)
    assert one is not compiled.kernel(source, "f", device=CUDA, ROWS=128)
    assert compiling.call_args.args[2] == [b"--gpu-architecture=sm_90", b"--std=c++17", b"-DROWS=128"]
    nvrtc.nvrtcCompileProgram.return_value = (Status.BROKEN,)
    with pytest.raises(compiled.CompileError, match=r"BROKEN: error: it is wrong$"):
        compiled.kernel(source, "g", device=CUDA)
    assert nvrtc.nvrtcDestroyProgram.call_count == 4


def test_a_launch_passes_pointers_and_sizes_on_the_current_stream_with_a_context_and_a_refusal_is_an_error(
    bindings, source
):
    driver, _ = bindings
    kernel = compiled.kernel(source, "f", device=CUDA)
    x = torch.zeros(8)
    driver.cuLaunchKernel.side_effect = [(Status.CUDA_ERROR_INVALID_CONTEXT,), (Status.FINE,)]  # in a new thread
    kernel((2, 3, 1), 128, 1024, x, None, 5, compiled.Long(1 << 40))
    _, *args, (values, types), _ = driver.cuLaunchKernel.call_args.args
    assert args == [2, 3, 1, 128, 1, 1, 1024, 70] and driver.cuCtxSetCurrent.call_args.args == ("primary",)
    assert values == (x.data_ptr(), 0, 5, 1 << 40)
    assert types == (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong)
    driver.cuLaunchKernel.side_effect = lambda *_: (Status.BROKEN,)
    driver.cuFuncSetAttribute.return_value = (Status.BROKEN,)
    for shared, words in ((0, "could not be launched: BROKEN"), (100_000, "100000 bytes of shared .* refused: BROKEN")):
        with pytest.raises(RuntimeError, match=words):
            kernel((1, 1, 1), 32, shared, x, None, 5, compiled.Long(0))


def test_a_kernel_runs_on_its_own_device_when_another_is_current(bindings, source, monkeypatch):
    (driver, _), seen = bindings, []
    kernel = compiled.kernel(source, "f", device=torch.device("cuda", 1))
    current = functools.partial(mock.patch.object, torch._C, "_cuda_getDevice")
    monkeypatch.setattr(torch.cuda, "device", lambda index: current(lambda: index))
    driver.cuLaunchKernel.side_effect = lambda *_: seen.append(torch._C._cuda_getDevice()) or (Status.FINE,)
    kernel((1, 1, 1), 32, 0)
    assert seen == [1] and driver.cuLaunchKernel.call_args.args[8] == 71  # its device, and that one's stream


def test_nothing_is_compiled_while_a_graph_is_captured(bindings, source, monkeypatch):
    kernel = compiled.kernel(source, "f", device=CUDA)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert compiled.kernel(source, "f", device=CUDA) is kernel
    with pytest.raises(UnsupportedError, match="'g' cannot be compiled in a CUDA graph's capture"):
        compiled.kernel(source, "g", device=CUDA)


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
