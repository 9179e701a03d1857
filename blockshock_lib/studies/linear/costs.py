"""What a case costs each method, the floors that ceilings put under its times, and what it asks of a machine."""

import math

import torch

from blockshock_lib.engine import memory
from blockshock_lib.engine.roofline import Ceilings, compute, link
from blockshock_lib.engine.study import Need
from blockshock_lib.kernels.sparse24.backends import choose
from blockshock_lib.report.axes import GENERAL
from blockshock_lib.studies.linear.methods import METHODS
from blockshock_lib.studies.linear.methods.method import MOMENTS, Cost, Shape, TrainingBytes
from blockshock_lib.studies.linear.params import Case, columns
from blockshock_lib.studies.linear.phases import PHASES

CHUNK = 1 << 24  # weights that are packed at once


class CaseCosts:
    """Costs of one rank of each method in `case`."""

    def __init__(self, case: Case):
        self.case = case

    def _shape(self, name: str) -> Shape:
        case = self.case
        sizes = (case.batch, case.in_features, case.out_features, memory.DTYPES[case.dtype].itemsize)
        update = METHODS[name].update if case.optimizer else None
        shape = Shape(*sizes, case.world_size, case.mask, update or "packed", case.dw)
        # Emulated ranks have nobody to swap entries with.
        swaps = case.emulated and METHODS[name].wgrad_choice(shape) == "exchange"
        return shape._replace(dw="full") if swaps else shape

    def pieces(self, name: str) -> dict[str, Cost]:
        """The least work of each piece of the phase: "forward", "dx", "dw", "optimizer" and the stages after it."""
        method, shape, phase = METHODS[name], self._shape(name), PHASES[self.case.phase]
        found = {"forward": method.cost(shape)}
        if phase.backward:
            found["dx"] = method.cost_dgrad(shape)
        if phase.train:
            found["dw"] = method.cost_wgrad(shape, method.wgrad_choice(shape))
            # It reads weight, gradient and state, and writes weight and state; its few FLOPs are not counted.
            moments, one = MOMENTS[self.case.optimizer], self.entries(name) * shape.itemsize
            found["optimizer"] = Cost(0.0, (2 + moments) * one, (1 + moments) * one, 0.0, one, one)
            found |= method.cost_post_step(shape)
        # Emulated ranks have no link between them.
        return {key: cost._replace(sent=0.0) for key, cost in found.items()} if self.case.emulated else found

    def cost(self, name: str) -> Cost:
        return self.pieces(name)["forward"]

    def entries(self, name: str) -> float:
        return METHODS[name].entries(self._shape(name))

    def training_bytes(self, name: str) -> TrainingBytes:
        return METHODS[name].training_bytes(self._shape(name), self.case.optimizer)

    def too_large(self, name: str) -> str:
        """Why the 2:4 product cannot multiply what one rank holds; "" when it can, or there is none."""
        method, shape = METHODS[name], self._shape(name)
        if method.product is None:
            return ""
        backend = choose(method.product or self.case.product, self.case.device)
        return backend.too_large((shape.out_features, int(shape.term_columns)))

    def floors(self, name: str, ceilings: Ceilings, chunks: int = 1) -> dict[str, float]:
        """Least ms of all that the phase times, the batch cut into `chunks`; dX's collective may hide behind dW."""
        work, phase = self.pieces(name), PHASES[self.case.phase]
        alone = {piece: compute(cost, ceilings) for piece, cost in work.items()}
        sent = {piece: link(cost, ceilings) for piece, cost in work.items()}
        shorter, longer = sorted([alone.pop("forward"), sent["forward"]])
        forward = longer + shorter / chunks  # the longer hides all but one chunk of the other
        found = {"floor_compute": compute(work["forward"], ceilings), "floor_forward": forward}
        found |= {"floor_reduce": sent["forward"]} if sent["forward"] else {}
        if not phase.backward:
            return found
        found |= {"floor_reduce_dx": sent["dx"]} if sent["dx"] else {}
        if not phase.train:
            return found | {"floor_dx": alone["dx"], "floor_pass": forward + alone["dx"] + sent["dx"]}
        alone["dw"] += sent["dw"]
        found |= {f"floor_{piece}": ms for piece, ms in alone.items()}
        backward = alone.pop("dx") + max(alone.pop("dw"), sent["dx"])
        return found | {"floor_step": forward + backward + sum(alone.values())}


