"""A deterministic factory of records frames: the rows that `records.load` would give, made of plausible numbers."""

import hashlib

import numpy as np
import pandas as pd

METHODS = (
    "dense",
    "row_parallel",
    "column_parallel",
    "masked_dense",
    "permuted_dense",
    "block_shock",
    "block_shock_torch",
)

# Kernel time of one product on an H200, ms: N -> B -> (dense half, 2:4).
PRODUCT = {
    4096: {
        16: (0.0080, 0.0216),
        64: (0.0085, 0.0218),
        256: (0.0104, 0.0229),
        1024: (0.028, 0.041),
        4096: (0.0957, 0.1231),
    },
    8192: {16: (0.0195, 0.0540), 64: (0.020, 0.047), 256: (0.0269, 0.0451), 1024: (0.095, 0.123), 4096: (0.369, 0.467)},
    16384: {16: (0.0630, 0.1933), 64: (0.065, 0.17), 256: (0.0991, 0.1263), 1024: (0.38, 0.47), 4096: (1.496, 1.846)},
    40960: {16: (0.395, 1.055), 64: (0.41, 0.95), 256: (0.616, 0.768), 1024: (2.40, 3.1), 4096: (10.0, 12.7)},
}
GIB = 2**30


def reduce_ms(n: int, batch: int) -> float:
    return 0.008 + n * batch * 2 / GIB * 3.9


def h200(method: str, n: int, batch: int) -> dict[str, float]:
    """Compute, reduce and host time (ms) of `method` on one of two GPUs."""
    half, sparse = PRODUCT[n][batch]
    compute = {
        "dense": 1.97 * half,
        "row_parallel": half,
        "column_parallel": 1.01 * half,
        "masked_dense": 1.98 * half,
        "permuted_dense": 1.06 * half,
    }.get(method, sparse)
    host = {"block_shock_torch": 0.43, "dense": 0.012}.get(method, 0.045)
    return {"compute": compute, "reduce": 0.0 if method == "dense" else reduce_ms(n, batch), "host": host}


def cpu(method: str, n: int, batch: int) -> dict[str, float]:
    """The same for two processes on a CPU: any plausible figure will do."""
    work = n * n * batch / 5e9 * 1e3
    factor = {
        "row_parallel": 0.5,
        "column_parallel": 0.5,
        "permuted_dense": 0.6,
        "block_shock": 1.6,
        "block_shock_torch": 0,
    }
    return {"compute": 0.02 + work * factor.get(method, 1.0), "reduce": 0.1 + n * batch / 1e7, "host": 0.05}


def make(
    ns=(4096, 8192, 16384, 40960),
    bs=(16, 64, 256, 1024, 4096),
    methods=METHODS,
    *,
    device="cuda",
    emulated=False,
    world_size=2,
    groups=3,
    repeats=12,
    noise=0.01,
    group_effect=0.004,
    masks=("checkerboard",),
    workloads=("gaussian",),
    dtypes=("bf16",),
    features=(),
    phase="phase1",
    run="a",
    kernel=None,
    timed=True,
    speedup=None,
    seed=0,
) -> pd.DataFrame:
    """A whole run. `speedup` {(method, n, batch): x} multiplies that cell's speed; `kernel` False: no kernel times."""
    rng = np.random.default_rng(seed)
    kernel = device == "cuda" if kernel is None else kernel
    cost = h200 if device == "cuda" else cpu
    rows = []
    for dtype in dtypes:
        for workload in workloads:
            for mask in masks:
                for n_in, n_out in [*((n, n) for n in ns), *features]:
                    for batch in bs:
                        setting = (phase, device, emulated, world_size, dtype, workload, mask, n_in, n_out, batch)
                        case = {
                            "run": run,
                            "phase": phase,
                            "case": hashlib.sha256(repr(setting).encode()).hexdigest()[:12],
                            "in_features": n_in,
                            "out_features": n_out,
                            "n": n_in if n_in == n_out else pd.NA,
                            "shape": f"{n_out}x{n_in}",
                            "batch": batch,
                            "dtype": dtype,
                            "mask": mask,
                            "workload": workload,
                            "world_size": world_size,
                            "emulated": emulated,
                            "device": device,
                            "optimizer": "",
                            "seed": seed,
                            "code": "",
                        }
                        for group in range(groups):
                            found = _group(
                                rng, case, methods, cost, repeats, noise, group_effect, kernel, timed, speedup
                            )
                            rows += [{**case, "group": group, **row} for row in found]
    frame = pd.DataFrame(rows)
    frame["n"] = frame["n"].astype("Int64")
    return frame


def row(method, metric, unit, value, repeat=0, rank=-1, status="ok", reason="", detail=""):
    value = float(value) if status == "ok" else np.nan
    return dict(
        method=method,
        metric=metric,
        unit=unit,
        value=value,
        repeat=repeat,
        rank=rank,
        status=status,
        reason=reason,
        detail=detail,
    )


