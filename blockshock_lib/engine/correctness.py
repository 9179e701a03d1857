"""The gate: no valid check, no number."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

# The worst that correct code has shown against a low-precision baseline sharded the same way: max ratio 1.42, RMS ratio
# 1.04. So these limits leave room for another order of summation and little for a fault.
MAX_RATIO = 2.0
RMS_RATIO = 1.25

# The baseline's own RMS error may be at most this: a few roundings of the dtype, and in fp32 those of long sums. A
# wrong baseline must not excuse a method that is as wrong.
BASELINE_RMS = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-16}


class Errors(NamedTuple):
    """Largest and RMS deviation from the truth, both over the RMS of the truth; NaN or Inf anywhere makes both
    infinite.
    """

    max: float
    rms: float


class Check(NamedTuple):
    """A method's errors, their ratios to the baseline's, and why the gate refused it ("" = it passed)."""

    errors: Errors
    max_ratio: float
    rms_ratio: float
    reason: str


# Entries that are turned to float64 at once: 1 GiB.
CHUNK = 2**27


def errors(y: torch.Tensor, truth: torch.Tensor) -> Errors:
    """Deviation of `y` from `truth`, of the same shape, in float64."""
    rows = max(1, CHUNK // max(1, truth[0].numel()))
    squares, off_squares, largest = 0.0, 0.0, 0.0
    for mine, true in zip(y.split(rows), truth.split(rows), strict=True):
        true = true.double()
        off = mine.double().sub_(true)
        squares += true.square().sum().item()
        largest = max(largest, off.abs().max().item())
        off_squares += off.square_().sum().item()
    if not squares or not math.isfinite(off_squares):
        return Errors(math.inf, math.inf)
    return Errors(largest / math.sqrt(squares / truth.numel()), math.sqrt(off_squares / squares))


def worst(checks: Iterable[Check]) -> Check:
    """The largest numbers of all and the first refusal; zeros of none."""
    found = Check(Errors(0.0, 0.0), 0.0, 0.0, "")
    for one in checks:
        found = Check(
            Errors(*map(max, found.errors, one.errors)),
            max(found.max_ratio, one.max_ratio),
            max(found.rms_ratio, one.rms_ratio),
            found.reason or one.reason,
        )
    return found


def strays(y: torch.Tensor, admitted: torch.Tensor) -> str:
    """Why `y` is not the tensor that was admitted, up to a few roundings; "" when it is."""
    found = errors(y, admitted)
    return "" if found.rms <= BASELINE_RMS[y.dtype] else f"is off by {found.rms:.3g} of its RMS"


def gate(y: torch.Tensor, expected: torch.Tensor, truth: torch.Tensor, what: str = "y") -> Check:
    """Compares y's error with that of `expected`, a low-precision product sharded the same way; both against float64.

    Passes when y has the right shape and dtype, is finite, its largest error is at most twice the baseline's, its RMS
    error at most 1.25 times the baseline's, and the baseline's own error is one that rounding explains.
    """
    bad = Errors(math.inf, math.inf)
    if y.shape != truth.shape or y.dtype != expected.dtype:
        got, want = f"{tuple(y.shape)} {y.dtype}", f"{tuple(truth.shape)} {expected.dtype}"
        return Check(bad, math.inf, math.inf, f"{what} is {got}, must be {want}")
    mine, base = errors(y, truth), errors(expected, truth)
    ratios = Check(mine, _ratio(mine.max, base.max), _ratio(mine.rms, base.rms), "")
    if not math.isfinite(mine.max):
        return ratios._replace(reason=f"{what} holds NaN or Inf")
    if not base.rms <= BASELINE_RMS[expected.dtype]:
        return ratios._replace(
            reason=f"{what}: the baseline itself is wrong: its RMS error is {base.rms:.3g} of the truth's RMS"
        )
    over = []
    if not ratios.max_ratio <= MAX_RATIO:
        over.append(f"largest error is {ratios.max_ratio:.3g}x the baseline's (allowed {MAX_RATIO:g}x)")
    if not ratios.rms_ratio <= RMS_RATIO:
        over.append(f"RMS error is {ratios.rms_ratio:.3g}x the baseline's (allowed {RMS_RATIO:g}x)")
    return ratios._replace(reason=f"{what}: {'; '.join(over)}" if over else "")


def _ratio(mine: float, base: float) -> float:
    if base == 0:
        return 1.0 if mine == 0 else math.inf
    return mine / base
