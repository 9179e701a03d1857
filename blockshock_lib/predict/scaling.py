"""A model of a forward with few numbers, fitted to what was measured: tried on that first, then asked about machines
that nobody here has measured.

A product takes an overhead and the longer of its arithmetic and its bytes; a collective a latency and its bytes; a
forward is their sum. Fitted are one dense kernel, one 2:4 kernel for few rows of x and one for many (Block-Shock has
not the same one multiply both), and one link: eleven numbers for all cases, less the rate of a kernel that only its
bytes bind. No kernel is given more bandwidth than the run's own copy reached, the ceiling of every floor here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from blockshock_lib.predict.gpus import GPUS, NODE_GPUS, NODE_LINK, Gpu, named
from blockshock_lib.report import cells

FEW_ROWS = 128
WORTH = 0.005  # RMS of log errors that one number more has to save
DENSE = ("dense", "row_parallel", "masked_dense")
METHODS = ("dense", "row_parallel", "masked_dense", "block_shock")
PACKED = 9 / 16  # bytes of a packed 2:4 term over those of the dense weight, 16-bit values with 2-bit positions


class Work(NamedTuple):
    """What a rank does in one forward: FLOP (of kept weights), bytes read and written, and bus bytes sent."""

    flops: float
    bytes: float
    sent: float


class Kernel(NamedTuple):
    """rate in TFLOP/s (infinite where bytes alone bind), bandwidth in GB/s, overhead in ms."""

    rate: float
    bandwidth: float
    overhead: float

    def ms(self, work: Work) -> float:
        return self.overhead + max(work.flops / self.rate / 1e9, work.bytes / self.bandwidth / 1e6)


class Link(NamedTuple):
    """latency in ms, bandwidth (bus bytes, by the convention of NCCL's tests) in GB/s."""

    latency: float
    bandwidth: float

    def ms(self, sent: float) -> float:
        return self.latency + sent / self.bandwidth / 1e6 if sent else 0.0


class Model(NamedTuple):
    """The fitted numbers. `few` is the 2:4 kernel for B < FEW_ROWS, `many` that for more rows."""

    dense: Kernel
    few: Kernel
    many: Kernel
    link: Link

    def product(self, method: str, batch: int, work: Work) -> float:
        """ms of one rank's product."""
        kernel = self.dense if method in DENSE else self.few if batch < FEW_ROWS else self.many
        return kernel.ms(work)

    def forward(self, method: str, batch: int, work: Work) -> float:
        """ms of a forward: the product, then its collective."""
        return self.product(method, batch, work) + self.link.ms(work.sent)


def work(method: str, n: int, batch: int, ranks: int, itemsize: int = 2) -> Work:
    """What one of `ranks` ranks does for a square weight of n x n, in 16-bit values; `methods.METHODS` says who holds
    what. An all-reduce of m bytes sends 2 m (ranks - 1) / ranks.
    """
    columns = {"dense": n, "row_parallel": n / ranks}.get(method, 2 * n / ranks)
    kept, held = {"block_shock": (0.5, PACKED)}.get(method, (1.0, 1.0))
    moved = itemsize * (held * n * columns + batch * columns + batch * n)
    sent = 0.0 if method == "dense" or ranks == 1 else 2 * itemsize * batch * n * (ranks - 1) / ranks
    return Work(2 * batch * n * columns * kept, moved, sent)


def measured(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a (case, method) of square 16-bit weights that was timed alone and whole: n, batch, ranks, method, the
    medians `product`, `reduce` (0 where nothing is sent) and `forward`, ms, `work`, and `copy`: the copy bandwidth that
    its case's run measured, GB/s, nan where none did. GPUs only, one a rank.
    """
    rows = cells.complete(frame)
    rows = rows[~rows["phase"].isin(["phase2", "phase3"])]
    parts = {name: cells.summary(rows, f"{metric}_kernel") for name, metric in _TIMES.items()}
    keys = ["case", "method"]
    table = parts["product"].rename(columns={"median": "product"})
    for name in ("reduce", "forward"):
        table = table.merge(parts[name][[*keys, "median"]].rename(columns={"median": name}), on=keys, how="left")
    square = table["in_features"].eq(table["out_features"]) & table["dtype"].isin(["bf16", "fp16"])
    real = table["method"].isin(METHODS) & table["forward"].notna()
    table = table[square & real & (cells.kind(table).eq("gpu") if len(table) else False)]
    table = table.rename(columns={"in_features": "side", "world_size": "ranks"}).fillna({"reduce": 0.0})
    table["n"] = table["side"].astype(int)
    table["work"] = [work(r.method, r.n, r.batch, r.ranks) for r in table.itertuples(index=False)]
    copy = cells.valid(rows[rows["metric"].eq("copy_bandwidth")]).groupby("case")["value"].median()
    table["copy"] = table["case"].map(copy).astype(float)
    columns = ["case", "n", "batch", "ranks", "method", "product", "reduce", "forward", "work", "copy"]
    return table[columns].reset_index(drop=True)


_TIMES = {"product": "compute", "reduce": "reduce", "forward": "forward"}


def fit(points: pd.DataFrame) -> Model | None:
    """The model that comes nearest to `points`, rows of `measured`, by the mean square of the log of predicted over
    measured; None where they are too few: three of each kernel, two of the link. No bandwidth of a kernel is above the
    median of `copy`.
    """
    sparse, few = points["method"].eq("block_shock"), points["batch"].lt(FEW_ROWS)
    parts = points[~sparse], points[sparse & few], points[sparse & ~few]
    sent = points[points["reduce"].gt(0)]
    if min(map(len, parts)) < 3 or len(sent) < 2:
        return None
    copy = float(points["copy"].median())
    most = math.inf if math.isnan(copy) else copy
    kernels = (_kernel([*part["work"]], part["product"].to_numpy(float), most) for part in parts)
    return Model(*kernels, _link(np.array([one.sent for one in sent["work"]]), sent["reduce"].to_numpy(float)))


def _kernel(done: list[Work], ms: np.ndarray, most: float) -> Kernel:
    flops, moved = (np.array([getattr(one, name) for one in done]) for name in ("flops", "bytes"))
    fastest = (flops / ms / 1e9).max()

    def predicted(bandwidth, overhead, rate=math.inf):
        return overhead + np.maximum(flops / rate / 1e9, moved / bandwidth / 1e6)

    # Without a bound, what a kernel loses on some cases is made up for by a bandwidth that no memory has.
    reached = min((moved / ms / 1e6).max(), most)
    ranges = [[0.5 * reached, min(3 * reached, most)], [1e-4, ms.min()]]
    # A rate is told only where it makes the fit better: where bytes alone bind, the times say nothing of one.
    bytes_alone, missed = _search(predicted, ms, ranges)
    both, missed_less = _search(predicted, ms, [*ranges, [0.9 * fastest, 3 * fastest]])
    bandwidth, overhead, rate = both if missed - missed_less > WORTH else (*bytes_alone, math.inf)
    return Kernel(rate, bandwidth, overhead)


def _link(sent: np.ndarray, ms: np.ndarray) -> Link:
    ranges = [[1e-4, ms.min()], (sent / ms / 1e6).max() * np.array([0.5, 3])]
    return Link(*_search(lambda latency, bandwidth: latency + sent / bandwidth / 1e6, ms, ranges)[0])


def _search(
    predicted, ms: np.ndarray, ranges: list, points: int = 21, rounds: int = 5
) -> tuple[tuple[float, ...], float]:
    """The parameters, each within its range, that fit best, and the RMS of their log errors: a logarithmic grid that
    shrinks around its best point.
    """
    low, high = (np.log([one[end] for one in ranges]) for end in (0, 1))
    least, most = low, high
    for _ in range(rounds):
        axes = [np.linspace(a, b, points) for a, b in zip(low, high, strict=True)]
        grid = [np.exp(axis)[..., None] for axis in np.meshgrid(*axes, indexing="ij")]
        loss = (np.log(predicted(*grid) / ms) ** 2).mean(axis=-1)
        place = np.unravel_index(loss.argmin(), loss.shape)
        best = np.array([axis[i] for axis, i in zip(axes, place, strict=True)])
        reach = (high - low) / 6
        low, high = np.maximum(best - reach, least), np.minimum(best + reach, most)
    return tuple(float(value) for value in np.exp(best)), float(loss.min() ** 0.5)


def backtest(points: pd.DataFrame) -> pd.DataFrame:
    """What the model says of each case from the others, those of another N: a row a case with A, B1 and Block-Shock.

    Columns n, batch, ranks; `b1_error`, `block_shock_error`: predicted / measured forward - 1; `predicted`, `ratio`:
    speed of Block-Shock over B1; `error`: the one over the other - 1.
    """
    found = []
    for n in sorted(points["n"].unique()):
        model = fit(points[points["n"].ne(n)])
        if model is None:
            continue
        for _, case in points[points["n"].eq(n)].groupby("case", sort=False):
            by = {row.method: row for row in case.itertuples(index=False)}
            if not {"row_parallel", "block_shock"} <= by.keys():
                continue
            told = {
                name: model.forward(name, by[name].batch, by[name].work) for name in ("row_parallel", "block_shock")
            }
            ratio = by["row_parallel"].forward / by["block_shock"].forward
            said = told["row_parallel"] / told["block_shock"]
            row = {name: getattr(by["block_shock"], name) for name in ("n", "batch", "ranks")}
            row |= {f"{short}_error": told[m] / by[m].forward - 1 for short, m in _SHORT.items()}
            found.append(row | {"predicted": said, "ratio": ratio, "error": said / ratio - 1})
    return pd.DataFrame(
        found, columns=["n", "batch", "ranks", "b1_error", "block_shock_error", "predicted", "ratio", "error"]
    )


_SHORT = {"b1": "row_parallel", "block_shock": "block_shock"}


def larger(model: Model, gpu: Gpu, n: int, batches: tuple[int, ...], ranks: tuple[int, ...]) -> pd.DataFrame:
    """PREDICTED forward of B1 and Block-Shock on more GPUs of the kind that was measured: n, batch, ranks, `machines`,
    ms of `b1` and `block_shock`, their `ratio`, and `link_share`: of B1's time the collective's.
    """
    found = []
    for w in ranks:
        there = model._replace(link=link_of(model, gpu, w))
        for batch in batches:
            parts = {m: work(m, n, batch, w) for m in ("row_parallel", "block_shock")}
            b1, ours = (there.forward(m, batch, one) for m, one in parts.items())
            share = there.link.ms(parts["row_parallel"].sent) / b1
            row = dict(n=n, batch=batch, ranks=w, machines=math.ceil(w / NODE_GPUS))
            found.append(row | dict(b1=b1, block_shock=ours, ratio=b1 / ours, link_share=share))
    return pd.DataFrame(found)


def link_of(model: Model, gpu: Gpu, ranks: int, node_link: float = NODE_LINK) -> Link:
    """The link among `ranks` GPUs. The latency grows with log2 of the ranks, as in a tree, from that of the measured
    two; beyond one machine the rings go through its adapters, of whose `node_link` GB/s the same share is used as was
    of the GPUs' own link.
    """
    used = model.link.bandwidth / gpu.link
    bandwidth = model.link.bandwidth if ranks <= NODE_GPUS else min(model.link.bandwidth, used * node_link)
    return Link(model.link.latency * max(1.0, math.log2(ranks)), bandwidth)


def on(model: Model, here: Gpu, there: Gpu) -> Model:
    """The model on another GPU: every rate scaled by the published ones, so that the share of the peak that was
    reached stays; overheads and latency stay as they are.
    """

    def scaled(kernel: Kernel, rate: float) -> Kernel:
        return Kernel(kernel.rate * rate, kernel.bandwidth * there.memory / here.memory, kernel.overhead)

    dense, sparse = there.dense / here.dense, there.sparse / here.sparse
    link = Link(model.link.latency, model.link.bandwidth * there.link / here.link)
    return Model(scaled(model.dense, dense), scaled(model.few, sparse), scaled(model.many, sparse), link)


def others(model: Model, here: Gpu, n: int, batches: tuple[int, ...]) -> pd.DataFrame:
    """PREDICTED speed of Block-Shock over B1 on two of each GPU of the table, the measured kind included: gpu, n,
    batch, ms of `b1` and `block_shock`, `ratio`, `source` of the published rates.
    """
    found = []
    for gpu in GPUS:
        there = on(model, here, gpu)
        for batch in batches:
            b1, ours = (there.forward(m, batch, work(m, n, batch, 2)) for m in ("row_parallel", "block_shock"))
            row = dict(gpu=gpu.name, n=n, batch=batch, b1=b1, block_shock=ours, ratio=b1 / ours, source=gpu.source)
            found.append(row)
    return pd.DataFrame(found)


def _ratios(points: pd.DataFrame) -> pd.DataFrame:
    # A row a measured (n, batch, ranks): speed of Block-Shock over B1, of medians over all its cases.
    keys = ["n", "batch", "ranks"]
    wide = points.pivot_table(index=keys, columns="method", values="forward", aggfunc="median")
    wide = wide.reindex(columns=list(_SHORT.values()))
    return (wide["row_parallel"] / wide["block_shock"]).rename("measured").reset_index()


class Plan(NamedTuple):
    """The model tried and asked: `why` says why there is none, and then every table is empty. `larger` has `measured`
    too, the ratio where that very case was measured, else nan.
    """

    model: Model | None
    gpu: Gpu | None
    backtest: pd.DataFrame
    larger: pd.DataFrame
    others: pd.DataFrame
    why: str

    @property
    def note(self) -> str:
        """What a prediction rests on, in a sentence or two."""
        if self.model is None:
            return self.why
        error = self.backtest["error"].abs()
        most = self.backtest["ranks"].max()
        tried = (
            f"Of the measured ratios it misses {error.median():.0%} (median) to {error.max():.0%} (largest) when it "
        )
        times = self.backtest[["b1_error", "block_shock_error"]].abs().max().max()
        tried += f"is fitted without their N, of the times up to {times:.0%}; it was never tried beyond {most} GPUs."
        return (
            f"The model is of the forward alone. {tried if len(error) else 'It was never tried.'} Latency grows with "
            f"log2 of the GPUs, from {self.model.link.latency * 1e3:.0f} us between two; beyond {NODE_GPUS} GPUs the "
            f"rings cross adapters of {NODE_LINK:.0f} GB/s a machine, used as well as the GPUs' own link."
        )


def plan(
    frame: pd.DataFrame, title: str, batches: tuple[int, ...] = (16, 256, 4096), ranks: tuple[int, ...] = (2, 4, 8, 64)
) -> Plan:
    """The model of what was measured in `frame`, tried on it and asked about its largest N.

    Args:
        title: of the machine that measured, for the published rates of its GPU.
    """
    points, gpu, nothing = measured(frame), named(title), pd.DataFrame()
    model = fit(points)
    if model is None or gpu is None:
        why = f"no published rates of {title} are in the table" if gpu is None else "too few cases on real GPUs to fit"
        return Plan(None, None, nothing, nothing, nothing, f"no prediction: {why}")
    n = int(points["n"].max())
    asked = larger(model, gpu, n, batches, ranks).merge(_ratios(points), on=["n", "batch", "ranks"], how="left")
    # Not at the batches between, where bytes and arithmetic bind alike: there the fit tells the two rates badly apart.
    ends = min(batches), max(batches)
    return Plan(model, gpu, backtest(points), asked, others(model, gpu, n, ends), "")