def _group(rng, case, methods, cost, repeats, noise, group_effect, kernel, timed, speedup):
    n_in, n_out, batch = case["in_features"], case["out_features"], case["batch"]
    n = n_in if case["device"] == "cpu" else min(PRODUCT, key=lambda known: abs(known - (n_in * n_out) ** 0.5))
    found = []
    for method in methods:
        if method == "permuted_dense" and case["mask"] not in (
            "checkerboard",
            *[m for m in [case["mask"]] if "uniform" in m],
        ):
            found.append(
                row(method, "check", "bool", 0, status="unsupported", reason=f"mask {case['mask']} is not periodic")
            )
            continue
        if method == "block_shock_torch" and case["device"] == "cpu":
            found.append(row(method, "check", "bool", 0, status="unsupported", reason="the CPU has no 2:4 product"))
            continue
        found.append(row(method, "check", "bool", 1))
        for metric, unit, value in (
            ("error_max_ratio", "x", 1 + 0.3 * rng.random()),
            ("error_rms_ratio", "x", 1 + 0.02 * rng.random()),
            ("error_max", "1", 0.02 * rng.random()),
            ("error_rms", "1", 0.003 * rng.random()),
        ):
            found.append(row(method, metric, unit, value))
        found += _memory(method, case)
        if timed:
            part = cost(method, n, batch)
            faster = (speedup or {}).get((method, n_in, batch), 1.0)
            effect = np.exp(rng.normal(0, group_effect))
            for repeat in range(repeats):
                shake = effect * np.exp(rng.normal(0, noise, 4)) / faster
                compute, reduce = part["compute"] * shake[0], part["reduce"] * shake[1]
                forward = (part["compute"] + 0.95 * part["reduce"]) * shake[2]
                found.append(row(method, "forward_call", "ms", forward + part["host"] * shake[3], repeat))
                if kernel:
                    found.append(row(method, "forward_kernel", "ms", forward, repeat))
                    found.append(row(method, "compute_kernel", "ms", compute, repeat))
                    if reduce:
                        found.append(row(method, "reduce_kernel", "ms", reduce, repeat))
            found += _cost(method, case)
    if timed and kernel:
        found += [
            row("ceiling", "copy_bandwidth", "GB/s", 4300 * np.exp(rng.normal(0, 0.005))),
            row("ceiling", "gemm_rate", "TFLOP/s", 720 * np.exp(rng.normal(0, 0.01))),
            row("ceiling", "allreduce_bandwidth", "GB/s", 300 * np.exp(rng.normal(0, 0.01))),
        ]
        for gpu in range(1 if case["emulated"] else case["world_size"]):
            for repeat in range(2):
                found += [
                    row("machine", "power", "W", 640 + 20 * rng.random(), repeat, gpu),
                    row("machine", "sm_clock", "MHz", 1700 + 100 * rng.random(), repeat, gpu),
                    row("machine", "throttle", "bool", gpu, repeat, gpu, detail="power cap" if gpu else ""),
                ]
        for method in {"row_parallel", "block_shock"}.intersection(methods):
            name = "cutlass_gemm" if method == "row_parallel" else "sparse_gemm"
            for kernel_name, value in ((name, 0.8), ("ncclDevKernel_AllReduce", 0.2), ("elementwise", 0.01)):
                found.append(row(method, "kernel_time", "ms", value, detail=kernel_name))
    return found


def _memory(method, case):
    dense = 2 * case["in_features"] * case["out_features"]
    share = {"dense": 1.0, "masked_dense": 1.0, "block_shock": 9 / 16, "block_shock_torch": 9 / 16}.get(method, 0.5)
    share *= 2 / case["world_size"] if method != "dense" else 1
    act = 2 * case["batch"] * (case["in_features"] + case["out_features"])
    weight = share * dense
    return [
        row(method, "weight_bytes", "B", weight, rank=0),
        row(method, "weight_bytes", "B", weight, rank=1),
        row(method, "weight_bytes_formula", "B", weight),
        row(method, "peak_bytes", "B", weight + 1.02 * act, rank=0),
        row(method, "peak_bytes", "B", weight + 1.05 * act, rank=1),
        row(method, "peak_bytes_formula", "B", weight + act),
    ]


def _cost(method, case):
    work = 2 * case["batch"] * case["in_features"] * case["out_features"]
    flops = work if method in ("dense", "masked_dense") else work / 2
    read = {m["metric"]: m["value"] for m in _memory(method, case)}["weight_bytes"] + 2 * case["batch"] * case[
        "in_features"
    ]
    written = 2 * case["batch"] * case["out_features"]
    floor = max(flops / 720e12, (read + written) / 4.3e12) * 1e3
    sent = 0 if method == "dense" else written
    return [
        row(method, "flops", "FLOP", flops),
        row(method, "bytes_read", "B", read),
        row(method, "bytes_written", "B", written),
        row(method, "bytes_sent", "B", sent),
        row(method, "floor_compute", "ms", floor),
        row(method, "floor_forward", "ms", floor + sent / 300e9 * 1e3),
    ]


def fail(
    frame, method, *, n=None, batch=None, mask=None, status="failed", reason="max error 3.1x the baseline's, gate 2x"
):
    """The frame with that method's check in the named cells turned into a non-ok row, its measurements kept."""
    frame = frame.copy()
    hit = frame["method"].eq(method) & frame["metric"].eq("check")
    for name, value in (("in_features", n), ("batch", batch), ("mask", mask)):
        hit &= frame[name].eq(value) if value is not None else True
    assert hit.any(), "no such cell"
    frame.loc[hit, ["status", "reason"]] = [status, reason]
    frame.loc[hit, "value"] = np.nan
    return frame
