"""The attention study: from which length and density does block-sparse attention pay, and what do several GPUs add?"""

from blockshock_lib.engine.study import Study
from blockshock_lib.report import late, shared_tables
from blockshock_lib.studies.attention.axes import AXES
from blockshock_lib.studies.attention.methods import METHODS
from blockshock_lib.studies.attention.params import PRESETS, Case, Params, columns, expand
from blockshock_lib.studies.attention.phases import METRICS, PHASES

_SCALING = "studies.attention.scaling"
_PROMISES = "studies.attention.promises"

_HYPOTHESES = {
    "attention_speed": (late("studies.attention.hypotheses:a1"), late("studies.attention.hypotheses:a2")),
    "attention_scaling": (
        late(f"{_SCALING}_hypotheses:a3"),
        *(late(f"{_SCALING}_hypotheses:stated", f"A4{letter}") for letter in "abcdefghijk"),
        *(late(f"{_SCALING}_hypotheses:advised", f"A4{letter}") for letter in "lmn"),
        late(f"{_SCALING}_hypotheses:a5"),
    ),
}

STUDY = Study(
    name="attention",
    question="From which length and density does block-sparse attention pay, and what do several GPUs add?",
    params=Params,
    case=Case,
    expand=expand,
    phases=PHASES,
    methods=METHODS,
    metrics=METRICS,
    columns=columns,
    plan=({"pattern": "pattern"}, {"lengths": "length", "shape": "heads", "block": "block", "dtype": "dtype"}),
    axes=AXES,
    twin=(AXES.over,),
    hypotheses=_HYPOTHESES,
    problem="blockshock_lib.studies.attention.problem:AttentionProblem",
    need="blockshock_lib.studies.attention.need:need",
    presets=PRESETS,
    defaults={"methods": "all", "profile": "none"},
    answers={
        "": late(f"{_PROMISES}:answer"),
        "attention_correctness": late(
            "report.answer:checked", "every pattern is right by every kernel that can run here"
        ),
        "attention_speed": late("studies.attention.report:answer"),
        "attention_scaling": late(f"{_SCALING}_report:answer"),
    },
    summary=late("studies.attention.report:summary"),
    results=late(f"{_PROMISES}:page"),
    joined=True,
    tables=shared_tables(AXES, _HYPOTHESES)
    | {
        "times": late("studies.attention.report:times"),
        "break-even": late("studies.attention.report:break_even"),
        "lists": late("studies.attention.report:lists"),
        "over FlexAttention": late(f"{_PROMISES}:rivals"),
        "auto": late(f"{_PROMISES}:choices"),
        "auto, shares": late(f"{_PROMISES}:shares"),
        "dilated": late(f"{_PROMISES}:gathered"),
        "speed-ups": late(f"{_SCALING}_report:speeds"),
        "parts of a step": late(f"{_SCALING}_report:waterfall"),
        "memory": late(f"{_SCALING}_report:memory"),
        "models": late(f"{_SCALING}_report:models"),
        "gradients": late(f"{_SCALING}_report:gradients"),
        "hybrid": late(f"{_SCALING}_report:block"),
    },
    figures={
        "checks": late("report.plots:check_matrix", AXES),
        "time over density": late("studies.attention.plots:time_over_density"),
        "backward over density": late("studies.attention.plots:time_over_density", "backward"),
        "share of dense": late("studies.attention.plots:share_of_dense"),
        "speed-up": late(f"{_SCALING}_plots:speed_up"),
        "speed-up over dense": late(f"{_SCALING}_plots:speed_up", "dense"),
        "waterfall": late(f"{_SCALING}_plots:waterfall"),
        "balance": late(f"{_SCALING}_plots:balance"),
    },
)
