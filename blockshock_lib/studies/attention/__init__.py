"""The attention study: from which length and density does block-sparse attention pay, and what do several GPUs add?"""

from blockshock_lib.engine.study import Study
from blockshock_lib.report import late
from blockshock_lib.studies.attention.axes import AXES
from blockshock_lib.studies.attention.methods import METHODS
from blockshock_lib.studies.attention.params import PRESETS, Case, Params, columns, expand
from blockshock_lib.studies.attention.phases import METRICS, PHASES

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
    twin=AXES.over,
    hypotheses={
        "attention_speed": (late("studies.attention.hypotheses:a1"), late("studies.attention.hypotheses:a2")),
    },
    problem="blockshock_lib.studies.attention.problem:AttentionProblem",
    presets=PRESETS,
    defaults={"methods": "all", "profile": "none"},
    answers={
        "attention_correctness": late("report.answer:checked", "every pattern is right by every kernel"),
        "attention_speed": late("studies.attention.report:answer"),
    },
    summary=late("studies.attention.report:summary"),
    tables={
        "correctness": late("report.tables:correctness_table", AXES),
        "reasons": late("report.tables:reasons", AXES),
        "errors": late("report.tables:error_table", AXES),
        "patterns": late("studies.attention.report:patterns"),
        "times": late("studies.attention.report:times"),
        "break-even": late("studies.attention.report:break_even"),
        "lists": late("studies.attention.report:lists"),
        "ceilings": late("report.tables:ceilings_table"),
        "energy": late("report.tables:energy_table", AXES),
        "twin": late("report.tables:twin_table", AXES),
        "machine": late("report.tables:machine_table"),
        "kernels": late("report.tables:top_kernels", AXES),
    },
    figures={
        "checks": late("report.grid_plots:check_matrix", AXES),
        "time over density": late("studies.attention.plots:time_over_density"),
        "backward over density": late("studies.attention.plots:time_over_density", "backward"),
        "share of dense": late("studies.attention.plots:share_of_dense"),
    },
)
