"""cuSPARSELt's two ops on the CPU, with the traps of the real ones; and what else tuning asks of a GPU."""

from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from blockshock_lib.kernels.sparse24 import compress as library
from blockshock_lib.kernels.sparse24 import cslt, packing, small
from blockshock_lib.kernels.sparse24.pattern import Pattern


def compress(dense, order=None):
    """Like torch._cslt_compress: values, then metadata, in one buffer [N, 9/16 K]. Reads `dense` as if contiguous."""
    n, k = dense.shape
    dense = torch.as_strided(dense, (n, k), (k, 1))
    values, metadata = packing.pack(dense, dense != 0).data
    metadata = order(Pattern.of(dense != 0)) if order else metadata.flatten()
    return torch.cat((values.flatten(), metadata.view(dense.dtype))).view(n, k * 9 // 16)


compress_in_its_order = partial(compress, order=library.metadata)  # that of the real library on an H200


class Matmul:
    """Like torch._cslt_sparse_mm; `calls` lists the settings used."""

    def __init__(self):
        self.calls = []

    def __call__(self, packed, dense, *, transpose_result, alg_id=0, split_k=1, split_k_mode=-1):
        self.calls.append((alg_id, split_k, split_k_mode))
        k, b = dense.shape
        if b % 8:
            raise RuntimeError("CUDA error: invalid value when calling `cusparseLtDenseDescriptorInit`")
        # Not contiguous means "the transpose of a contiguous one" to the real op, whatever the strides are.
        x = dense.t() if dense.is_contiguous() else torch.as_strided(dense, (b, k), (k, 1))
        n = packed.shape[0]
        values = packed.view(-1)[: n * k // 2].view(n, k // 2)
        metadata = packed.view(-1)[n * k // 2 :].view(torch.uint8).view(n, k // 8)
        y = x @ packing.unpack(values, metadata).t()
        return y if transpose_result else y.t().contiguous()


def small_multiply(x, buffer, shape, config, out=None, bias=None):
    """Like small.multiply, for any config."""
    rows = len(x)
    y = Matmul()(buffer, F.pad(x, (0, 0, 0, -rows % 8)).t(), transpose_result=True)[:rows]
    y = y if bias is None else y + bias
    return y if out is None else out.copy_(y)


def install(monkeypatch):
    """The library, the small-batch kernel and CUDA as a probe sees them; returns the `Matmul`."""
    matmul, mm = Matmul(), torch.mm
    monkeypatch.setattr(torch, "_cslt_compress", compress)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", matmul)
    monkeypatch.setattr(cslt, "unsupported", lambda device, dtype: "")
    monkeypatch.setattr(small, "unsupported", lambda device, dtype: "")
    monkeypatch.setattr(small, "multiply", small_multiply)
    monkeypatch.setattr(small, "prepare", lambda configs, rows, dtype, device: None)
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: mm(a.to(out_dtype), b.to(out_dtype)))
    gpu = SimpleNamespace(L2_cache_size=50_000, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    library = SimpleNamespace(mm_search=lambda *args: (2, 1, 1, 4))
    monkeypatch.setattr(torch._C, "_cusparselt", library, raising=False)
    return matmul
