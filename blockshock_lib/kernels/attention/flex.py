"""PyTorch's FlexAttention by our lists and our rule; compiled where the device is a GPU, eager elsewhere."""

from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from blockshock_lib.kernels.attention.call import Call


def refuse(call: Call) -> str:
    if call.q.device.type == "cuda" and call.q.shape[-1] < 16:
        return "its kernels need a head dimension of 16 or more"
    if call.q.device.type == "cpu" and any(x.requires_grad for x in (call.q, call.k, call.v)):
        return "on a CPU it has no gradients"
    if call.pattern is None:
        return "its rule knows the positions of a whole sequence only"
    return ""


def attend(call: Call, options: dict | None = None) -> tuple[Tensor, Tensor]:
    heads = call.q.shape[1] != call.k.shape[1]
    mask = call.kept("flex", lambda: block_mask(call))
    run = _compiled() if call.q.device.type == "cuda" else flex.flex_attention
    aux = flex.AuxRequest(lse=True)
    out, told = run(
        *(call.q, call.k, call.v),
        block_mask=mask,
        scale=call.scale,
        enable_gqa=heads,
        kernel_options=options,
        return_aux=aux,
    )
    return out, told.lse


def block_mask(call: Call) -> flex.BlockMask:
    """Both directions from our lists, so that no matrix of blocks is made but the padded form that it takes."""
    lists, held = call.lists, []
    for rows, blocks in ((lists.rows, lists.q_blocks), (lists.columns, lists.k_blocks)):
        for at, entries in ((rows.partial_at, rows.partial), (rows.full_at, rows.full)):
            held += [each[lists.plane.long()] for each in padded(at, entries, lists.planes, blocks)]
    rule = call.pattern.mask_mod(lists.q_len, lists.k_len, call.q.device)
    lengths = (lists.q_len, lists.k_len)
    return flex.BlockMask(lengths, *held, BLOCK_SIZE=(lists.block, lists.block), mask_mod=rule)


def padded(at: Tensor, entries: Tensor, planes: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Compressed rows as counts int32 [planes, blocks] and entries int32 [planes, blocks, most], filled up with 0."""
    counts = at.diff().view(planes, blocks)
    most = max(int(counts.max()), 1)
    place = torch.arange(most, device=at.device)
    listed = place < counts[..., None]
    filled = torch.zeros(planes, blocks, most, dtype=torch.int32, device=at.device)
    filled[listed] = entries
    return counts.int(), filled


@cache
def _compiled():
    return torch.compile(flex.flex_attention, dynamic=False)
