"""Records frames of phases 2 and 3 for the tests of reports: the rows that the engine writes, of plausible numbers."""

import hashlib

import numpy as np
import pandas as pd

from tests.report import frames
from tests.report.frames import row

METHODS = (*frames.METHODS[:6], "block_shock_recompress", "block_shock_torch")
OURS = ("block_shock", "block_shock_recompress", "block_shock_torch")
TENSORS = {"phase2": ("", "dx"), "phase3": ("", "dx", "dw", "db", "weight")}
ENTRY = 2  # bytes of a 16-bit value


def pieces(method: str, n: int, batch: int, optimizer: str) -> dict[str, float]:
    """ms of each piece of a training step on one of two H200s."""
    half, sparse = frames.PRODUCT[n][batch]
    reduce = 0.0 if method == "dense" else frames.reduce_ms(n, batch)
    update = n * n * ENTRY / 4.3e12 * 1e3 * (3 if optimizer == "sgd" else 5)
    if method not in OURS:
        product = {"dense": 1.97, "masked_dense": 1.98, "permuted_dense": 1.06}.get(method, 1.0) * half
        one = dict(compute=product, dx=product, dw=product, optimizer=update / (1 if method == "dense" else 2))
        return one | dict(reduce=reduce, reduce_dx=reduce, remask=0.0, compress=0.0, refresh=0.0)
    small = n * n * ENTRY / 4.3e12 * 1e3
    one = dict(compute=sparse, dx=1.05 * sparse, dw=1.15 * half, optimizer=update / 2, reduce=reduce, reduce_dx=reduce)
    if method == "block_shock":
        return one | dict(remask=0.0, compress=0.0, refresh=0.8 * small)
    slow = 3 if method == "block_shock_torch" else 1
    return one | dict(optimizer=update, dw=2.3 * half, remask=2 * small, compress=5 * slow * small, refresh=0.0)


def cpu(method: str, n: int, batch: int, optimizer: str) -> dict[str, float]:
    work = n * n * batch / 5e9 * 1e3
    product = 0.02 + work * (1.6 if method in OURS else 0.5)
    own = dict(remask=0.02, compress=0.05, refresh=0.0) if method == "block_shock_recompress" else {}
    one = dict(compute=product, dx=product, dw=product, optimizer=0.05, reduce=0.1, reduce_dx=0.1)
    return one | dict(remask=0.0, compress=0.0, refresh=0.03 if method == "block_shock" else 0.0) | own


def training_frame(
    ns=(4096, 16384),
    bs=(256, 4096),
    optimizers=("sgd", "adamw"),
    methods=METHODS,
    *,
    phase="phase3",
    device="cuda",
    emulated=False,
    masks=("checkerboard",),
    groups=3,
    repeats=4,
    noise=0.005,
    speedup=None,
    kernel=True,
    loss_steps=60,
    seed=0,
) -> pd.DataFrame:
    """A whole run of phase 2 or 3. `speedup` {(method, metric): x} divides those times; `kernel` False: calls alone."""
    rng = np.random.default_rng(seed)
    found = []
    for optimizer in optimizers if phase == "phase3" else ("",):
        for mask in masks:
            for n in ns:
                for batch in bs:
                    setting = (phase, device, emulated, mask, n, batch, optimizer)
                    case = dict(run="t", phase=phase, case=hashlib.sha256(repr(setting).encode()).hexdigest()[:12])
                    case |= dict(in_features=n, out_features=n, n=n, shape=f"{n}x{n}", batch=batch, dtype="bf16")
                    case |= dict(mask=mask, workload="gaussian", world_size=2, emulated=emulated, device=device)
                    case |= dict(seed=seed, optimizer=optimizer, code="")
                    first = n == min(ns) and batch == min(bs)
                    for group in range(groups):
                        rows = _group(rng, case, methods, repeats, noise, speedup or {}, kernel)
                        if phase == "phase3" and first and group == 0:
                            rows += losses(methods, loss_steps)
                        if phase == "phase3" and n == max(ns) and batch == max(bs) and group == 0:
                            rows += _largest(methods, optimizer)
                        found += [{**case, "group": group, **one} for one in rows]
    frame = pd.DataFrame(found)
    return frame.astype({"n": "Int64"})


