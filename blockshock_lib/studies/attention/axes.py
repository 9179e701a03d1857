"""How the cases and methods of the attention study are named in tables and figures."""

from blockshock_lib.report.axes import Axes, Work
from blockshock_lib.studies.attention.methods import METHODS

AXES = Axes(
    columns=("pattern", "lengths", "shape", "batch", "heads", "kv_heads", "head_dim", "q_len", "k_len", "block"),
    x="k_len",
    y="pattern",
    methods=METHODS,
    over="dense",
    under="triton",
    times={"forward": Work("a forward"), "backward": Work("a backward", ", backward"), "step": Work("a step")},
    settings=("shape", "block"),
    checked=("pattern",),
    looser=True,
    headers={
        "k_len": "keys",
        "q_len": "queries",
        "head_dim": "head dimension",
        "detail": "tensor",
        "world_size": "ranks",
    },
    words={
        "block": {block: f"blocks of {block}" for block in range(32, 257, 32)},
        "detail": {"": "out", "lse": "logsumexp", "dq": "dQ", "dk": "dK", "dv": "dV"},
    },
)
