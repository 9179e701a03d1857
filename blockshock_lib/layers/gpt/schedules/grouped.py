"""Parallel track: each rank goes through `depth` whole layers alone (arXiv:2602.07306); the last group may be shorter.

What the ranks made is then summed, as in tensor parallelism.
"""

from blockshock_lib.layers.gpt.schedule import Step, dropping, within


def grouped(layers: int, depth: int) -> tuple[Step, ...]:
    within("depth of grouped", [depth], 1, layers)
    return dropping(layers, {s for s in range(2 * layers) if (s + 1) % (2 * depth)})
