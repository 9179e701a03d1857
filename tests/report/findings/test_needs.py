import math

import numpy as np
import pandas as pd
import pytest

from blockshock_lib import records
from blockshock_lib.manifest import ROOT
from blockshock_lib.report.findings import needs
from blockshock_lib.report.findings.law import NAME
from blockshock_lib.report.findings.needs import Parts, what_if
from tests.report import frames
from tests.report.training_frames import training_frame


@pytest.fixture(scope="module")
def frame():
    first = frames.make((4096, 16384), (16, 256, 4096), groups=2, repeats=4, noise=0.001)
    return pd.concat([first, training_frame((16384,), (4096,), groups=2, repeats=2, noise=0.001)], ignore_index=True)


def test_with_the_s_that_is_needed_the_forwards_are_equal(frame):
    parts = Parts.of(frame)
    for row in parts.law.itertuples(index=False):
        then = what_if(parts, s=row.s_needed)
        (same,) = then[then["case"].eq(row.case)]["then"]
        assert same == pytest.approx(1, abs=1e-6)


def test_no_s_will_do_where_communication_alone_is_longer_than_b1(frame):
    slow = frame.copy()
    slow.loc[slow["method"].eq("block_shock") & slow["metric"].eq("forward_kernel"), "value"] *= 50
    assert needs.needs(slow)["s_needed"].isna().all()


def test_no_link_brings_parity_where_the_product_alone_loses(frame):
    table = needs.needs(frame)
    assert table["free"].lt(1).all() and table["link"].isna().all()
    free = what_if(Parts.of(frame), link=math.inf)
    assert free[free["work"].eq("forward")]["then"].lt(1).all()


def test_any_link_will_do_where_the_product_wins(frame):
    fast = frame.copy()
    fast.loc[fast["method"].eq("block_shock") & fast["metric"].eq("compute_kernel"), "value"] /= 4
    assert needs.needs(fast)["link"].eq(0).all()


def test_the_link_that_beats_one_gpu_makes_both_equally_long(frame):
    table = needs.needs(frame).dropna(subset=["alone"])
    assert len(table)
    sent = table["bus"] * table["reduce"]
    assert np.allclose(table["ours"] + sent / table["alone"], table["a_forward"])


def test_a_slower_link_brings_the_ratio_nearer_to_1(frame):
    parts = Parts.of(frame)
    slow, fast = (what_if(parts, link=gbs) for gbs in (10, 1000))
    ours = slow["work"].eq("forward")
    assert (slow[ours]["then"] > fast[ours]["then"]).all() and slow[ours]["then"].lt(1).all()


def test_as_measured_changes_nothing(frame):
    table = what_if(Parts.of(frame))
    assert np.allclose(table["ratio"], table["then"]) and set(table["work"]) == {"forward", "step"}


def test_compression_moves_the_step_that_recompresses_alone(frame):
    table = what_if(Parts.of(frame), compress=0.0)
    moved = ~np.isclose(table["ratio"], table["then"])
    assert (
        set(table[moved]["method"]) == {"block_shock_recompress"}
        and (table[moved]["then"] > table[moved]["ratio"]).all()
    )


def test_the_allowed_compress_time_makes_t1_as_fast_as_t3(frame):
    cheap = frame.copy()
    # T1 with cheap products: then compression is all that it loses by.
    cheap.loc[cheap["method"].eq("block_shock_recompress") & cheap["metric"].eq("step_kernel"), "value"] -= 2.3
    table = needs.compress_needs(cheap)
    assert table["for_t3"].gt(0).all()
    for row in table.itertuples(index=False):
        assert row.t1 - row.compress + row.for_t3 == pytest.approx(row.t3)
        assert row.t1 - row.compress + row.for_b1 == pytest.approx(row.b1)


def test_where_even_free_compression_loses_the_allowed_time_is_below_0(frame):
    assert needs.compress_needs(frame)["for_b1"].lt(0).all()


def test_the_stretches_lie_between_the_batches_around_them(frame):
    table = needs.batch_needs(frame)
    assert set(table["b1_faster"]) == {()} and table["at"].eq(4096).all()
    for stretches in table["c_faster"]:
        ((low, high),) = stretches
        assert 16 < low < 4096 and high == math.inf


@pytest.mark.parametrize(
    "ratio, found",
    [
        ((2, 2, 2), [(0, math.inf)]),
        ((0.5, 0.5, 0.5), []),
        ((0.5, 2, 2), [(64, math.inf)]),
        ((2, 0.5, 2), [(0, 64), (512, math.inf)]),
        ((2, 2, 0.5), [(0, 512)]),
        ((0.5, 2, 0.5), [(64, 512)]),
    ],
)
def test_every_stretch_that_wins_is_told(ratio, found):
    told = needs.stretches(np.array([16.0, 256.0, 1024.0]), np.array(ratio, float))
    assert np.allclose(np.ravel(told), np.ravel(found)) and len(told) == len(found)


def test_an_unmeasured_rival_is_no_rival_that_wins(frame):
    assert needs.batch_needs(frame[frame["method"].ne("masked_dense")])["c_faster"].isna().all()


def test_without_times_there_is_nothing_to_ask():
    parts = Parts.of(pd.DataFrame())
    assert parts.law.empty and parts.steps.empty and what_if(parts).empty
    assert needs.batch_needs(pd.DataFrame()).empty


def test_b1_gathers_its_dx_and_sends_half_of_what_block_shock_sends(frame):
    parts = Parts.of(frame)
    there = what_if(parts, link=25.0)
    for row in parts.steps.itertuples(index=False):
        here = parts.pieces[parts.pieces["case"].eq(row.case)].set_index(["method", "part"])["ms"]
        once = 2 * row.batch * row.in_features / 2 / 25e6  # ms of an all-gather on two ranks at 25 GB/s
        names = [NAME[name] for name in ("reduce_kernel", "reduce_dx_kernel")]
        b1 = row.b1 + 3 * once - sum(here["row_parallel", name] for name in names)
        t3 = row.t3 + 4 * once - sum(here["block_shock", name] for name in names)
        mine = there[there["case"].eq(row.case) & there["method"].eq("block_shock")]
        assert mine["then"].item() == pytest.approx(b1 / t3)


def test_a_slow_link_costs_the_shipped_step_what_it_costs_by_hand():
    table = what_if(Parts.of(records.load(ROOT / "outputs" / "reference" / "phase3-cuda")), link=25.0)
    row = table[table["size"].eq(40960) & table["optimizer"].eq("sgd") & table["method"].eq("block_shock")]
    assert row["then"].item() == pytest.approx(53.6 / 68.5, rel=0.005)


def test_an_interval_moves_with_its_ratio(frame):
    now, then = what_if(Parts.of(frame)), what_if(Parts.of(frame), s=2.0)
    assert (now["low"].lt(now["ratio"]) & now["high"].gt(now["ratio"])).all()
    assert np.allclose(then["high"] / then["low"], now["high"] / now["low"])
