"""Kernels in CUDA C++, compiled when they are first needed: NVRTC through cuda.bindings, the optional extra `cuda`.

A kernel lies in a .cu file beside the module that uses it; sizes that the compiler should know are its defines. It is
compiled for one device and kept as long as the process. Several threads may compile at once.
"""

import ctypes
import functools
import threading
from pathlib import Path

import torch
from torch import Tensor

from blockshock_lib.errors import BlockShockError, UnsupportedError, first_line


class CompileError(BlockShockError):
    """The compiler refused a kernel; its log is the message."""


class Long(int):
    """A kernel's argument of 64 bits; plain ints have 32."""


class Kernel:
    """A compiled kernel on one device, made by `kernel`."""

    def __init__(self, function, device: int, context):
        self.function, self.device, self.context, self._types = function, device, context, None
        self._shared = 48 << 10  # bytes a block may have without asking

    def __call__(self, grid: tuple[int, int, int], threads: int, shared: int, *args: Tensor | int | None) -> None:
        """Launches it on PyTorch's current stream of its device, whichever device is the thread's current one.

        `shared` is bytes of dynamic shared memory a block; args are tensors and None (64-bit pointers), ints (32 bits)
        and `Long`s, the same kinds at every call. RuntimeError where the driver refuses the launch.
        """
        if torch._C._cuda_getDevice() != self.device:  # the driver launches in the current context only
            with torch.cuda.device(self.device):
                return self(grid, threads, shared, *args)
        driver, _ = _bindings()
        if shared > self._shared:
            self.allow(shared)
        if self._types is None:
            long = lambda a: ctypes.c_longlong if isinstance(a, Long) else ctypes.c_int  # noqa: E731
            self._types = tuple(ctypes.c_void_p if a is None or isinstance(a, Tensor) else long(a) for a in args)
        values = tuple(a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in args)
        stream = torch._C._cuda_getCurrentRawStream(self.device)  # as Triton asks for it: 0.1 us, current_stream 4 us
        launch = (self.function, *grid, threads, 1, 1, shared, stream, (values, self._types), 0)
        (status,) = driver.cuLaunchKernel(*launch)
        if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # a thread has none before its first call of CUDA
            driver.cuCtxSetCurrent(self.context)
            (status,) = driver.cuLaunchKernel(*launch)
        if status:
            raise RuntimeError(f"a kernel could not be launched: {status.name}")

    def allow(self, shared: int) -> None:
        """Asks the driver for so many bytes of dynamic shared memory a block. RuntimeError where it has fewer."""
        driver, _ = _bindings()
        what = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        if status := driver.cuFuncSetAttribute(self.function, what, shared)[0]:
            raise RuntimeError(f"{shared} bytes of shared memory are refused: {status.name}")
        self._shared = shared


def unsupported(device: torch.device) -> str:
    """Why kernels cannot be compiled for that device; "" when they can. Makes no CUDA context."""
    if device.type != "cuda":
        return f"kernels are compiled for NVIDIA GPUs, not for the device type {device.type!r}"
    if not torch.cuda.is_available() or torch.version.hip:
        return "no CUDA device is available"
    return _compiler_missing()


@functools.cache
def kernel(
    path: Path, name: str, *, device: torch.device, prelude: str = "", specific: bool = False, **defines: int
) -> Kernel:
    """The kernel `name` of the file `path`, compiled at the first call with these defines, and `prelude` before the
    source, for a device with its index; `specific`: for exactly this generation, with its own instructions ("sm_90a").
    UnsupportedError for what `unsupported` says, and where it is not compiled while a CUDA graph is captured;
    CompileError.
    """
    if reason := unsupported(device):
        raise UnsupportedError(reason)
    torch.cuda.init()
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}{'a' if specific else ''}", "--std=c++17"]
    options += [f"-D{key}={value}" for key, value in sorted(defines.items())]
    driver, _ = _bindings()
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(f"kernel {name!r} cannot be compiled in a CUDA graph's capture: call it once before")
        cubin = _compile(prelude + path.read_text(encoding="utf-8"), options)
        torch.cuda.current_stream().synchronize()  # PyTorch's context is the thread's current one from here on
        module = _done(driver.cuModuleLoadData(cubin))
        function, context = _done(driver.cuModuleGetFunction(module, name.encode())), _done(driver.cuCtxGetCurrent())
        return Kernel(function, device.index, context)


def _compile(source: str, options: list[str]) -> bytes:
    _, nvrtc = _bindings()
    program = _done(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status:
            log = b" " * _done(nvrtc.nvrtcGetProgramLogSize(program))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(f"{status.name}: {log.decode(errors='replace').strip(' ' + chr(0))}")
        cubin = b" " * _done(nvrtc.nvrtcGetCUBINSize(program))
        _done((*nvrtc.nvrtcGetCUBIN(program, cubin), None))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _done(answer: tuple):
    status, result = answer
    if status:
        raise RuntimeError(status.name)
    return result


@functools.cache
def _bindings() -> tuple:
    from cuda.bindings import driver, nvrtc

    return driver, nvrtc


_asking = threading.Lock()


@functools.cache
def _compiler_missing() -> str:
    try:
        with _asking:
            status, *_ = _bindings()[1].nvrtcVersion()
    except ImportError:
        return "cuda.bindings is not installed (the extra `cuda`)"
    except Exception as error:  # whatever the bindings raise where they do not find the library
        return f"the run-time compiler NVRTC cannot be loaded: {first_line(error)}"
    return f"the run-time compiler NVRTC fails: {status.name}" if status else ""
