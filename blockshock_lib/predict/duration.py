"""How long a run will take: a rough model of its work, brought to scale by an earlier run. An estimate, no more."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from pathlib import Path

from blockshock_lib.engine.phases import PHASES
from blockshock_lib.engine.roofline import Ceilings
from blockshock_lib.manifest import shown
from blockshock_lib.methods import METHODS
from blockshock_lib.params import Params
from blockshock_lib.plan import Case, expand
from blockshock_lib.predict import costs, earlier, memory
from blockshock_lib.predict.table import work

COMMAND_SECONDS = 8.0  # from the command to the run's first line and from its last to the prompt; in no manifest
# Of each work: how many things of a method are timed (the whole as a call and as a kernel, and its pieces), how long
# one of them is on average as a part of the whole, and how many products of the weight's size its check makes.
TASKS = {"forward": (4, 1.0, 1), "pass": (9, 0.6, 2), "step": (14, 0.4, 6)}
EXTRA_SAMPLES = 3  # taken to size a graph
STEP_SECONDS = 2e-3  # a step of the loss curve at the least: a batch is drawn and every tensor looked at


@dataclass(frozen=True)
class Rates:
    """Seconds that the model counts on a kind of device, seen once on one machine of it; `estimate` brings it to scale.

    Attributes:
        page: the notebook and page of a phase without and with times.
        group: the start of a group of processes.
        case: a case's fixed part.
        weight, product: building and checking a method, for each weight, and for each weight and row of the input.
        unpack: one call of a 2:4 product that must unpack, for each weight.
    """

    page: tuple[float, float]
    group: float
    case: float
    weight: float
    product: float
    unpack: float


RATES = {
    "cpu": Rates((2.0, 5.0), 2.5, 0.035, 1.2e-8, 3e-11, 3e-9),
    "cuda": Rates((3.0, 6.0), 8.0, 0.6, 1e-10, 1e-13, 0.0),
}


@dataclass(frozen=True)
class Estimate:
    """Seconds from the command to its end: the middle, the range that it may well lie in, and what it rests on."""

    seconds: float
    low: float
    high: float
    why: str


def estimate(params: Params, card: dict, ceilings: dict[str, Ceilings | None], out: Path | None = None) -> Estimate:
    """The model's seconds times what an earlier run took over what the model says of it.

    The run is the newest of this machine and phase, else of this machine, else the shipped one of the device kind.

    Args:
        ceilings: dtype -> ceilings, where they are known; they say how long the calls take that are timed.
    """
    modelled = model_seconds(params, expand(params), ceilings)
    runs = earlier.runs(params.hardware.device, machine=card["title"], out=out)
    same = [run for run in runs if run.manifest["phase"] == params.phase]
    for run in same + [run for run in runs if run not in same]:
        scale = _scale(run, ceilings)
        if scale is None:
            continue
        here, alike = run.machine == card["title"], run in same
        wide = (1.5 if alike else 2.0) if here else (2.5 if alike else 4.0)
        middle = scale * modelled + COMMAND_SECONDS
        why = f"scaled from {shown(run.folder)}, {'this machine' if here else run.machine}"
        return Estimate(middle, middle / wide, middle * wide, why)
    middle = modelled + COMMAND_SECONDS
    return Estimate(middle, middle / 4, middle * 4, "no earlier run to scale it by: a bare model")


def _scale(run: earlier.Earlier, ceilings: dict[str, Ceilings | None]) -> float | None:
    """Seconds that a run took over the model's; None where its manifest does not tell, or no such run can be."""
    try:
        params = Params.model_validate(run.manifest["params"])
        times = [dt.datetime.fromisoformat(run.manifest[name]) for name in ("started", "ended")]
    except (KeyError, TypeError, ValueError):
        return None
    if run.manifest.get("resumed"):
        return None  # it did only the rest of its work between the two
    taken = (times[1] - times[0]).total_seconds()
    known = {dtype: ceilings.get(dtype) for dtype in params.dtypes}
    return taken / model_seconds(params, expand(params), known) if taken > 0 else None


def model_seconds(params: Params, cases: tuple[Case, ...], ceilings: dict[str, Ceilings | None]) -> float:
    """Seconds that the unscaled model counts for a run, from its manifest's start to its end."""
    timed = PHASES[params.phase].time
    rates, groups = RATES[params.hardware.device], params.timing.groups
    each = sum(_case_seconds(params, case, rates, ceilings.get(case.dtype)) for case in cases)
    return rates.page[timed] + groups * (rates.group + each) + _curves(params, cases, rates)


def _curves(params: Params, cases: tuple[Case, ...], rates: Rates) -> float:
    """The first group draws the loss curve of every method in the first case of each optimizer."""
    seconds = 0.0
    for case in {case.optimizer: case for case in reversed(cases) if case.optimizer}.values():
        weights, products = case.in_features * case.out_features, TASKS["step"][2]
        one = STEP_SECONDS + products * weights * case.batch * rates.product
        seconds += params.loss_steps * len(_methods(case)) * one
    return seconds


def _methods(case: Case) -> list[str]:
    return [name for name in case.methods if case.mask.periodic or not METHODS[name].periodic_only]


def _case_seconds(params: Params, case: Case, rates: Rates, ceilings: Ceilings | None) -> float:
    weights = case.in_features * case.out_features
    names = _methods(case)
    tasks, part, products = TASKS[work(case)]
    seconds = rates.case + len(names) * weights * (rates.weight + products * case.batch * rates.product)
    if not PHASES[case.phase].time:
        return seconds
    samples = params.timing.warmup + params.timing.samples + EXTRA_SAMPLES
    for name in names:
        least = costs.floor(costs.pieces(case, name), ceilings).whole / 1e3 if ceilings else 0.0
        unpack = rates.unpack * weights if METHODS[name].product is not None else 0.0
        call = max(memory.GRAPH_MS / 1e3, params.timing.min_sample_ms / 1e3, part * 1.5 * least + unpack)
        seconds += tasks * samples * call
    return seconds
