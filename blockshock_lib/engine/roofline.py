"""Ceilings measured in the same run, and the floor that they put under each method's time."""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from blockshock_lib.engine.timing import Timer, Work


class Ceilings(NamedTuple):
    """Of the slowest rank: copy bandwidth (bytes read + written, GB/s), dense GEMM rate (TFLOP/s), bus bandwidth of a
    large all-reduce (GB/s, by the convention of NCCL's tests; 0 without ranks to reduce over).
    """

    copy_bandwidth: float
    gemm_rate: float
    allreduce_bandwidth: float


def gemm_rate(timer: Timer, dtype: torch.dtype) -> float:
    n = 8192 if timer.device.type == "cuda" else 512
    a, b = _random(timer, 2, n, n).to(dtype)  # one draw: two would be equal
    return 2 * n**3 / _slowest_ms(timer, lambda: torch.mm(a, b)) / 1e9


def measure(timer: Timer, dtype: torch.dtype) -> Ceilings:
    """Measures the three ceilings on random data; a collective call, every rank must make it."""
    device, group = timer.device, timer.group
    big = device.type == "cuda"
    # Two tensors of at most a sixteenth of the memory each; 4 GiB on an H200. Ranks that are threads share a GPU's.
    words = min(2**30, torch.cuda.get_device_properties(device).total_memory // 64) if big else 2**22
    words //= group.world_size if big and group.handle is None else 1

    def copied() -> float:
        source = _random(timer, words)
        target = torch.empty_like(source)
        return 2 * source.nbytes / _slowest_ms(timer, lambda: target.copy_(source)) / 1e6

    def reduced() -> float:
        x, w = _random(timer, 2**27 if big else 2**18).to(dtype), group.world_size
        with torch.no_grad():
            return 2 * x.nbytes * (w - 1) / w / _slowest_ms(timer, lambda: group.all_reduce(x)) / 1e6

    return Ceilings(copied(), gemm_rate(timer, dtype), 0.0 if group.handle is None else reduced())


def _random(timer: Timer, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(timer.device).manual_seed(1), device=timer.device)


def _slowest_ms(timer: Timer, fn: Callable[[], Any]) -> float:
    work = Work("", [], fn=fn, heavy=True)
    return statistics.median(timer.interleave([[work]], warmup=2, samples=5)[work])


def compute(cost: Any, ceilings: Ceilings) -> float:
    """The larger of arithmetic and bytes, in ms. A cost has the least flops, bytes read, written and sent of a rank."""
    return max(cost.flops / ceilings.gemm_rate / 1e9, (cost.read + cost.written) / ceilings.copy_bandwidth / 1e6)


def link(cost: Any, ceilings: Ceilings) -> float:
    """What is sent over the link, in ms; 0 where nothing is, or no link was measured."""
    return cost.sent / ceilings.allreduce_bandwidth / 1e6 if cost.sent and ceilings.allreduce_bandwidth else 0.0
