"""Does 2:4 pay in fp8 and int8? cuSPARSELt's products of 8 bits beside PyTorch's dense ones, each checked first.

    python benchmarks/eight_bits.py --json eight_bits.json

Weights [N, K] are 2:4 by magnitude and quantized a row at a time, x [B, K] too: fp8 is e4m3, scales are float32. What
a product must be is that of the quantized operands in float64, times the scales; a method whose values are off is
`failed`, one that this machine or shape lacks is `unsupported`, and neither has a time. Times are of kernels, in CUDA
graphs over copies of the weight that do not fit in the L2 cache together: `ms` of the product alone, `scaled ms` with
all that applies the scales; the fastest by that counts. To quantize x costs every method of 8 bits the same, and is not
timed, but for the layer. For comparison: both products in bf16, each as Block-Shock tunes it.

| method | scales | who applies them |
|---|---|---|
| dense | a row of W, a row of x | fp8: `_scaled_mm`; int8: a pass over y |
| dense, whole x and W | one of W, one of x | the same |
| 2:4 | a row of W, a row of x | a pass over y |
| 2:4, alpha | a row of W, a row of x | cuSPARSELt W's, as its `alpha`; x's are multiplied into y in place |
| 2:4, alpha, whole x | a row of W, one of x | cuSPARSELt both; `scaled ms` makes `alpha` of the two too |
| 2:4, layer | a row of W, a row of x | what `sparsify_(model, Sparse24(dtype=...))` calls, with the quantizing of x |

A pass is one kernel where torch.compile makes it. Hopper adds fp8 in about 14 bits: a product that does so throughout
may fail at large K. Of 8 bits a packed weight has 5/8 of the dense bytes (values 1/2, metadata 1/8), of 16 bits 9/16:
at best 1.6 and 1.78 times as fast where bytes bind.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import product as every
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from blockshock_lib.engine.timing import copies_past_cache
from blockshock_lib.errors import UnsupportedError, first_line
from blockshock_lib.kernels.graph import Clock
from blockshock_lib.kernels.patterns.eight_bits import EightBits, off, quantized
from blockshock_lib.kernels.patterns.table import PATTERNS

KINDS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
RAW = {"fp8": torch.bfloat16, "int8": torch.int32}  # in which cuSPARSELt gives a product without scales
WEIGHTS = (8192, 8192), (28672, 8192), (8192, 28672), (4096, 4096)
BATCHES = (16, 32, 64, 256, 4096)
SAMPLES = 5
REFUSALS = (RuntimeError, AttributeError, ValueError, UnsupportedError)  # as PyTorch and the libraries refuse


Time = Callable[[list[Callable[[], Tensor]]], float]
Call = Callable[[Tensor], Tensor]  # of a weight, dense or as it is compressed


class Operands(NamedTuple):
    """x8 [B, K] and W8 [N, K] with float32 scales that broadcast to [B, 1] and [N, 1]."""

    x: Tensor
    x_scale: Tensor
    w: Tensor
    w_scale: Tensor

    def truth(self) -> Tensor:
        return (self.x.double() * self.x_scale.double()) @ (self.w.double() * self.w_scale.double()).t()


class Way(NamedTuple):
    """A product alone, and all that makes y [B, N] in bf16; `setting`: its algorithm, split of K, how it is split."""

    product: Call
    whole: Call
    setting: tuple = ()


def at_once(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """As `quantized`, with one scale [1, 1] of all of x."""
    values, scale = quantized(x.reshape(1, -1), KINDS[kind])
    return values.view(x.shape), scale


def scaled(y: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    return (y.float() * x_scale * w_scale.t()).bfloat16()


def one_pass(device: torch.device) -> Callable:
    """`scaled` as one kernel, where it can be compiled."""
    made = torch.compile(scaled, dynamic=True)
    try:
        for dtype in RAW.values():
            ones = partial(torch.ones, device=device)
            made(ones(16, 64, dtype=dtype), ones(16, 1), ones(64, 1))
    except Exception as error:  # whatever the compiler lacks
        print(f"scales are applied by several kernels, as none was compiled: {first_line(error)}", file=sys.stderr)
        return scaled
    return made


def dense(kind: str, of: Operands, scale: Callable) -> list[Way]:
    if kind == "int8":
        rows, wide = len(of.x), F.pad(of.x, (0, 0, 0, max(0, 32 - len(of.x))))  # it takes no 16 rows
        product = lambda w: torch._int_mm(wide, w.t())[:rows]  # noqa: E731
        return [Way(product, lambda w: scale(product(w), of.x_scale, of.w_scale))]
    own = {"scale_a": of.x_scale, "scale_b": of.w_scale.t(), "out_dtype": torch.bfloat16}
    # Added up in fp32 too, or in the tensor cores alone.
    each = [lambda w, fast=fast: torch._scaled_mm(of.x, w.t(), **own, use_fast_accum=fast) for fast in (False, True)]
    return [Way(one, one) for one in each]


def sparse(kind: str, of: Operands, weight: Tensor, form: str, scale: Callable) -> list[Way]:
    """Of a compressed weight: the library's own pick, and each of its algorithms. `form`: "" for no `alpha`, "row" for
    W's scales, "all" for x's one beside them.
    """
    alpha = {"": lambda: None, "row": of.w_scale.flatten, "all": lambda: (of.w_scale * of.x_scale).flatten()}[form]
    ready, out = alpha(), torch.bfloat16 if form else RAW[kind]

    def way(setting: tuple) -> Way:
        how = dict(zip(("alg_id", "split_k", "split_k_mode"), setting, strict=True))
        how |= {"out_dtype": out, "transpose_result": True}
        product = lambda w, alpha=ready: torch._cslt_sparse_mm(w, of.x.t(), alpha=alpha, **how)  # noqa: E731
        wholes = {
            "": lambda w: scale(product(w), of.x_scale, of.w_scale),
            "row": lambda w: product(w).mul_(of.x_scale),
            "all": lambda w: product(w, alpha()),
        }
        return Way(product, wholes[form], setting)

    return [way(setting) for setting in settings(weight, of.x, ready, out)]


def settings(weight: Tensor, x: Tensor, alpha: Tensor | None, out: torch.dtype) -> list[tuple]:
    pick = torch._C._cusparselt.mm_search(weight, x.t(), None, alpha, out, True)
    return list(dict.fromkeys([tuple(pick[:3]), *((alg, 1, -1) for alg in range(pick[3]))]))


def timed(device: torch.device) -> Time:
    clock = Clock(device)

    def time(calls: list[Callable[[], Tensor]]) -> float:
        for call in calls:
            call()
        with clock.timed(calls) as sample:
            return statistics.median(sample() for _ in range(SAMPLES))

    return time


def judged(way: Way, weights: list, truth: Tensor, time: Time) -> dict:
    """A row's status, and the time of all that makes y."""
    found = {"setting": way.setting} if way.setting else {}
    try:
        if reason := off(way.whole(weights[0]), truth):
            return found | {"status": "failed", "reason": reason}
        return found | {"status": "ok", "scaled ms": time([partial(way.whole, one) for one in weights])}
    except REFUSALS as error:
        return found | {"status": "unsupported", "reason": first_line(error)}


