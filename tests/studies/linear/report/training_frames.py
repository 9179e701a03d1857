"""Records frames of phases 2 and 3 for the tests of reports: the rows that the engine writes, of plausible numbers."""

import hashlib
from itertools import product

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
    small = n * n * ENTRY / 4.3e12 * 1e3
    update, slow = small * (3 if optimizer == "sgd" else 5), 3 if method == "block_shock_torch" else 1
    one = dict(reduce=reduce, reduce_dx=reduce, optimizer=update / 2, remask=0.0, compress=0.0, refresh=0.0)
    if method not in OURS:
        dense = {"dense": 1.97, "masked_dense": 1.98, "permuted_dense": 1.06}.get(method, 1.0) * half
        one |= dict(compute=dense, dx=dense, dw=dense)
        return one | (dict(optimizer=update) if method == "dense" else {})
    one |= dict(compute=sparse, dx=1.05 * sparse, dw=1.15 * half)
    if method == "block_shock":
        return one | dict(refresh=0.8 * small)
    return one | dict(optimizer=update, dw=2.3 * half, remask=2 * small, compress=5 * slow * small)


def cpu(method: str, n: int, batch: int, optimizer: str) -> dict[str, float]:
    whole = 0.02 + n * n * batch / 5e6 * (1.6 if method in OURS else 0.5)
    one = dict(compute=whole, dx=whole, dw=whole, optimizer=0.05, reduce=0.1, reduce_dx=0.1)
    after = dict(remask=0.0, compress=0.0, refresh=0.03 if method == "block_shock" else 0.0)
    return one | after | (dict(remask=0.02, compress=0.05) if method == "block_shock_recompress" else {})


def training_frame(
    ns=(4096, 16384),
    bs=(256, 4096),
    optimizers=("sgd", "adamw"),
    methods=METHODS,
    *,
    phase="phase3",
    device="cuda",
    masks=("checkerboard",),
    groups=3,
    repeats=4,
    noise=0.005,
    speedup=None,
    seed=0,
) -> pd.DataFrame:
    """A whole run of phase 2 or 3. `speedup` {(method, metric): x} divides those times."""
    rng, found = np.random.default_rng(seed), []
    for optimizer, mask, n, batch in product(optimizers if phase == "phase3" else ("",), masks, ns, bs):
        setting = (phase, device, mask, n, batch, optimizer)
        case = dict(run="t", phase=phase, case=hashlib.sha256(repr(setting).encode()).hexdigest()[:12])
        case |= dict(in_features=n, out_features=n, n=n, shape=f"{n}x{n}", batch=batch, dtype="bf16")
        case |= dict(mask=mask, workload="gaussian", world_size=2, emulated=False, device=device)
        case |= dict(seed=seed, optimizer=optimizer, code="")
        for group in range(groups):
            rows = _group(rng, case, methods, repeats, noise, speedup or {})
            if phase == "phase3" and (n, batch, group) == (min(ns), min(bs), 0):
                rows += _losses(methods)
            if phase == "phase3" and (n, batch, group) == (max(ns), max(bs), 0):
                rows += _largest(methods, optimizer)
            found += [{**case, "group": group, **one} for one in rows]
    return pd.DataFrame(found).astype({"n": "Int64"})


def _group(rng, case, methods, repeats, noise, speedup):
    found, phase = [], case["phase"]
    cost = cpu if case["device"] == "cpu" else pieces
    for method in methods:
        if method == "block_shock_torch" and case["device"] == "cpu":
            found.append(row(method, "check", "bool", 0, status="unsupported", reason="the CPU has no 2:4 product"))
            continue
        found.append(row(method, "check", "bool", 1))
        errors = (("max_ratio", 1, 0.3), ("rms_ratio", 1, 0.02), ("max", 0, 0.02), ("rms", 0, 0.003))
        for tensor, (name, least, most) in product(TENSORS[phase], errors):
            found.append(row(method, f"error_{name}", "x", least + most * rng.random(), detail=tensor))
        found += _memory(method, case)
        part = cost(method, case["in_features"], case["batch"], case["optimizer"])
        effect = np.exp(rng.normal(0, 0.002))
        for repeat in range(repeats):
            times = {name: value * effect * np.exp(rng.normal(0, noise)) for name, value in part.items()}
            for (metric, detail), value in _metrics(phase, method, times).items():
                value /= speedup.get((method, metric), 1.0)
                if value > 0:
                    found.append(row(method, metric, "ms", value, repeat, detail=detail))
        floors = {name: part[name] for name in ("dx", "dw", "optimizer", "remask", "compress", "refresh") if part[name]}
        floors |= {"forward": part["compute"], "pass" if phase == "phase2" else "step": sum(part.values())}
        found += [row(method, f"floor_{name}", "ms", 0.6 * value) for name, value in floors.items()]
    return found


