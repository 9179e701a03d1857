"""Chrome traces for the tests: a few events in a file named as engine.profile names it."""

import gzip
import json
from pathlib import Path


def event(name, ts, dur, cat="kernel", pid=0, tid=7, **more):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, **more}


def write(folder, events, *, method="block_shock", rank=0, case="0123456789ab") -> Path:
    path = Path(folder) / "traces" / f"{case}-{method}-rank{rank}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"schemaVersion": 1, "traceEvents": list(events)}).encode()))
    return path


def calls(start, compute, send, count=3):
    """`count` calls of a product and an all-reduce behind each other on a GPU, us."""
    found = []
    for begin in range(start, start + count * (compute + send), compute + send):
        found.append(event("gemm", begin, compute))
        found.append(event("ncclDevKernel_AllReduce_Sum", begin + compute, send))
        found.append(event("nccl:all_reduce", begin + compute, send, cat="gpu_user_annotation"))
    return found
