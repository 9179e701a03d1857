"""The cost of a method in a case, and the floor that ceilings put under its time, split by what binds it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import torch

from blockshock_lib.engine import roofline
from blockshock_lib.layers.problem import DTYPES, LinearProblem
from blockshock_lib.layers.sharded import Cost
from blockshock_lib.methods import METHODS
from blockshock_lib.plan import Case


class Floor(NamedTuple):
    """Least times of one forward in ms: of moving the product's bytes, of its arithmetic, and of the link.

    `forward` is the larger of the first two plus the link: the engine's own floor. `bound` names the largest of the
    three: "bytes", "arithmetic" or "link".
    """

    bytes: float
    arithmetic: float
    link: float
    forward: float
    bound: str


def cost(case: Case, name: str) -> Cost:
    """What one rank of method `name` must at least do, as the engine counts it: FLOP and bytes (see `Cost`)."""
    # The engine's cost reads the case and the size of an element alone, so that no operand need be made for it.
    return LinearProblem.cost(SimpleNamespace(case=case, x=torch.empty(0, dtype=DTYPES[case.dtype])), name)


def floor(work: Cost, ceilings: roofline.Ceilings) -> Floor:
    """The engine's floors of `work`; an infinite ceiling takes one part out of its formula, which leaves the other."""
    whole = roofline.floors(work, ceilings)
    parts = {
        "bytes": roofline.floors(work, ceilings._replace(gemm_rate=math.inf))["floor_compute"],
        "arithmetic": roofline.floors(work, ceilings._replace(copy_bandwidth=math.inf))["floor_compute"],
        "link": whole.get("floor_reduce", 0.0),
    }
    return Floor(**parts, forward=whole["floor_forward"], bound=max(parts, key=parts.__getitem__))


def cannot(case: Case, name: str, card: dict) -> str:
    """Why method `name` cannot run this case on the machine of `card`; "" when it can.

    A GPU is judged by its card: to ask CUDA would take memory on the GPUs that a run may be measuring just now.
    """
    method, device = METHODS[name], torch.device(case.device)
    options, dtype = method.options(case.product), DTYPES[case.dtype]
    if device.type == "cpu" or dtype is torch.float32 or not options or options["product"] == "reference":
        return method.load().unsupported(case.mask, device, dtype, **options)
    return card["unsupported"].get("cslt", "")
