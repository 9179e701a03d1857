"""Ladder residual: a sublayer reads all but the result of the one before, whose sum runs beside it (arXiv:2501.06589).

The last two land together at the end: one sum fewer than two a layer.
"""

from blockshock_lib.layers.gpt.schedule import Step


def ladder(layers: int) -> tuple[Step, ...]:
    lands = (min(s + 2, 2 * layers) for s in range(2 * layers))
    return tuple(Step(at, at) for at in lands)
