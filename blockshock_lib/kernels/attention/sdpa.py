"""PyTorch's own dense attention, by the fastest of its kernels: cuDNN's, else FlashAttention 2, else what there is."""

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from blockshock_lib.kernels.attention import pattern
from blockshock_lib.kernels.attention.call import Call

ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def refuse(call: Call) -> str:
    if call.pattern is None:
        return "it is dense, and this is a part of a sequence"
    if call.return_lse:
        return "it gives no logsumexp"
    if _causal(call) and call.lists.q_len != call.lists.k_len:
        return "its causal mask puts the first query beside the first key, so it needs as many queries as keys"
    if not _causal(call) and call.pattern.rules != pattern.full().rules:
        return "it is dense: it takes full() and causal(), and any other pattern as a mask of queries x keys"
    return call.spoilt() if _causal(call) else ""


def attend(call: Call) -> tuple[Tensor, None]:
    q, k, v = call.q, call.k, call.v
    with sdpa_kernel(ORDER, set_priority=True):
        heads = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, scale=call.scale, is_causal=_causal(call), enable_gqa=heads
        ), None


def _causal(call: Call) -> bool:
    return call.pattern.rules == pattern.causal().rules
