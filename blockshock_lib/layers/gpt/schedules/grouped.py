"""Parallel track: each rank goes through `depth` whole layers alone (arXiv:2602.07306); the last group may be shorter.

What the ranks made is then summed, as in tensor parallelism; with "mean" averaged.
"""

from dataclasses import replace

from blockshock_lib.errors import allowed
from blockshock_lib.layers.gpt.schedule import Step, dropping, within

JOINS = {"sum": "1", "mean": "1/n"}


def grouped(layers: int, depth: int, join: str = "sum") -> tuple[Step, ...]:
    within("depth of grouped", [depth], 1, layers)
    if join not in JOINS:
        raise ValueError(f"unknown join {join!r} of grouped; {allowed(join, JOINS)}")
    steps = dropping(layers, {s for s in range(2 * layers) if (s + 1) % (2 * depth)})
    return tuple(replace(step, late=JOINS[join]) for step in steps)
