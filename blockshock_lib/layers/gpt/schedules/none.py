"""Each rank is a narrow transformer of its own; one sum at the end, none between layers."""

from blockshock_lib.layers.gpt.schedule import Step, dropping


def none(layers: int) -> tuple[Step, ...]:
    return dropping(layers, range(2 * layers - 1))
