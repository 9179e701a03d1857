"""The correctness phase: right kernels pass, and each planted fault is refused by name."""

import types

import pytest

from blockshock_lib import studies
from blockshock_lib.kernels.attention import backends
from blockshock_lib.params import load
from tests.kernels.attention.faults import planted
from tests.studies.attention.test_speed import run

STUDY = studies.load("attention")


def checks(methods, pattern, dtype="bf16", length=(300,), heads=(4, 2, 64)):
    """Method -> (status, reason) of one case, its two ranks as threads."""
    shape = dict(zip(("heads", "kv_heads", "head_dim"), heads, strict=True))
    sweep = {"patterns": [pattern], "lengths": [list(length)], "shapes": [shape], "blocks": [64], "dtypes": [dtype]}
    settings = {"methods": list(methods), "hardware.emulated": True} | {f"sweep.{key}": sweep[key] for key in sweep}
    params = load(STUDY, "attention_correctness", settings, choose={"hardware": "cpu"})
    _, rows = run(params)
    return {row["method"]: (row["status"], row["reason"]) for row in rows if row["metric"] == "check"}


@pytest.mark.parametrize("pattern", ["causal", "packed_windows", "by_head", "nearly_empty"])
def test_the_reference_and_every_strategy_are_right(pattern):
    found = checks(("reference", "gather", "pull", "ring", "heads"), pattern)
    assert {status for status, _ in found.values()} == {"ok"}, found


@pytest.mark.parametrize("length", [(1,), (1, 200), (7, 65)])
def test_short_and_decoding_lengths_are_right_and_ranks_are_told_why_not(length):
    found = checks(("reference", "pull"), "causal", "fp16", length)
    assert found["reference"][0] == "ok" and found["pull"][0] == "unsupported" and found["pull"][1]


@pytest.mark.parametrize(
    ("name", "pattern", "words"),
    [
        ("list ignored", "block_diagonal", "out: largest error"),
        ("stale tail", "causal", "out: largest error"),
        ("lse in base 2", "causal", "lse is off by"),
        ("zero dQ", "window", "dq: largest error"),
        ("one row of another head", "causal", "out: "),
        ("empty rows average the values", "nearly_empty", "out: "),
        ("empty rows are not a number", "nearly_empty", "out"),
        ("averaged chunks", "strided", "out: "),
        ("dropped d(alpha)", "strided", "dq: "),
        ("no delta", "causal", "dq: "),
        ("backward ignores the list", "window", "dq: "),
        ("stale dQ tail", "causal", "dq: "),
        ("gradients far too large", "causal", "dq: "),
        ("no mask of partial blocks", "causal", "out: "),
        ("not a number", "causal", "out"),
    ],
)
def test_a_kernel_that_is_wrong_is_refused(name, pattern, words, monkeypatch):
    wrong = types.SimpleNamespace(refuse=lambda call: "", attend=lambda call: planted(call, name))
    monkeypatch.setitem(backends.BACKENDS, "reference", wrong)
    status, reason = checks(("reference",), pattern)["reference"]
    assert status == "failed" and words in reason, reason
