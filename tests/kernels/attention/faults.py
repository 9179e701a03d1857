"""Right attention with one fault: each is planted against the gate of the tuner and against that of the study."""

import math
from dataclasses import replace

import torch

from blockshock_lib.kernels.attention import reference
from blockshock_lib.layers import attention
from tests.kernels.attention.dense import listed


def over_keys(call, part):
    """Out and lse over some of the keys, bool."""
    mask = torch.stack([listed(call.lists, plane) & part for plane in range(call.lists.planes)])[
        call.lists.plane.long()
    ]
    return reference.attend(replace(call, lists=attention.from_mask(mask).lists(*mask.shape[2:], call.lists.block)))


def planted(call, fault):
    """(out, lse) of the reference with the fault of that name; "" is right."""
    lists = call.lists
    if fault == "list ignored":
        return reference.attend(replace(call, lists=attention.full().lists(lists.q_len, lists.k_len, lists.block)))
    if fault == "stale tail":  # the last keys are read where the ones before lie
        call = replace(call, k=torch.cat((call.k[:, :, :-20], call.k[:, :, -40:-20]), 2))
    if fault == "averaged chunks":
        every = torch.arange(call.k.shape[2])
        (a, lse_a), (b, lse_b) = (over_keys(call, every % 2 == i) for i in range(2))
        return (a + b) / 2, torch.logaddexp(lse_a, lse_b)
    out, lse = reference.attend(call)
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
    if fault == "empty rows average the values":
        out = torch.where(lse.isinf()[..., None], call.v.mean(), out)
    return out, lse


FAULTS = ["list ignored", "stale tail", "averaged chunks", "zero dQ", "lse in base 2", "not a number"]
FAULTS += ["one row of another head"]
"""Those that any pattern shows."""
