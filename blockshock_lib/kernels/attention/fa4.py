"""FlashAttention 4 (flash-attn-4, a beta) by our lists, whole blocks of 128 only; full() and causal() need none."""

import torch
from torch import Tensor

from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.kernels.attention.pattern import causal, full
from blockshock_lib.kernels.needs import lacks


def refuse(call: Call) -> str:
    q, lists = call.q, call.lists
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] != 9:
        return "it is run on Hopper GPUs only"
    if why := lacks("flash-attn-4", "attention", "flash_attn.cute.interface:flash_attn_func"):
        return why
    if q.dtype not in (torch.bfloat16, torch.float16):
        return "it takes bf16 and fp16"
    if q.shape[-1] not in (64, 128):
        return "its block-sparse kernels are of head dimensions 64 and 128"
    if _dense(call):
        return ""
    if lists.block != 128:
        return "its lists are of blocks of 128"
    if len(lists.rows.partial):
        return "its rule for partial blocks is a CuTe function; this pattern has partial blocks"
    return ""


def attend(call: Call) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import flash_attn_func

    if _dense(call):
        how = {"causal": call.pattern.rules == causal().rules}
    else:
        rows, columns = call.kept("fa4", lambda: _tensors(call))
        how = {"block_sparse_tensors": rows, "block_sparse_tensors_bwd": columns}
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    out, lse = flash_attn_func(q, k, v, softmax_scale=call.scale, return_lse=True, **how)[:2]
    return out.transpose(1, 2), lse


def _dense(call: Call) -> bool:
    """Whether it needs no lists. Its causal mask puts the last query beside the last key, as ours does."""
    return call.pattern is not None and call.pattern.rules in (full().rules, causal().rules)


def _tensors(call: Call) -> list:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    size = call.lists.block, call.lists.block
    return [BlockSparseTensorsTorch(*way, block_size=size) for way in call.lists.padded()]
