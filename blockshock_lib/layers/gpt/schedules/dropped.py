"""The sums of any sublayers but the last, which the head reads, are dropped: made with the next that is kept."""

from blockshock_lib.layers.gpt.schedule import Step, dropping, within


def dropped(layers: int, *sublayers: int) -> tuple[Step, ...]:
    return dropping(layers, within("sublayer", sublayers, 0, 2 * layers - 2))
