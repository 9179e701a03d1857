"""Latency: what is timed is checked, a sum that is left out is refused, and the cache is the whole forward."""

import copy

import pytest
import torch

from blockshock_lib import gpt, studies
from blockshock_lib.comm import Group, symm
from blockshock_lib.engine import experiment
from blockshock_lib.errors import ParamsError
from blockshock_lib.layers.gpt import ranks
from blockshock_lib.params import load
from blockshock_lib.studies.gpt import latency
from blockshock_lib.studies.gpt.need import need
from blockshock_lib.studies.gpt.params import COLUMNS
from tests.layers.gpt.test_model import CONFIG, drawn

STUDY = studies.load("gpt")
QUICK = {f"timing.{name}": 0.0 for name in ("lead_in_s", "lead_in_most_s", "min_sample_ms")}
QUICK |= {
    "timing.warmup": 1,
    "timing.samples": 1,
    "hardware.emulated": True,
    "size": {"width": 16, "heads": 4, "vocab": 300, "context": 8},
}
ASKED = {"prefill": {"prefill": [3]}, "decode": {"decode": [4]}, "step": {"step": [[16, 6]]}}


def asked(work, *methods, **settings):
    sizes = {"layers": 4, "head": 4, "widths": [16], "prefill": [], "decode": [], "step": []} | ASKED[work]
    told = {f"latency.{name}": value for name, value in sizes.items()} | QUICK
    return load(STUDY, "gpt_latency", told | {"methods": list(methods)} | settings, choose={"hardware": "cpu"})


def measured(work, *methods):
    params = asked(work, *methods)
    (case,) = STUDY.expand(params)
    own = latency.opened(case, params, device=torch.device("cpu"), group=Group())
    rows = experiment.measure(own, params, STUDY)
    return {row["method"]: row["reason"] for row in rows if row["metric"] == "check"}, rows


@pytest.mark.parametrize("work", ASKED)
def test_each_schedule_and_the_bound_are_checked_and_timed(work, monkeypatch):
    monkeypatch.setattr(experiment, "copies_past_cache", lambda *given: 2)
    names = ("tensor_parallel", "grouped_2", "ladder", "no_sync")
    why, rows = measured(work, *names)
    assert why == dict.fromkeys((*names, "twin"), "")
    kind = "step" if work == "step" else "forward"
    timed = {(row["method"], row["metric"]) for row in rows if row["metric"].endswith(("_kernel", "_call"))}
    for name in names:
        parts = () if name == "no_sync" else ("compute_kernel", "sums_kernel")
        assert {metric for method, metric in timed if method == name} == {f"{kind}_kernel", f"{kind}_call", *parts}


def test_a_schedule_that_has_no_such_number_of_layers_is_left_out_and_the_others_are_timed():
    params = asked("prefill", "tensor_parallel", "selective", **{"latency.layers": 2})
    (case,) = STUDY.expand(params)
    why = need(case, {}).unsupported
    assert why == {"tensor_parallel": "", "selective": "layer 2 is out of range: 0 to 1"}
    rows = experiment.measure(latency.opened(case, params, device=torch.device("cpu"), group=Group()), params, STUDY)
    said = {row["method"]: (row["status"], row["reason"]) for row in rows if row["metric"] == "check"}
    assert said["tensor_parallel"] == ("ok", "") and said["selective"] == ("unsupported", why["selective"])


def test_a_step_of_a_trained_width_is_of_that_gpt():
    """Else S3 finds no time of the very shape whose losses it has."""
    told = {"latency.step": [[384, 32768], [768, 65536], [256, 2048]], "latency.widths": [], "training.batch": 64}
    trained = STUDY.expand(load(STUDY, "gpt_training", {"size": "25M"} | told, choose={"hardware": "cuda-1"}))[0]
    params = load(STUDY, "gpt_latency", {"latency.head": 64} | told, choose={"hardware": "cuda-4"})
    small, wide, other = STUDY.expand(params)
    shape = [*COLUMNS, "dtype"]
    assert [getattr(small, name) for name in shape] == [getattr(trained, name) for name in shape]
    assert (wide.heads, wide.context, wide.batch) == (12, 1024, 64)
    assert (other.heads, other.context, other.batch) == (4, 1024, 2)
    own = {"size": {"width": 512, "heads": 16, "vocab": 300, "context": 256}, "latency.step": [[512, 512]]}
    (step,) = STUDY.expand(load(STUDY, "gpt_latency", told | own, choose={"hardware": "cuda-4"}))
    assert (step.heads, step.context, step.batch) == (16, 256, 2)


@pytest.mark.parametrize("work", ASKED)
def test_a_sum_that_is_not_made_is_refused_but_of_the_bound(work, monkeypatch):
    monkeypatch.setattr(ranks.Sum, "begin", lambda self, x: setattr(self, "pending", ranks.Pending(x)) or x)
    why, _ = measured(work, "tensor_parallel", "no_sync")
    assert "baseline's" in why["tensor_parallel"] or "off by" in why["tensor_parallel"]
    assert why["no_sync"] == ""


