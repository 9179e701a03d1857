"""The phases as toggles of the one engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """What the engine does for each case, after the check that every phase makes first."""

    time: bool


PHASES = {
    "phase0": Phase(time=False),
    "phase1": Phase(time=True),
}
