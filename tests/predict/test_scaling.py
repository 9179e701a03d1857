import math

import numpy as np
import pandas as pd
import pytest

from blockshock_lib import records
from blockshock_lib.manifest import ROOT
from blockshock_lib.predict import scaling
from blockshock_lib.predict.gpus import GPUS, NODE_LINK, named
from blockshock_lib.predict.scaling import Kernel, Link, Model
from blockshock_lib.report import cells, verdicts
from tests.report import frames

H200 = named("2x NVIDIA H200")
TRUTH = Model(Kernel(700, 4000, 0.004), Kernel(math.inf, 1700, 0.010), Kernel(560, 1900, 0.008), Link(0.012, 250))


def points(model=TRUTH, noise=0.0):
    """Cases that behave exactly as the model says."""
    rng, rows = np.random.default_rng(0), []
    for n in (2048, 4096, 8192, 16384, 32768):
        for batch in (16, 64, 256, 1024, 4096):
            for method in scaling.METHODS:
                work = scaling.work(method, n, batch, 2)
                shake = np.exp(rng.normal(0, noise, 2)) if noise else np.ones(2)
                product = model.product(method, batch, work) * shake[0]
                reduce = model.link.ms(work.sent) * shake[1]
                row = dict(case=f"{n}-{batch}", n=n, batch=batch, ranks=2, method=method, work=work, copy=math.nan)
                rows.append(row | dict(product=product, reduce=reduce, forward=product + reduce))
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def shipped():
    return records.load(ROOT / "outputs" / "reference" / "phase1-cuda")


def test_the_fit_finds_the_numbers_that_made_the_times():
    found = scaling.fit(points())
    for kernel, truth in zip(found[:3], TRUTH[:3], strict=True):
        assert kernel.bandwidth == pytest.approx(truth.bandwidth, rel=0.03)
        assert kernel.overhead == pytest.approx(truth.overhead, rel=0.1)
    assert found.dense.rate == pytest.approx(700, rel=0.03) and found.many.rate == pytest.approx(560, rel=0.03)
    assert found.link.latency == pytest.approx(0.012, rel=0.05) and found.link.bandwidth == pytest.approx(250, rel=0.03)


def test_no_kernel_is_given_more_bandwidth_than_the_runs_own_copy():
    table, copy = points().assign(copy=3600.0), 3600.0
    found = scaling.fit(table)
    assert found.dense.bandwidth == pytest.approx(copy) and found.few.bandwidth == pytest.approx(1700, rel=0.03)
    # Above the 4000 that made the times the bound changes nothing.
    assert scaling.fit(table.assign(copy=4400.0)).dense.bandwidth == pytest.approx(4000, rel=0.03)


def test_of_the_shipped_run_every_kernel_keeps_below_its_copy(shipped):
    table = scaling.measured(shipped)
    copy = cells.valid(shipped).query("metric == 'copy_bandwidth'").groupby("case")["value"].median()
    assert table["copy"].equals(table["case"].map(copy).rename("copy"))
    kernels = scaling.fit(table)[:3]
    assert max(kernel.bandwidth for kernel in kernels) <= 1.0001 * table["copy"].median()


def test_what_is_predicted_of_the_measured_largest_size_stands_beside_its_measurement(shipped):
    table = scaling.plan(shipped, "2x NVIDIA H200").larger.set_index(["ranks", "batch"])
    assert table["measured"].notna().equals(pd.Series(table.index.get_level_values("ranks") == 2, table.index))
    forward = scaling.measured(shipped).query("n == 40960 and batch == 16").set_index("method")["forward"]
    assert table.loc[(2, 16), "measured"] == forward["row_parallel"] / forward["block_shock"]
    # Few rows of the largest weight are bytes alone, which the model must know how to count: to 3% of the 99% interval.
    (seen,) = verdicts.ratio(shipped, "row_parallel", "block_shock").query("size == 40960 and batch == 16").itertuples()
    assert seen.low / 1.03 < table.loc[(2, 16), "ratio"] < seen.high * 1.03


def test_a_rate_that_no_case_depends_on_is_infinite():
    assert scaling.fit(points()).few.rate == math.inf


def test_the_backtest_of_a_machine_that_is_as_the_model_is_misses_nothing():
    table = scaling.backtest(points())
    assert len(table) == 25 and table[["b1_error", "block_shock_error", "error"]].abs().max().max() < 0.03


def test_the_backtest_sees_none_of_the_size_that_it_predicts():
    table = points()
    odd = table["n"].eq(8192) & table["method"].eq("block_shock")
    table.loc[odd, ["product", "forward"]] *= 3
    found = scaling.backtest(table).set_index("n")["block_shock_error"]
    assert found[8192].abs().min() > 0.6, "the error of a size was taken into its own prediction"