def need(case: Case, card: dict) -> Need:
    unsupported, costs, held = {name: cannot(case, name, card) for name in case.methods}, CaseCosts(case), {}
    for name in (name for name in case.methods if not unsupported[name]):
        moved = _moved(costs.pieces(name))
        weights = {"step holds": costs.training_bytes(name).peak} if case.optimizer else {"weights": moved["weights"]}
        held[name] = weights | {"moved": moved["read"] + moved["written"], "sent": moved["sent"]}
    return Need(rank_bytes(case, list(held)), unsupported, held)


def _moved(work: dict[str, Cost]) -> dict[str, float]:
    sums = {what: sum(getattr(cost, what) for cost in work.values()) for what in ("read", "written", "sent")}
    return {"weights": work["forward"].weights} | sums


def cannot(case: Case, name: str, card: dict) -> str:
    """Why method `name` cannot run this case on the machine of `card`; "" when it can. To ask CUDA would take memory on
    GPUs that a run may be measuring just now. Without a GPU, a case for GPUs is looked at as if all were there.
    """
    method, device = METHODS[name], torch.device(case.device)
    options, dtype = method.options(case.product), memory.DTYPES[case.dtype]
    if too_large := CaseCosts(case).too_large(name):
        return too_large
    if device.type == "cpu" or dtype is torch.float32 or options.get("product", "reference") == "reference":
        return method.load().unsupported(case.mask, device, dtype, **options)
    backend = "small-batch product" if options["product"] == "small" else "cslt"
    return "" if "cuda" in card["unsupported"] else card["unsupported"].get(backend, "")


def floor_parts(work: dict[str, Cost], ceilings: Ceilings) -> dict[str, float]:
    """Least ms of moving `bytes`, of `arithmetic` and of the `link`, of which dX's share may hide behind dW."""
    # An infinite ceiling takes one part out of the engine's formula, which leaves the other.
    alone = {"bytes": ceilings._replace(gemm_rate=math.inf), "arithmetic": ceilings._replace(copy_bandwidth=math.inf)}
    parts = {name: sum(compute(piece, ceiling) for piece in work.values()) for name, ceiling in alone.items()}
    dw = compute(work["dw"], ceilings) + link(work["dw"], ceilings) if "dw" in work else 0.0
    hidden = min(link(work["dx"], ceilings), dw) if dw else 0.0
    return parts | {"link": sum(link(piece, ceilings) for piece in work.values()) - hidden}


def floor_rows(case: Case, card: dict, ceilings: Ceilings | None) -> list[dict]:
    """A row a method: the case's columns, `unsupported`, bytes, and `floor_*` in ms with what binds, where known."""
    asked, phase, costs = need(case, card), PHASES[case.phase], CaseCosts(case)
    about = columns(case.as_dict()) | {name: getattr(case, name) for name in GENERAL} | {"rank_bytes": asked.bytes}
    about |= {"work": "step" if phase.train else "pass" if phase.backward else "forward"}
    rows = []
    for name, reason in asked.unsupported.items():
        row = about | {"method": name, "unsupported": reason, "floor_whole": math.nan, "bound": ""}
        if not reason:
            work = costs.pieces(name)
            row |= _moved(work)
            if ceilings is not None:
                parts, whole = floor_parts(work, ceilings), costs.floors(name, ceilings)[f"floor_{about['work']}"]
                row |= {"floor_whole": whole, "bound": max(parts, key=parts.get)}
                row |= {f"floor_{part}": value for part, value in parts.items()}
        rows.append(row)
    return rows


def rank_bytes(case: Case, names: list[str]) -> int:
    """Most bytes that the fullest rank holds at once while methods `names` are measured; an upper estimate."""
    n, k, b, e = case.out_features, case.in_features, case.batch, memory.DTYPES[case.dtype].itemsize
    phase, steps = PHASES[case.phase], [CaseCosts(case).training_bytes(name) for name in names]
    # W is drawn and scaled in float32, x with its outliers; of a layer's part it is said where the kept weights are.
    making = max(8 * n * k, 16 * b * k) + 12 * min(n * k, CHUNK)
    # W, its mask; x and y, or as large dy and dX, with a float64 truth; the layers; in training truths of dW and W.
    standing = (e + 1) * n * k + (e + 8) * b * (n + k) + sum(step.weights + step.copies for step in steps)
    standing += phase.train * (e + 8) * (2 * n * k + b * (n + k))
    standing += e * b * (n + k) * any(METHODS[name].folded for name in names)  # x and dy in their order too
    running = 2 * max((step.peak for step in steps), default=0)  # once to be checked, once what it is checked against
    return memory.upper(standing + max(making, running), phase.timed, case.device)
