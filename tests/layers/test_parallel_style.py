"""BlockShockParallel in a plan of parallelize_module: equal to the dense model, beside torch's styles, compiled."""

import pytest
import torch

from tests import training


@pytest.fixture(scope="module")
def dense():
    """Losses and weights of the dense model after the same five steps."""
    model = training.mlp(dtype=torch.float64)
    losses = training.steps(model, training.adamw(model), 5)
    return losses, training.dense_view(model)


@pytest.mark.parametrize(
    "asked",
    [({},), ({}, True), ({"mask": "random"},), ({"update": "recompress"},), ({"dw": "exchange"},)],
    ids=str,
)
def test_a_styled_model_compiled_or_not_trains_as_the_dense_one_from_the_source_ranks_weights(pair, dense, asked):
    for losses, weights, kinds in pair.call(training.trained, *asked, seconds=100):
        assert kinds == ["BlockShockLinear", "GELU", "BlockShockLinear"]
        assert losses == pytest.approx(dense[0], abs=1e-10) and weights.keys() == dense[1].keys()
        assert all((weights[key] - wanted).abs().max() <= 1e-10 for key, wanted in dense[1].items())


def test_what_cannot_be_converted_is_refused_and_stays_as_it_was(pair):
    with pytest.raises(TypeError, match="produkt"):
        training.BlockShockParallel(produkt="auto")
    for found in pair.call(training.refusals, seconds=60):
        for words, said, unchanged in found:
            assert words in said and unchanged


def test_names_attributes_and_modes_survive_the_change(pair):
    for note, training_mode, names, trains in pair.call(training.kept_apart, seconds=60):
        assert note == "mine" and training_mode is False and names == list(trains)
        assert trains == {"0.weight": False, "0.bias": True, "2.weight": True, "2.bias": True}
