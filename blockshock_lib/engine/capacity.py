"""The largest square weight that a method can train on this machine: by its memory formula, or by its 2:4 library."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from blockshock_lib.engine import memory
from blockshock_lib.engine.protocol import Problem
from blockshock_lib.engine.trial import Trial

STEP = 4096
# What the driver, the communication library and the allocator's rounding take of a GPU's memory.
USABLE = 0.95
MEMORY, LIBRARY = "memory", "2:4 library"
"""What bounds the largest N: the detail of its row."""


def largest(trial: Trial, names: Iterable[str]) -> None:
    """Adds a row a method: the largest multiple of STEP whose step with this case's batch and optimizer fits, and which
    the method can multiply at all.

    The input is counted too. All ranks of a computer without GPUs share its memory.
    """
    shared = trial.group.world_size if trial.device.type == "cpu" else 1
    room = USABLE * memory.total(trial.device) / shared
    room = -trial.group.largest([-room], trial.device)[0]
    for name in names:
        n, bound = largest_n(trial.problem, name, room)
        trial.rows.add(name, "largest_n", n, detail=bound)


def largest_n(problem: Problem, name: str, room: float) -> tuple[int, str]:
    """(N, what bounds it); N is 0 where not even STEP fits into `room` bytes."""
    item = problem.x.element_size()

    def fits(n: int) -> bool:
        return problem.training_bytes(name, n).peak + problem.case.batch * n * item <= room

    n = last(fits)
    if not problem.unsupported(name, n):
        return n, MEMORY
    return last(lambda n: not problem.unsupported(name, n)), LIBRARY


def last(holds: Callable[[int], bool], step: int = STEP) -> int:
    """The largest multiple of `step` for which it holds, where it holds for all smaller ones; 0 if for none."""
    low, high = 0, step
    while holds(high):
        low, high = high, 2 * high
    while high - low > step:
        middle = (low + high) // (2 * step) * step
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
