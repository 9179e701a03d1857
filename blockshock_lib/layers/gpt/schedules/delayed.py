"""Delayed tensor parallelism: a rank reads its own part at once, the others' `delta` sublayers later.

After github.com/edereynaldesaintmichel/DTP, dtp/model.py, and blog.kog.ai. With "scaled" the own parts of the first and
last `delta` sublayers count sqrt(n) until they land. Here they then count 1 as the others', and all parts land at the
end; there the scale stays, the last never land, and the ranks' final norms are averaged.
"""

from blockshock_lib.errors import allowed
from blockshock_lib.layers.gpt.schedule import Step, within

OWN = ("plain", "scaled")


def delayed(layers: int, delta: int, own: str = "plain") -> tuple[Step, ...]:
    within("delta of delayed", [delta], 1, end := 2 * layers)
    if own not in OWN:
        raise ValueError(f"unknown own {own!r} of delayed; {allowed(own, OWN)}")
    scaled = [own == "scaled" and not delta <= s < end - delta for s in range(end)]
    return tuple(Step(s + 1, min(s + 1 + delta, end), "sqrt(n)" if scaled[s] else "1") for s in range(end))
