"""Ceilings measured in the same run, and the floor that they put under each method's time."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch

from blockshock_lib.comm import Group
from blockshock_lib.engine.phases import Phase
from blockshock_lib.engine.protocol import Cost, Problem
from blockshock_lib.engine.timing import Clock, Task


class Ceilings(NamedTuple):
    """Of the slowest rank: copy bandwidth (bytes read + written, GB/s), dense GEMM rate (TFLOP/s), bus bandwidth of a
    large all-reduce (GB/s, by the convention of NCCL's tests; 0 without ranks to reduce over).
    """

    copy_bandwidth: float
    gemm_rate: float
    allreduce_bandwidth: float


def measure(device: torch.device, dtype: torch.dtype, group: Group, repeats: int = 5) -> Ceilings:
    """Measures the three ceilings on random data; a collective call, every rank must make it."""
    big = device.type == "cuda"
    # Two tensors of at most a sixteenth of the memory each; 4 GiB on an H200.
    words = min(2**30, torch.cuda.get_device_properties(device).total_memory // 64) if big else 2**22
    clock = Clock(device, group)
    generator = torch.Generator(device).manual_seed(1)

    def rand(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    def slowest_ms(fn) -> float:
        task = Task(fn, calls=4)
        samples = [clock.sample(task) for _ in range(repeats + 1)][1:]
        return group.largest([statistics.median(samples)], device)[0]

    def copied() -> float:
        source = rand(words, dtype=torch.float32)
        target = torch.empty_like(source)
        return 2 * source.nbytes / slowest_ms(lambda: target.copy_(source)) / 1e6

    def multiplied() -> float:
        n = 8192 if big else 512
        a, b = rand(n, n), rand(n, n)
        return 2 * n**3 / slowest_ms(lambda: torch.mm(a, b)) / 1e9

    def reduced() -> float:
        x, w = rand(2**27 if big else 2**18), group.world_size
        with torch.no_grad():
            return 2 * x.nbytes * (w - 1) / w / slowest_ms(lambda: group.all_reduce(x)) / 1e6

    return Ceilings(copied(), multiplied(), 0.0 if group.handle is None else reduced())


def floors(cost: Cost, ceilings: Ceilings, chunks: int = 1) -> dict[str, float]:
    """Least times in ms that the ceilings allow: `floor_compute` (the larger of arithmetic and bytes), `floor_reduce`,
    and `floor_forward` with the batch cut into `chunks`: their sum for one. For c the longer of the two hides the other
    but for one piece, the first product or the last reduction: longer + shorter / c.
    """
    found = {"floor_compute": compute(cost, ceilings)}
    if cost.sent and ceilings.allreduce_bandwidth:
        found["floor_reduce"] = link(cost, ceilings)
    longer, shorter = max(found.values()), min(found.values()) if len(found) > 1 else 0.0
    return found | {"floor_forward": longer + shorter / chunks}


def compute(cost: Cost, ceilings: Ceilings) -> float:
    """The larger of arithmetic and bytes, in ms."""
    return max(cost.flops / ceilings.gemm_rate / 1e9, (cost.read + cost.written) / ceilings.copy_bandwidth / 1e6)


def link(cost: Cost, ceilings: Ceilings) -> float:
    """What is sent over the link, in ms; 0 where nothing is, or no link was measured."""
    return cost.sent / ceilings.allreduce_bandwidth / 1e6 if cost.sent and ceilings.allreduce_bandwidth else 0.0


def phase_floors(problem: Problem, name: str, phase: Phase, ceilings: Ceilings, chunks: int = 1) -> dict[str, float]:
    """The floors of all that a phase times of a method whose forward cuts its batch into `chunks`. In a step the
    collective of dX may hide behind dW.
    """
    found = floors(problem.cost(name), ceilings, chunks)
    if not phase.backward:
        packed = problem.cost_compress(name)
        return found if packed is None else found | {"floor_compress": compute(packed, ceilings)}
    dx = problem.cost_dx(name)
    found["floor_dx"] = compute(dx, ceilings)
    if joined := link(dx, ceilings):
        found["floor_reduce_dx"] = joined
    if not phase.train:
        found["floor_pass"] = found["floor_forward"] + found["floor_dx"] + joined
        return found
    dw = problem.cost_dw(name, problem.dw_by(name))
    found["floor_dw"] = compute(dw, ceilings) + link(dw, ceilings)
    after = {"optimizer": problem.cost_optimizer(name)} | problem.cost_stages(name)
    after = {f"floor_{key}": compute(cost, ceilings) for key, cost in after.items()}
    found |= after
    backward = found["floor_dx"] + max(found["floor_dw"], joined)
    found["floor_step"] = found["floor_forward"] + backward + sum(after.values())
    return found
