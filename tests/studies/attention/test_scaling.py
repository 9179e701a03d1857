"""The scaling phase: its parts are what they are called, wrong methods get no time, and its verdicts follow rules."""

import re
import threading
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from blockshock_lib import studies
from blockshock_lib.comm import Group, local
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.attention import backends, sdpa, tune
from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.layers.attention import fetch, hybrid, parallel
from blockshock_lib.params import load
from blockshock_lib.report.frames import COLUMNS
from blockshock_lib.studies.attention import models, promises, scaling, scaling_plots, scaling_report, works
from blockshock_lib.studies.attention import scaling_hypotheses as rules
from blockshock_lib.studies.attention.axes import AXES
from blockshock_lib.studies.attention.law import RIVALS
from blockshock_lib.studies.attention.methods import METHODS
from blockshock_lib.studies.attention.params import columns, expand
from blockshock_lib.studies.attention.problem import AttentionProblem
from tests.report.frames import row, title
from tests.studies.attention.test_speed import framed, opened, run

STUDY = studies.load("attention")
QUICK = {"timing.samples": 2, "timing.warmup": 1, "timing.min_sample_ms": 0.01}
SHARE = 64  # positions of a rank: two blocks
LETTERS = "abcdefghijk"


def asked(methods, ranks=2, emulated=True, pattern="causal"):
    more = {
        "methods": methods,
        "hardware.world_size": ranks,
        "hardware.emulated": emulated,
        "sweep.patterns": [pattern],
        "sweep.lengths": [[SHARE * ranks]],
    }
    return load(STUDY, "attention_scaling", QUICK | more, choose={"hardware": "cpu"})


def measured(methods, **how):
    return run(asked(methods, **how))


def on_ranks(ctx, methods, fault=""):
    """What a rank of a process group measures; `fault`: a hook loses a part of the gradient."""
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setitem(models.HOOKS, "fp16", (models.HOOKS["fp16"][0], spoilt))
        return framed(*run(asked(methods, emulated=False), Group.of()))


def spoilt(state, bucket):
    bucket.buffer()[:40] = 0
    return models._fp16(state, bucket)


def outcomes(frame):
    rows = frame[frame["metric"].eq("check") & frame["method"].ne("twin")]
    return dict(zip(rows["method"], rows["status"], strict=True))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_strategies_and_the_block_are_checked_timed_and_drawn(ranks):
    names = ["dense", "alone", "gather", "pull", "ring", "pull_contiguous", "pull_cost", "block", "hybrid", "ddp"]
    frame = framed(*measured(names if ranks == 2 else names[:5], ranks=ranks))
    found = outcomes(frame)
    assert found.pop("ddp", "unsupported") == "unsupported" and set(found.values()) == {"ok"}, found
    table = scaling_report.parts(frame)
    assert set(table["method"]) == {name for name in found if "pull" in name or name in ("gather", "ring")}
    np.testing.assert_allclose(table[list(scaling_report.PARTS)].sum(axis=1), table["step"])
    assert table["balance"].between(0, 1).all() and table.set_index("method").loc["ring", "merges"] > 0
    sent = table.set_index("method")["sent"]
    # 2 sequences: keys, values and their gradients, of 2 heads of 32 in fp32.
    assert sent["gather"] == (ranks - 1) * SHARE * 2 * 2 * 32 * 4 * 2 * 2
    if ranks == 4:  # as with two
        return
    for name in ("speed-ups", "parts of a step", "hybrid"):
        assert len(STUDY.tables[name](frame)) >= 1
    assert set(STUDY.tables["parts of a step"](frame)["keys are"]) == {"sent"}
    assert {verdict(frame).verdict for verdict in STUDY.hypotheses["attention_scaling"]} == {"not applicable"}
    assert "CPU" in scaling_report.answer(frame)


def test_one_kernel_serves_all_strategies_though_a_dense_one_was_the_fastest(monkeypatch):
    problem = opened(asked(["alone", "ring"]))
    monkeypatch.setattr(tune, "nearest", lambda call: {tune.Backend("sdpa"): 1.0})
    whole = Call(problem.q, problem.k, problem.v, problem.pattern, problem.lists, problem.scale)
    assert backends.chosen("auto", whole) is backends.explicit("auto", whole) is sdpa
    assert problem.backend("alone") == problem.backend("ring") == "reference"


