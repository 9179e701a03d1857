"""Records frames for the tests, made of plausible numbers; and those of a study that is no linear layer's."""

import hashlib
from itertools import product

import numpy as np
import pandas as pd

from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.studies.linear.methods import METHODS as LINEAR
from blockshock_lib.studies.linear.methods.method import Shape
from tests import cases
from tests.studies import toy

METHODS = (*cases.METHODS, "block_shock_torch")
GIB = 2**30


def times(method: str, n_in: int, n_out: int, batch: int) -> dict[str, float]:
    """Compute, reduce and host time (ms) of `method`, nearly as on one of two H200s."""
    half = 0.004 + n_in * n_out * max(2.3e-10, 1.4e-12 * batch)  # of a dense product
    of_half = {"dense": 1.97, "row_parallel": 1, "column_parallel": 1.01, "masked_dense": 1.98, "permuted_dense": 1.06}
    sparse = 0.01 + n_in * n_out * max(5e-10, 1.8e-12 * batch)
    reduce = 0.0 if method == "dense" else 0.008 + n_out * batch * 2 / GIB * 3.9
    host = {"block_shock_torch": 0.43, "dense": 0.012}.get(method, 0.045)
    return {"compute": of_half[method] * half if method in of_half else sparse, "reduce": reduce, "host": host}


RUN = dict(run="a", phase="phase1", device="cuda", emulated=False, world_size=2, seed=0)
SWEEP = dict(dtypes=("bf16",), workloads=("gaussian",), masks=("checkerboard",), features=(), groups=3)
TIMES = dict(repeats=12, noise=0.01, group_effect=0.004, timed=True, kernel=None, speedup={})


def make(ns=(4096, 8192, 16384, 40960), bs=(16, 64, 256, 1024, 4096), methods=METHODS, **changed) -> pd.DataFrame:
    """A whole run. `speedup` {(method, n, batch): x} multiplies that cell's speed; `kernel` False: no kernel times."""
    assert set(changed) <= {*RUN, *SWEEP, *TIMES}
    about, sweep, how = ({name: changed.get(name, one[name]) for name in one} for one in (RUN, SWEEP, TIMES))
    how["kernel"] = about["device"] == "cuda" if how["kernel"] is None else how["kernel"]
    rng, rows, shapes = np.random.default_rng(about["seed"]), [], [*((n, n) for n in ns), *sweep["features"]]
    places = product(sweep["dtypes"], sweep["workloads"], sweep["masks"], shapes, bs)
    for dtype, workload, mask, (n_in, n_out), batch in places:
        case = dict(in_features=n_in, out_features=n_out, shape=f"{n_out}x{n_in}", batch=batch, dtype=dtype, mask=mask)
        case |= about | dict(n=n_in if n_in == n_out else pd.NA, workload=workload, optimizer="", code="")
        named = repr([case[name] for name in sorted(case) if name not in ("run", "seed")])
        case["case"] = hashlib.sha256(named.encode()).hexdigest()[:12]
        for group in range(sweep["groups"]):
            rows += [{**case, "group": group, **each} for each in _group(rng, case, methods, **how)]
    return pd.DataFrame(rows).astype({"n": "Int64"})


def row(method, metric, unit, value, repeat=0, rank=-1, status="ok", reason="", detail=""):
    value = float(value) if status == "ok" else np.nan
    about = dict(method=method, metric=metric, unit=unit, value=value, repeat=repeat)
    return about | dict(rank=rank, status=status, reason=reason, detail=detail)


