"""The speed phase: its law, break-even and verdicts on planted times; and a tiny case through the engine."""

import types

import numpy as np
import pandas as pd
import pytest
import torch

from blockshock_lib import studies
from blockshock_lib.comm import Group
from blockshock_lib.engine import case_run, experiment
from blockshock_lib.engine.timing import Timer
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.attention import backends, reference, sdpa, tune
from blockshock_lib.layers import attention
from blockshock_lib.params import load
from blockshock_lib.report.interval import Interval
from blockshock_lib.studies.attention import hypotheses, law, patterns, plots, promises, report, truth
from blockshock_lib.studies.attention.params import columns, expand
from blockshock_lib.studies.attention.problem import AttentionProblem
from tests.report.frames import row, title

STUDY = studies.load("attention")
QUICK = {"timing.samples": 2, "timing.warmup": 1, "timing.min_sample_ms": 0.01, "profile": "none"}


def asked(pattern="blocks 0.5", length=256, **settings):
    sweep = {"sweep.patterns": [pattern], "sweep.lengths": [[length]]}
    return load(STUDY, "attention_speed", QUICK | sweep | settings, choose={"hardware": "cpu"})


def opened(params, group=None):
    """The problem of the one case that is asked for, on a CPU."""
    (case,) = expand(params)
    return AttentionProblem(case, params, device=torch.device("cpu"), group=group or Group())


def run(params, group=None):
    problem = opened(params, group)
    return problem.case, experiment.measure(problem, params, STUDY)


def measured(**how):
    return run(asked(**how))


def framed(case, rows):
    about = columns(vars(case)) | dict(run="a", case=case.id, group=0, seed=0, code="")
    about |= {name: getattr(case, name) for name in ("phase", "device", "emulated", "world_size", "dtype")}
    return pd.DataFrame([about | one for one in rows])


def planted(slope=0.9, overhead=0.02, device="cuda", bend=0.0, noise=0.002, lengths=hypotheses.LENGTHS, more=()):
    """A GPU's records of the headline cells: at length k dense takes (k / 4096)^2 ms, FA4 that times slope d +
    overhead + bend sqrt(d); `more`: (method, how many times as long).
    """
    rng, found = np.random.default_rng(0), []
    for k in lengths:
        for density in map(float, hypotheses.DENSITIES):
            case = dict(pattern=f"blocks {density:g}", batch=1, heads=16, kv_heads=16, head_dim=128, q_len=k, k_len=k)
            about = columns(case | {"block": 128}) | dict(run="a", phase="attention_speed", case=f"{k} {density}")
            about |= dict(seed=0, code="", device=device, emulated=False, world_size=1, dtype="bf16")
            whole = (k / 4096) ** 2
            for group in range(3):
                rows = []
                ours = slope * density + overhead + bend * density**0.5
                for method, ms in (("dense", 1.0), ("fa4", ours), *((name, ours * times) for name, times in more)):
                    rows += [
                        row(method, "check", "bool", 1),
                        row(method, "flops", "FLOP", 1e9 if method == "dense" else 1e9 * density),
                    ]
                    for metric, times in (("forward_kernel", 1), ("backward_kernel", 2.5), ("forward_call", 1.1)):
                        each = whole * times * ms * np.exp(rng.normal(0, noise, 4))
                        rows += [row(method, metric, "ms", value, repeat) for repeat, value in enumerate(each)]
                rows.append(row("fa4", "block_density", "1", density))
                found += [about | {"group": group} | one for one in rows]
    return pd.DataFrame(found)


def test_the_law_finds_a_planted_overhead_and_its_break_even():
    table = law.laws(planted(slope=1.25, overhead=0.1))
    assert list(table["k_len"]) == list(hypotheses.LENGTHS) and set(table["method"]) == {"fa4"}
    for one, k in zip(table["law"], table["k_len"], strict=True):
        whole = (k / 4096) ** 2
        assert one.slope == pytest.approx(1.25 * whole, rel=0.01) and one.worst < 0.01
        assert one.overhead == pytest.approx(0.1 * whole, rel=0.05)
        assert one.even.low < 0.72 < one.even.high and one.even.high - one.even.low < 0.05
    assert law.laws(planted(slope=1.25, overhead=1.5))["law"].map(lambda one: np.isnan(one.even.ratio)).all()


