"""How the cases and methods of the gpt study are named in tables and figures."""

from blockshock_lib.report.axes import Axes, Work
from blockshock_lib.studies.gpt.methods import METHODS
from blockshock_lib.studies.gpt.params import COLUMNS

AXES = Axes(
    columns=(*COLUMNS, "trained"),
    x="width",
    y="ranks",
    methods=METHODS,
    over="tensor_parallel",
    under="grouped_2",
    times={"block": Work("a block")},
    settings=("heads", "vocab", "context", "batch", "trained"),
    checked=("width", "ranks"),
    headers={"detail": "tensor", "trained": "tokens"},
    words={"detail": {"": "logits"}},
)
