"""What a case costs each method, the floors that ceilings put under its times, and what it asks of a machine."""

import math
from collections.abc import Callable

import torch

from blockshock_lib.engine.roofline import Ceilings, compute, link
from blockshock_lib.engine.study import Need
from blockshock_lib.kernels.sparse24.backends import choose
from blockshock_lib.report.axes import GENERAL, TWIN
from blockshock_lib.studies.linear.axes import AXES
from blockshock_lib.studies.linear.methods import METHODS
from blockshock_lib.studies.linear.methods.method import MOMENTS, Cost, Shape, TrainingBytes
from blockshock_lib.studies.linear.params import Case, columns
from blockshock_lib.studies.linear.phases import PHASES
from blockshock_lib.studies.linear.reference import TRUTH_ROWS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GIB, MIB = 2**30, 2**20
SLACK, TIMING_SLACK = 1.2, 1.1  # blocks that an allocator holds and cannot reuse; emptied before it is timed
CHUNK = 1 << 24  # weights that are packed at once
L2 = 128 * MIB  # no GPU with 2:4 tensor cores has more; the copies of a timed method go past three times that
CEILINGS = {"cpu": 64 * MIB, "cuda": 9 * GIB}  # buffers that the ceilings are measured with
GRAPH = 5 * GIB  # a captured graph lasts about 2 ms, in which no memory takes more outputs than this


class CaseCosts:
    """Costs of one rank of each method in `case`."""

    def __init__(self, case: Case):
        self.case = case

    def _shape(self, name: str) -> Shape:
        case = self.case
        sizes = (case.batch, case.in_features, case.out_features, DTYPES[case.dtype].itemsize)
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
        forward = work.pop("forward")
        found = {"floor_compute": compute(forward, ceilings)}
        if reduced := link(forward, ceilings):
            found["floor_reduce"] = reduced
        longer, shorter = max(found.values()), min(found.values()) if len(found) > 1 else 0.0
        found["floor_forward"] = longer + shorter / chunks  # the longer hides all but one chunk of the other
        if not phase.backward:
            return found
        dx = work.pop("dx")
        found["floor_dx"] = compute(dx, ceilings)
        if reduced := link(dx, ceilings):
            found["floor_reduce_dx"] = reduced
        if not phase.train:
            return found | {"floor_pass": found["floor_forward"] + found["floor_dx"] + reduced}
        dw = work.pop("dw")
        found["floor_dw"] = compute(dw, ceilings) + link(dw, ceilings)
        after = {f"floor_{stage}": compute(cost, ceilings) for stage, cost in work.items()}
        backward = found["floor_dx"] + max(found["floor_dw"], reduced)
        return found | after | {"floor_step": found["floor_forward"] + backward + sum(after.values())}


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
    """Why method `name` cannot run this case on the machine of `card`; "" when it can. A GPU is judged by its card: to
    ask CUDA would take memory on the GPUs that a run may be measuring just now. Without one, a case for GPUs is looked
    at as if all were there: the run is refused as a whole.
    """
    method, device = METHODS[name], torch.device(case.device)
    options, dtype = method.options(case.product), DTYPES[case.dtype]
    if too_large := CaseCosts(case).too_large(name):
        return too_large
    if device.type == "cpu" or dtype is torch.float32 or options.get("product", "reference") == "reference":
        return method.load().unsupported(case.mask, device, dtype, **options)
    backend = "small-batch product" if options["product"] == "small" else "cslt"
    return "" if "cuda" in card["unsupported"] else card["unsupported"].get(backend, "")