def test_the_bound_that_sums_is_refused(monkeypatch):
    monkeypatch.setattr(latency, "silent", lambda model: model)
    assert measured("prefill", "no_sync")[0]["no_sync"]


def test_what_was_timed_is_checked_again(monkeypatch):
    count, right = [0], latency.LatencyRunner.call

    def stale(self, model):
        count[0] += 1
        return (right(self, model)[0] * (1 if count[0] < 9 else 1.5),)

    monkeypatch.setattr(latency.LatencyRunner, "call", stale)
    _, rows = measured("prefill", "spd")
    assert not [row for row in rows if row["metric"] == "forward_kernel"]


@pytest.mark.parametrize("name", ["tensor_parallel", "spd", "grouped(2)", "ladder", "delayed(1)"])
def test_tokens_behind_a_cache_are_those_of_a_whole_forward(name):
    model, cache = drawn(name, 2), gpt.Cache(7)
    tokens = torch.arange(14).view(2, 7)
    with torch.no_grad():
        whole = model(tokens)
        parts = [model(part, cache=cache) for part in tokens.split([3, 1, 2, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-12, rtol=0)
    assert cache.length == 7 == CONFIG.context
    with pytest.raises(ValueError, match="at most 0 positions"):
        model(tokens[:, :1], cache=cache)


def test_a_cache_is_copied_with_what_it_holds_and_serves_one_model_and_its_sequences_without_gradients():
    model, cache, tokens = drawn("spd", 2), gpt.Cache(7), torch.arange(14).view(2, 7)
    assert not model(tokens[:, :3], tokens[:, 1:4], cache=cache).requires_grad
    branch = copy.deepcopy(cache)
    for one in (cache, branch):
        torch.testing.assert_close(model(tokens[:, 3:], cache=one), model(tokens)[:, 3:], atol=1e-12, rtol=0)
    assert cache.length == branch.length == 7
    for other, given in ((drawn("spd", 2), tokens), (model, tokens[:1])):
        model(tokens[:, :3], cache=(held := gpt.Cache(7)))
        with pytest.raises(ValueError, match=r"other sequences, or those of another model, schedule, .*: begin a new"):
            other(given[:, 3:], cache=held)
    with pytest.raises(IndexError):  # of targets beyond the vocabulary: the tokens do not count
        model(tokens[:, :1], tokens[:, :1] + CONFIG.vocab, cache=(held := gpt.Cache(7)))
    assert held.length == 0
    with torch.inference_mode():
        model(tokens[:, :3], cache=held)
    with pytest.raises(ValueError, match="begin a new one"):
        model(tokens[:, 3:], cache=held)
    model(tokens[:, :3], cache=(held := gpt.Cache(7)))
    model.schedule = "tensor_parallel"
    with pytest.raises(ValueError, match="begin a new one"):
        model(tokens[:, 3:], cache=held)
    model.schedule = "spd"
    with pytest.raises(ValueError, match="begin a new one"):
        model.float()(tokens[:, 3:], cache=held)


def test_a_slow_link_starts_ranks_without_peer_access(monkeypatch):
    cuda = {"hardware.emulated": False, "hardware.device": "cuda", "hardware.backend": "nccl"}
    params = asked("prefill", "spd", **cuda | {"hardware.link": "slow"})
    assert params.hardware.environment == {"NCCL_P2P_DISABLE": "1"}
    assert {case.link for case in STUDY.expand(params)} == {"slow"}
    assert not asked("prefill", "spd", **cuda).hardware.environment
    monkeypatch.setattr(symm.compiled, "unsupported", lambda device: "")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert "NCCL_P2P_DISABLE" in symm.impossible(2, torch.device("cuda"))


@pytest.mark.parametrize(
    "phase, settings, said",
    [
        ("latency", {"hardware.link": "slow"}, "'slow' is a link between GPUs"),
        ("latency", {"latency.head": 16, "latency.widths": [16]}, "heads of 16 in 16 cannot be dealt whole to 2 ranks"),
        ("latency", {f"latency.{work}": [] for work in ASKED}, "nothing is asked"),
        ("latency", {"latency.step": [[64, 1025]]}, "1025 tokens are no 17 sequences of one length"),
        ("training", {"dtype": "fp16"}, "gradients vanish in fp16, and no loss is scaled"),
        ("correctness", {"methods": ["no_sync"]}, "'no_sync' is a bound of time"),
    ],
)
def test_what_cannot_be_is_refused_before_a_process_starts(phase, settings, said):
    with pytest.raises(ParamsError, match=said):
        load(STUDY, f"gpt_{phase}", settings, choose={"hardware": "cpu"})
