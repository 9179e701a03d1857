"""The phases of the gallery: its notebooks, and what their records hold."""

from blockshock_lib.engine.study import Metric, Phase
from blockshock_lib.studies.gpt.phases import LOSSES, NATS, TRAINED

PHASES = {
    "gallery_speed": Phase(
        "gallery_speed",
        "gallery_speed.ipynb",
        "Which sparsity pattern pays on this GPU, at which sparsity and batch?",
        True,
        "forward_kernel",
        ("speed over dense", "fastest", "time over floor"),
    ),
    "gallery_training": Phase(
        "gallery_training",
        "gallery_training.ipynb",
        "Does 2:4 training of weights or of activations pay, once what makes them 2:4 is paid for?",
        True,
        figures=("break-even",),
    ),
    "gallery_decode": Phase(
        "gallery_decode",
        "gallery_decode.ipynb",
        "How many tokens a second does a whole 2:4 model decode beside the dense one?",
        True,
        figures=("tokens",),
    ),
    "gallery_accuracy": Phase(
        "gallery_accuracy",
        "gallery_accuracy.ipynb",
        "How much of a model's loss does each pattern cost, pruned after training or trained so?",
        False,
        figures=("nats lost",),
        **TRAINED,
    ),
}
WORKS = ("forward", "dx")
STEP = ("sparsify", "forward", "backward", "step")  # the pieces of a training step, and all of it
METRICS = LOSSES | {
    **{f"{work}_{kind}": Metric("ms", zero=False) for work in (*WORKS, *STEP, "token") for kind in ("kernel", "call")},
    **{f"floor_{work}": Metric("ms") for work in (*WORKS, "token")},
    "greedy": Metric("1"),  # share of the sequences whose next token is the dense model's
    # Of a weight, without its gradient and the optimizer's state; of what a step holds for its backward.
    **dict.fromkeys(("weight_training", "weight_inference", "activations"), Metric("B")),
    "flops": Metric("FLOP"),  # of a forward, of the weights that are kept
    **dict.fromkeys(("packed_bytes", "packed_bytes_formula"), Metric("B")),  # as the kernel holds the weight
    **dict.fromkeys(("kept", "rows_kept"), Metric("1")),  # weights; outputs with a weight
    "teacher_loss": NATS,  # of the truth on the validation pairs
    "attention": Metric("1"),  # `detail`: PyTorch's kernels of it, one of which all methods of a decoding case take
    "compile_time": Metric("s", zero=False),  # of a compiled model's first call, in no time of it; less once on disk
    "prune_time": Metric("s", zero=False),  # of `sparsify_` with its calibration
}