def test_a_run_of_other_cells_leaves_the_laws_of_the_first_their_intervals():
    frame = planted(slope=1.25, overhead=0.1)
    other = frame[frame["method"].eq("fa4") & frame["pattern"].eq("blocks 0.25")]
    both = law.laws(pd.concat([frame, other.assign(run="b", case="other " + other["case"])]))
    for one, alone in zip(both["law"], law.laws(frame)["law"], strict=True):
        assert one.even.ratio == pytest.approx(alone.even.ratio) and one.even.low > 0.7


def test_a_headline_cell_that_another_run_measured_once_more_counts_as_it_was_measured_most():
    frame = planted(slope=1.25, overhead=0.005)
    once = frame[frame["pattern"].eq("blocks 0.25") & frame["group"].eq(0)]
    for both in ([once.assign(run="b", case="tuned"), frame], [frame, once.assign(run="b", case="tuned")]):
        found = pd.concat(both, ignore_index=True)
        assert "tuned" in set(found["case"]) and "tuned" not in set(hypotheses.headline(found)["case"])
        assert hypotheses.a1(found).verdict == "supported"


@pytest.mark.parametrize(
    ("times", "verdict", "proportional"),
    [
        (dict(slope=1.25, overhead=0.005), "supported", "supported"),
        (dict(slope=0.8, overhead=0.005), "supported", "supported"),  # d* beyond 1: faster at any density
        (dict(slope=1.25, overhead=0.1), "supported", "refuted"),
        (dict(slope=1.25, overhead=1.5), "refuted", "refuted"),
        (dict(slope=0.0, overhead=1.004, noise=0.01), "undecided", "refuted"),  # no cell is faster, few are slower
        (dict(slope=1.25, overhead=0.005, noise=0.3), "undecided", "undecided"),
        (dict(slope=1.25, overhead=0.005, device="cpu"), "undecided", "undecided"),
        (dict(slope=1.25, overhead=0.005, lengths=(4096,)), "undecided", "undecided"),
    ],
)
def test_the_verdicts_follow_their_rules(times, verdict, proportional):
    frame = planted(**times)
    one, two = hypotheses.a1(frame), hypotheses.a2(frame)
    assert (one.verdict, two.verdict) == (verdict, proportional), (one.why, two.why)
    if times.get("device") == "cpu":
        assert "CPU" in one.why and "CPU" in two.why and "CPU" in report.answer(frame)


def test_a1_is_refuted_by_a_slower_cell_below_a_faster_one_and_not_by_cells_off_the_law():
    for pattern, times, verdict in (("blocks 1", 1 / 1.6, "undecided"), ("blocks 0.1", 20, "refuted")):
        frame = planted(slope=1.25, overhead=0.005)
        cell = frame["pattern"].eq(pattern) & frame["method"].eq("fa4") & frame["metric"].eq("forward_kernel")
        frame.loc[cell, "value"] *= times
        assert hypotheses.a1(frame).verdict == verdict


def test_a_group_without_a_break_even_leaves_a_length_undecided_in_any_order():
    for length in (4096, 65536):
        frame = planted(slope=0.8, overhead=0.1)
        odd = frame["k_len"].eq(length) & frame["method"].eq("dense") & frame["group"].eq(1)
        frame.loc[odd & frame["metric"].eq("forward_kernel"), "value"] *= 0.05
        said = report.answer(frame)
        assert "at no density" not in said and f"(1 of 3 groups have none) at {length} keys (FA4" in said
        assert said.count("at every density measured") == 2, "what is known of the others is said as ever"
        assert hypotheses.a1(frame).verdict == "undecided"


@pytest.mark.parametrize("level", [0.6, 1.2])  # below and above the dense kernel's
def test_a_group_whose_time_does_not_grow_with_density_leaves_its_length_undecided(level):
    frame = planted(slope=0.8, overhead=0.1)
    odd = frame["k_len"].eq(4096) & frame["method"].eq("fa4") & frame["group"].eq(1) & frame["unit"].eq("ms")
    density = frame["pattern"].str.split().str[1].astype(float)
    frame.loc[odd, "value"] *= (level - 0.1 * density) / (0.8 * density + 0.1)
    said = report.answer(frame)
    assert "(1 of 3 groups have none) at 4096 keys (FA4" in said and said.count("groups have none") == 1
    assert law.laws(frame)["law"].iloc[0].even.high == np.inf and hypotheses.a1(frame).verdict == "undecided"


