"""What tuning asks of a GPU, answered by the CPU."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from blockshock_lib.sparse24 import cslt, small

from .fake_cusparselt import Matmul, compress


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
