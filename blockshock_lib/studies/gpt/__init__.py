"""The gpt study: how many synchronisations can a tensor-parallel GPT drop, and what does each one buy?"""

from blockshock_lib.engine.study import Study
from blockshock_lib.report import late, shared_tables
from blockshock_lib.studies.gpt.axes import AXES
from blockshock_lib.studies.gpt.methods import METHODS
from blockshock_lib.studies.gpt.params import PRESETS, Case, Params, columns, expand
from blockshock_lib.studies.gpt.phases import METRICS, PHASES

_HYPOTHESES = {
    "gpt_training": tuple(late(f"studies.gpt.hypotheses:{name}") for name in ("s1", "s2", "s4", "s5")),
    "gpt_latency": tuple(late("studies.gpt.hypotheses:s3", link) for link in ("fast", "slow")),
}
STUDY = Study(
    name="gpt",
    question="How many all-reduces can a tensor-parallel GPT drop before its loss shows it, and what does each cost?",
    params=Params,
    case=Case,
    expand=expand,
    phases=PHASES,
    methods=METHODS,
    metrics=METRICS,
    columns=columns,
    plan=(
        {"width": "width", "ranks": "ranks", "trained": "tokens trained on"},
        {"timed": "timed, tokens", "seed": "seed", "dtype": "dtype"},
    ),
    axes=AXES,
    twin=(AXES.over,),
    problem="blockshock_lib.studies.gpt.latency:opened",
    need="blockshock_lib.studies.gpt.need:need",
    presets=PRESETS,
    defaults={"methods": "all", "profile": "none"},
    hypotheses=_HYPOTHESES,
    answers={
        "gpt_correctness": late("report.answer:checked", "every schedule is its equation and syncs as it says"),
        "gpt_training": late("studies.gpt.report:answer"),
        "gpt_latency": late("studies.gpt.saved:answer"),
        "": late("studies.gpt.results:answer"),
    },
    summary=late("studies.gpt.saved:summary"),
    results=late("studies.gpt.results:page"),
    picture="gap over time saved",
    joined=True,
    tables=shared_tables(AXES, _HYPOTHESES)
    | {
        "syncs": late("studies.gpt.report:counts"),
        "losses": late("studies.gpt.report:losses"),
        "rates": late("studies.gpt.report:rates"),
        "times": late("studies.gpt.saved:times"),
        "headline": late("studies.gpt.results:headline"),
        "extrapolated": late("studies.gpt.saved:extrapolated"),
    },
    figures={
        "checks": late("report.plots:check_matrix", AXES),
        "gap over syncs": late("studies.gpt.plots:gap_over_syncs"),
        "loss over tokens": late("studies.gpt.plots:loss_over_tokens"),
        "dropped syncs": late("studies.gpt.plots:dropped"),
        "time over width": late("report.plots:time_over", AXES),
        "step over width": late("report.plots:time_over", AXES, "step_kernel"),
        "gap over time saved": late("studies.gpt.saved:gap_over_time_saved"),
    },
)
