"""cuDNN's block-sparse attention (BSA of nvidia-cudnn-frontend, experimental): whole blocks of 64 or 128."""

import torch
from torch import Tensor

from blockshock_lib.kernels.attention.call import Call, explicit
from blockshock_lib.kernels.needs import lacks


def refuse(call: Call) -> str:
    q, lists = call.q, call.lists
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, call.k, call.v))
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] != 9:
        return "it is run on Hopper GPUs only"
    if why := lacks("nvidia-cudnn-frontend", "attention", "cudnn:BSA"):
        return why
    if q.dtype not in (torch.bfloat16, torch.float16) or (grad and q.dtype != torch.bfloat16):
        return "it takes bf16, and fp16 without gradients"
    if q.shape[-1] not in (64, 96, 128) or (grad and q.shape[-1] != 128):
        return "it takes head dimensions 64, 96 and 128, and with gradients 128 only"
    if grad and q.shape[1] != call.k.shape[1]:
        return "with gradients it needs as many heads of keys as of queries"
    if lists.block not in (64, 128):
        return "its lists are of blocks of 64 or 128"
    if len(lists.rows.partial):
        return "it has no partial blocks; this pattern has some"
    if grad and call.return_lse:
        return "its logsumexp has no gradient"
    return ""


def attend(call: Call) -> tuple[Tensor, Tensor]:
    return explicit(_forward, _backward, call)


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    from cudnn import BSA

    made = BSA.block_sparse_attention_forward(call.q, call.k, call.v, allow_empty_block_nums=True, **_options(call))
    return made["o_tensor"], made["lse_tensor"]


def _backward(call: Call, dout: Tensor, out: Tensor, lse: Tensor, dlse: None) -> tuple[Tensor, Tensor, Tensor]:
    from cudnn import BSA

    made = BSA.block_sparse_attention_backward(dout.contiguous(), call.q, call.k, call.v, out, lse, **_options(call))
    return made["dq_tensor"], made["dk_tensor"], made["dv_tensor"]


def _options(call: Call) -> dict:
    heads = call.q.shape[:2]

    def make():
        return [x.expand(*heads, *x.shape[2:]).contiguous() for x in call.lists.padded()[0][2:]]

    counts, indices = call.kept(f"cudnn {heads}", make)
    shape = {"sparse_block_size": call.lists.block, "softmax_scale": call.scale}
    return {"q2k_block_index": indices, "q2k_block_nums": counts} | shape
