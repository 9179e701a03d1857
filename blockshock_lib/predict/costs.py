"""The work of a method in a case, and the floor that ceilings put under its time, split by what binds it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from blockshock_lib.engine import roofline
from blockshock_lib.engine.phases import PHASES
from blockshock_lib.layers.case_costs import DTYPES, CaseCosts
from blockshock_lib.layers.costs import Cost
from blockshock_lib.methods import METHODS
from blockshock_lib.plan import Case


class Floor(NamedTuple):
    """Least times in ms: of moving the bytes, of the arithmetic, of the link, each summed over the pieces of the work.

    Of dX's collective only that counts as link which is longer than dW, behind which it can hide. `whole` is the sum
    over the pieces of the larger of the first two, plus the link: the engine's own floor of a forward in one piece.
    `bound` names the largest of the three: "bytes", "arithmetic" or "link".
    """

    bytes: float
    arithmetic: float
    link: float
    whole: float
    bound: str


def pieces(case: Case, name: str) -> dict[str, Cost]:
    """What one rank of method `name` must at least do, piece by piece, as the engine counts it (see `Cost`).

    "forward"; where the phase goes backward "dx"; where it trains "dw", "optimizer" and the stages that must follow.
    """
    costs, phase = CaseCosts(case), PHASES[case.phase]
    found = {"forward": costs.cost(name)}
    if phase.backward:
        found["dx"] = costs.cost_dx(name)
    if phase.train:
        found |= {"dw": costs.cost_dw(name, costs.dw_by(name)), "optimizer": costs.cost_optimizer(name)}
        found |= costs.cost_stages(name)
    return found


def cost(case: Case, name: str) -> Cost:
    """All pieces together: their sum, the forward's weights, and the largest peak."""
    work = pieces(case, name)
    total = Cost(*map(sum, zip(*work.values(), strict=True)))
    return total._replace(weights=work["forward"].weights, peak=max(piece.peak for piece in work.values()))


def floor(work: dict[str, Cost], ceilings: roofline.Ceilings) -> Floor:
    """The engine's floors of pieces of work that follow each other."""
    found = {name: _floor(piece, ceilings) for name, piece in work.items()}
    moving, counting, link = map(sum, zip(*found.values(), strict=True))
    if "dw" in found:
        link -= min(found["dx"][2], max(found["dw"][:2]) + found["dw"][2])
    parts = {"bytes": moving, "arithmetic": counting, "link": link}
    whole = sum(max(piece[:2]) for piece in found.values()) + link
    return Floor(**parts, whole=whole, bound=max(parts, key=parts.__getitem__))


def _floor(piece: Cost, ceilings: roofline.Ceilings) -> tuple[float, float, float]:
    # An infinite ceiling takes one part out of the engine's formula, which leaves the other.
    moving = roofline.floors(piece, ceilings._replace(gemm_rate=math.inf))["floor_compute"]
    counting = roofline.floors(piece, ceilings._replace(copy_bandwidth=math.inf))["floor_compute"]
    return moving, counting, roofline.floors(piece, ceilings).get("floor_reduce", 0.0)


def cannot(case: Case, name: str, card: dict) -> str:
    """Why method `name` cannot run this case on the machine of `card`; "" when it can.

    A GPU is judged by its card: to ask CUDA would take memory on the GPUs that a run may be measuring just now. On a
    machine without one, a case for GPUs is looked at as on a machine that has what it needs: the run is refused there
    as a whole, and no method is at fault.
    """
    method, device = METHODS[name], torch.device(case.device)
    options, dtype = method.options(case.product), DTYPES[case.dtype]
    if device.type == "cpu" or dtype is torch.float32 or options.get("product", "reference") == "reference":
        reason = method.load().unsupported(case.mask, device, dtype, **options)
    else:
        needed = "small-batch product" if options["product"] == "small" else "cslt"
        missing = card["unsupported"]
        reason = "" if "cuda" in missing else missing.get(needed, "")
    return CaseCosts(case).too_large(name) or reason
