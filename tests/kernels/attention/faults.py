"""Right attention with one fault: each is planted against the gate of the tuner and against that of the study."""

import math
from dataclasses import replace

import torch

from blockshock_lib.kernels.attention import reference
from blockshock_lib.layers import attention
from tests.kernels.attention.dense import listed, merge


def masked(call, mask):
    """Out and lse, where `mask`, of a plane -> bool [q_len, k_len], says what is seen."""
    each = torch.stack([mask(plane) for plane in range(call.lists.planes)])[call.lists.plane.long()]
    return reference.attend(replace(call, lists=attention.from_mask(each).lists(*each.shape[2:], call.lists.block)))


def halves(call):
    """Outs and lses over every other key."""
    every = torch.arange(call.k.shape[2]) % 2
    return zip(
        *(masked(call, lambda plane, i=i: listed(call.lists, plane) & (every == i)) for i in range(2)), strict=True
    )


def planted(call, fault):
    """(out, lse) of the reference with the fault of that name; "" is right."""
    lists = call.lists
    if fault == "list ignored":
        return reference.attend(replace(call, lists=attention.full().lists(lists.q_len, lists.k_len, lists.block)))
    if fault == "stale tail":  # the last keys are read where the ones before lie
        call = replace(call, k=torch.cat((call.k[:, :, :-20], call.k[:, :, -40:-20]), 2))
    if fault == "averaged chunks":
        outs, lses = halves(call)
        return sum(outs) / 2, torch.logaddexp(*lses)
    if fault == "dropped d(alpha)":  # chunks are merged, and their shares have no gradient
        outs, lses = halves(call)
        return merge(outs, [lse.detach() for lse in lses])
    if fault == "no mask of partial blocks":
        block, sides = lists.block, (lists.q_len, lists.k_len)
        whole = lambda plane: torch.kron(lists.map(plane), torch.ones(block, block)) > 0  # noqa: E731
        return masked(call, lambda plane: whole(plane)[: sides[0], : sides[1]])
    if fault == "dK of the last head":
        last = torch.arange(call.k.shape[1])[:, None, None] == call.k.shape[1] - 1
        call = replace(call, k=torch.where(last, call.k.detach(), call.k))
    if fault == "list of the first head":
        call = replace(call, lists=replace(lists, plane=lists.plane[:, :1] + 0 * lists.plane, forms={}))
    if fault == "scale of the head dimension":
        call = replace(call, scale=call.q.shape[3] ** -0.5)
    out, lse = reference.attend(call)
    if fault == "last head":
        out = torch.where(torch.arange(out.shape[1])[:, None, None] == out.shape[1] - 1, 0, out)
    if fault == "0 times NaN":
        out = out + 0 * call.v.sum(2, keepdim=True).repeat_interleave(call.q.shape[1] // call.v.shape[1], 1)
    if fault == "strides taken for those of a whole tensor" and not call.q.is_contiguous():
        out = out.roll(1, 2)
    if fault.startswith("asked for it alone"):
        lse = (lse / math.log(2) if "base 2" in fault else lse.detach()) if call.return_lse else None
    if fault == "NaN as gradient of lse":
        lse = lse.clone()
        lse.register_hook(lambda grad: grad * math.nan) if lse.requires_grad else None
    if fault == "no delta":  # what softmax takes off each gradient of a score
        level = lse.masked_fill(lse.isinf(), 0)
        out = out * (level - level.detach()).exp()[..., None].to(out.dtype)
    if fault == "backward ignores the list":
        dense = planted(call, "list ignored")[0]
        out = out.detach() + (dense - dense.detach())
    if fault == "gradients far too large":
        out = out.detach() + 300 * (out - out.detach())
    if fault == "stale dQ tail":  # of the last features
        q = torch.cat((call.q[..., :-4], call.q[..., -4:].detach()), 3)
        out = reference.attend(replace(call, q=q))[0]
    if fault == "zero dQ":
        out = reference.attend(replace(call, q=call.q.detach()))[0] + 0 * call.q
    if fault == "lse in base 2":
        lse = lse / math.log(2)
    if fault == "it raises":
        raise ImportError("a beta without its library")
    if fault == "not a number":
        out = torch.where(torch.arange(out.shape[2])[:, None] == 0, math.nan, out)
    if fault == "one row of another head":
        out = torch.cat((out[:, :, :1], out[:, :, 1:2].roll(1, 1), out[:, :, 2:]), 2)
    if fault.startswith("empty rows"):
        value = call.v.mean() if fault == "empty rows average the values" else math.nan
        out = torch.where(lse.isinf()[..., None], value, out)
    return out, lse


FAULTS = ["list ignored", "stale tail", "averaged chunks", "zero dQ", "lse in base 2", "not a number"]
FAULTS += ["one row of another head", "dropped d(alpha)", "no delta", "backward ignores the list", "stale dQ tail"]
FAULTS += ["gradients far too large", "no mask of partial blocks"]
"""Those that any pattern shows."""
RARE = ["last head", "dK of the last head", "scale of the head dimension", "0 times NaN"]
RARE += ["strides taken for those of a whole tensor"]
"""Those that show in some heads or calls alone."""


def merging(fault):
    """forward and backward of the reference with the fault of that name; "" is right."""

    def forward(call):
        out, lse = reference.forward(call)
        return out, lse / math.log(2) if fault == "lse in base 2" else lse

    def backward(call, dout, out, lse, dlse):
        own = reference.forward(call)
        out, lse = (own[0] if fault == "own out" else out), (own[1] if fault == "own lse" else lse)
        dq, dk, dv = reference.backward(call, dout, out, lse, dlse)
        dk[:, -1] *= fault != "dK of the last head"
        return dq, dk, dv

    return {"forward": forward, "backward": backward}


MERGING = ["lse in base 2", "own out", "own lse", "dK of the last head"]
