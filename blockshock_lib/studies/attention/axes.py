"""How the cases and methods of the attention study are named in tables and figures."""

from blockshock_lib.report.axes import Axes, Work
from blockshock_lib.studies.attention.methods import METHODS

AXES = Axes(
    columns=("pattern", "lengths", "shape", "batch", "heads", "kv_heads", "head_dim", "q_len", "k_len", "block"),
    x="k_len",
    y="pattern",
    methods=METHODS,
    over="reference",
    under="pull",
    times={"forward": Work("a forward")},
    settings=("shape", "block"),
    checked=("pattern",),
    headers={"k_len": "keys", "q_len": "queries", "head_dim": "head dimension", "detail": "tensor"},
    words={"detail": {"": "out", "lse": "logsumexp", "dq": "dQ", "dk": "dK", "dv": "dV"}},
)