def test_heads_by_a_dense_kernel_compute_dense_attention_and_stand_beside_that_kernel_on_one_rank(monkeypatch):
    rows = measured(["heads_fa4"])[1]
    assert "Hopper" in next(one["reason"] for one in rows if one["status"] == "unsupported")
    monkeypatch.setitem(METHODS, "heads_fa4", replace(METHODS["heads_fa4"], backend="reference"))
    frame = framed(*measured(["dense", "heads_fa4"], pattern="strided"))  # causal, which holds it
    assert outcomes(frame) == {"dense": "ok", "heads_fa4": "ok"}
    frame = planted(lambda p, k: {"alone": 1.0, "heads": 1.7, "dense_fa4": 2.0, "heads_fa4": 3.6}, (4096,), (2,))
    table = scaling_report.speeds(frame).set_index("method")
    assert table["step, over one rank"].str[:4].to_dict() == {
        AXES.label("heads"): "1.70",
        AXES.label("heads_fa4"): "1.80",
    }
    assert rules.best(frame)["method"].tolist() == ["heads_fa4"] and "is 1.80x [" in scaling_report.answer(frame)
    assert "heads_fa4" not in RIVALS
    frame = planted(lambda p, k: {"alone": 1.0, "heads": 1.9, "dense_fa4": 2.0, "heads_fa4": 3.4}, (4096,), (2,))
    assert "is 1.70x [" in scaling_report.answer(frame), "the fastest one counts, which gains less"


def test_the_answer_says_the_interval_the_least_case_and_the_strongest_rival():
    frame = planted(lambda p, k: {"alone": 1.0, "dense": 1.2, "dense_fa4": 1.5, "pull": 1.8}, (4096,), (2,))
    slow = planted(lambda p, k: {"alone": 1.0, "pull": 0.6}, (4096,), (2,)).assign(case="slow", pattern="window")
    said = scaling_report.answer(frame)
    assert "is 1.80x [" in said and "1.20x [1.20, 1.20] as fast as the fastest dense kernel on one (faster; as" in said
    kernels = frame[frame["metric"].eq("step_call")].assign(metric="step_kernel")
    kernels["value"] *= kernels["method"].map({"pull": 0.5}).fillna(1.0)
    assert "2.40x [2.40, 2.40] as fast as the fastest dense kernel on one (faster; as called 1.20x [" in (
        scaling_report.answer(pd.concat([frame, kernels]))
    )
    four = planted(lambda p, k: {"alone": 1.0, "pull": 3.0, "heads": 3.2}, (4096,), (4,))
    assert "on 2 GPUs (pull, causal, heads not run) is" in scaling_report.answer(pd.concat([frame, four]))
    assert "1.80x" in scaling_report.answer(pd.concat([frame, slow])), "A3's cells are the answer where there are some"
    said = scaling_report.answer(pd.concat([frame.assign(shape="8 heads of 64"), slow]))
    assert "(pull, window, the least of 2 cases) is 0.60x [" in said and "1.80x" not in said
    assert "is 1.80x [no interval] as fast" in scaling_report.answer(frame[frame["group"].eq(0)])


def test_strategies_are_compared_in_the_same_time_and_equals_by_the_lower_end():
    frame = planted(lambda p, k: {"alone": 1.0, "heads": 1.4, "pull": 1.8}, (4096,), (2,))
    kernel = frame[frame["metric"].eq("step_call") & frame["method"].isin(["alone", "heads"])]
    frame = pd.concat([frame, kernel.assign(metric="step_kernel", value=kernel["value"] / 2)])
    assert rules.best(frame)["method"].tolist() == ["pull"], "the kernel time of heads is shorter than pull's calls"
    frame = planted(lambda p, k: {"alone": 1.0, "ring": 1.79, "pull": 1.8}, (4096,), (2,))
    frame["value"] *= np.where(frame["method"].eq("pull") & frame["unit"].eq("ms"), 1.1 ** (frame["group"] - 1), 1)
    assert rules.best(frame)["method"].tolist() == ["ring"] and rules.best(frame)["most"].gt(2).all()
    alone, (chosen,) = rules.best(frame[frame["method"].ne("ring")]), rules.best(frame)["most"]
    assert alone["most"].item() < chosen, "of two strategies either may be the best by chance"


