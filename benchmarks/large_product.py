"""What holds the 2:4 product of large batches? Its time, clock and power beside the dense half product's.

    python benchmarks/large_product.py --n 40960 --b 1024 4096 --json large.json

At these sizes the products are bound by arithmetic, where a 2:4 product could take as long as a dense one of half the
size. Four run in turn on one GPU, bf16, each without pause for a while, so that clocks and power settle: the dense half
[N, N/2] and the tuned 2:4 term [N, N] of a random weight, checked first, on random inputs and on zeros. What zeros
gain is what switching costs: same work, same bytes, less power. Where Nsight Compute (`ncu`) is installed, its counters
of one launch of each follow: how busy the tensor cores and the shared memory are, and the bytes moved.

Prints a line a product; needs a GPU.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from blockshock_lib import cache  # noqa: E402
from blockshock_lib.engine.power import Sampler  # noqa: E402
from blockshock_lib.params import Mask  # noqa: E402
from blockshock_lib.sparse24 import masks, product  # noqa: E402

PRODUCTS = ("dense half", "2:4", "dense half, x = 0", "2:4, x = 0")
NEAR = 1 / 8  # error allowed, in standard deviations of the right values
CHECKED = 512  # rows of the weight that are compared
NCU = ("--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "details")
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis")
METRICS = ("gpu__time_duration.sum", "sm__cycles_elapsed.max", "dram__bytes_read.sum", "lts__t_bytes.sum")
COUNTERS = {  # as ncu names them in its table -> (our name, factor)
    "gpu__time_duration.sum": ("ms", 1e-6),
    "sm__cycles_elapsed.max": ("million_cycles", 1e-6),
    "SM Busy": ("tensor_busy_percent", 1.0),  # the busiest pipe: in these kernels the tensor cores
    "L1/TEX Cache Throughput": ("shared_memory_busy_percent", 1.0),  # the same unit
    "dram__bytes_read.sum": ("memory_read_gb", 1e-9),
    "lts__t_bytes.sum": ("l2_gb", 1e-9),
}


@dataclass
class Row:
    """One product of one size: a time (ms), power (W) and SM clock (MHz) a round, and the counters of one launch."""

    n: int
    b: int
    what: str
    ms: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    mhz: list[float] = field(default_factory=list)
    throttle: list[str] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def line(self) -> str:
        times = f"{statistics.median(self.ms):.3f} [{min(self.ms):.3f}, {max(self.ms):.3f}]"
        state = [f"{statistics.median(seen):.0f}" if seen else "-" for seen in (self.watts, self.mhz)]
        words = ", ".join(f"{name} {value:.4g}" for name, value in self.counters.items())
        why = ", ".join(dict.fromkeys(filter(None, self.throttle))) or "not throttled"
        return f"{self.n:6} {self.b:5}  {self.what:18} {times:24} {state[0]:>5} {state[1]:>5}  {why}  {words}".rstrip()


def products(n: int, batches: Iterable[int]) -> dict[tuple[int, str], Callable[[], torch.Tensor]]:
    """What is timed, by (batch, name); each has given right values once.

    Raises:
        RuntimeError: a product is wrong.
    """
    device, backend = torch.device("cuda", torch.cuda.current_device()), product.choose("auto", "cuda")
    weight = torch.randn(n, n, dtype=torch.bfloat16, device=device)
    keep = masks.make(Mask.named("checkerboard"), (n, n), device=device)
    packed, half = backend.pack(weight, keep), weight[:, : n // 2].contiguous()
    some = {"dense half": half[:CHECKED].float(), "2:4": torch.where(keep, weight, 0)[:CHECKED].float()}
    del weight, keep
    calls = {}
    for b in batches:
        x = torch.randn(b, n, dtype=torch.bfloat16, device=device)
        backend.tune(x, packed)
        for given, ending in ((x, ""), (torch.zeros_like(x), ", x = 0")):
            out, left = torch.empty_like(x), given[:, : n // 2].contiguous()
            calls[b, "dense half" + ending] = lambda left=left, out=out: torch.mm(left, half.t(), out=out)
            calls[b, "2:4" + ending] = lambda given=given, out=out: backend.linear(given, packed, out)
        for name, part in (("dense half", x[:, : n // 2]), ("2:4", x)):
            right = F.linear(part.float(), some[name])
            off = float((calls[b, name]()[:, : len(some[name])].float() - right).abs().max() / right.std())
            if not off <= NEAR:
                raise RuntimeError(f"{name} of {n}x{n}, B={b}, is off by {off:.3g} standard deviations")
    return calls


def sustained(call: Callable[[], object], seconds: float) -> float:
    """Milliseconds of a call, as the mean over `seconds` of calls without a pause."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def over(count: int) -> float:
        start.record()
        for _ in range(count):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    return over(count := max(2, round(1e3 * seconds / over(1)))) / count