def test_cases_of_other_batches_have_laws_of_their_own_and_the_surest_kernel_counts():
    frame = planted(lengths=(4096,), more=[("triton", 0.97)])
    slow = planted(slope=1.8, lengths=(4096,), more=[("triton", 0.97)]).assign(batch=4)
    both = law.laws(pd.concat([frame, slow.assign(case="4 " + slow["case"])]))
    assert list(both["densities"]) == [6] * 4 and both["law"].map(lambda one: one.worst < 0.02).all()
    table = law.laws(frame).set_index("method", drop=False)
    assert law.fastest(table)["method"].tolist() == ["triton"]
    (alone,) = law.laws(frame[frame["method"].ne("fa4") | frame["unit"].ne("ms")])["law"]
    assert alone.even.low > table["law"]["triton"].even.low, "either of two may be the best by chance"
    wide = table["law"]["triton"]._replace(even=Interval(1.2, 0.5, 2.9))
    assert law.fastest(table.assign(law=[wide, table["law"]["fa4"]]))["method"].tolist() == ["fa4"]


def test_the_faster_dense_kernel_is_the_rival():
    frame = planted(slope=0.9, overhead=0.005, more=[])
    quick = frame[frame["method"].eq("dense")].assign(method="dense_fa4")
    quick.loc[quick["unit"].eq("ms"), "value"] *= 0.8
    both = pd.concat([frame, quick])
    one = hypotheses.a1(both)
    assert one.verdict == "supported" and one.why.endswith("dense kernels that ran: SDPA dense, FA4 dense")
    table = law.laws(both)
    assert set(table["rival"]) == {"dense_fa4"} and set(law.laws(frame)["rival"]) == {"dense"}
    for slow, fast in zip(law.laws(frame)["law"], table["law"], strict=True):
        assert slow.even.ratio > 1 > fast.even.ratio > 0.8


def test_one_group_of_one_run_has_no_intervals_and_refutes_nothing():
    frame = planted(slope=1.25, overhead=0.1)
    one = frame[frame["group"].eq(0)]
    assert hypotheses.a1(one).verdict == "undecided"
    said = "lock-sparse attention is faster than the fastest dense kernel that ran (SDPA dense)"
    assert report.answer(frame).startswith(f"B{said} up to a density of 0.72 [")
    assert report.answer(one).startswith(
        f"It is undecided whether b{said}, by points of the density below which it is: "
    )
    assert "0.72 [no interval] at 4096 keys (FA4, batch 1, 6 densities), 0.72 [no interval] at 1" in report.answer(one)
    assert report.answer(planted(slope=0.8, overhead=0.005)).count("at every density measured") == 3
    close = report.answer(planted(slope=0.98, overhead=0.005, noise=0.03))
    assert "up to a density of at least 0.99 at 65536 keys" in close and "1.0" not in close, "its interval holds 1"
    some = pd.concat([planted(slope=1.25, overhead=1.5, lengths=(4096,)), planted(overhead=0.1, lengths=(16384,))])
    assert "at no density measured at 4096 keys (each kernel, " in report.answer(some)
    assert not report.answer(some).startswith("It is undecided")


def test_there_are_at_most_twenty_headline_cells_and_a_sweep_of_a_gpu_measures_them():
    params = load(STUDY, "attention_speed", choose={"hardware": "cuda"})
    cases = pd.DataFrame([vars(case) | columns(vars(case)) for case in expand(params)])
    assert params.hardware.world_size == 1 and not params.hardware.emulated
    cases = cases.assign(value=0.0, case=cases.index.map(str), run="", group=0)
    assert 12 <= len(hypotheses.headline(cases)) <= 20