def _group(rng, case, methods, *, repeats, noise, group_effect, kernel, timed, speedup):
    n_in, n_out, batch, rows = case["in_features"], case["out_features"], case["batch"], []
    for method in methods:
        why = ""
        if method == "permuted_dense" and case["mask"] != "checkerboard" and "uniform" not in case["mask"]:
            why = f"mask {case['mask']} is not periodic"
        if method == "block_shock_torch" and case["device"] == "cpu":
            why = "the CPU has no 2:4 product"
        if why:
            rows.append(row(method, "check", "bool", 0, status="unsupported", reason=why))
            continue
        rows.append(row(method, "check", "bool", 1))
        for metric, least, most in (("max_ratio", 1, 0.3), ("rms_ratio", 1, 0.02), ("max", 0, 0.02), ("rms", 0, 0.003)):
            rows.append(row(method, f"error_{metric}", "x" if least else "1", least + most * rng.random()))
        rows += _costs(method, case, timed)
        if timed:
            part = times(method, n_in, n_out, batch)
            effect = np.exp(rng.normal(0, group_effect)) / speedup.get((method, n_in, batch), 1.0)
            for repeat in range(repeats):
                shake = effect * np.exp(rng.normal(0, noise, 4))
                forward = (part["compute"] + 0.95 * part["reduce"]) * shake[2]
                rows.append(row(method, "forward_call", "ms", forward + part["host"] * shake[3], repeat))
                if kernel:
                    rows.append(row(method, "forward_kernel", "ms", forward, repeat))
                    rows.append(row(method, "compute_kernel", "ms", part["compute"] * shake[0], repeat))
                    if part["reduce"]:
                        rows.append(row(method, "reduce_kernel", "ms", part["reduce"] * shake[1], repeat))
    if timed and kernel:
        rows += _ceilings(rng)
    return rows


def _ceilings(rng):
    ceilings = {"copy_bandwidth": ("GB/s", 4300), "gemm_rate": ("TFLOP/s", 720), "allreduce_bandwidth": ("GB/s", 300)}
    return [row("ceiling", name, unit, v * np.exp(rng.normal(0, 0.01))) for name, (unit, v) in ceilings.items()]


def _costs(method, case, timed):
    """What the method's formulas say, and that each of two ranks held a little more."""
    sizes, method_row = (case[f"{side}_features"] for side in ("in", "out")), LINEAR.get(method, LINEAR["row_parallel"])
    cost = method_row.cost(Shape(case["batch"], *sizes, 2, case["world_size"], Mask.named(case["mask"])))
    rows = [row(method, f"{n}_bytes_formula", "B", b) for n, b in (("weight", cost.weights), ("peak", cost.peak))]
    for rank, more in enumerate((1.02, 1.05)):
        rows.append(row(method, "weight_bytes", "B", cost.weights, rank=rank))
        rows.append(row(method, "peak_bytes", "B", more * cost.peak, rank=rank))
    if timed:
        rows.append(row(method, "flops", "FLOP", cost.flops))
        rows += [row(method, f"bytes_{name}", "B", getattr(cost, name)) for name in ("read", "written", "sent")]
    return rows


def where(frame, **wanted):
    """Which rows have these values."""
    return np.logical_and.reduce([frame[name].eq(value) for name, value in wanted.items()])


def fail(
    frame, method, *, n=None, batch=None, mask=None, status="failed", reason="max error 3.1x the baseline's, gate 2x"
):
    """The frame with that method's check in the named cells turned into a non-ok row, its measurements kept."""
    wanted = {"in_features": n, "batch": batch, "mask": mask}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    hit = where(frame, method=method, metric="check", **wanted)
    assert hit.any(), "no such cell"
    return frame.assign(
        status=frame["status"].mask(hit, status),
        reason=frame["reason"].mask(hit, reason),
        value=frame["value"].mask(hit),
    )


SORTING = toy.STUDY.axes


def sorting(**how) -> pd.DataFrame:
    """Records of the toy study: those of two methods of `make`, by other names."""
    frame = make(**({"ns": (4096, 8192), "bs": (16, 256), "methods": ("row_parallel", "block_shock")} | how))
    order = frame["batch"].map({16: "random", 256: "reversed"})
    names = {"row_parallel": "whole", "block_shock": "shared"}
    frame = frame.replace({"method": names}).assign(order=order, phase="race")
    frame["metric"] = frame["metric"].str.replace("forward", "sort")
    return frame.drop(columns=["in_features", "out_features", "shape", "batch", "mask", "workload", "optimizer"])


def words(fig) -> str:
    """All text of a figure."""
    from matplotlib.text import Text

    return " ".join(text.get_text().replace("\n", " ") for text in fig.findobj(Text))


def title(fig) -> str:
    return fig.texts[0].get_text().replace("\n", " ")