def fastest(make: Callable[[], tuple[list[Way], list]], truth: Tensor, time: Time) -> dict:
    """The row of the fastest right way of those that `make` gives with their weights, one where it cannot."""
    try:
        ways, weights = make()
        rows = [judged(way, weights, truth, time) for way in ways]
        row, way = min(zip(rows, ways, strict=True), key=lambda pair: pair[0].get("scaled ms", float("inf")))
        return row | ({"ms": time([partial(way.product, one) for one in weights])} if row["status"] == "ok" else {})
    except REFUSALS as error:  # no cuSPARSELt here, or not for this
        return {"status": "unsupported", "reason": first_line(error)}


def measure(n: int, k: int, rows: int, device: torch.device, time: Time, scale: Callable = scaled) -> list[dict]:
    """Rows of one size, bf16 first."""
    draw = partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))
    weight, x, found = draw(n, k).bfloat16(), draw(rows, k).bfloat16(), []
    keep = PATTERNS["2:4"].mask(weight.float().abs(), 0.5)
    weight = torch.where(keep, weight, 0)

    def add(kind: str, method: str, truth: Tensor, make: Callable[[], tuple[list[Way], list]]) -> None:
        found.append({"n": n, "k": k, "b": rows, "kind": kind, "method": method} | fastest(make, truth, time))

    def copies(one: Tensor) -> list[Tensor]:
        return [one, *(one.clone() for _ in range(copies_past_cache(one.nbytes, device) - 1))]

    def layers(make: Callable, *given, **options) -> tuple[list[Way], list]:
        packed = make(*given, **options)
        packed.tune(x)
        product = lambda one: one.product(x)  # noqa: E731
        return [Way(product, product)], [
            packed,
            *(packed.copy() for _ in range(copies_past_cache(packed.nbytes, device) - 1)),
        ]

    truth = x.double() @ weight.double().t()
    for method, options in (("dense", {"kernel": "searched"}), ("2:4", {})):
        add("bf16", method, truth, partial(layers, PATTERNS[method].pack, weight, keep, **options))
    for kind, dtype in KINDS.items():
        xs, ws = [(quantized(one, dtype), at_once(one, kind)) for one in (x, weight)]
        by_row, whole_x, whole = (Operands(*xs[i], *ws[j]) for i, j in ((0, 0), (1, 0), (1, 1)))
        methods = ("2:4", by_row, ""), ("2:4, alpha", by_row, "row"), ("2:4, alpha, whole x", whole_x, "all")
        truths = {id(of): of.truth() for of in (by_row, whole_x, whole)}
        for method, of in (("dense", by_row), ("dense, whole x and W", whole)):
            add(kind, method, truths[id(of)], lambda kind=kind, of=of: (dense(kind, of, scale), copies(of.w)))
        for method, of, form in methods:

            def compressed(kind=kind, of=of, form=form):
                one = torch._cslt_compress(of.w)
                return sparse(kind, of, one, form, scale), copies(one)

            add(kind, method, truths[id(of)], compressed)
        given = by_row.w, by_row.w_scale, torch.bfloat16
        add(kind, "2:4, layer", truths[id(by_row)], partial(layers, EightBits, *given))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=lambda text: tuple(map(int, text.split("x"))), nargs="+", default=WEIGHTS)
    parser.add_argument("--b", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU: cuSPARSELt runs on no other device", file=sys.stderr)
        return 1
    device, rows = torch.device("cuda", 0), []
    scale = one_pass(device)
    for (n, k), b in every(args.weights, args.b):
        for row in measure(n, k, b, device, timed(device), scale):
            rows.append(row)
            times = f"{row['ms']:.4f} ms, scaled {row['scaled ms']:.4f}" if row["status"] == "ok" else row["reason"]
            print(f"{n}x{k} B={b:<5} {row['kind']:5} {row['method']:20} {row['status']:12} {times}", flush=True)
        if args.json:
            about = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__}
            about |= {"cusparselt": torch.backends.cusparselt.version()}
            args.json.write_text(json.dumps(about | {"rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
