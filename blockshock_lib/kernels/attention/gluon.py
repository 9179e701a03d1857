"""Block-sparse attention by a Gluon forward for Hopper GPUs and the Triton backward."""

import math
from functools import cache, partial

import torch
from torch import Tensor

from blockshock_lib.kernels.attention import triton
from blockshock_lib.kernels.attention.call import Call, explicit
from blockshock_lib.kernels.attention.lists import BlockLists
from blockshock_lib.kernels.needs import version

GUARDED = {"forward": triton.Config("forward", 64, 32, 4, 2)}  # the Triton kernel, where a result holds a NaN


def refuse(call: Call) -> str:
    if not call.q.is_cuda or torch.cuda.get_device_capability(call.q.device)[0] != 9:
        return "it needs a Hopper GPU"
    if why := triton.refuse(call):
        return why
    if not _installed():
        return "it needs Gluon as of Triton 3.6"
    if call.q.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 and fp16, not {call.q.dtype}"
    if call.q.shape[3] not in (64, 128):
        return f"it takes head dimensions of 64 and 128, not {call.q.shape[3]}"
    if call.lists.block % 64:
        return f"it takes blocks of a multiple of 64, not {call.lists.block}"
    return ""


@cache
def _installed() -> bool:
    return tuple(map(int, version("triton").split(".")[:2])) >= (3, 6)


def attend(call: Call, cuts: triton.Cuts = triton.UNTUNED) -> tuple[Tensor, Tensor]:
    """cuts: of the Triton kernels."""
    return explicit(forward, partial(backward, cuts=cuts), call)


backward = triton.backward


def forward(call: Call, cuts: triton.Cuts = triton.UNTUNED) -> tuple[Tensor, Tensor]:
    """out, and lse in fp32. No cut is taken: which form is the faster is plain."""
    from blockshock_lib.kernels.attention import gluon_forward  # here, as Triton comes with PyTorch's CUDA builds only

    lists, (q, k, v) = call.lists, map(_aligned, (call.q, call.k, call.v))
    batch, heads, q_len, dim = q.shape
    groups, tile = warpgroups(lists, dim), 128 if lists.block % 128 == 0 else 64
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    bad = torch.empty((batch, heads, lists.q_blocks * lists.block // 64), dtype=torch.int32, device=q.device)
    with torch.cuda.device_of(q):
        gluon_forward.forward[lists.q_blocks * lists.block // (64 * groups), batch * heads](
            *(_descriptor(q, 64), _descriptor(k, tile), _descriptor(v, tile), out, lse, bad, out.stride()[:3]),
            *triton.taken(lists.rows, call),
            *(q_len, lists.q_blocks, heads, heads // k.shape[1], call.scale / math.log(2)),
            **dict(D=dim, BLOCK=lists.block, BLOCK_N=tile, STAGES=2, GROUPS=groups),
            **dict(num_warps=4, maxnreg=168 if groups == 2 else 128),  # one and two programs a multiprocessor
        )
    return triton.forward(call, GUARDED, 1, (out, lse, bad))


def warpgroups(lists: BlockLists, dim: int) -> int:
    """That share the tiles of a program. One, and two programs a multiprocessor, is faster where rows are short."""
    rows = max(1, lists.rows.order.numel())
    short = (len(lists.rows.full) + len(lists.rows.partial)) / rows < 32
    return 1 if lists.block % 128 or (dim == 64 and short) else 2


def _aligned(x: Tensor) -> Tensor:
    """As TMA takes it: rows of 16 bytes."""
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(step > 0 and step % 8 == 0 for step in x.stride()[:3])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _descriptor(x: Tensor, rows: int):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    shape = [1, 1, rows, x.shape[3]]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(x, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype))
