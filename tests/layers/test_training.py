"""Layers train between real gloo ranks: gradients, variants, compilation and the dense view."""

import pytest

from blockshock_lib import launch
from tests.layers import tasks

VARIANTS = [("packed", "full"), ("packed", "exchange"), ("recompress", "full"), ("recompress", "exchange")]
CASES = [
    ("row_parallel", "checkerboard", {}),
    ("column_parallel", "checkerboard", {}),
    ("masked_dense", "random", {}),
    ("permuted_dense", "checkerboard", {}),
    ("permuted_dense", "uniform_1010", {}),
    ("block_shock", "checkerboard", {}),
    ("block_shock", "uniform_1100", {}),
    ("block_shock_recompress", "checkerboard", {}),
]
CASES += [
    ("block_shock", mask, {"update": update, "dw": dw})
    for mask in ("transposable_random", "random")
    for update, dw in VARIANTS
]
EVERY = [("dense", "checkerboard", {}), *CASES]
EVERY += [(name, "checkerboard", {"overlap": False}) for name in ("row_parallel", "column_parallel", "block_shock")]
TERMS = [case for case in CASES if case[0].startswith("block_shock")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with launch.WorkerGroup(2, logs=tmp_path_factory.mktemp("logs")) as group:
        yield group


def test_gradients_pass_gradcheck_in_float64_on_two_ranks(pair):
    assert pair.call(tasks.check_gradients, EVERY, seconds=120) == [[], []]


def test_gradients_pass_gradcheck_in_float64_on_four_ranks(tmp_path):
    assert launch.call(tasks.check_gradients, EVERY, processes=4, logs=tmp_path, seconds=120) == [[]] * 4


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw fused"])
def test_fifty_steps_give_the_weights_of_dense_training(optimizer, pair):
    for worst in pair.call(tasks.train, TERMS, optimizer, 50, seconds=120):
        for case, (off, moved) in worst.items():
            assert moved > 0.05, case
            assert off < 1e-10, case


def test_a_compiled_model_trains_as_the_eager_one(pair):
    assert pair.call(tasks.compiled, CASES, "aot_eager", seconds=200) == [[], []]


def test_inductor_trains_as_eager_also_where_a_graph_on_disk_had_another_layer_by_that_handle(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "graphs"))
    for name in ("row_parallel", "block_shock"):  # in fresh processes, so that handles begin anew
        cases = [(name, "checkerboard", {})]
        assert launch.call(tasks.compiled, cases, "inductor", processes=2, logs=tmp_path, seconds=300) == [[], []]


def test_the_dense_view_is_saved_and_loaded_bit_for_bit(pair):
    assert pair.call(tasks.round_trip, CASES, seconds=120) == [[], []]


@pytest.mark.parametrize("update", ["packed", "recompress"])
def test_lent_weights_leave_the_layers_own_alone(update, pair):
    for seen in pair.call(tasks.lent_weights, update, seconds=60):
        assert seen == {"lent": True, "own again": True, "gradient": True}
