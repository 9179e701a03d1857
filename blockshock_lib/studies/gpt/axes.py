"""How the cases and methods of the gpt study are named in tables and figures."""

from blockshock_lib.report.axes import Axes, Work
from blockshock_lib.studies.gpt.methods import METHODS
from blockshock_lib.studies.gpt.params import COLUMNS, LATER, LAYERS, SIZES

AXES = Axes(
    columns=(*COLUMNS, "trained", *LATER),
    x="width",
    y="ranks",
    methods=METHODS,
    over="tensor_parallel",
    under="grouped_2",
    times={"forward": Work("a forward of all blocks"), "step": Work("a training step", ", step")},
    settings=("vocab", "layers", "link", "trained", "work", "length"),
    panels=("work", "length"),
    checked=("width", "ranks"),
    looser=True,
    headers={"detail": "tensor", "trained": "tokens", "size": "width"},
    words={
        "detail": {"": "logits"},
        "trained": {0: ""},
        "layers": {LAYERS: f"{LAYERS} layers"},
        "vocab": {size["vocab"]: f"vocabulary of {size['vocab']}" for size in SIZES.values()},
        "length": {0: ""},
        "link": {"fast": "", "slow": "peer access off"},
        "work": {work: work for work in ("prefill", "decode", "step")},
    },
)
