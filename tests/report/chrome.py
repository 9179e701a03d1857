"""Chrome traces for the tests: a few events in a file named as engine.profile names it."""

import gzip
import json
from pathlib import Path

BASE = 1_790_857_026_000_000_000


def event(name, ts, dur, cat="kernel", pid=0, tid=7, **more):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, **more}


def op(name, ts, dur, tid=1, cat="cpu_op"):
    return event(name, ts, dur, cat=cat, pid=1, tid=tid)


def gloo(ts, dur, tid=2):
    return op("gloo:all_reduce", ts, dur, tid, "user_annotation")


def write(folder, events, *, method="block_shock", rank=0, case="0123456789ab", base=BASE, **more) -> Path:
    path = Path(folder) / "traces" / f"{case}-{method}-rank{rank}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    top = {"schemaVersion": 1, "traceEvents": list(events), **more, "baseTimeNanoseconds": base}
    path.write_bytes(gzip.compress(json.dumps(top).encode()))
    return path


def calls(start, compute, send, count=3):
    """`count` calls of a product and an all-reduce behind each other on a GPU, us."""
    found = []
    for begin in range(start, start + count * (compute + send), compute + send):
        found.append(event("gemm", begin, compute))
        found.append(event("ncclDevKernel_AllReduce_Sum", begin + compute, send))
        found.append(event("nccl:all_reduce", begin + compute, send, cat="gpu_user_annotation"))
    return found
