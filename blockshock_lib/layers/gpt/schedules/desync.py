"""Desynced residuals: of every k sublayers, and at the end, the last is summed, and the ranks' streams are averaged.

x <- sum over ranks of (f(x) + x / n) where summed, else x <- x + f(x): as in gpt_fast/gpt_desync_TP.py of
github.com/mayank31398/ladder-residual-inference, whose two patterns are k = 2 and 4.
"""

from blockshock_lib.layers.gpt.schedule import Step, dropping, within


def desync(layers: int, k: int) -> tuple[Step, ...]:
    within("k of desync", [k], 1, end := 2 * layers)
    return dropping(layers, {s for s in range(end - 1) if (s + 1) % k}, mean=True)
