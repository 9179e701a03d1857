"""Compiling and launching, against a fake of cuda.bindings. Real kernels: tests/gpu."""

import contextlib
import ctypes
import enum
from types import SimpleNamespace

import pytest
import torch

from blockshock_lib import compiled
from blockshock_lib.errors import UnsupportedError

CUDA = torch.device("cuda", 0)


class Status(enum.IntEnum):
    FINE = 0
    BROKEN = 1
    CUDA_ERROR_INVALID_CONTEXT = 201


class Driver:
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")
    CUresult = Status

    def __init__(self):
        self.launched, self.allowed, self.status, self.context = [], [], Status.FINE, "primary"

    def cuCtxGetCurrent(self):
        return Status.FINE, self.context

    def cuCtxSetCurrent(self, context):
        self.context = context
        return (Status.FINE,)

    def cuModuleLoadData(self, cubin):
        return Status.FINE, cubin

    def cuModuleGetFunction(self, module, name):
        return Status.FINE, (module, name)

    def cuFuncSetAttribute(self, function, what, value):
        self.allowed.append(value)
        return (self.status,)

    def cuLaunchKernel(self, function, *args):
        if self.context is None:
            return (Status.CUDA_ERROR_INVALID_CONTEXT,)
        self.launched.append((function, args))
        return (self.status,)


class Nvrtc:
    def __init__(self, log=b"error: it is wrong"):
        self.compiled, self.destroyed, self.status, self.log = [], 0, Status.FINE, log

    def nvrtcVersion(self):
        return Status.FINE, 13, 0

    def nvrtcCreateProgram(self, source, name, *_):
        return Status.FINE, source

    def nvrtcDestroyProgram(self, program):
        self.destroyed += 1

    def nvrtcCompileProgram(self, program, count, options):
        self.compiled.append((program.decode(), [o.decode() for o in options]))
        return (self.status,)

    def nvrtcGetProgramLogSize(self, program):
        return Status.FINE, len(self.log) + 1

    def nvrtcGetProgramLog(self, program, log):
        ctypes.memmove(log, self.log + b"\0", len(self.log) + 1)

    def nvrtcGetCUBINSize(self, program):
        return Status.FINE, 4

    def nvrtcGetCUBIN(self, program, cubin):
        return (Status.FINE,)


@pytest.fixture
def bindings(monkeypatch):
    driver, nvrtc = Driver(), Nvrtc()
    monkeypatch.setattr(compiled, "_bindings", lambda: (driver, nvrtc))
    monkeypatch.setattr(compiled, "_kernels", {})
    monkeypatch.setattr(compiled, "unsupported", lambda device: "")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
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
    one = compiled.kernel(source, "f", device=CUDA, prelude="before ", specific=True, ROWS=64)
    assert one is compiled.kernel(source, "f", device=CUDA, prelude="before ", specific=True, ROWS=64)
    assert nvrtc.compiled == [("before the source", ["--gpu-architecture=sm_90a", "--std=c++17", "-DROWS=64"])]
    assert one is not compiled.kernel(
        source, "f", device=torch.device("cuda", 1), prelude="before ", specific=True, ROWS=64
    )
    assert one is not compiled.kernel(source, "f", device=CUDA, ROWS=128)
    assert nvrtc.compiled[-1][1] == ["--gpu-architecture=sm_90", "--std=c++17", "-DROWS=128"]
    assert nvrtc.destroyed == 3


def test_what_the_compiler_says_is_the_error(bindings, source):
    _, nvrtc = bindings
    nvrtc.status = Status.BROKEN
    with pytest.raises(compiled.CompileError, match=r"BROKEN: error: it is wrong$"):
        compiled.kernel(source, "f", device=CUDA)
    assert nvrtc.destroyed == 1 and not compiled._kernels


def test_a_launch_passes_pointers_and_numbers_of_their_sizes_on_the_current_stream(bindings, source):
    driver, _ = bindings
    kernel = compiled.kernel(source, "f", device=CUDA)
    x = torch.zeros(8)
    kernel((2, 3, 1), 128, 1024, x, None, 5, compiled.Long(1 << 40))
    ((_, args),) = driver.launched
    values, types = args[-2]
    assert args[:-2] == (2, 3, 1, 128, 1, 1, 1024, 70)
    assert values == (x.data_ptr(), 0, 5, 1 << 40)
    assert types == (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong)


def test_a_thread_that_has_not_used_cuda_yet_is_given_the_context(bindings, source):
    driver, _ = bindings
    kernel = compiled.kernel(source, "f", device=CUDA)
    driver.context = None
    kernel((1, 1, 1), 32, 0)
    assert driver.context == "primary" and len(driver.launched) == 1


def test_a_kernel_runs_on_its_own_device_when_another_is_current(bindings, source, monkeypatch):
    driver, _ = bindings
    kernel = compiled.kernel(source, "f", device=torch.device("cuda", 1))
    current = [0]

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1])
    seen = []
    monkeypatch.setattr(driver, "cuLaunchKernel", lambda *args: seen.append((current[-1], args[8])) or (Status.FINE,))
    kernel((1, 1, 1), 32, 0)
    assert seen == [(1, 71)] and current == [0]


def test_nothing_is_compiled_while_a_graph_is_captured(bindings, source, monkeypatch):
    kernel = compiled.kernel(source, "f", device=CUDA)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert compiled.kernel(source, "f", device=CUDA) is kernel
    with pytest.raises(UnsupportedError, match="'g' cannot be compiled in a CUDA graph's capture"):
        compiled.kernel(source, "g", device=CUDA)


def test_shared_memory_beyond_the_plain_amount_is_asked_for_once(bindings, source):
    driver, _ = bindings
    kernel = compiled.kernel(source, "f", device=CUDA)
    for shared in (1000, 100_000, 100_000, 50_000, 200_000):
        kernel((1, 1, 1), 32, shared)
    assert driver.allowed == [100_000, 200_000]


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
    for raised, said in (
        (ImportError("no"), "the extra `cuda`"),
        (RuntimeError("lost\nmore"), "cannot be loaded: lost"),
    ):
        compiled._compiler_missing.cache_clear()

        def broken(error=raised):
            raise error

        monkeypatch.setattr(compiled, "_bindings", broken)
        assert said in compiled.unsupported(CUDA)
    compiled._compiler_missing.cache_clear()
    monkeypatch.setattr(compiled, "_bindings", lambda: (Driver(), Nvrtc()))
    assert compiled.unsupported(CUDA) == ""
    compiled._compiler_missing.cache_clear()


def test_without_a_compiler_a_kernel_is_refused_by_name(source):
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        compiled.kernel(source, "f", device=CUDA)
