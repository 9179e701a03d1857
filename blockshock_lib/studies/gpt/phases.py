"""The phases of the gpt study: its notebooks, and what their records hold."""

from blockshock_lib.engine.study import CORE, Metric, Phase

TRAINED = {  # of a phase that trains GPTs
    "unit": "M tokens",
    "amount": lambda case: case.tokens / 1e6,
    "reached": lambda case, row: (
        row["repeat"] * case.batch * case.context / 1e6 if row["metric"] == "train_loss" else 0
    ),
    "portable": True,
}
PHASES = {
    "gpt_correctness": Phase(
        "gpt_correctness",
        "gpt_correctness.ipynb",
        "Does every schedule over ranks equal its formula, forward and backward, and sync as often as it says?",
        False,
        figures=("checks",),
    ),
    "gpt_training": Phase(
        "gpt_training",
        "gpt_training.ipynb",
        "How many all-reduces can a tensor-parallel GPT drop before its loss shows it?",
        False,
        figures=("gap over syncs", "loss over tokens"),
        **TRAINED,
    ),
    "gpt_latency": Phase(
        "gpt_latency",
        "gpt_latency.ipynb",
        "How much time does each dropped all-reduce give back on this link?",
        True,
        "forward_kernel",
        figures=("time over width", "gap over time saved"),
    ),
}
NATS = Metric("nat")
LOSSES = CORE | {
    # `repeat` is the optimizer step after which it was taken.
    **dict.fromkeys(("train_loss", "validation_loss"), NATS),
    "corpus": Metric("token"),  # trained on once over; `detail` is the digest of the corpus
    "token_rate": Metric("token/s", zero=False),  # of training, without validation and what compiles
}
METRICS = LOSSES | {
    # Of all blocks, and of a training step; then the same with its sums left out, and these alone in a row.
    **{f"{work}_{kind}": Metric("ms", zero=False) for work in ("forward", "step") for kind in ("kernel", "call")},
    **dict.fromkeys(("compute_kernel", "sums_kernel"), Metric("ms", zero=False)),
    # Of a forward, and of the backward: all-reduces that were counted as they were called.
    **dict.fromkeys(("syncs_forward", "syncs_backward"), Metric("1")),
    "weights_used": Metric("1"),  # share of the weights' entries whose gradient is not 0
    "bytes_per_token": Metric("B", zero=False),  # of the validation text
    # After training, of the model that was trained with all syncs. `detail` of the first: the sublayer whose sync alone
    # is dropped; `repeat` of the others: how many are, the least sensitive first.
    "sensitivity": Metric("nat", negative=True),
    **dict.fromkeys(("dropped_loss", "affinity_loss", "distilled_loss"), NATS),
}
