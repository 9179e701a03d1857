"""Does the largest N that the engine foretells really train, and is it the largest?

    python benchmarks/largest_n.py --optimizers sgd adamw --json largest.json

For each method and optimizer two ranks build a square layer (bf16, checkerboard, bias) of the foretold N, which the
memory formula bounds or the 2:4 library, and take two training steps. Where that fails they try about 4% less, and so
on; where it works they try one step of N above. Each attempt has processes of its own, so that none inherits a lost
CUDA context or a cut-up allocator.

Building and stepping are measured apart, as a layer can need more memory to be made than to be trained. To need little
itself, the benchmark gives a weight whose rows are all equal: one row, expanded. So the right y and dX are known as
well, and some rows of each are compared, of dW the last one, which lies behind the 2^31-th entry.

Prints a line an attempt and then a table. On a CPU nothing measures a peak: there an N fits where the formula says so
and its steps run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from blockshock_lib import errors, params
from blockshock_lib.comm import Group
from blockshock_lib.engine import memory
from blockshock_lib.kernels.sparse24 import masks
from blockshock_lib.ranks import WorkerGroup
from blockshock_lib.runs import measure
from blockshock_lib.studies.linear import STUDY
from blockshock_lib.studies.linear.costs import DTYPES, CaseCosts
from blockshock_lib.studies.linear.methods import METHODS
from blockshock_lib.studies.linear.params import Case
from blockshock_lib.studies.linear.training import Trainer

NAMES = ("row_parallel", "block_shock", "block_shock_recompress")
USABLE = 0.95  # the driver, the communication library and the allocator's rounding take the rest of a GPU's memory
LESS = 0.04  # how much smaller the next N is after a failure
LEAST = 0.5  # of the foretold N: below that the search ends without an answer
RATE = 1e-2  # large enough that nearly every weight moves in the first step
MOST = 0.8  # of a row's weights; by SGD one with a small gradient stays
ROWS = 8  # rows of y and dX that are compared
NEAR = 1 / 8  # error allowed, in standard deviations of the right values; rounding alone stays below half of it
BUILDING, STEPPING = "while building", "in a step"

built: dict[str, tuple] = {}
"""What `build` leaves for `train` in a rank's process: a layer of this size cannot travel through the parent."""


@dataclass
class Attempt:
    """One N of one method and optimizer. Bytes and seconds are those of the worst rank; None where unknown.

    Attributes:
        outcome: "trained", or why not.
        bound: no N above this one can do better, by what had been allocated when memory ran out.
    """

    method: str
    optimizer: str
    n: int
    formula_bytes: float
    outcome: str = "trained"
    building_bytes: int | None = None
    step_bytes: int | None = None
    step_seconds: float | None = None
    bound: float | None = None

    @property
    def trained(self) -> bool:
        return self.outcome == "trained"

    @property
    def line(self) -> str:
        numbers = f"building {gib(self.building_bytes)}, step {gib(self.step_bytes)}, formula {gib(self.formula_bytes)}"
        seconds = "" if self.step_seconds is None else f"; {self.step_seconds:.3f} s a step"
        return f"{self.method} {self.optimizer} N={self.n}: {self.outcome} (GiB: {numbers}{seconds})"


def gib(count: float | None) -> str:
    return "-" if count is None else f"{count / memory.GIB:.4g}"


# On every rank


def total(ctx) -> int:
    return memory.total(ctx.device)


def build(ctx, case: Case) -> dict:
    """Makes the layer, the transposed copy of its first dX included: its peak, or how far the memory went."""
    name, n, device = case.methods[0], case.in_features, ctx.device
    group, make = Group.of(), METHODS[case.methods[0]].load()
    group.barrier(torch.zeros(1, device=device))  # what the communication library holds is held from here on
    meter = memory.Peak(device)
    seed = torch.Generator(device).manual_seed(case.seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=seed, dtype=DTYPES[case.dtype], device=device)

    try:
        row, bias, x, dy = draw(n).mul_(n**-0.5), draw(n), draw(case.batch, n), draw(case.batch, n)
        keep = masks.make(case.mask, (n, n), device=device) if make.uses_mask else None
        options = METHODS[name].options(case.product, frozen=False, dw=case.dw)
        layer = make(row.expand(n, n), bias, mask=case.mask, keep=keep, group=group, **options)
        del keep
        with torch.no_grad():
            layer.local_dgrad(dy)
    except torch.OutOfMemoryError as error:
        # Here, while the failed call's tensors are still alive. All of this grows by at most the square of N.
        held = torch.cuda.memory_allocated(device)
        return {"short": n * ((held + memory.free(device)) / (held + asked(str(error)))) ** 0.5}
    found = {"peak": meter.read()}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    built["layer"] = layer, row, x, dy, meter
    return found


