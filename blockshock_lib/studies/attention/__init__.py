"""The attention study: from which length and density does block-sparse attention pay, and what do several GPUs add?"""

from blockshock_lib.engine.study import Study
from blockshock_lib.report import answer
from blockshock_lib.report.axes import Axes, Work
from blockshock_lib.studies.attention.methods import METHODS
from blockshock_lib.studies.attention.params import PRESETS, Case, Params, columns, expand
from blockshock_lib.studies.attention.phases import METRICS, PHASES
from blockshock_lib.studies.attention.report import FIGURES, TABLES, summary

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
    problem="blockshock_lib.studies.attention.problem:AttentionProblem",
    presets=PRESETS,
    defaults={"methods": "all", "profile": "none"},
    answers={"attention_correctness": lambda frame: answer.checked(frame, "every pattern is right by every kernel")},
    summary=summary,
    tables=TABLES,
    figures=FIGURES,
)