def _metrics(phase, method, t):
    forward, back = t["compute"] + t["reduce"], t["dx"] + t["reduce_dx"]
    found = {("forward_call", ""): forward + 0.05, ("forward_kernel", ""): forward}
    found |= {(f"{name}_kernel", ""): t[name] for name in ("compute", "reduce", "reduce_dx")}
    found["dx_kernel", "2:4" if method in OURS else "dense"] = t["dx"]
    if phase == "phase2":
        pass_ = {("pass_call", ""): forward + back + 0.1, ("pass_kernel", ""): forward + back}
        return found | pass_ | {("backward_kernel", ""): back}
    backward = t["dw"] + t["dx"] + 0.4 * t["reduce_dx"]
    after = ("optimizer", "remask", "compress", "refresh")
    step = forward + backward + sum(t[name] for name in after)
    found |= {("step_call", ""): step + 0.3, ("step_kernel", ""): step} | {(f"{n}_kernel", ""): t[n] for n in after}
    orders = {"overlapped": backward, "in turn": t["dw"] + t["dx"] + t["reduce_dx"]}
    if method == "column_parallel":  # which is faster in turn
        orders["in turn"] = 0.9 * backward
    taken = min(orders, key=orders.get) if t["reduce_dx"] else ""
    found["backward_kernel", taken] = orders.get(taken, backward)
    found["dw_kernel", "periodic" if method in (*OURS[:2], "permuted_dense") else "full"] = t["dw"]
    found |= {("backward_order_kernel", name): ms for name, ms in orders.items() if taken}
    by = {"full": 2.0, "periodic": 1.0, "exchange": 1.2} if method in OURS else {}
    return found | {("dw_strategy_kernel", name): factor * t["dw"] for name, factor in by.items()}


def _memory(method, case):
    dense = ENTRY * case["in_features"] * case["out_features"]
    share = {"dense": 1, "masked_dense": 1, "block_shock_recompress": 1, "block_shock_torch": 1}.get(method, 0.5)
    states = {"sgd": 0, "adamw": 2}.get(case["optimizer"], 0)
    held, trained = dense * share, case["phase"] == "phase3"
    copies = 9 / 8 * dense if method in OURS else 0.0
    parts = dict(weights_bytes_held=held, copies_bytes=copies, gradient_bytes=held if trained else 0.0)
    parts |= dict(optimizer_bytes=states * held, activation_bytes=ENTRY * case["batch"] * 2 * case["in_features"])
    peak = sum(parts.values())
    found = [row(method, "peak_bytes", "B", 1.03 * peak, rank=0), row(method, "peak_bytes_formula", "B", peak)]
    for name, value in ({"weight_bytes": held} | (parts if trained else {})).items():
        found += [row(method, name, "B", value, rank=0), row(method, f"{name}_formula", "B", value)]
    return found


def _losses(methods):
    """Loss of a regression: the same for all methods but for rounding, which grows with the steps."""
    found = []
    trained = [method for method in methods if method in ("dense", "row_parallel", *OURS[:2])]
    for (place, method), step in product(enumerate(trained), range(60)):
        value = np.exp(-step / 25) * (1 + 1e-3 * place * np.sin(step) * step / 60)
        found.append(row(method, "loss", "1", value, step))
    return found


def _largest(methods, optimizer):
    found = []
    for place, method in enumerate(methods):
        n = (61440 if optimizer == "sgd" else 45056) + 4096 * place
        found += [row(method, "largest_n", "1", n, detail=by) for by in ("memory", "measured")]
    return found