@pytest.mark.parametrize("fails", [False, True])
def test_all_ranks_take_the_kernel_that_rank_0_takes_once_it_has_searched(fails, monkeypatch):
    params = asked(["alone", "ring"])
    here = threading.local()  # ranks are threads: what each has read of what was kept

    def search(problem):
        if problem.group.rank == 0 and fails:
            raise torch.OutOfMemoryError("planted")
        here.kept = "reference" if problem.group.rank == 0 else "triton"

    monkeypatch.setattr(AttentionProblem, "tune", search)
    monkeypatch.setattr(backends, "explicit", lambda name, call: backends.BACKENDS[here.kept])

    def on(group):
        problem = opened(params, group)
        if not fails or group.rank == 0:
            return problem.backend("alone"), problem.build("ring").backend
        with pytest.raises(UnsupportedError, match="rank 0 has found no kernel"):
            problem.backend("alone")

    if fails:
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            local.run(2, on)
    else:
        assert local.run(2, on) == [("reference", "reference")] * 2


@pytest.mark.parametrize("strategy", parallel.STRATEGIES)
def test_a_replay_computes_the_same_and_sends_nothing_and_what_travels_is_what_travelled(strategy):
    params = asked([strategy])

    def on(group):
        problem = opened(params, group)
        runner = problem.build(strategy)
        right, own = works.step(runner)(), scaling.quiet(runner)
        replay = own.layer.group
        then = [[x.clone() for x in take] for _, take in replay.kept]
        replay.group = None  # any use of it fails
        again = works.step(own)()
        for one, other in zip(right, again, strict=True):
            assert torch.equal(one, other)
        replay.group = group
        if strategy != "ring":  # which passes on what came: what is overwritten would travel
            for _, take in replay.kept:
                [x.fill_(7) for peer, x in enumerate(take) if peer != group.rank]
            for (move, _), before in zip(replay.kept, then, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(move(), before, strict=True))
        with pytest.raises(RuntimeError, match="was asked of a step"):
            replay.start_all_to_all(*([x.new_zeros(3) for x in replay.kept[0][1]] for _ in range(2)))
        return True

    assert local.run(2, on) == [True, True]


def averaged(out, lse, found, level):
    out.add_(found).div_(2)
    return torch.logaddexp(lse, level)


def stale_keys(x, *rest, pass_on=parallel._pass_on):
    return pass_on(x, *rest)[0] * 0 + x[..., :1, :], lambda: None


def bias_on_every_rank(x, linear, group):
    return hybrid.Sum.apply(F.linear(x, linear.weight, linear.bias), group, True)


def sliced(ctx, grad):
    mine = torch.zeros_like(grad)
    mine[..., hybrid.equal_shard(grad.shape[-1], ctx.group.rank, 2)] = 1
    return (grad if ctx.here else grad * mine), None, None


def summed_twice(ctx, grad):
    return (2 * grad if ctx.here else hybrid.summed(grad, ctx.group)), None, None


