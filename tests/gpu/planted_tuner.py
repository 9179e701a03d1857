"""A child that searches with faults planted in cuSPARSELt's product: `... <parent> <device>` as tuner.py starts it.

Algorithm 1 writes nothing, algorithm 2 breaks the CUDA context as an illegal instruction does, algorithm 3 hangs.
"""

import time

import torch

from blockshock_lib.sparse24 import cslt, tuner

real = cslt.multiply


def planted(x, compressed, setting):
    if setting.alg_id == 1:
        return x.new_empty(x.shape[0], compressed.shape[0])  # what is in the memory must not pass for a result
    if setting.alg_id == 2 and setting.split_k == 1:
        torch.arange(4, device=x.device)[torch.tensor([1 << 20], device=x.device)]  # a failed assertion on the GPU
    if setting.alg_id == 3 and setting.split_k == 1:
        time.sleep(600)
    return real(x, compressed, setting)


if __name__ == "__main__":
    cslt.multiply = planted
    tuner.main()
