"""Does 2:4 pay in fp8 and int8? cuSPARSELt's products of 8 bits beside PyTorch's dense ones, each checked first.

    python benchmarks/eight_bits.py --json eight_bits.json

Weights [N, K] are 2:4 by magnitude and quantized a row at a time, x [B, K] too: fp8 is e4m3, scales are float32. What
a product must be is that of the quantized operands in float64, times both scales; a method whose values are off is
`failed`, one that this machine or shape lacks is `unsupported`, and neither has a time. Times are of kernels, in CUDA
graphs over copies of the weight that do not fit in the L2 cache together: `ms` of the product in the dtype in which the
library gives it, `scaled ms` with the pass behind it that applies the scales (`_scaled_mm` applies them itself). To
quantize x costs every method of 8 bits the same, and is not timed. For comparison: both products in bf16, each as
Block-Shock tunes it. Hopper adds fp8 in about 14 bits: a product that does so throughout may fail at large K. Of 8 bits
a packed weight has 5/8 of the dense bytes (values 1/2, metadata 1/8), of 16 bits 9/16: at best 1.6 and 1.78 times as
fast where bytes bind.
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

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from blockshock_lib.engine.timing import copies_past_cache
from blockshock_lib.errors import first_line
from blockshock_lib.kernels.patterns.table import PATTERNS
from blockshock_lib.kernels.tuning.clock import Clock

KINDS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {"fp8": 448.0, "int8": 127.0}
RAW = {"fp8": torch.bfloat16, "int8": torch.int32}  # in which cuSPARSELt gives a product
WEIGHTS = (8192, 8192), (28672, 8192), (8192, 28672), (4096, 4096)
BATCHES = (16, 32, 64, 256, 4096)
RMS = 2**-7  # of y's own, that y may be off; twice that in a row or column: y is rounded to bf16 twice
SAMPLES = 5

Time = Callable[[list[Callable[[], Tensor]]], float]


def quantized(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(values [R, K] of 8 bits, scales [R, 1] in float32) of x [R, K], whose product is x but for rounding."""
    scale = x.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / LARGEST[kind]
    values = x.float() / scale
    return (values.round() if kind == "int8" else values).to(KINDS[kind]), scale


def off(y: Tensor, truth: Tensor) -> str:
    """Why y [B, N] is not the truth, in float64; "" where it is."""
    wrong, size = (y.double() - truth).square(), truth.square()
    whole = (wrong.mean() / size.mean()).sqrt().item()
    line = max((wrong.mean(dim) / size.mean(dim).clamp_min(1e-30)).sqrt().max().item() for dim in (0, 1))
    good = y.shape == truth.shape and whole <= RMS and line <= 2 * RMS  # neither with a NaN
    return "" if good else f"RMS error is {whole:.3g} of the truth's RMS, {line:.3g} in the worst row or column"


