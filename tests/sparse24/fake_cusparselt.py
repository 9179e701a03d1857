"""cuSPARSELt's two ops on the CPU, with the traps of the real ones: their callers can be tried without a GPU."""

import torch

from blockshock_lib.sparse24 import Pattern, metadata, packing


def compress(dense):
    """Like torch._cslt_compress: values, then metadata, in one buffer [N, 9/16 K]. Reads `dense` as if contiguous."""
    n, k = dense.shape
    dense = torch.as_strided(dense, (n, k), (k, 1))
    values, metadata = packing.pack(dense, dense != 0)
    return torch.cat((values.flatten(), metadata.flatten().view(dense.dtype))).view(n, k * 9 // 16)


def compress_in_its_order(dense):
    """`compress` with the metadata where the real library keeps them on an H200."""
    n, k = dense.shape
    dense = torch.as_strided(dense, (n, k), (k, 1))
    values, order = packing.pack(dense, dense != 0)[0], metadata.of(Pattern.of(dense != 0))
    return torch.cat((values.flatten(), order.view(dense.dtype))).view(n, k * 9 // 16)


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
