"""The phases of the linear study: its notebooks, and what their records hold."""

from dataclasses import dataclass

from blockshock_lib.engine import study
from blockshock_lib.engine.study import CORE, Metric
from blockshock_lib.studies.linear.methods.method import FORMULAS


@dataclass(frozen=True)
class Phase(study.Phase):
    """`backward`: the gradient of the input as well. `train`: those of weight and bias, and an optimizer, as well."""

    backward: bool = False
    train: bool = False


_SUM = "Does the sum of two sparse products equal the dense product?"
_FORWARD = "When is Block-Shock's forward faster than tensor parallelism?"
_PASS = "Does the backward pass keep the sum right, and what does it cost?"
_STEP = "What is left of Block-Shock in training?"
PHASES = {
    phase.name: phase
    for phase in (
        Phase("phase0", "phase0_correctness.ipynb", _SUM, False, "", ("checks",)),
        Phase("phase1", "phase1_forward.ipynb", _FORWARD, True, "forward_kernel", ("which to use", "speed over B1")),
        Phase("phase2", "phase2_backward.ipynb", _PASS, True, "pass_kernel", ("pass over B1",), backward=True),
        Phase(
            "phase3", "phase3_training.ipynb", _STEP, True, "step_kernel", ("step over B1",), backward=True, train=True
        ),
    )
}

LINES = {
    "torch": "B1 by RowwiseParallel",
    "compiled": "B1 by torch.compile",
    "fp8": "B1 in fp8 (other precision)",
    "fused": "B1 fused (PyTorch's own)",
}
"""Reference lines of phase 1 -> what tables and figures call them; see lines.py."""

WORKS = {
    "call": ("forward", "forward_graph", *(f"forward_{line}" for line in LINES), "pass", "step"),
    "kernel": (
        *("forward", "compute", "reduce", "dx", "reduce_dx", "backward", "pass", "dw"),
        *(f"forward_{line}" for line in LINES),
        *("optimizer", "remask", "compress", "refresh", "step"),
        # Each way of a piece, named by the detail.
        *("dw_strategy", "backward_order", "product_by", "reduce_by", "compress_by", "forward_chunks"),
    ),
}
FLOORS = (
    *("compute", "reduce", "forward", "dx", "reduce_dx", "dw", "pass"),
    *("optimizer", "remask", "compress", "refresh", "step"),
)
METRICS = CORE | {
    **{f"{work}_{kind}": Metric("ms", zero=False) for kind, works in WORKS.items() for work in works},
    "host_us": Metric("us", zero=False),  # of the host, in one eager call of a product, the device idle before it
    # The floor of a collective is there only where something is sent.
    **{f"floor_{work}": Metric("ms", zero="reduce" not in work) for work in FLOORS},
    "fp8_error_rms": Metric("1"),  # of the fp8 line from the float64 truth of what was not quantized, over its RMS
    "flops": Metric("FLOP"),
    **dict.fromkeys(("bytes_read", "bytes_written", "bytes_sent"), Metric("B")),
    **dict.fromkeys(("weight_bytes", "weight_bytes_formula", "peak_bytes_formula"), Metric("B")),
    **{f"{part}{end}": Metric("B") for part in FORMULAS for end in ("", "_formula")},
    "loss": Metric("1"),  # mean squared error; `repeat` is the step
    "largest_n": Metric("1"),  # in older runs of phase 3: the largest square weight, by 4096, whose training fits
}
