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
    "attention_speed": Phase(
        "attention_speed",
        "attention_speed.ipynb",
        "From which length and density does block-sparse attention beat the best dense kernel?",
        True,
        "forward_kernel",
        figures=("time over density", "share of dense"),
    ),
}
WORKS = ("forward", "backward")
METRICS = CORE | {
    **{f"{work}_{kind}": Metric("ms", zero=False) for work in WORKS for kind in ("kernel", "call")},
    **{f"floor_{work}": Metric("ms") for work in WORKS},
    "flops": Metric("FLOP"),  # of a forward over the blocks that are visited
    # Of a case's lists: all of it; both directions alone, from the blocks that were found; and its peak on a GPU.
    **dict.fromkeys(("list_build", "list_sort"), Metric("ms", zero=False)),
    "list_peak_bytes": Metric("B"),
    "first_call": Metric("ms", zero=False),  # a forward, with what the backend makes of the lists and compiles
    **dict.fromkeys(("density", "block_density"), Metric("1")),  # pairs that see each other; blocks that are visited
    "lists_bytes": Metric("B"),
}
