"""What holds the 2:4 product of large batches? Its time, clock and power beside the dense half product's.

    python benchmarks/large_product.py --n 40960 --b 1024 4096 --json large.json

At these sizes the products are bound by arithmetic, where a 2:4 product could take as long as a dense one of half the
size. Four run in turn on one GPU, bf16: the dense half [N, N/2] and the tuned 2:4 term [N, N] of a random weight, on
random inputs (their values are checked first) and on zeros. Each runs without pause for `LEAD_IN` seconds and is then
timed. Rounds alternate in order, so a product follows one neighbour and then the other (at the ends, itself): what is
left of the neighbour's heat shows in the spread.

On zeros the same work on as many bytes switches less and takes less power. What that gains is a lower bound of what
the power limit costs: on an H200 even the zeros ran at the power cap, at 1650 to 1695 of 1980 MHz.

Where Nsight Compute (`ncu`) is installed, its counters of the two products on random inputs follow: how busy the tensor
cores and the unit of the shared memory are, and the bytes moved. They are of one launch from a cold start under ncu, at
clocks of its own, not of the sustained rounds.

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

from blockshock_lib.kernels.sparse24 import backends, masks
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.kernels.tuning import store as cache
from blockshock_lib.runs.machine import Sampler

PRODUCTS = ("dense half", "2:4", "dense half, x = 0", "2:4, x = 0")
NEAR = 1 / 8  # error allowed, in standard deviations of the right values
CHECKED = 512  # rows of the weight that are compared
LEAD_IN = 1.5  # s; NVML's power is a mean over about 1 s. After 0.15 s power and times still followed the neighbour's
NCU = ("--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "details")
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis")
METRICS = ("gpu__time_duration.sum", "sm__cycles_elapsed.max", "dram__bytes_read.sum", "lts__t_bytes.sum")
# As ncu names them in its table -> (our name, factor). All are of one launch from a cold start: ncu repeats it until
# all counters are read, flushes the caches before each pass and leaves the clocks free, so neither its time nor its
# clock is that of the sustained rounds. A percentage is of the unit's peak: near 100 in one kernel and not in another,
# it is a property of the kernel, not of the hardware.
COUNTERS = {
    "gpu__time_duration.sum": ("ms", 1e-6),
    "sm__cycles_elapsed.max": ("million_cycles", 1e-6),
    "SM Busy": ("tensor_busy_percent", 1.0),  # the busiest pipe: in these kernels the tensor cores
    # The busiest part of the L1/TEX unit, which holds the L1 cache and the shared memory: not the shared memory alone.
    "L1/TEX Cache Throughput": ("shared_memory_busy_percent", 1.0),
    "dram__bytes_read.sum": ("memory_read_gb", 1e-9),
    "lts__t_bytes.sum": ("l2_gb", 1e-9),
}


@dataclass
class Row:
    """One product of one size: a time (ms), power (W) and SM clock (MHz) a round, and the counters of one launch.

    `throttle` has an entry for each round that was sampled, "" where no sample was throttled.
    """

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
        why = ", ".join(dict.fromkeys(filter(None, self.throttle))) or ("not throttled" if self.throttle else "-")
        return f"{self.n:6} {self.b:5}  {self.what:18} {times:24} {state[0]:>5} {state[1]:>5}  {why}  {words}".rstrip()


def check(name: str, y: torch.Tensor, right: torch.Tensor) -> None:
    """Compare the first columns of y [B, N] with the right ones [B, CHECKED].

    Raises:
        RuntimeError: y is wrong, or not a number.
    """
    off = float((y[:, : right.shape[1]].float() - right).abs().max() / right.std())
    if not off <= NEAR:
        raise RuntimeError(f"{name} is off by {off:.3g} standard deviations")


def products(
    n: int, batches: Iterable[int], device: torch.device | None = None
) -> dict[tuple[int, str], Callable[[], torch.Tensor]]:
    """What is timed, by (batch, name), on the current GPU if no device is given.

    Those of random inputs have given right values once.

    Raises:
        RuntimeError: a product is wrong.
    """
    device = device or torch.device("cuda", torch.cuda.current_device())
    backend = backends.choose("auto", device)
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
            check(f"{name} of {n}x{n}, B={b},", calls[b, name](), F.linear(part.float(), some[name]))
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
    """A row a product, sorted by batch and then as in `PRODUCTS`."""
    calls = products(n, batches)
    rows = [Row(n, b, what) for b, what in itertools.product(batches, PRODUCTS)]
    with Sampler("cuda", 1) as sampler:
        for _ in range(rounds):
            for row in rows:
                call = calls[row.b, row.what]
                sustained(call, LEAD_IN)
                sampler.rows()  # drops what was seen so far
                row.ms.append(sustained(call, seconds))
                seen = {one["metric"]: one for one in sampler.rows()}
                if seen:
                    row.watts.append(seen["power"]["value"])
                    row.mhz.append(seen["sm_clock"]["value"])
                    row.throttle.append(seen["throttle"]["detail"])
            rows.reverse()  # so that each follows its other neighbour, whose heat is still there
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
    batches = sorted(set(args.b))  # the order of the rows, so that launches counted in it are theirs
    if reason := backends.choose("auto", "cuda").unsupported(torch.device("cuda"), torch.bfloat16):
        print(f"this benchmark needs a GPU: {reason}", file=sys.stderr)
        return 1
    if args.once:
        once(args.n[0], batches)
        return 0
    rows = []
    print(f"{'N':>6} {'B':>5}  {'product':18} {'ms [min, max]':24} {'W':>5} {'MHz':>5}")
    for n in args.n:
        mine = measure(n, batches, args.rounds, args.seconds)
        seen = [row for row in mine if row.what in PRODUCTS[:2]]
        for row, counters in zip(seen, counted(n, batches) or [{}] * len(seen), strict=True):
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
