"""A child that searches with faults planted in both products: `... <parent> <device>` as tuner.py starts it.

Of the library, algorithm 1 writes nothing, algorithm 2 breaks the CUDA context as an illegal instruction does,
algorithm 3 hangs. Of the small-batch kernel, the first candidate breaks the context, and those that split no sum write
zeros, which takes less time than any product.
"""

import time

import torch

from blockshock_lib.sparse24 import cslt, small, tuner

library, kernel = cslt.multiply, small.multiply


def break_context(device):
    torch.arange(4, device=device)[torch.tensor([1 << 20], device=device)]  # a failed assertion on the GPU


def planted_library(x, buffer, shape, setting, out=None, bias=None):
    if setting.alg_id == 1:
        return x.new_empty(x.shape[0], shape[0]) if out is None else out  # what is in memory must not pass for a result
    if setting.alg_id == 2 and setting.split_k == 1:
        break_context(x.device)
    if setting.alg_id == 3 and setting.split_k == 1:
        time.sleep(600)
    return library(x, buffer, shape, setting, out, bias)


def planted_kernel(x, buffer, shape, config, out=None, bias=None):
    if config == small.candidates(shape, x.shape[0])[0]:
        break_context(x.device)
    if config.split == 1:
        return (x.new_empty(x.shape[0], shape[0]) if out is None else out).zero_()
    return kernel(x, buffer, shape, config, out, bias)


if __name__ == "__main__":
    cslt.multiply, small.multiply = planted_library, planted_kernel
    tuner.main()