def test_figures_and_tables_say_what_was_planted_and_stand_without_records():
    frame = planted(slope=1.25, overhead=0.1)
    drawn = plots.time_over_density(frame)
    assert "up to a density of 0.72" in title(drawn) and len(drawn.axes) == 3
    assert "no claim" in drawn.alt or "d* = 0.72" in drawn.alt
    assert set(report.break_even(frame)["d*"].str[:4]) == {"0.72"}
    assert report.answer(frame).count("0.72 [0.72, 0.72] at ") == 3
    # At a density of 0.05 a kernel with an overhead of a tenth of dense computes a block at less than a third.
    assert "reach 31% to 74%" in title(drawn := plots.share_of_dense(frame))
    assert [ax.get_title("left") for ax in drawn.axes] == ["forward", "backward"]
    table = report.times(frame)
    assert {"faster", "slower"} <= set(table["vs dense"].str.split().str[-1]) and set(table["over"]) == {"SDPA dense"}
    # A second dense kernel, twice as fast: it is what counts.
    frame = planted(slope=1.25, overhead=0.1, more=[("dense_fa4", 0.3)], lengths=(4096,))
    frame = frame[frame["case"].eq("4096 1.0")].assign(value=lambda x: x["value"].mask(x["metric"].eq("flops"), 1e9))
    table = report.times(frame).set_index("method")
    assert set(table["over"]) == {"FA4 dense"} and list(table["vs dense"].str[:4]) == ["0.40", "–", "0.30"]
    assert table["share of dense"].to_list() == pytest.approx([0.405, 1, 0.3], rel=0.02)
    assert not [name for name in table if name.startswith("step")]
    assert [hypotheses.a1(frame.iloc[:0]).verdict, hypotheses.a2(frame.iloc[:0]).verdict] == ["undecided"] * 2


def test_a_kernel_that_is_slower_than_one_rival_is_slower_though_the_fastest_tells_nothing():
    frame = planted(lengths=(4096,), more=[("triton", 1.0), ("flex", 0.9), ("flex_tuned", 0.88)])
    frame = frame[frame["case"].eq("4096 1.0")].copy()
    frame["value"] *= np.where(
        frame["method"].eq("flex_tuned") & frame["unit"].eq("ms"), 2.0 ** (frame["group"] - 1), 1
    )
    assert set(promises.rivals(frame)["claim"]) == {"slower"}


@pytest.mark.long
def test_what_is_promised_is_read_from_records_and_the_page_stands_without_them():
    more = [("triton", 1.0), ("flex", 1.3), ("flex_tuned", 1.2), ("auto", 1.05)]
    frame = planted(lengths=(4096,), more=more)
    frame = frame[frame["repeat"].lt(2)]
    table = promises.rivals(frame)
    assert len(table) == 12 and set(table["what counts"].str[:4]) == {"1.20"} == set(table["over Flex, tuned"].str[:4])
    assert set(table["over Flex"].str[:4]) == {"1.30"} and set(table["claim"]) == {"faster"}
    unsure = frame.copy()  # the other rival may be the faster one
    unsure["value"] *= np.where(frame["method"].eq("flex") & frame["unit"].eq("ms"), 3.0 ** (frame["group"] - 1), 1)
    assert set(promises.rivals(unsure)["claim"]) == {"undecided"}
    assert set(promises.choices(frame)["over the best single backend"].str[:4]) == {"0.95"}
    shares = promises.shares(frame).set_index("work")
    assert list(shares["cells"]) == [6, 6]
    assert set(shares["points at least 0.97 (%)"]) == {0.0} and set(shares["points at least 0.9 (%)"]) == {100.0}
    assert (
        set(shares["undecided at 0.97"])
        == {0}
        != set(promises.shares(frame[frame["group"].eq(0)])["undecided at 0.97"])
    )
    near = planted(noise=0, lengths=(4096,), more=[("triton", 1.0), ("auto", 1 / 0.9651)])
    assert set(promises.choices(near)["over the best single backend"].str[:4]) == {"0.97"}
    near = promises.shares(near)
    assert set(near["points at least 0.97 (%)"]) == {0.0} and set(near["least point"]) == {0.9651}
    first = frame[frame["case"].eq("4096 1.0")].head(1)
    tuned = first.assign(method="auto", metric="kernel", value=1.0, detail="flex; tuned here")
    assert set(promises.shares(pd.concat([frame, tuned]))["cells"]) == {5}
    page = promises.page(frame)
    assert (
        "d* = at least 1.00 at 4096 keys (" in page
        and "| 4096 | blocks 1 |" in page
        and "no case holds valid times of it" in page
    )
    assert "Of 18 headline cells 6 were timed, 0 in 3 whole runs or more; of others 0, 0 in" in page
    assert (
        "No record of attention_sc" in page
        and " keys up to a density of 1.00 at least, at 0.05 by 15.36x in kernel" in promises.answer(frame)
    )
    three = pd.concat([frame.assign(run=run) for run in "abc"])
    assert promises.rests(three).startswith("Of 18 headline cells 6 were timed, 6 in 3 whole runs")
    for part in (frame.iloc[:0], frame[frame["method"].eq("flex")], frame[frame["case"].eq("4096 1.0")]):
        assert "## Every check" in promises.page(part)


