"""The linear study: does a linear layer as a sum of two 2:4-sparse terms beat ordinary tensor parallelism?"""

from blockshock_lib.engine.study import Study
from blockshock_lib.studies.linear.axes import AXES
from blockshock_lib.studies.linear.hypotheses import ANSWERS, HYPOTHESES, summary
from blockshock_lib.studies.linear.methods import METHODS
from blockshock_lib.studies.linear.params import PRESETS, Case, Params, columns, expand
from blockshock_lib.studies.linear.phases import METRICS, PHASES
from blockshock_lib.studies.linear.report import FIGURES, RESULTS, TABLES

STUDY = Study(
    name="linear",
    question="Does dense by superposition, two 2:4-sparse terms on two GPUs, beat ordinary tensor parallelism?",
    params=Params,
    case=Case,
    expand=expand,
    phases=PHASES,
    methods=METHODS,
    metrics=METRICS,
    columns=columns,
    plan=(
        {"workload": "workload", "dtype": "dtype", "shape": "size (out x in)"},
        {"batch": "B", "mask": "mask", "optimizer": "optimizer"},
    ),
    axes=AXES,
    twin=(AXES.over,),
    problem="blockshock_lib.studies.linear.problem:LinearProblem",
    hypotheses=HYPOTHESES,
    summary=summary,
    answers=ANSWERS,
    tables=TABLES,
    figures=FIGURES,
    findings="findings.ipynb",
    results=RESULTS,
    need="blockshock_lib.studies.linear.costs:need",
    presets=PRESETS,
    live="blockshock_lib.studies.linear.explore:live_controls",
)