def measure(n: int, batches: list[int], rounds: int, seconds: float) -> list[Row]:
    calls = products(n, batches)
    rows = [Row(n, b, what) for b, what in itertools.product(batches, PRODUCTS)]
    with Sampler("cuda", 1) as sampler:
        for _ in range(rounds):
            for row in rows:
                call = calls[row.b, row.what]
                sustained(call, seconds / 4)  # until power and clocks are this product's
                sampler.rows()
                row.ms.append(sustained(call, seconds))
                seen = {one["metric"]: one for one in sampler.rows()}
                if seen:
                    row.watts.append(seen["power"]["value"])
                    row.mhz.append(seen["sm_clock"]["value"])
                    row.throttle.append(seen["throttle"]["detail"])
            rows.reverse()  # what is warm from the one before is cold in the next round
    return sorted(rows, key=lambda row: (row.b, PRODUCTS.index(row.what)))


def once(n: int, batches: list[int]) -> None:
    """One launch of each product on random inputs, for ncu to look at."""
    calls = products(n, batches)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for b, what in itertools.product(batches, PRODUCTS[:2]):
        calls[b, what]()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def counted(n: int, batches: list[int], seconds: float = 300) -> list[dict[str, float]]:
    """The counters of each launch of `once`, by ncu; empty where ncu is not installed.

    Raises:
        RuntimeError: ncu cannot read them.
    """
    if (ncu := shutil.which("ncu")) is None:
        return []
    asked = [*itertools.chain(*(("--section", name) for name in SECTIONS)), "--metrics", ",".join(METRICS)]
    mine = [sys.executable, __file__, "--once", "--n", str(n), "--b", *map(str, batches)]
    done = subprocess.run([ncu, *NCU, *asked, *mine], capture_output=True, text=True, timeout=seconds, check=False)
    found = read_counters(done.stdout)
    if done.returncode or len(found) != 2 * len(batches):
        raise RuntimeError(f"ncu counted {len(found)} launches, not {2 * len(batches)}: {done.stdout[-500:]}")
    return found


def read_counters(text: str) -> list[dict[str, float]]:
    """`COUNTERS` of each launch in ncu's table, in order; the lines before it are the program's own."""
    table = text[text.find('"ID"') :] if '"ID"' in text else ""
    launches: dict[str, dict[str, float]] = {}
    for line in csv.DictReader(table.splitlines()):
        if line["Metric Name"] in COUNTERS:
            name, factor = COUNTERS[line["Metric Name"]]
            launches.setdefault(line["ID"], {})[name] = float(line["Metric Value"].replace(",", "")) * factor
    return list(launches.values())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, nargs="+", default=[16384, 40960])
    parser.add_argument("--b", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.6, help="of one product in one round")
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    parser.add_argument("--once", action="store_true", help="one launch of each and no times: what ncu looks at")
    args = parser.parse_args(argv)
    if reason := product.choose("auto", "cuda").unsupported(torch.device("cuda"), torch.bfloat16):
        print(f"this benchmark needs a GPU: {reason}", file=sys.stderr)
        return 1
    if args.once:
        once(args.n[0], args.b)
        return 0
    rows = []
    print(f"{'N':>6} {'B':>5}  {'product':18} {'ms [min, max]':24} {'W':>5} {'MHz':>5}")
    for n in args.n:
        mine = measure(n, args.b, args.rounds, args.seconds)
        seen = [row for row in mine if row.what in PRODUCTS[:2]]
        for row, counters in zip(seen, counted(n, args.b) or [{}] * len(seen), strict=True):
            row.counters = counters
        for row in mine:
            print(row.line, flush=True)
        rows += mine
    if args.json:
        versions = {"torch": torch.__version__, "cusparselt": torch.backends.cusparselt.version()}
        found = {"gpu": torch.cuda.get_device_name(), "driver": cache.driver_version(), **versions}
        args.json.write_text(json.dumps(found | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