def test_too_few_cases_are_no_model():
    assert scaling.fit(points().head(3)) is None
    empty = scaling.measured(pd.DataFrame())
    assert scaling.fit(empty) is None and scaling.backtest(empty).empty


def test_the_work_is_what_the_records_count(shipped):
    table = scaling.measured(shipped)
    by = {m: cells.summary(shipped, m).set_index(["case", "method"])["median"] for m in ("flops", "bytes_sent")}
    moved = [cells.summary(shipped, f"bytes_{m}").set_index(["case", "method"])["median"] for m in ("read", "written")]
    assert len(table) == 80
    for row in table.itertuples(index=False):
        key = (row.case, row.method)
        assert row.work.flops == by["flops"][key] and row.work.bytes == moved[0][key] + moved[1][key]
        assert row.work.sent == by["bytes_sent"].get(key, 0)


def test_of_the_shipped_ratios_the_model_misses_a_tenth_at_most_in_the_median(shipped):
    table = scaling.backtest(scaling.measured(shipped))
    assert len(table) == 20
    assert table["error"].abs().median() < 0.10 and table["error"].abs().max() < 0.30


def test_a_cpu_is_not_fitted():
    assert scaling.measured(frames.make((256, 512), (16, 64), device="cpu", kernel=True)).empty


def test_an_emulated_run_is_not_fitted():
    assert scaling.measured(frames.make((4096, 8192), (16,), emulated=True)).empty


def test_both_methods_of_one_size_multiply_and_send_the_same():
    for ranks in (2, 4, 8, 64):
        b1, ours = (scaling.work(m, 8192, 256, ranks) for m in ("row_parallel", "block_shock"))
        assert b1.flops == ours.flops and b1.sent == ours.sent and ours.bytes > b1.bytes
    assert scaling.work("row_parallel", 8192, 256, 4).flops == scaling.work("dense", 8192, 256, 1).flops / 4


def test_more_gpus_make_communication_a_larger_share_and_the_ratio_nearer_to_1():
    table = scaling.larger(TRUTH, H200, 16384, (4096,), (2, 4, 8, 64))
    assert table["ratio"].is_monotonic_increasing and table["ratio"].max() < 1
    assert table["link_share"].is_monotonic_increasing
    assert list(table["machines"]) == [1, 1, 1, 8]


def test_beyond_one_machine_the_adapters_bound_the_link():
    near, far = (scaling.link_of(TRUTH, H200, ranks) for ranks in (8, 64))
    assert near.bandwidth == 250 and far.bandwidth == pytest.approx(250 * NODE_LINK / H200.link)
    assert far.latency == pytest.approx(6 * TRUTH.link.latency) and near.latency == pytest.approx(3 * 0.012)
    assert scaling.link_of(TRUTH, H200, 64, node_link=10_000).bandwidth == 250, "faster than the GPUs' own link"


def test_the_measured_kind_predicts_itself_unchanged():
    same = scaling.on(TRUTH, H200, H200)
    assert same == TRUTH


def test_another_gpu_keeps_the_share_of_its_published_rates():
    b200 = next(gpu for gpu in GPUS if gpu.name.startswith("B200"))
    there = scaling.on(TRUTH, H200, b200)
    assert there.dense.rate / b200.dense == pytest.approx(TRUTH.dense.rate / H200.dense)
    assert there.many.rate / b200.sparse == pytest.approx(TRUTH.many.rate / H200.sparse)
    assert there.many.bandwidth / b200.memory == pytest.approx(TRUTH.many.bandwidth / H200.memory)
    assert there.link.bandwidth / b200.link == pytest.approx(TRUTH.link.bandwidth / H200.link)


def test_a_plan_says_why_there_is_none():
    none = scaling.plan(pd.DataFrame(), "2x NVIDIA H200")
    assert none.model is None and none.larger.empty and "too few cases" in none.note
    assert "no published rates of 2x Unknown" in scaling.plan(pd.DataFrame(), "2x Unknown").note


def test_a_plan_of_the_shipped_records_holds_every_table_and_says_how_good_it_is(shipped):
    plan = scaling.plan(shipped, "2x NVIDIA H200")
    assert set(plan.larger["ranks"]) == {2, 4, 8, 64} and set(plan.larger["n"]) == {40960}
    assert list(plan.others["gpu"].unique()) == [gpu.name for gpu in GPUS]
    assert "median" in plan.note and "400 GB/s" in plan.note
    assert "forward alone" in plan.note and "never tried beyond 2 GPUs" in plan.note
    worst = {name: f"{plan.backtest[name].abs().max():.0%}" for name in ("error", "b1_error", "block_shock_error")}
    assert f"to {worst['error']} (largest)" in plan.note
    assert (
        f"of the times up to {max(worst['b1_error'], worst['block_shock_error'], key=lambda t: int(t[:-1]))};"
        in plan.note
    )
