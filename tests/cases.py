"""Small cases for the tests, in the shapes that the library really uses."""

import functools

from blockshock_lib.engine import study
from blockshock_lib.kernels.sparse24 import mask
from blockshock_lib.runs import record
from blockshock_lib.studies.linear import STUDY
from blockshock_lib.studies.linear.params import WORKLOADS, Case

METHODS = ("dense", "row_parallel", "column_parallel", "masked_dense", "permuted_dense", "block_shock")
MASKS = ("uniform_1100", "uniform_1010", "uniform_1001", "random", "checkerboard", "transposable_random", "magnitude")


def case(**changes) -> Case:
    """An emulated 128 x 256 case of all methods on the CPU; `mask` may be a shipped name."""
    fields = dict(phase="phase0", methods=METHODS, dtype="bf16", bias=True, mask="checkerboard", workload="gaussian")
    fields |= dict(in_features=256, out_features=128, batch=16, seed=0)
    fields |= dict(product="auto", device="cpu", world_size=2, emulated=True) | changes
    for key, known in (("mask", mask.MASKS), ("workload", WORKLOADS)):
        if isinstance(fields[key], str):
            fields[key] = known[fields[key]]
    return Case(**fields)


row = functools.partial(study.row, STUDY.metrics)
write = functools.partial(record.write, study=STUDY)


def picked(rows: list[dict], method: str, metric: str) -> list[dict]:
    return [row for row in rows if (row["method"], row["metric"]) == (method, metric)]


def validate(rows: list[dict]) -> None:
    record.validate(rows, STUDY.metrics)
