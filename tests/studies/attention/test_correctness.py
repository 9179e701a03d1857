"""The correctness phase: right kernels pass, and each planted fault is refused by name."""

import types

import pytest
import torch

from blockshock_lib import studies
from blockshock_lib.engine import experiment
from blockshock_lib.kernels.attention import backends, reference
from blockshock_lib.layers.attention import parallel
from blockshock_lib.params import load
from blockshock_lib.studies.attention.params import expand
from blockshock_lib.studies.attention.problem import AttentionProblem

STUDY = studies.load("attention")


def checks(methods, pattern, dtype="bf16", length=(300,), heads=(4, 2, 64)):
    """Method -> (status, reason) of one case, its two ranks as threads."""
    shape = dict(zip(("heads", "kv_heads", "head_dim"), heads, strict=True))
    sweep = {"patterns": [pattern], "lengths": [list(length)], "shapes": [shape], "blocks": [64], "dtypes": [dtype]}
    settings = {"methods": list(methods), "hardware.emulated": True} | {f"sweep.{key}": sweep[key] for key in sweep}
    params = load(STUDY, "attention_correctness", settings, choose={"hardware": "cpu"})
    (case,) = expand(params)
    rows = experiment.measure(AttentionProblem(case, params, device=torch.device("cpu"), group=None), params, STUDY)
    return {row["method"]: (row["status"], row["reason"]) for row in rows if row["metric"] == "check"}


@pytest.mark.parametrize("pattern", ["causal", "packed_windows", "by_head", "nearly_empty"])
def test_the_reference_and_every_strategy_are_right(pattern):
    found = checks(("reference", "gather", "pull", "ring", "heads"), pattern)
    assert {status for status, _ in found.values()} == {"ok"}, found


@pytest.mark.parametrize("length", [(1,), (1, 200), (7, 65)])
def test_short_and_decoding_lengths_are_right_and_ranks_are_told_why_not(length):
    found = checks(("reference", "pull"), "causal", "fp16", length)
    assert found["reference"][0] == "ok" and found["pull"][0] == "unsupported" and found["pull"][1]


def fault(name):
    """The reference with a fault, as a backend."""

    def attend(call):
        lists = call.lists
        if name == "list ignored":
            whole = torch.arange(max(lists.q_blocks, lists.k_blocks))
            full = torch.cartesian_prod(torch.tensor([0]), whole[: lists.q_blocks], whole[: lists.k_blocks])
            none = torch.zeros(0, 3, dtype=torch.long)
            lists = type(lists).of(
                *(full, none, none[:, 0], 1),
                **{key: getattr(lists, key) for key in ("block", "q_len", "k_len", "tiles", "plane")},
            )
            call = types.SimpleNamespace(**vars(call) | {"lists": lists})
        if name == "stale tail":  # of the keys of the last block, the first of it is read again
            k = call.k.clone()
            k[:, :, -20:] = k[:, :, -40:-20]
            call = types.SimpleNamespace(**vars(call) | {"k": k})
        out, lse = reference.attend(call)
        if name == "lse in base 2":
            lse = lse / torch.log(torch.tensor(2.0))
        if name == "zero dQ":
            other = types.SimpleNamespace(**vars(call) | {"q": call.q.detach()})
            out = reference.attend(other)[0]
            out = out + 0 * call.q
        if name == "one row of another head":
            out = torch.cat((out[:, :, :1], out[:, :, 1:2].roll(1, 1), out[:, :, 2:]), 2)
        if name == "empty rows average the values":
            out = torch.where(lse.isinf()[..., None], call.v.mean(), out)
        return out, lse

    return types.SimpleNamespace(refuse=lambda call: "", attend=attend)


@pytest.mark.parametrize(
    ("name", "pattern", "words"),
    [
        ("list ignored", "block_diagonal", "out: largest error"),
        ("stale tail", "causal", "out: largest error"),
        ("lse in base 2", "causal", "lse is off by"),
        ("zero dQ", "window", "dq: largest error"),
        ("one row of another head", "causal", "out: "),
        ("empty rows average the values", "nearly_empty", "out: "),
    ],
)
def test_a_kernel_that_is_wrong_is_refused(name, pattern, words, monkeypatch):
    monkeypatch.setitem(backends.BACKENDS, "reference", fault(name))
    status, reason = checks(("reference",), pattern)["reference"]
    assert status == "failed" and words in reason, reason


def test_ranks_whose_parts_are_averaged_are_refused(monkeypatch):
    monkeypatch.setattr(parallel, "merge", lambda outs, lses: (sum(outs) / 2, torch.logaddexp(*lses)))
    assert checks(("ring", "pull"), "causal")["ring"][0] == "failed"
