"""Parameters of the attention study, and the cases that they become."""

import itertools

import pytest

from blockshock_lib import studies
from blockshock_lib.errors import ParamsError
from blockshock_lib.params.load import load
from blockshock_lib.studies.attention import params
from blockshock_lib.studies.attention.patterns import PATTERNS, made

STUDY = studies.load("attention")


def loaded(*overrides):
    return load(STUDY, "attention_correctness", dict(overrides), choose={"hardware": "cpu"})


def test_every_named_pattern_can_be_made():
    assert set(params.NAMES) == set(PATTERNS)
    for case in params.expand(loaded(("sweep.lengths", [[1], [100]]), ("sweep.blocks", [32]))):
        made(case).lists(case.q_len, case.k_len, case.block)


def test_pairs_cover_every_pair_of_values_with_few_cases():
    sweep = loaded().sweep
    axes = [sweep.patterns, sweep.lengths, sweep.shapes, sweep.blocks, sweep.dtypes]
    rows = params.covering(axes)
    for (i, one), (j, other) in itertools.combinations(enumerate(axes), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(one, other))
    assert len(rows) == len(params.expand(loaded())) <= 60  # of 936


def test_further_sweeps_bring_cases_of_their_own_methods_and_no_case_twice():
    more = {"patterns": ["full", "causal"], "lengths": [[130]], "shapes": [{}], "blocks": [64], "methods": ["flex"]}
    more["dtypes"] = ["fp32"]
    first = more | {"patterns": ["causal"], "methods": ["reference"], "tuned": True}
    cases = params.expand(loaded(("sweep", first), ("more", [more])))
    assert [(one.pattern, one.methods, one.tuned) for one in cases] == [
        ("causal", ("reference",), True),
        ("full", ("flex",), False),
    ]
    assert "tuned" not in cases[1].as_dict() and cases[0].id != cases[1].id


@pytest.mark.parametrize("name", ["headline", "patterns", "auto", "shapes"])
def test_sweeps_of_a_gpu_can_be_expanded(name):
    assert params.expand(
        load(STUDY, "attention_speed", {"layers.sweep": f"attention_speed-{name}"}, choose={"hardware": "cuda-1"})
    )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("sweep.patterns", ["casual"], "did you mean 'causal'"),
        ("sweep.patterns", ["random 1.5"], "is no density"),
        ("sweep.shapes", [{"heads": 4, "kv_heads": 3}], "cannot share 3 evenly"),
        ("sweep.lengths", [[9, 4]], "last of the keys"),
        ("sweep.blocks", [40], "multiples of 32"),
        ("methods", ["flax"], "did you mean 'flex'"),
        ("methods", ["flex", "flex"], "listed twice"),
        ("sweep.methods", ["flex", "flex"], "sweep.methods: 'flex' is listed twice"),
    ],
)
def test_nonsense_is_named(key, value, words):
    with pytest.raises(ParamsError, match=words):
        loaded((key, value))