def test_a_case_is_checked_timed_and_drawn():
    case, rows = measured(methods=["dense", "reference", "flex"])
    frame = framed(case, rows)
    assert frame[frame["metric"].eq("check")]["status"].eq("ok").all()
    found = frame[frame["status"].eq("ok")].groupby("method")["metric"].agg(set)
    both = {f"{work}_{kind}" for work in ("forward", "backward") for kind in ("kernel", "call")}
    for name in ("dense", "reference"):
        assert both | {"floor_forward", "floor_backward", "flops", "first_call"} <= found[name]
    assert both <= found["twin"] and {"list_build", "list_sort", "block_density"} <= found["reference"]
    # On a CPU FlexAttention has no gradients: its forward is timed, and what is missing has its reason.
    assert "forward_kernel" in found["flex"] and not found["flex"] & {"backward_kernel", "backward_call"}
    missing = frame[frame["metric"].eq("backward_kernel") & frame["status"].eq("unsupported")]
    assert set(missing["method"]) == {"flex"} and missing["reason"].str.contains("no gradients").all()
    assert not report.lists(frame).empty and report.times(frame)["vs dense"].str.fullmatch(".* no claim|–").all()
    assert "no claim" in plots.share_of_dense(frame).alt


def test_kernels_are_tuned_where_the_sweep_asks_for_it_and_what_was_kept_is_not_tuned_again(monkeypatch):
    searched, kept = [], []
    monkeypatch.setattr(tune, "is_kept", lambda call: call.q.requires_grad in kept)
    monkeypatch.setattr(backends, "tuned", lambda call, seconds: searched.append((call.q.requires_grad, seconds)))

    def runner(method, tuned):
        made = opened(asked(methods=[method], tune_seconds=3.0, **{"sweep.tuned": tuned})).build(method)
        made.problem.device = torch.device("cuda")
        return made

    runner("auto", False).tune()
    runner("dense", True).tune()
    assert not searched
    runner("auto", True).tune()
    assert searched == [(False, 3.0), (True, 3.0)]
    kept += [False, True]
    runner("auto", True).tune()
    assert len(searched) == 2
    assert runner("auto", True).kernel() == "reference; tuned here" and runner("auto", False).kernel() == "reference"
    kept.clear()
    assert runner("auto", True).kernel() == "reference", "the search failed"


@pytest.mark.long
def test_longnet_by_gathering_is_held_to_its_own_truth_and_by_a_mask_to_the_union(monkeypatch):
    how = dict(pattern="longnet", methods=["reference", "dilated", "dilated_sdpa"])
    _, rows = measured(**how)
    assert [one["status"] for one in rows if one["metric"] == "check"] == ["ok"] * 3
    for method in how["methods"]:
        assert {"forward_kernel", "backward_kernel"} <= {one["metric"] for one in rows if one["method"] == method}
    monkeypatch.setattr("blockshock_lib.studies.attention.problem.Counted", lambda pairs: pairs[0] | pairs[1])
    _, rows = measured(**how)
    assert [one["status"] for one in rows if one["metric"] == "check"] == ["ok", "failed", "failed"]
    monkeypatch.undo()
    for of in (reference, sdpa):  # the gradients of each part by its own denominator, not by that of all
        share = of.backward
        own = lambda call, dout, *_, of=of, share=share: share(call, dout, *of.forward(call), None)  # noqa: E731
        monkeypatch.setattr(of, "backward", own)
    (_, *wrong) = [one for one in measured(**how)[1] if one["metric"] == "check"]
    assert all(one["status"] == "failed" and "dq: " in one["reason"] for one in wrong)


@pytest.mark.parametrize(("pattern", "rival"), [("window", "causal"), ("blocks 0.5", "full"), ("causal", "causal")])
def test_the_dense_rival_computes_the_least_dense_attention_that_holds_the_pattern(pattern, rival, monkeypatch):
    params = asked(pattern=pattern)
    (case,) = expand(params)
    assert patterns.dense(patterns.made(case)).rules == getattr(attention, rival)().rules
    # A rival that saw the pattern would be refused: it is checked against dense attention.
    fake = types.SimpleNamespace(refuse=lambda call: "", attend=lambda call: reference.attend(wrong(call)))

    def wrong(call):
        lists = attention.block_diagonal(case.block).lists(case.q_len, case.k_len, case.block)
        return types.SimpleNamespace(**vars(call) | {"lists": lists})

    monkeypatch.setitem(backends.BACKENDS, "sdpa", fake)
    _, rows = measured(pattern=pattern, methods=["dense"])
    failed = [one for one in rows if one["metric"] == "check"]
    assert {one["status"] for one in failed} == {"failed"} and not [r for r in rows if r["metric"] == "forward_kernel"]


