"""The gallery of sparsity patterns: which pays on one GPU, at which sparsity and batch, at what cost in accuracy?"""

from blockshock_lib.engine.study import Study
from blockshock_lib.report import late, shared_tables
from blockshock_lib.studies.gallery.axes import AXES, SPEEDS
from blockshock_lib.studies.gallery.methods import ARMS, DECODERS, METHODS, WAYS
from blockshock_lib.studies.gallery.params import PRESETS, Case, Params, columns, expand
from blockshock_lib.studies.gallery.phases import METRICS, PHASES

_HYPOTHESES = {
    "gallery_speed": tuple(late(f"studies.gallery.hypotheses:{one}", once=True) for one in ("p1", "p2a", "p2b", "p3")),
    "gallery_decode": tuple(late(f"studies.gallery.hypotheses:{name}", once=True) for name in ("p4", "p4b")),
    "gallery_training": (late("studies.gallery.steps:p5", once=True),),
    "gallery_accuracy": tuple(late(f"studies.gallery.losses:{name}", once=True) for name in ("p6a", "p6b")),
}

STUDY = Study(
    name="gallery",
    question="Which sparsity pattern pays on this GPU, at which sparsity and batch, and what does it cost in accuracy?",
    params=Params,
    case=Case,
    expand=expand,
    phases=PHASES,
    methods=METHODS | WAYS | DECODERS | ARMS,
    metrics=METRICS,
    columns=columns,
    plan=({"pattern": "pattern", "block": "block (or 0)"}, {"weight": "weight", "batch": "B", "sparsity": "sparsity"}),
    axes=AXES,
    twin=(AXES.over, "step_dense", "decode_dense"),
    hypotheses=_HYPOTHESES,
    problem="blockshock_lib.studies.gallery.accuracy:opened",
    need="blockshock_lib.studies.gallery.need:need",
    presets=PRESETS,
    defaults={"methods": "all", "profile": "none"},
    answers={
        "": late("studies.gallery.results:answer"),
        "gallery_speed": late("studies.gallery.report:answer", once=True),
        "gallery_training": late("studies.gallery.steps:answer", once=True),
        "gallery_decode": late("studies.gallery.report:decoded", once=True),
        "gallery_accuracy": late("studies.gallery.losses:answer", once=True),
    },
    results=late("studies.gallery.results:page"),
    joined=True,
    tables=shared_tables(SPEEDS, _HYPOTHESES)
    | {
        "times": late("report.tables:speed_table", SPEEDS, "forward"),
        "times dX": late("report.tables:speed_table", SPEEDS, "dx"),
        "break-even": late("studies.gallery.report:break_even"),
        "tuned": late("studies.gallery.report:tuned"),
        "packed weight": late("studies.gallery.report:memory"),
        "steps": late("studies.gallery.steps:times"),
        "held": late("studies.gallery.steps:held"),
        "tokens": late("studies.gallery.results:tokens"),
        "losses": late("studies.gallery.losses:losses"),
    },
    figures={
        "speed over dense": late("studies.gallery.plots:speed_over_dense"),
        "fastest": late("studies.gallery.plots:fastest"),
        "time over floor": late("studies.gallery.plots:time_over_floor"),
        "break-even": late("studies.gallery.steps:break_even"),
        "tokens": late("studies.gallery.plots:tokens"),
        "nats lost": late("studies.gallery.losses:nats_lost"),
    },
)
