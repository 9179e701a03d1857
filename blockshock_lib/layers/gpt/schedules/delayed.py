"""Delayed tensor parallelism: a rank reads its own part at once, the others' `delta` sublayers later.

After github.com/edereynaldesaintmichel/DTP, dtp/model.py, and blog.kog.ai. Here all parts count 1 and land by the end;
there the own ones of the first and last `delta` sublayers count sqrt(n), the last never land, and the ranks' final
norms are averaged.
"""

from blockshock_lib.layers.gpt.schedule import Step, within


def delayed(layers: int, delta: int) -> tuple[Step, ...]:
    within("delta of delayed", [delta], 1, end := 2 * layers)
    return tuple(Step(s + 1, min(s + 1 + delta, end)) for s in range(end))
