"""The phases as toggles of the one engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """What the engine does for each case, after the check that every phase makes first.

    Attributes:
        time: samples of time, and traces.
        backward: the gradient of the input as well.
        train: gradients of weight and bias, and an optimizer, as well.
    """

    time: bool
    backward: bool = False
    train: bool = False


PHASES = {
    "phase0": Phase(time=False),
    "phase1": Phase(time=True),
    "phase2": Phase(time=True, backward=True),
    "phase3": Phase(time=True, backward=True, train=True),
}
