"""A phase 1 frame with what "How close to the limit" adds to it: every way of each piece, calls and host times."""

import numpy as np
import pandas as pd

from tests.report import frames

NS, BS = (4096, 16384), (16, 64, 1024)
# µs of an eager product on the host.
HOST = {"dense": 9.0, "torch": 420.0, "cslt": 18.0, "small": 14.0}
# Times over the method's floor.
OVER = {"cslt": 2.5, "small": 1.2}
LINKS = {"nccl": 1.4, "one-shot": 1.0}


def make(groups=3, **changes) -> pd.DataFrame:
    """The run of `frames.make` with all rows of the section; `small` up to B = 64, compression at B = 16 alone."""
    frame = frames.make(**{"ns": NS, "bs": BS, "groups": groups} | changes)
    rng = np.random.default_rng(7)
    more = []
    for _, cell in frame.groupby(["case", "group"], sort=False):
        about = cell.iloc[0].drop(["method", "metric", "unit", "value", "repeat", "rank", "status", "reason", "detail"])
        effect = np.exp(rng.normal(0, 0.004))

        def add(method, metric, value, detail="", unit="ms", about=about, effect=effect):
            for repeat in range(4):
                shaken = value * effect * np.exp(rng.normal(0, 0.01))
                more.append(about.to_dict() | frames.row(method, metric, unit, shaken, repeat, detail=detail))

        value = cell[cell["repeat"].eq(0)].set_index(["method", "metric"])["value"]
        floor = value["block_shock", "floor_compute"]
        small = about["batch"] <= 64
        for way in ("cslt", "small")[: 1 + small]:
            if small:
                add("block_shock", "product_by_kernel", OVER[way] * floor, way)
            add("block_shock", "host_us", HOST[way], way, "us")
        add("dense", "host_us", HOST["dense"], "dense", "us")
        add("row_parallel", "host_us", 2 * HOST["dense"], "dense", "us")
        add("block_shock_torch", "host_us", HOST["torch"], "torch", "us")
        for method in ("row_parallel", "block_shock"):
            add(method, "forward_graph_call", 1.05 * value[method, "forward_kernel"] + 0.006)
            if about["batch"] >= 1024:
                for chunks, factor in (("1", 1.0), ("2", 0.93)):
                    add(method, "forward_chunks_kernel", factor * value[method, "forward_kernel"], chunks)
        for way, factor in LINKS.items():
            add("row_parallel", "reduce_by_kernel", factor * value["row_parallel", "reduce_kernel"], way)
        if about["batch"] == min(frame["batch"]):
            least = 4 * about["in_features"] * about["out_features"] / 4.3e12 * 1e3
            more.append(about.to_dict() | frames.row("block_shock", "floor_compress", "ms", least))
            add("block_shock", "compress_by_kernel", 50 * least, "library")
            add("block_shock", "compress_by_kernel", 1.6 * least, "by mask")
    named = {("block_shock", "compute_kernel"): "small", ("row_parallel", "compute_kernel"): "dense"}
    named |= {("block_shock_torch", "compute_kernel"): "torch", ("row_parallel", "reduce_kernel"): "one-shot"}
    for (method, metric), detail in named.items():
        frame.loc[frame["method"].eq(method) & frame["metric"].eq(metric), "detail"] = detail
    large = frame["batch"].gt(64) & frame["method"].eq("block_shock") & frame["metric"].eq("compute_kernel")
    frame.loc[large, "detail"] = "cslt"
    frame.loc[frame["metric"].eq("forward_kernel") & frame["batch"].ge(1024), "detail"] = "2"
    return pd.concat([frame, pd.DataFrame(more)], ignore_index=True).astype({"n": "Int64"})
