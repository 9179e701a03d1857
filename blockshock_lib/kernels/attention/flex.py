"""PyTorch's FlexAttention by our lists and our rule; compiled where the device is a GPU, eager elsewhere."""

from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from blockshock_lib.errors import UnsupportedError, first_line
from blockshock_lib.kernels.attention.call import Call, uncast

LEAKS = True  # on a GPU a NaN of a masked pair reaches other queries of its block: 0 times NaN is NaN
PATTERNS = 128  # and shapes, that are compiled in one process
# Its own choice of tiles is for blocks of 128; smaller ones must be multiples of what a kernel takes at a time.
SMALL = {"BLOCK_M": 64, "BLOCK_N": 64} | {f"BLOCK_{side}": 32 for side in ("M1", "N1", "M2", "N2")}


def refuse(call: Call) -> str:
    if call.q.device.type == "cuda" and call.q.shape[-1] < 16:
        return "its kernels need a head dimension of 16 or more"
    if call.q.device.type == "cpu" and any(x.requires_grad for x in (call.q, call.k, call.v)):
        return "on a CPU it has no gradients"
    if call.pattern is None:
        return "its rule knows the positions of a whole sequence only"
    return call.spoilt()


@uncast
def attend(call: Call, mode: str | None = None) -> tuple[Tensor, Tensor]:
    """mode: of torch.compile."""
    heads, mask = call.q.shape[1] != call.k.shape[1], call.kept("flex", lambda: block_mask(call))
    run = _compiled(mode) if call.q.device.type == "cuda" else flex.flex_attention
    how = {"block_mask": mask, "scale": call.scale, "enable_gqa": heads, "return_aux": flex.AuxRequest(lse=True)}
    if call.q.device.type == "cuda" and call.lists.block % 128:
        how["kernel_options"] = {key: min(size, call.lists.block) for key, size in SMALL.items()}
    try:
        out, told = run(call.q, call.k, call.v, **how)
    except RuntimeError as error:
        if "Inductor" not in type(error).__name__:
            raise
        raise UnsupportedError(f"FlexAttention cannot be compiled for this: {first_line(error)}") from error
    return out, told.lse


def block_mask(call: Call) -> flex.BlockMask:
    """Both directions from our lists, so that no matrix of blocks is made but the padded form that it takes."""
    lists = call.lists
    rule = call.pattern.mask_mod(lists.q_len, lists.k_len, call.q.device)
    rows, columns = lists.padded()
    lengths, sizes = (lists.q_len, lists.k_len), (lists.block, lists.block)
    return flex.BlockMask(lengths, *rows, *columns, BLOCK_SIZE=sizes, mask_mod=rule)


@cache
def _compiled(mode: str | None):
    from torch._dynamo import config  # here, as it takes a second to import

    # Each pattern and shape is compiled for itself. What comes after PyTorch's limit, 8, would run uncompiled without a
    # word, with all scores in memory.
    config.recompile_limit = max(config.recompile_limit, PATTERNS)
    return torch.compile(flex.flex_attention, dynamic=False, mode=mode)