def scaled(y: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    return (y.float() * x_scale * w_scale.t()).bfloat16()


def dense(kind: str, x: Tensor, x_scale: Tensor, w_scale: Tensor, fast: bool = False) -> tuple[Callable, Callable]:
    """(weight -> product, product -> y), as `sparse`; fast: fp8 is added up in the tensor cores alone."""
    if kind == "fp8":
        own = {"scale_a": x_scale, "scale_b": w_scale.t(), "out_dtype": torch.bfloat16, "use_fast_accum": fast}
        return lambda w: torch._scaled_mm(x, w.t(), **own), lambda y: y
    rows, wide = len(x), F.pad(x, (0, 0, 0, max(0, 32 - len(x))))  # it takes no 16 rows
    return lambda w: torch._int_mm(wide, w.t())[:rows], partial(scaled, x_scale=x_scale, w_scale=w_scale)


def sparse(kind: str, x: Tensor, x_scale: Tensor, w_scale: Tensor, setting: tuple = ()) -> tuple[Callable, Callable]:
    """The same of a compressed weight; setting: cuSPARSELt's algorithm, its split of K and how it is split."""
    how = dict(zip(("alg_id", "split_k", "split_k_mode"), setting, strict=False))
    how |= {"out_dtype": RAW[kind], "transpose_result": True}
    finish = partial(scaled, x_scale=x_scale, w_scale=w_scale)
    return lambda w: torch._cslt_sparse_mm(w, x.t(), **how), finish


def settings(kind: str, weight: Tensor, x: Tensor) -> list[tuple]:
    """The library's own pick, and each of its algorithms."""
    pick = torch._C._cusparselt.mm_search(weight, x.t(), None, None, RAW[kind], True)
    return list(dict.fromkeys([tuple(pick[:3]), *((alg, 1, -1) for alg in range(pick[3]))]))


def timed(device: torch.device) -> Time:
    clock = Clock(device)

    def time(calls: list[Callable[[], Tensor]]) -> float:
        for call in calls:
            call()
        with clock.timed(calls) as sample:
            return statistics.median(sample() for _ in range(SAMPLES))

    return time


def judged(make: tuple[Callable, Callable], weights: list[Tensor], truth: Tensor, time: Time) -> dict:
    """A row's status and times."""
    product, finish = make
    try:
        if reason := off(finish(product(weights[0])), truth):
            return {"status": "failed", "reason": reason}
        ms = time([partial(product, one) for one in weights])
        return {"status": "ok", "ms": ms, "scaled ms": time([lambda one=one: finish(product(one)) for one in weights])}
    except (RuntimeError, AttributeError, ValueError) as error:  # as PyTorch and the library refuse
        return {"status": "unsupported", "reason": first_line(error)}


def fastest(rows: list[dict]) -> dict:
    """The first where none has a time."""
    return min(rows, key=lambda row: row.get("ms", float("inf")))


def measure(n: int, k: int, rows: int, device: torch.device, time: Time) -> list[dict]:
    """Rows of one size, bf16 first."""
    draw = partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))
    weight, x, found = draw(n, k).bfloat16(), draw(rows, k).bfloat16(), []
    keep = PATTERNS["2:4"].mask(weight.float().abs(), 0.5)
    weight = torch.where(keep, weight, 0)

    def add(kind: str, method: str, row: dict) -> None:
        found.append({"n": n, "k": k, "b": rows, "kind": kind, "method": method} | row)

    def copies(one: Tensor) -> list[Tensor]:
        return [one, *(one.clone() for _ in range(copies_past_cache(one.nbytes, device) - 1))]

    truth = x.double() @ weight.double().t()
    for method, options in (("dense", {"kernel": "searched"}), ("2:4", {})):
        packed = PATTERNS[method].pack(weight, keep, **options)
        packed.tune(x)
        size = sum(one.nbytes for one in packed.tensors.values())
        packs = [packed, *(packed.copy() for _ in range(copies_past_cache(size, device) - 1))]
        add("bf16", method, judged((lambda one: one.product(x), lambda y: y), packs, truth, time))
    for kind in KINDS:
        (w8, w_scale), (x8, x_scale) = quantized(weight, kind), quantized(x, kind)
        truth = (x8.double() * x_scale.double()) @ (w8.double() * w_scale.double()).t()
        given = kind, x8, x_scale, w_scale
        tried = [judged(dense(*given, fast), copies(w8), truth, time) for fast in (False, True)[: 1 + (kind == "fp8")]]
        add(kind, "dense", fastest(tried))
        try:
            weights = copies(torch._cslt_compress(w8))
            ways = settings(kind, weights[0], x8)
        except (RuntimeError, AttributeError) as error:  # no cuSPARSELt here, or not for this
            add(kind, "2:4", {"status": "unsupported", "reason": first_line(error)})
            continue
        tried = [judged(sparse(*given, way), weights, truth, time) | {"setting": way} for way in ways]
        add(kind, "2:4", fastest(tried))
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
    for (n, k), b in every(args.weights, args.b):
        for row in measure(n, k, b, device, timed(device)):
            rows.append(row)
            times = f"{row['ms']:.4f} ms, scaled {row['scaled ms']:.4f}" if row["status"] == "ok" else row["reason"]
            print(f"{n}x{k} B={b:<5} {row['kind']:5} {row['method']:6} {row['status']:12} {times}", flush=True)
        if args.json:
            about = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__}
            about |= {"cusparselt": torch.backends.cusparselt.version()}
            args.json.write_text(json.dumps(about | {"rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