def _group(rng, case, methods, repeats, noise, speedup, kernel):
    found, phase = [], case["phase"]
    cost = cpu if case["device"] == "cpu" else pieces
    for method in methods:
        if method == "block_shock_torch" and case["device"] == "cpu":
            found.append(row(method, "check", "bool", 0, status="unsupported", reason="the CPU has no 2:4 product"))
            continue
        found.append(row(method, "check", "bool", 1))
        for tensor in TENSORS[phase]:
            found.append(row(method, "error_max_ratio", "x", 1 + 0.3 * rng.random(), detail=tensor))
            found.append(row(method, "error_rms_ratio", "x", 1 + 0.02 * rng.random(), detail=tensor))
            found.append(row(method, "error_max", "1", 0.02 * rng.random(), detail=tensor))
            found.append(row(method, "error_rms", "1", 0.003 * rng.random(), detail=tensor))
        found += _memory(method, case)
        part = cost(method, case["in_features"], case["batch"], case["optimizer"])
        effect = np.exp(rng.normal(0, 0.002))
        for repeat in range(repeats):
            times = {name: value * effect * np.exp(rng.normal(0, noise)) for name, value in part.items()}
            for (metric, detail), value in _metrics(phase, method, times, kernel).items():
                value /= speedup.get((method, metric), 1.0)
                if value > 0:
                    found.append(row(method, metric, "ms", value, repeat, detail=detail))
        for name in ("forward", "dx", "dw", "optimizer", "remask", "compress", "refresh"):
            value = 0.6 * part.get("compute" if name == "forward" else name, 0.0)
            if value > 0:
                found.append(row(method, f"floor_{name}", "ms", value))
        found.append(row(method, "floor_pass" if phase == "phase2" else "floor_step", "ms", 0.6 * sum(part.values())))
    return found


def _metrics(phase, method, t, kernel):
    forward, back = t["compute"] + t["reduce"], t["dx"] + t["reduce_dx"]
    dx_by = "2:4" if method in OURS else "dense"
    dw_by = "periodic" if method in (*OURS[:2], "permuted_dense") else "full"
    found = {("forward_call", ""): forward + 0.05}
    if kernel:
        found |= {("forward_kernel", ""): forward, ("compute_kernel", ""): t["compute"]}
        found |= {("reduce_kernel", ""): t["reduce"], ("dx_kernel", dx_by): t["dx"]}
        found |= {("reduce_dx_kernel", ""): t["reduce_dx"]}
    if phase == "phase2":
        found |= {("pass_call", ""): forward + back + 0.1}
        return found | ({("backward_kernel", ""): back, ("pass_kernel", ""): forward + back} if kernel else {})
    backward = t["dw"] + t["dx"] + 0.4 * t["reduce_dx"]
    step = forward + backward + t["optimizer"] + t["remask"] + t["compress"] + t["refresh"]
    found |= {("step_call", ""): step + 0.3}
    if kernel:
        orders = {"overlapped": backward, "in turn": t["dw"] + t["dx"] + t["reduce_dx"]}
        if method == "column_parallel":  # which is faster in turn
            orders["in turn"] = 0.9 * backward
        taken = min(orders, key=orders.get) if t["reduce_dx"] else ""
        found |= {("backward_kernel", taken): orders.get(taken, backward), ("dw_kernel", dw_by): t["dw"]}
        found |= {("backward_order_kernel", name): ms for name, ms in orders.items() if taken}
        found |= {("step_kernel", ""): step}
        found |= {(f"{name}_kernel", ""): t[name] for name in ("optimizer", "remask", "compress", "refresh")}
        if method in OURS:
            by = {"full": 2.0, "periodic": 1.0, "exchange": 1.2}
            found |= {("dw_strategy_kernel", name): factor * t["dw"] for name, factor in by.items()}
    return found


def _memory(method, case):
    dense = ENTRY * case["in_features"] * case["out_features"]
    share = {"dense": 1, "masked_dense": 1, "block_shock_recompress": 1, "block_shock_torch": 1}.get(method, 0.5)
    states = {"sgd": 0, "adamw": 2}.get(case["optimizer"], 0)
    held = dense * share
    parts = dict(
        weights_bytes_held=held,
        copies_bytes=9 / 8 * dense if method in OURS else 0.0,
        gradient_bytes=held if case["phase"] == "phase3" else 0.0,
        optimizer_bytes=states * held,
        activation_bytes=ENTRY * case["batch"] * 2 * case["in_features"],
    )
    found = [row(method, "weight_bytes", "B", held, rank=0), row(method, "weight_bytes_formula", "B", held)]
    if case["phase"] == "phase3":
        for name, value in parts.items():
            found += [row(method, name, "B", value, rank=0), row(method, f"{name}_formula", "B", value)]
    peak = sum(parts.values())
    return [*found, row(method, "peak_bytes", "B", 1.03 * peak, rank=0), row(method, "peak_bytes_formula", "B", peak)]


def losses(methods=METHODS, steps=60):
    """Loss of a regression: the same for all methods but for rounding, which grows with the steps."""
    found = []
    for place, method in enumerate(m for m in methods if m in ("dense", "row_parallel", *OURS[:2])):
        for step in range(steps):
            value = np.exp(-step / 25) * (1 + 1e-3 * place * np.sin(step) * step / steps)
            found.append(row(method, "loss", "1", value, step))
    return found


def _largest(methods, optimizer):
    found = []
    for place, method in enumerate(methods):
        n = (61440 if optimizer == "sgd" else 45056) + 4096 * place
        found += [row(method, "largest_n", "1", n, detail=by) for by in ("memory", "measured")]
    return found
