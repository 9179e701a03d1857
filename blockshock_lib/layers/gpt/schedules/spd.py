"""Sync-point drop: the MLP reads its rank's own part of the attention; one sum adds both (arXiv:2502.20727)."""

from blockshock_lib.layers.gpt.schedule import Step, dropping


def spd(layers: int) -> tuple[Step, ...]:
    return dropping(layers, range(0, 2 * layers, 2))
