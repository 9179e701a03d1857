"""The largest square weight whose training fits in this machine's memory, by the methods' own formulas."""

from __future__ import annotations

from collections.abc import Iterable

from blockshock_lib.engine import memory
from blockshock_lib.engine.trial import Trial

STEP = 4096
# What the driver, the communication library and the allocator's rounding take of a GPU's memory.
USABLE = 0.95


def largest(trial: Trial, names: Iterable[str]) -> None:
    """Adds a row a method: the largest multiple of STEP whose step with this case's batch and optimizer fits.

    The input is counted too. All ranks of a computer without GPUs share its memory.
    """
    shared = trial.group.world_size if trial.device.type == "cpu" else 1
    room = USABLE * memory.total(trial.device) / shared
    room = -trial.group.largest([-room], trial.device)[0]
    for name in names:
        trial.rows.add(name, "largest_n", largest_n(trial, name, room), detail="formula")


def largest_n(trial: Trial, name: str, room: float) -> int:
    """0 where not even STEP fits."""
    problem = trial.problem
    item = problem.x.element_size()

    def fits(n: int) -> bool:
        return problem.training_bytes(name, n).peak + problem.case.batch * n * item <= room

    low, high = 0, STEP
    while fits(high):
        low, high = high, 2 * high
    while high - low > STEP:
        middle = (low + high) // (2 * STEP) * STEP
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
