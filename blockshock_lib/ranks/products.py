"""Products of 16-bit floats on a CPU that has no instructions for them.

PyTorch multiplies such numbers there one by one: [256, 512] x [512, 512] in bf16 took 100 ms, in float32 2 ms. In a
rank they are multiplied in float32 and rounded once, as a GPU does: all methods of a run alike, ours and the rivals.
"""

import warnings

import torch
from torch import Tensor

OPERATORS = ("mm", "addmm", "bmm", "baddbmm")
_replaced: list[torch.library.Library] = []  # what one replaces is replaced for as long as it is there


def widen() -> None:
    """For the rest of this process, where its CPU needs it."""
    ops, there = torch.ops.mkldnn, torch.backends.mkldnn.is_available()
    known = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    slow = [dtype for dtype, supported in known.items() if not (there and getattr(ops, supported)())]
    if slow and not _replaced:
        _replaced.append(torch.library.Library("aten", "IMPL"))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for name in OPERATORS:
                _replace(name, slow)


def _replace(name: str, slow: list[torch.dtype]) -> None:
    plain, into = (torch.library.get_kernel(f"aten::{name}{kind}", "CPU") for kind in ("", ".out"))

    def product(keys, *args, **scales):
        dtype = args[0].dtype
        # Of several dtypes torch makes an error.
        if dtype not in slow or any(isinstance(one, Tensor) and one.dtype != dtype for one in args):
            return plain.call_boxed(keys, *args, **scales)
        wide = (one.float() if isinstance(one, Tensor) else one for one in args)
        return plain.call_boxed(keys, *wide, **scales).to(dtype)

    def product_into(keys, *args, out, **scales):
        made = product(keys, *args, **scales) if args[0].dtype in slow else None
        if made is not None and (made.dtype, made.shape) == (out.dtype, out.shape):
            return out.copy_(made)
        return into.call_boxed(keys, *args, out=out, **scales)

    _replaced[0].impl(name, product, "CPU", with_keyset=True)
    _replaced[0].impl(f"{name}.out", product_into, "CPU", with_keyset=True)
