"""GPT-J's and PaLM's: attention and MLP of a layer read the same, and one sum adds both (arXiv:2204.02311).

Here each has a norm of its own, as in the other schedules.
"""

from blockshock_lib.layers.gpt.schedule import Step


def parallel(layers: int) -> tuple[Step, ...]:
    return tuple(Step(s // 2 * 2 + 2, s // 2 * 2 + 2) for s in range(2 * layers))
