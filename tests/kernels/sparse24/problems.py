"""A weight with its mask and an input, for the tests of this folder."""

import torch

from blockshock_lib.kernels.sparse24 import masks
from blockshock_lib.kernels.sparse24.mask import MASKS


def errors(y, x, weight, mask, bias=None):
    """(largest, RMS) error against float64, each over that of a plain product of the same dtype; a bias is added in
    float32, as ours is. Where the plain product happens to be exact, a thousandth of a rounding is its error.
    """
    kept = torch.where(mask, weight, 0)
    truth = x.double() @ kept.double().t() + (0 if bias is None else bias.double())
    dense = x @ kept.t() if bias is None else (x.float() @ kept.float().t() + bias.float()).to(x.dtype)
    ours, plain = (y.double() - truth).abs(), (dense.double() - truth).abs()
    floor = torch.finfo(x.dtype).eps * truth.abs().max() * 1e-3
    largest, rms = ours.max() / plain.max().clamp_min(floor), ours.square().mean().sqrt()
    return largest.item(), (rms / plain.square().mean().sqrt().clamp_min(floor)).item()


def problem(b=16, n=128, k=192, dtype=torch.bfloat16, seed=0):
    """x [B, K], a weight [N, K] and a random mask of it."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    return torch.randn(b, k, generator=generator).to(dtype), weight, masks.make(MASKS["random"], (n, k), seed=seed)