@pytest.mark.parametrize("density", ["1", "0.25", "0.1"])
def test_random_blocks_have_the_asked_density_and_a_block_in_each_row(density):
    (case,) = expand(asked(pattern=f"blocks {density}", length=4096))
    lists = patterns.made(case).lists(case.q_len, case.k_len, case.block)
    assert lists.block_density == pytest.approx(float(density), rel=0.15) and not len(lists.rows.partial)
    assert (lists.rows.full_at.diff() > 0).all()
    assert expand(asked(pattern="blocks 0.02", length=1024)) == (), "not a block a row"


def test_sampled_truth_is_the_whole_one_at_its_places_and_a_fault_there_is_refused(monkeypatch):
    params = asked(pattern="window", length=512, methods=["reference"])
    whole = opened(params)
    monkeypatch.setattr(truth, "WHOLE", 128)
    monkeypatch.setattr(truth, "SAMPLED", 32)
    monkeypatch.setattr(truth, "HEADS", 1)
    monkeypatch.setattr(truth, "ENTRIES", 100 * 512)
    some = opened(params)
    (all_of, _), (part, _), at = whole.expected("reference"), some.expected("reference"), some.places
    assert at.sampled and 32 <= len(at.rows) <= 34 and len(at.heads) == 1
    for name in ("out", "dq", "lse"):
        torch.testing.assert_close(getattr(part, name), getattr(all_of, name)[:, :, at.rows])
    for name in ("dk", "dv"):
        torch.testing.assert_close(getattr(part, name), getattr(all_of, name)[:, at.heads][:, :, at.keys])
    _, rows = measured(pattern="window", length=512, methods=["reference"])
    assert [one["status"] for one in rows if one["metric"] == "check"] == ["ok"]
    assert next(one["value"] for one in rows if one["metric"] == "entries_total") == 2 * 512 * 64

    def attend(call):
        out, lse = reference.attend(call)
        keep = torch.ones(out.shape[2]).scatter(0, at.rows[3:4], 1.5)
        return out * keep[:, None], lse

    monkeypatch.setitem(backends.BACKENDS, "reference", types.SimpleNamespace(refuse=lambda call: "", attend=attend))
    _, rows = measured(pattern="window", length=512, methods=["reference"])
    assert next(one["reason"] for one in rows if one["metric"] == "check").startswith("rank 0: out")


def test_the_dense_kernel_that_is_checked_is_the_one_that_is_timed(monkeypatch):
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *x, **how: plain(*x, **how) / 2)
    _, rows = measured(pattern="causal", methods=["dense", "reference"])
    found = {one["method"]: one["status"] for one in rows if one["metric"] == "check"}
    assert found["dense"] == "failed" and found["reference"] == "ok"


def test_a_beta_that_breaks_is_a_row_and_the_others_go_on(monkeypatch):
    def broken(call):
        raise TypeError("planted")

    monkeypatch.setitem(backends.BACKENDS, "fa4", types.SimpleNamespace(refuse=lambda call: "", attend=broken))
    _, rows = measured(methods=["fa4", "reference"])
    found = {one["method"]: (one["status"], one["reason"]) for one in rows if one["metric"] == "check"}
    assert found["fa4"] == ("unsupported", "rank 0: FlashAttention 4 fails: planted")
    assert found["reference"][0] == "ok" and any(one["metric"] == "forward_kernel" for one in rows)


def test_a_call_that_cannot_be_captured_is_still_timed_as_a_call(monkeypatch):
    def refused(*_):
        raise UnsupportedError("it cannot be captured in a CUDA graph: planted")

    monkeypatch.setattr(case_run, "try_capture", refused)
    monkeypatch.setattr(Timer, "pool", property(lambda timer: True, lambda timer, pool: None), raising=False)
    _, rows = measured(methods=["reference"])
    found = {one["metric"]: one for one in rows}
    assert found["forward_kernel"]["status"] == "unsupported" and "planted" in found["forward_kernel"]["reason"]
    assert found["forward_call"]["status"] == found["backward_call"]["status"] == "ok"
