"""PyTorch's own dense attention, by the fastest of its kernels: cuDNN's, else FlashAttention 2, else what there is.

A plain call is `F.scaled_dot_product_attention`. Where the logsumexp is wanted, so that parts of the keys can be
merged, the operators under it are called: cuDNN's or FlashAttention's, on a CPU the one that PyTorch has there.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.attention import pattern
from blockshock_lib.kernels.attention.call import Call, explicit, uncast

ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
OPERATORS = torch.ops.aten


def refuse(call: Call) -> str:
    if call.pattern is None:
        return "it is dense, and this is a part of a sequence"
    if _causal(call) and call.lists.q_len != call.lists.k_len:
        return "its causal mask puts the first query beside the first key, so it needs as many queries as keys"
    if not _causal(call) and call.pattern.rules != pattern.full().rules:
        return "it is dense: it takes full() and causal(), and any other pattern as a mask of queries x keys"
    if _causal(call) and call.scale <= 0 and call.q.device.type == "cpu":
        return f"on a CPU its causal mask makes NaN of a scale of {call.scale:g}: it needs one over 0"
    if call.return_lse and call.q.shape[1] != call.k.shape[1]:
        return "its logsumexp needs as many heads of keys as of queries"
    if call.return_lse and not _operator(call):
        return "no kernel of it gives the logsumexp of this dtype, head dimension and device"
    looks = call.q.device.type == "cpu" and not torch._C._are_functorch_transforms_active()
    if looks and not bool(call.q.detach().isfinite().all()):
        return "on a CPU it may give a query of NaN or Inf an output of 0"
    return call.spoilt() if _causal(call) else ""


@uncast
def attend(call: Call) -> tuple[Tensor, Tensor | None]:
    if call.return_lse:
        return explicit(forward, backward, call)
    q, k, v = call.q, call.k, call.v
    with sdpa_kernel(ORDER, set_priority=True):
        heads = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, scale=call.scale, is_causal=_causal(call), enable_gqa=heads
        ), None


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out, and lse in fp32 or wider."""
    name, given = _operator(call), [_plain(x) for x in (call.q, call.k, call.v)]
    run = getattr(OPERATORS, f"_scaled_dot_product_{name}").default
    given += [None, True] if name == "cudnn_attention" else []  # no bias; the logsumexp is wanted
    out, lse = run(*given, dropout_p=0.0, is_causal=_causal(call), scale=call.scale)[:2]
    return out, lse.view(call.q.shape[:3])


def backward(call: Call, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; `out` and `lse` may be those over more keys than these: P = exp(S - lse) and the row sums of
    dout * out are all that is made of them. UnsupportedError where lse has a gradient.
    """
    if dlse is not None:
        raise UnsupportedError("backend 'sdpa' cannot do this attention: its logsumexp has no gradient")
    name = _operator(call)
    run = getattr(OPERATORS, f"_scaled_dot_product_{name}_backward").default
    given = [_plain(x) for x in (dout.to(call.q.dtype), call.q, call.k, call.v, out)]
    options = {"dropout_p": 0.0, "is_causal": _causal(call), "scale": call.scale}
    if call.q.device.type == "cpu":
        return run(*given, lse, **options)
    seed = torch.zeros(2, dtype=torch.int64, device=dout.device)  # of a dropout, which there is not
    options |= {"cum_seq_q": None, "cum_seq_k": None, "max_q": call.q.shape[2], "max_k": call.k.shape[2]}
    options |= {"philox_seed": seed, "philox_offset": seed}
    lse = _plain(lse.float())
    if name == "cudnn_attention":
        options["attn_bias"] = None
        lse = lse.view(*lse.shape, *[1] * (_lse_dims(lse.device) - 3))
    return tuple(run(*given, lse, **options))


def _causal(call: Call) -> bool:
    return call.pattern.rules == pattern.causal().rules


def _operator(call: Call) -> str:
    """The one that gives the logsumexp, the same for the forward and the backward; "" where there is none."""
    q, k, v = (x.detach() for x in (call.q, call.k, call.v))
    if q.device.type == "cpu":
        return "flash_attention_for_cpu"
    if q.device.type != "cuda" or q.shape[3] % 8:
        return ""
    params = SDPAParams(q, k, v, None, 0.0, _causal(call), False)
    if q.shape[3] <= 128 and can_use_cudnn_attention(params):  # wider heads it takes without gradients only
        return "cudnn_attention"
    return "flash_attention" if can_use_flash_attention(params) else ""


def _plain(x: Tensor) -> Tensor:
    """Contiguous, and so in dimensions of one element, which may have any stride."""
    return x.contiguous().view(x.shape)


@cache
def _lse_dims(device: torch.device) -> int:
    """Of cuDNN's logsumexp: [B, H, S, 1] in some releases of PyTorch, [B, H, S] in others."""
    one = torch.zeros(1, 1, 64, 64, dtype=torch.float16, device=device)
    return OPERATORS._scaled_dot_product_cudnn_attention.default(one, one, one, None, True)[1].dim()