FAULTS = {
    "ring: chunks averaged": (parallel, "absorb", averaged),
    "gather: chunks averaged": (fetch, "absorb", averaged),
    "ring: stale keys": (parallel, "_pass_on", stale_keys),
    "hybrid: a bias of each rank": (hybrid, "joined", bias_on_every_rank),
    "hybrid: no sum in the backward": (hybrid.Sum, "backward", staticmethod(lambda ctx, grad: (grad, None, None))),
    "hybrid: sliced, not summed": (hybrid.Sum, "backward", staticmethod(sliced)),
    "hybrid: summed twice": (hybrid.Sum, "backward", staticmethod(summed_twice)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_strategy_that_is_wrong_gets_no_time(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    wrong = fault.partition(":")[0]
    frame = framed(*measured(["alone", "pull", wrong]))
    assert outcomes(frame) == {"alone": "ok", "pull": "ok", wrong: "failed"}
    timed = frame[frame["metric"].isin(["step_call", "step_kernel", "own_call", "balance"])]
    assert wrong not in set(timed["method"]) and "pull" in set(timed["method"])


def test_a_strategy_that_goes_wrong_while_it_is_timed_gets_no_number(monkeypatch):
    right = works.step
    monkeypatch.setattr(works, "step", lambda runner: lambda: tuple(0 * one for one in right(runner)()))
    frame = framed(*measured(["pull"]))
    assert "failed" in set(frame.loc[frame["metric"].eq("check"), "status"])
    assert "step_kernel" not in set(frame.loc[frame["status"].eq("ok"), "metric"])


@pytest.mark.long
def test_models_and_hooks_are_right_over_a_process_group_and_a_hook_that_loses_is_refused(pair):
    names = ["model", "dp", "ddp", "ddp_fp16", "ddp_psgd", "ddp_top_k", "model_ring", "block", "hybrid"]
    frame, other = pair.call(on_ranks, names, seconds=600)
    assert len(frame) == len(other)
    found = outcomes(frame)
    assert found.pop("dp") == "unsupported" and set(found.values()) == {"ok"}, found
    assert len(scaling_report.models(frame)) == 5
    table = scaling_report.gradients(frame).set_index("method")
    size, shown = 4 * (4 * 64 * 64 + 4 * 64) / 2**20, lambda number: float(f"{number:.3g}")
    assert table.loc["Model: DDP", "sent (MiB)"] == shown(size)
    assert table.loc["Model: DDP, fp16", "sent (MiB)"] == shown(size / 2)
    # Of 16,640 values 166: each with a place of 8 bytes.
    assert table.loc["Model: DDP, top-k", "sent (MiB)"] == shown(166 * 12 / 2**20)
    # Of weights [192, 64] and [64, 64] a row and a column, biases whole; the last are sent by gloo's threads.
    assert table.loc["Model: DDP, PowerSGD", "sent (MiB)"] == shown(4 * (256 + 128 + 256) / 2**20)
    error = table["error of the gradient"]
    assert error["Model: DDP"] == 0 < error["Model: DDP, fp16"] < 0.01 < error["Model: DDP, top-k"] < 1
    faulty = outcomes(pair.call(on_ranks, ["model", "ddp", "ddp_fp16"], "lost", seconds=600)[0])
    assert faulty == {"model": "ok", "ddp": "ok", "ddp_fp16": "failed"}


def planted(speeds, lengths=(4096, 16384), ranks=(2, 4), batch=1, noise=0.001, claimed=False, device="cuda", peaks=()):
    """Records of a GPU: speeds(method, p, k) times as fast as the first of them; `peaks`: method -> bytes by rank."""
    rng, found = np.random.default_rng(0), []
    of = rules.CLAIMED if claimed else rules.HEADLINE
    heads, width = (8, 64) if claimed else (16, 128)
    for p in ranks:
        for k in lengths:
            case = dict(
                pattern=of["pattern"], batch=batch, heads=heads, kv_heads=heads, head_dim=width, q_len=k, k_len=k
            )
            about = columns(case | {"block": 128}) | dict(run="a", phase="attention_scaling", case=f"{p} {k}", seed=0)
            about |= dict(code="", device=device, emulated=False, world_size=p, dtype="bf16")
            for group in range(3):
                for method, speed in speeds(p, k).items():
                    rows = [row(method, "check", "bool", 1)]
                    each = 10 / speed * np.exp(rng.normal(0, noise, 4))
                    rows += [row(method, "step_call", "ms", ms, at) for at, ms in enumerate(each)]
                    held = dict(peaks).get(method, ())
                    rows += [row(method, "rank_peak_bytes", "B", b, r, detail=f"rank {r}") for r, b in enumerate(held)]
                    rows += [row(method, "peak_bytes", "B", max(held))] if held else []
                    found += [about | {"group": group} | one for one in rows]
    return pd.DataFrame(found)


@pytest.mark.parametrize(
    ("share", "how", "verdict"),
    [
        (0.95, {}, "supported"),
        (0.80, {}, "refuted"),
        (0.90, {"noise": 0.05}, "undecided"),
        (0.95, {"ranks": (2,)}, "undecided"),
        (0.95, {"device": "cpu"}, "not applicable"),
        (0.95, {"batch": 4}, "undecided"),  # no headline
    ],
)
def test_a3_asks_for_nine_tenths_of_each_number_of_gpus(share, how, verdict):
    def speeds(p, k):
        return {"alone": 1.0, "ring": 1.1, "pull": share * p if k > 4096 else 0.5 * p}

    found = rules.a3(planted(speeds, **how))
    assert found.verdict == verdict, found.why
    mixed = rules.a3(pd.concat([planted(speeds, device="cpu", ranks=(8,)), planted(speeds, **how)]))
    assert mixed.verdict == verdict, "a CPU's records beside a GPU's change nothing"
    if verdict == "supported":
        assert "L* = 16384" in found.why and "pull" in found.why


def test_a5_needs_a_hook_that_is_faster_everywhere():
    def speeds(best, other):
        return lambda p, k: {"ddp": 1.0, "ddp_fp16": best if k > 4096 else max(1.2, best), "ddp_psgd": other}

    for best, other, verdict in ((1.2, 0.5, "supported"), (0.9, 0.5, "undecided"), (1.0, 1.0, "undecided")):
        found = rules.a5(planted(speeds(best, other), claimed=True, batch=4))
        assert found.verdict == verdict, found.why
    slower = planted(lambda p, k: {"ddp": 1.0, "ddp_fp16": 0.9, "ddp_psgd": 0.5}, claimed=True)
    assert rules.a5(slower).verdict == "refuted"


def of_claim(name, factor):
    """Records in which the claim's number is `factor` times what it states."""
    one, gib = rules.CLAIMS[name], 2**30
    value = one.value * factor
    lengths = {"A4a": 4096, "A4b": 8192, "A4c": 16384, "A4g": 8192, "A4h": 32768, "A4i": 65536, "A4j": 131072}
    held = {
        "A4d": {"dp": (value * gib, gib)},
        "A4e": {"dense": (value * gib,), "ring": (gib, gib)},
        "A4k": {"alone": (gib,), "ring": (value * gib / 2,) * 2},
    }.get(name, {"alone": (20 * gib * value,), "ring": ((20 * value - value) * gib,) * 2})
    named = {"A4g": "model_ring"}.get(name, "dp")
    frame = planted(
        lambda p, k: {"model": 1.0, named: value} | dict.fromkeys(held, 1.0),
        *((lengths.get(name, 16384),),),
        ranks=(2,),
        claimed=True,
        batch=4,
        peaks=held,
    )
    if name != "A4f":
        return frame
    found = []
    for pattern, ms in (("full", value), ("quarter", 1.0)):
        part = planted(lambda p, k, ms=ms: {"alone": 1 / ms}, (128,), (1,), claimed=True)
        found.append(
            part.assign(pattern=pattern, case=pattern, metric=part["metric"].replace("step_call", "forward_call"))
        )
    return pd.concat(found, ignore_index=True)


@pytest.mark.parametrize("letter", LETTERS)
@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.0, "supported"), (0.4, "refuted"), (2.5, "refuted"), (1.25, "undecided")]
)
def test_a_stated_number_is_held_to_what_was_measured(letter, factor, verdict):
    name = f"A4{letter}"
    found = rules.stated(of_claim(name, factor), name)
    exact = letter in "dehijk"  # memory has no scatter here: at the edge it is still inside
    assert found.verdict == ("supported" if exact and verdict == "undecided" else verdict), found.why
    assert found.ratio == pytest.approx(factor, rel=0.02) and re.search(r" at \d+ keys, ", found.why)
    frame = of_claim(name, factor)
    assert ("(a point" in found.why, "(a point" in rules.stated(frame[frame["group"].eq(0)], name).why) == (False, True)


