"""cuSPARSELt's product with a plan that is made once, through nvmath.bindings.cusparseLt (the optional extra `cuda`).

The plan is kept, for a weight's shape, a batch, a dtype, a setting and the place of a bias; it holds no weight. A call
costs one launch. Workspace is taken from PyTorch's allocator in every call: calls on several streams, and calls in a
captured graph beside others, never share it.
"""

import ctypes
import functools
import threading
import weakref
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from blockshock_lib.errors import UnsupportedError, first_line
from blockshock_lib.kernels.sparse24.packing import ALIGNMENT, aligned

MOST_PLANS = 512  # kept at once; the one unused for longest goes. A plan takes about 0.5 ms and a few kilobytes
_NO_MEMORY = ("out of memory", "alloc_failed", "insufficient_resources")  # of an error that may pass
_TYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
_COLUMN, _ROW = 1, 2  # cusparseOrder_t
_PLAIN, _TRANSPOSED = 0, 1  # cusparseOperation_t


class Setting(NamedTuple):
    """One way to run cuSPARSELt's product. The defaults are the library's own; split_k -1 is its "segment-K"."""

    alg_id: int = 0
    split_k: int = 1
    split_k_mode: int = -1

    def valid(self) -> bool:
        return self.alg_id >= 0 and self.split_k != 0


def missing(device: torch.device) -> str:
    """Why products are planned anew in each call there; "" where plans are kept. Asked once, but again after what
    passes: a CUDA graph's capture, in which it cannot be asked, or a lack of memory.
    """
    if device.type != "cuda":
        return f"cuSPARSELt runs on NVIDIA GPUs, not on the device type {device.type!r}"
    try:
        return _missing()
    except (UnsupportedError, torch.OutOfMemoryError) as passing:  # which no cache keeps
        return first_line(passing)


@functools.cache
def _missing() -> str:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError("nvmath cannot be asked while a CUDA graph is captured: run a product once before")
    try:
        library = _library()
        theirs, ours = library.get_version(_handle(torch.cuda.current_device())), torch.backends.cusparselt.version()
    except ImportError:
        return "nvmath-python is not installed (the extra `cuda`)"
    except Exception as error:  # whatever the bindings raise where they do not find the library
        reason = f"nvmath cannot use cuSPARSELt: {first_line(error)}"
        if any(words in str(error).lower() for words in _NO_MEMORY):
            raise torch.OutOfMemoryError(reason) from None
        return reason
    if theirs != ours:
        return f"nvmath found cuSPARSELt {theirs}, PyTorch has {ours}: packed weights need not fit"
    return ""


def fits(x: Tensor) -> bool:
    """Whether x [B, K] can be read as it lies: a slice of a wider tensor can, where its rows begin at 16 bytes."""
    row, step = x.stride()
    return step == 1 and row >= x.shape[1] and not row % 8 and aligned(x)