def floor_parts(work: dict[str, Cost], ceilings: Ceilings) -> dict[str, float]:
    """Least times in ms, each summed over pieces of work that follow each other: of moving the `bytes`, of the
    `arithmetic`, of the `link`. Of dX's collective only that counts which is longer than dW, behind which it can hide.
    """

    def total(floor: Callable[[Cost, Ceilings], float], **out: float) -> float:
        return sum(floor(piece, ceilings._replace(**out)) for piece in work.values())

    hidden = (
        min(link(work["dx"], ceilings), compute(work["dw"], ceilings) + link(work["dw"], ceilings))
        if "dw" in work
        else 0.0
    )
    # An infinite ceiling takes one part out of the engine's formula, which leaves the other.
    moving, counting = total(compute, gemm_rate=math.inf), total(compute, copy_bandwidth=math.inf)
    return {"bytes": moving, "arithmetic": counting, "link": total(link) - hidden}


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
    """Most bytes that the fullest rank holds at once while methods `names` are measured; an upper estimate. Every rank
    builds the whole problem (W, x, the float64 truths, the mask) before it keeps its part.
    """
    n, k, b, e = case.out_features, case.in_features, case.batch, DTYPES[case.dtype].itemsize
    w, x, y, truth, mask = e * n * k, e * b * k, e * b * n, 8 * b * n, n * k
    phase, costs = PHASES[case.phase], CaseCosts(case)
    steps = {name: costs.training_bytes(name) for name in names}
    if phase.timed and AXES.over in names:
        steps[TWIN] = steps[AXES.over]
    held = {name: step.weights + step.copies for name, step in steps.items()}
    states = {name: step.gradients + step.optimizer for name, step in steps.items()}
    rows = min(n, TRUTH_ROWS)
    # W is drawn and scaled in float32; x with its outliers; the truth; the mask.
    outliers, truths = w + x + 16 * b * k, w + x + 8 * b * k + 8 * rows * (k + b) + 2 * truth
    making = max(8 * n * k, outliers, truths, w + x + truth + mask + min(8 * n * k, 16 * CHUNK))
    shardings = len({(METHODS[name].split, METHODS[name].periodic_only) for name in names})
    standing = w + x + truth + mask + e * n + sum(held.values()) + shardings * y
    if phase.backward:
        standing += y + 8 * b * k + shardings * x
    checking = [_checking(case, name, steps[name], states[name]) for name in names]
    trained = 0
    if phase.train:
        # The truths of dW and of the trained W, what rounding alone allows of both, those of y and dX once more.
        trained = 2 * (8 * n * k + w) + truth + 8 * b * k + shardings * (x + y)
        checking.append(max(8 * b * (k + rows), (1 + MOMENTS[case.optimizer]) * max(w, 8 * rows * k)))
    timing = standing + _timing(case, held, steps, states) if phase.timed and names else 0
    return math.ceil(max(SLACK * max(making, standing + trained + max(checking, default=0)), TIMING_SLACK * timing))


def _checking(case: Case, name: str, step: TrainingBytes, state: float) -> float:
    """What a method holds for a moment while it is built, run, checked or trained, beyond what it holds throughout."""
    n, k, b, e = case.out_features, case.in_features, case.batch, DTYPES[case.dtype].itemsize
    y, (in_parts, out_parts) = e * b * n, METHODS[name].shards(case.world_size)
    part = n // out_parts * (k // in_parts)
    index = min(12 * part, 12 * CHUNK) if METHODS[name].product is not None else 0  # where the kept weights are
    build = (2 * e + 1) * part + index
    run = step.activations + step.scratch + state + y + (e * part + index if case.device == "cpu" else 0)
    check = 2 * y + max(16 * b * max(n, k), (2 * e + 1) * part + 2 * y)
    train = state + (e + 8 + 4) * part + 24 * min(8 * CHUNK, n * k) if case.optimizer else 0
    return max(build, run, check, train, 3 * n * k)


def _timing(case: Case, held: dict, steps: dict, states: dict) -> float:
    """Copies past the L2 cache, the outputs of a captured graph, fresh starts of the sums; the ceilings' buffers."""
    y = DTYPES[case.dtype].itemsize * case.batch * case.out_features
    outputs = max(step.activations + step.gradients for step in steps.values())
    scratch, resets = max(step.scratch for step in steps.values()), 4 * y * len(held)
    if case.device == "cpu":
        return CEILINGS["cpu"] + resets + sum(states.values()) + 2 * (outputs + scratch)
    spare = {name: max(0.0, 3 * L2 - held[name]) for name in held}  # bytes of copies beside the first
    copies = sum((1 + spare[name] / held[name]) * states[name] + spare[name] + steps[name].activations for name in held)
    return max(CEILINGS["cuda"], copies + min(64 * outputs, max(GRAPH, outputs)) + scratch + resets)
