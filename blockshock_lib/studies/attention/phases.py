"""The phases of the attention study: its notebooks, and what their records hold."""

from dataclasses import dataclass

from blockshock_lib.engine import study
from blockshock_lib.engine.study import CORE, Metric


@dataclass(frozen=True)
class Phase(study.Phase):
    works: tuple[str, ...] = ()
    lists: bool = False  # whether what comes before the steady state is timed


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
        works=("forward", "backward"),
        lists=True,
    ),
    "attention_scaling": Phase(
        "attention_scaling",
        "attention_scaling.ipynb",
        "What do several GPUs add to block-sparse attention?",
        True,
        "step_call",
        figures=("speed-up", "waterfall", "balance"),
        works=("forward", "step"),
    ),
}
WORKS = ("forward", "backward", "step")  # a step: a forward with its backward
PARTS = ("own", "moved", "merged")
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
    "kernel": Metric("1"),  # detail: the backend that ran, and how its kernels are cut
    # Of a step over ranks, each measured alone: all but what travels; what travels; the merges of partial results.
    **{f"{part}_call": Metric("ms", zero=False) for part in PARTS},
    "balance": Metric("1", zero=False),  # of a rank's own work: the mean over ranks over the slowest
    **dict.fromkeys(("sent_bytes", "rank_peak_bytes", "memory_bytes"), Metric("B")),
    "peak_bytes_formula": Metric("B"),  # of shipped records, which no table shows
    "wait_call": Metric("ms", zero=False),  # of a call for which all ranks but one only wait
    "compress_call": Metric("ms", zero=False),  # a hook alone on all gradients, without other ranks
    "gradient_error": Metric("1"),  # of what a hook gives, over the RMS of the mean gradient
    **{f"{piece}_call": Metric("ms", zero=False) for piece in ("attention", "mlp", "reduce")},
}
