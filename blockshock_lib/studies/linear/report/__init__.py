"""Every table and figure of the study by name: notebooks, pages and widgets ask for them with these words."""

from blockshock_lib.report import late, shared_tables
from blockshock_lib.studies.linear.axes import AXES


def _shared(place, **options):
    return late(f"report.{place}", AXES, **options)


def _own(place, *given, **options):
    return late(f"studies.linear.report.{place}", *given, **options)


_HELD = {"weights": "weights_bytes_held", "copies": "copies_bytes", "gradients": "gradient_bytes"}
_HELD |= {"optimizer": "optimizer_bytes", "activations": "activation_bytes", "peak": "peak_bytes"}
TABLES = shared_tables(AXES, None) | {
    "speed": _shared("tables:speed_table"),
    "products": _own("tables:product_table"),
    "calls": _own("tables:call_table"),
    "reference lines": _own("tables:lines_table"),
    "all-reduce": _own("tables:reduce_table"),
    "chunks": _own(
        *("tables:ways_table", "forward_chunks_kernel", "forward_kernel", "1", "2", "4"),
        missing=("forward in pieces", "only batches from 1024 are cut, and this run has none"),
        called="pieces: {}",
    ),
    "weights": _shared("tables:formula_table", metric="weight_bytes"),
    "memory": _shared("tables:memory_table", metrics={"weight": "weight_bytes", "peak": "peak_bytes"}, whole="weight"),
    "exposed": _shared("timeline:exposed"),
    "pass": _shared("tables:speed_table", stem="pass"),
    "step": _shared("tables:speed_table", stem="step"),
    "pieces": _own("tables:pieces_table"),
    "dW": _own("tables:ways_table", "dw_strategy_kernel", "dw_kernel", "full", "periodic", "exchange"),
    "order": _own("tables:ways_table", "backward_order_kernel", "backward_kernel", "overlapped", "in turn"),
    "step memory": _shared("tables:memory_table", metrics=_HELD),
    "ratios of H2": _own("law:ratios_table"),
    "hypotheses": late("studies.linear.hypotheses:words"),
    "numbers": late("studies.linear.hypotheses:numbers"),
    "law": _own("law:law_table"),
}
RESULTS = _own("results:page")
FIGURES = {
    "which to use": _shared("plots:which_to_use"),
    "which to use by energy": _shared("plots:which_to_use", metric="energy", title="Which takes the least energy"),
    "which to use on one GPU": _own("plots:one_gpu"),
    "which to use in training": _shared("plots:which_to_use", metric="step_kernel"),
    "speed over B1": _shared("plots:ratio_heatmap"),
    "step over B1": _shared("plots:ratio_heatmap", metric="step_kernel"),
    "pass over B1": _shared("plots:ratio_heatmap", metric="pass_kernel"),
    "checks": _shared("plots:check_matrix"),
    "time over B1": _own("plots:forward_over"),
    "pass time over B1": _shared("plots:time_over", metric="pass_kernel"),
    "step time over B1": _shared("plots:time_over", metric="step_kernel"),
    "timeline": _shared("timeline:timeline"),
    "law": _own("plots:law_figure"),
    "roofline": _shared(
        "machine_plots:roofline",
        claim="{label}'s 2:4 product reaches {rate} TFLOP/s of nonzeros, {share}% of the dense ceiling",
        note="FLOPs of nonzeros only: a 2:4 product with s = 2 would touch the flat roof. ",
    ),
    "loss": _own("plots:loss_curves"),
    "where": _own("plots:where_figure"),
}
"""The first of them that a run has rows for is its headline."""
