"""The phases of the attention study: its notebooks, and what their records hold."""

from blockshock_lib.engine.study import CORE, Metric, Phase

PHASES = {
    "attention_correctness": Phase(
        "attention_correctness",
        "attention_correctness.ipynb",
        "Is every kernel right for every pattern, on one device and over ranks?",
        False,
        figures=("checks",),
    ),
}
METRICS = CORE | {
    **dict.fromkeys(("density", "block_density"), Metric("1")),  # pairs that see each other; blocks that are visited
    "lists_bytes": Metric("B"),
}