def multiply(
    x: Tensor, buffer: Tensor, shape: tuple[int, int], setting: Setting, out: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x [B, K] times the weight [N, K] in `buffer`, transposed, plus bias [N]: into out [B, N]. Unchecked: x as `fits`
    has it, B a multiple of 8, out contiguous, out and bias aligned, all of one 16-bit dtype on one device, the thread's
    current one or not. RuntimeError where the library refuses the setting.
    """
    index = x.device.index
    if torch._C._cuda_getDevice() != index:  # the library launches on the current device
        with torch.cuda.device(index):
            return multiply(x, buffer, shape, setting, out, bias)
    pointer = 0 if bias is None else bias.data_ptr()
    with _making:
        plan = _plan(index, *shape, x.shape[0], x.stride(0), x.dtype, setting, pointer)
    with plan.lock:
        plan.run(buffer.data_ptr(), x.data_ptr(), out.data_ptr(), torch._C._cuda_getCurrentRawStream(index))
    return out


class _Plan:
    """The library's objects for one kind of product. `lock` is held while it runs: the library notes the addresses of a
    call in the plan, and two threads at once made an illegal access to memory (cuSPARSELt 0.8.0).
    """

    def __init__(self, index, n, k, rows, stride, dtype, setting, bias):
        library, kind = _library(), _TYPES[dtype]
        self.handle, self.setting, self.lock, self.made = _handle(index), setting, threading.Lock(), ExitStack()
        self.stream = ctypes.c_void_p()  # of the call that runs; the library takes a list of streams
        self.streams = ctypes.addressof(self.stream)
        weakref.finalize(self, self.made.close).atexit = False  # pushed out, and run by no call any more
        h = self.handle
        try:
            half, gone = library.Sparsity.SPARSITY_50_PERCENT, library.mat_descriptor_destroy
            w = self._keep(library.structured_descriptor_init(h, n, k, k, ALIGNMENT, kind, _ROW, half), gone)
            x = self._keep(library.dense_descriptor_init(h, rows, k, stride, ALIGNMENT, kind, _ROW), gone)
            # y^T [N, B] by columns is y [B, N] by rows.
            y = self._keep(library.dense_descriptor_init(h, n, rows, n, ALIGNMENT, kind, _COLUMN), gone)
            operands = _PLAIN, _TRANSPOSED, w, x, y, y, library.ComputeType.COMPUTE_32F
            product = self._keep(library.matmul_descriptor_init(h, *operands), library.matmul_descriptor_destroy)
            if bias:
                attribute = library.MatmulDescAttribute.BIAS_POINTER
                self._set(library.matmul_desc_set_attribute, product, attribute, ctypes.c_void_p(bias))
            chosen = library.matmul_alg_selection_init(h, product, library.MatmulAlg.DEFAULT)
            self._keep(chosen, library.matmul_alg_selection_destroy)
            # What the raw op sets, in its order: of a setting's three numbers only those that differ from its defaults.
            attributes = library.MatmulAlgAttribute
            wanted = {attributes.CONFIG_ID: setting.alg_id} if setting.alg_id else {}
            if setting.split_k != 1:
                wanted[attributes.SPLIT_K] = setting.split_k
                if setting.split_k_mode > 0:
                    wanted[attributes.SPLIT_K_MODE] = setting.split_k_mode
            for attribute, value in wanted.items():
                self._set(library.matmul_alg_set_attribute, chosen, attribute, ctypes.c_int(value))
            self.plan = self._keep(library.matmul_plan_init(h, product, chosen), library.matmul_plan_destroy)
            self.workspace = library.matmul_get_workspace(h, self.plan)
        except library.cuSPARSELtError as error:
            self.made.close()
            raise RuntimeError(f"cuSPARSELt refuses {tuple(setting)}: {error}") from None

    def run(self, w: int, x: int, y: int, stream: int) -> None:
        # In that stream of the thread's current device; the lock is held.
        library, size = _library(), self.workspace
        self.stream.value = stream
        # Given back once the launch is in the stream: what takes it next runs after. A tensor would cost 2 us.
        room = torch._C._cuda_cudaCachingAllocator_raw_alloc(size, stream) if size else 0
        try:
            library.matmul(self.handle, self.plan, _ONE, w, x, _ZERO, y, y, room, self.streams, 1)
        except library.cuSPARSELtError as error:  # no RuntimeError, as what the raw op raises
            raise RuntimeError(f"cuSPARSELt refuses to run {tuple(self.setting)}: {error}") from None
        finally:
            if room:
                torch._C._cuda_cudaCachingAllocator_raw_delete(room)

    def _keep(self, thing: int, destroy) -> int:
        self.made.callback(destroy, thing)
        return thing

    def _set(self, function, thing: int, attribute: int, value) -> None:
        function(self.handle, thing, attribute, ctypes.addressof(value), ctypes.sizeof(value))


_ones = ctypes.c_float(1.0), ctypes.c_float(0.0)
_ONE, _ZERO = map(ctypes.addressof, _ones)  # alpha and beta, read on the host
_plan = functools.lru_cache(MOST_PLANS)(_Plan)
_making = threading.Lock()


@functools.cache
def _handle(index: int) -> int:
    with torch.cuda.device(index):
        torch.cuda.current_stream().synchronize()
        return _library().init()


@functools.cache
def _library():
    from nvmath.bindings import cusparseLt

    return cusparseLt