@pytest.mark.parametrize(("letter", "length"), [("l", 32768), ("m", 65536), ("n", 131072)])
def test_what_is_advised_must_be_the_fastest_in_its_range(letter, length):
    name, speeds = f"A4{letter}", dict.fromkeys(rules.MODELS, 1.0)
    method = rules.ADVICE[name][0]
    for speed, verdict in ((1.5, "supported"), (0.7, "refuted"), (1.0, "undecided")):
        frame = planted(lambda p, k, s=speed: speeds | {method: s}, (length,), claimed=True, batch=4, noise=0.01)
        found = rules.advised(frame, name)
        assert found.verdict == verdict and found.hypothesis.startswith(f"{name}: the advice to use ")
        assert rules.advised(frame.assign(k_len=512), name).verdict == "undecided"
    frame = planted(lambda p, k: speeds | {method: 1.5}, (length, length - 1024), claimed=True)
    rival = next(other for other in rules.MODELS if other != method)
    fewer = rules.advised(frame[frame["method"].ne(rival) | frame["k_len"].eq(length)], name)
    assert fewer.verdict == "undecided" and fewer.why.endswith(f"no times beside {AXES.label(rival)}")


def test_tables_say_what_was_planted_and_figures_stand_without_records():
    gib = 2**30
    frame = planted(lambda p, k: {"alone": 1.0, "pull": 1.5}, (4096,), (2,), peaks={"pull": (gib, 2 * gib)})
    about = frame[frame["method"].eq("pull")].iloc[0].to_dict() | row("pull", "memory_bytes", "B", 64 * gib)
    table = scaling_report.memory(pd.concat([frame, pd.DataFrame([about])])).iloc[0]
    assert (table["rank 1 (GiB)"], table["longest (keys)"]) == (2, "128K")
    hooks = planted(lambda p, k: {"ddp": 1.0, "ddp_fp16": 0.9}, (4096,), (2,), claimed=True)
    more = []
    for method, sent, ms in (("ddp", 4e6, 1.0), ("ddp_fp16", 2e6, 3.0)):
        about = hooks[hooks["method"].eq(method)].iloc[0].to_dict()
        more += [about | row(method, "sent_bytes", "B", sent), about | row(method, "compress_call", "ms", ms)]
    hooks = pd.concat([hooks, pd.DataFrame(more)])
    assert "hook (ms)" in scaling_report.gradients(hooks[hooks["method"].eq("ddp")]), "plain DDP may be the only one"
    table = scaling_report.gradients(hooks).set_index("method")
    assert table.loc["Model: DDP, fp16", "breaks even (GB/s)"] == pytest.approx(1.0)  # 2 MB in 2 ms
    assert (
        "is 1.50x [" in title(scaling_plots.speed_up(frame)) and "slower" in table.loc["Model: DDP, fp16", "over DDP"]
    )
    both = planted(lambda p, k: {"dense": 1.0, "dense_fa4": 2.0, "pull": 3.0}, (4096,), (2,))
    assert scaling_report.speeds(both)["step, over best dense"].str.startswith("1.5").all(), "the faster one counts"
    for name in ("speed-ups", "parts of a step", "memory", "models", "gradients", "hybrid"):
        assert len(STUDY.tables[name](frame.iloc[:0])) == 1
    unsure = frame["value"].mul(np.where(frame["unit"].eq("ms"), 2.0 ** (frame["group"] % 2), 1))
    wide = scaling_plots.speed_up(frame.assign(value=unsure.where(frame["method"].eq("pull"), frame["value"])))
    assert wide.axes[0].get_ylim()[1] < 3, "an interval that tells nothing hides no point"
    page = promises.page(frame)
    assert "| ranks |" in page and "world_size" not in page
    assert "At 4096 keys a step on 2 GPUs (pull, causal) is 1.50x [" in promises.answer(frame), (
        "nothing dense was timed"
    )
    both = planted(lambda p, k: {"alone": 2.5, "dense": 1.0, "dense_fa4": 2.0, "pull": 3.0}, (4096,), (2,))
    assert promises.answer(both).startswith("A step at 4096 keys is 1.50x [1.50, 1.50] on 2 GPUs (pull) as fast")
    assert "## Speed-up over ranks" in page
    assert "- **No record of their cells yet.** A4a: the claim that at 4K " in page and "; A4k: the claim that " in page
    assert "No record of attention_speed on these machines is shipped yet." in page and "- **A1: " not in page
    empty = pd.DataFrame(columns=COLUMNS)
    assert {verdict(empty).verdict for verdict in STUDY.hypotheses["attention_scaling"]} == {"undecided"}


def test_a_sweep_of_gpus_measures_the_headline_and_the_lengths_of_the_claims():
    def cases(**choose):
        params = load(STUDY, "attention_scaling", choose={"hardware": "cuda"} | choose)
        return pd.DataFrame([vars(case) | columns(vars(case)) for case in expand(params)])

    assert len(rules.where(cases().assign(value=0.0), **rules.HEADLINE, batch=1)) >= 3
    claims = rules.where(cases(sweep="attention_scaling-claims").assign(value=0.0), **rules.CLAIMED)
    assert {4096, 8192, 16384, 32768, 65536, 131072} <= set(claims["k_len"]) and set(claims["batch"]) == {2}
    assert set(rules.MODELS) | set(rules.HOOKS) | {"dense", "alone", "ring"} <= set(claims["methods"].iloc[0])
    pruned = cases(sweep="attention_scaling-pruned")
    assert set(pruned["pattern"]) == {"full", "quarter"} and set(pruned["k_len"]) == {128}