def asked(text: str) -> float:
    """Bytes that could not be allocated, by the allocator's message; 0 where it does not say."""
    found = re.search(r"allocate ([\d.]+) ([KMG])iB", text)
    return float(found[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[found[2]] if found else 0.0


@torch.no_grad()
def train(ctx, case: Case) -> dict:
    """Two steps with the layer that was built: what is wrong with the first, peak of both, seconds of the second."""
    layer, row, x, dy, meter = built.pop("layer")
    meter.restart()
    trainer, bias, before = Trainer(layer, case.optimizer, RATE), layer.bias.clone(), layer.weight[-1].clone()
    y, dx, dw, _ = trainer.step(x, dy)
    fault = first_fault(layer, case, {"row": row, "bias": bias, "x": x, "dy": dy}, {"y": y, "dx": dx, "dw": dw})
    moved = float((layer.weight[-1] != before)[before != 0].float().mean())
    if not moved > MOST:
        fault = fault or f"{1 - moved:.0%} of the last row of the weight did not move"
    del y, dx, dw
    token = torch.zeros(1, device=ctx.device)
    layer.group.barrier(token)
    token.item()
    start = time.perf_counter()
    y = trainer.step(x, dy)[0]
    token.add_(y[-1, -1]).item()
    seconds = time.perf_counter() - start
    if not bool(y.sum(dtype=torch.float32).isfinite()):  # no temporary of y's size
        fault = fault or "y of the second step is not finite"
    return {"fault": fault, "peak": meter.read(), "seconds": seconds}


def first_fault(layer, case: Case, given: dict, made: dict) -> str:
    """What is wrong with a step's y [B, N], dX [B, K] and the last row of dW; "" where nothing is.

    With equal rows w of W: y[b, n] = x[b] . w + bias[n], and dX[b] = w times the sum of dy[b].
    """
    row, x, dy = given["row"].float(), given["x"], given["dy"]
    few, features = slice(0, ROWS), case.in_features
    right_y = (x[few].float() @ row)[:, None] + given["bias"].float()
    right_dx = torch.outer(dy[few].float().sum(1), row)
    right_dw = torch.mm(dy[:, -1:].t(), x[:, layer.cols])[0]
    if layer.term is not None:
        kept = masks.make(case.mask, (4, features), device=x.device)[-1][layer.cols] ^ bool(layer.term)
        packed = made["dw"].shape[1] < right_dw.numel()
        right_dw = right_dw[kept] if packed else right_dw * kept
    for what, found, right, scale in (
        ("y", made["y"][few], right_y, 1.0),
        ("dX", made["dx"][few], right_dx, features**0.5 * row.abs().max()),
        ("dW", made["dw"][-1], right_dw, case.batch**0.5),
    ):
        off = float((found.float() - right).abs().max() / scale)
        if not off <= NEAR:
            return f"{what} is off by {off:.3g} standard deviations"
    return ""


# In the parent


def needed(case: Case, n: int) -> float:
    """Bytes of a training step at N = n by the method's formula, x included."""
    x = case.batch * n * DTYPES[case.dtype].itemsize
    return square(case, n).training_bytes(case.methods[0]).peak + x


def square(case: Case, n: int) -> CaseCosts:
    return CaseCosts(replace(case, in_features=n, out_features=n))


def largest(case: Case, room: float, step: int) -> int:
    """The largest multiple of `step` that needs no more than `room` bytes and that the method can multiply; or 0."""

    def holds(n: int) -> bool:  # where it does, it does for all smaller ones
        return needed(case, n) <= room and not square(case, n).too_large(case.methods[0])

    low, high = 0, step
    while holds(high):
        low, high = high, 2 * high
    while high - low > step:
        middle = (low + high) // (2 * step) * step
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def attempt(case: Case, n: int, room: float, seconds: float) -> Attempt:
    """Builds and trains in fresh processes, `seconds` at most for starting, building and stepping each."""
    from benchmarks import largest_n  # the ranks must import this file by name

    case = replace(case, in_features=n, out_features=n)
    found, stage = Attempt(case.methods[0], case.optimizer, n, needed(case, n)), "while starting"
    if case.device == "cpu" and found.formula_bytes > room:
        return replace(found, outcome="needs more than the room by its formula")
    try:
        with (
            tempfile.TemporaryDirectory() as logs,
            WorkerGroup(case.world_size, device=case.device, logs=Path(logs) / "logs", start_seconds=seconds) as group,
        ):
            stage = BUILDING
            made = group.call(largest_n.build, case, seconds=seconds)
            if short := [one["short"] for one in made if "short" in one]:
                return replace(found, outcome=f"out of memory {BUILDING}", bound=min(short))
            found.building_bytes, stage = worst(made, "peak"), STEPPING
            made = group.call(largest_n.train, case, seconds=seconds)
    except errors.LaunchError as error:
        return replace(found, outcome=in_words(error, stage))
    found.step_bytes, found.step_seconds = worst(made, "peak"), worst(made, "seconds")
    if fault := next((one["fault"] for one in made if one["fault"]), ""):
        found.outcome = f"trained wrong: {fault}"
    return found


def worst(ranks: list[dict], what: str) -> float | None:
    return max((one[what] for one in ranks if one[what] is not None), default=None)


def in_words(error: errors.LaunchError, stage: str) -> str:
    """Why the ranks ended in a stage."""
    if not isinstance(error, errors.RankError):
        return f"crashed {stage}: {errors.first_line(error)}"
    text = error.message.lower()
    if error.kind == errors.UnsupportedError.__name__:
        return f"unsupported: {errors.first_line(error.message)}"
    if "OutOfMemory" in error.kind or any(words in text for words in measure.OUT_OF_MEMORY):
        return f"out of memory {stage}"
    by = "cuSPARSELt failed" if "cusparselt" in text or "_cslt_" in error.traceback else "crashed"
    return f"{by} {stage}: {error.kind}: {errors.first_line(error.message)}"


def search(case: Case, room: float, step: int, seconds: float, ceiling: int) -> tuple[dict, int]:
    """Tries one method and optimizer; a row of the table, and the largest N that could be built as far as is known.

    `ceiling` is that of the same method with another optimizer: what cannot be built is not tried again.
    """

    def tried(n: int) -> Attempt:
        found = attempt(case, n, room, seconds)
        print(found.line, flush=True)
        return found

    foretold, refused = largest(case, room, step), ""
    n = min(foretold, ceiling)
    if n < foretold:
        refused = f"out of memory {BUILDING}"
        print(
            f"{case.methods[0]} {case.optimizer} N={foretold}: larger than what could be built; from {n} on", flush=True
        )
    found = tried(n)
    if found.trained and n == foretold:
        above = tried(n + step)
        found, refused = (above, "not tried") if above.trained else (found, above.outcome)
    while not found.trained:
        refused = found.outcome
        n = int(min(n - max(1, round(LESS * n / step)) * step, (found.bound or n) // step * step))
        if found.bound:
            ceiling = n
        if n < max(step, LEAST * foretold):
            break
        found = tried(n)
    row = {"method": case.methods[0], "optimizer": case.optimizer, "foretold_n": foretold, "above": refused}
    return row | {"largest": asdict(found) if found.trained else None}, ceiling


def table(rows: list[dict]) -> str:
    """Fixed-width text: the two N, GiB of the larger one that trained, seconds, and what ended the search."""
    lines = [
        f"{'method':<22} {'optimizer':<9} {'foretold N':>10} {'trained N':>9} {'building':>8} {'step':>6} "
        f"{'formula':>7} {'s/step':>7}  one above"
    ]
    for row in rows:
        best = row["largest"] or {}
        seconds = "-" if best.get("step_seconds") is None else f"{best['step_seconds']:.3f}"
        sizes = [gib(best.get(f"{what}_bytes")) for what in ("building", "step", "formula")]
        lines.append(
            f"{row['method']:<22} {row['optimizer']:<9} {row['foretold_n']:>10} {best.get('n', '-'):>9} {sizes[0]:>8} "
            f"{sizes[1]:>6} {sizes[2]:>7} {seconds:>7}  {row['above']}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--optimizers", nargs="+", default=["sgd", "adamw"], choices=["sgd", "adamw"])
    parser.add_argument("--b", type=int, default=4096)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--room", type=float, help="GiB a rank that may be used; default: what a run uses")
    parser.add_argument("--step", type=int, default=4096, help="N is a multiple of it, and it of 128")
    parser.add_argument("--seconds", type=float, default=60, help="limit of each of an attempt's three stages")
    parser.add_argument("--json", type=Path, help="file for the table, written anew after each of its rows")
    args = parser.parse_args(arguments)
    if args.room is None and args.device == "cpu":
        parser.error("--device cpu needs --room")
    from benchmarks import largest_n

    if args.room is None:  # asked of a child: this process would hold GPU memory for as long as it lives
        with WorkerGroup(1, device="cuda") as group:
            room = USABLE * group.call(largest_n.total, seconds=60)[0]
    else:
        room = args.room * memory.GIB
    settings = {"sweep.n": [args.step], "sweep.b": [args.b], "methods": args.methods, "optimizers": args.optimizers}
    asked_for = params.load(STUDY, "phase3", settings, choose={"hardware": args.device, "mask": "checkerboard"})
    rows, ceilings = [], dict.fromkeys(args.methods, 1 << 30)
    for name in args.methods:
        for case in STUDY.expand(asked_for):
            row, ceilings[name] = search(replace(case, methods=(name,)), room, args.step, args.seconds, ceilings[name])
            rows.append(row)
            if args.json:
                args.json.write_text(json.dumps({"b": args.b, "room_bytes": room, "rows": rows}, indent=1) + "\n")
    print(table(rows))
    return 0 if all(row["largest"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
