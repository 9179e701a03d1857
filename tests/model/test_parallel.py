"""BlockShockParallel in a plan of parallelize_module: equal to the dense model, beside torch's styles, compiled."""

import pytest
import torch

from blockshock_lib import launch
from tests import training


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with launch.WorkerGroup(2, logs=tmp_path_factory.mktemp("logs")) as group:
        yield group


@pytest.fixture(scope="module")
def dense():
    """Losses and weights of the dense model after the same five steps."""
    model = training.mlp(dtype=torch.float64)
    losses = training.steps(model, training.adamw(model), 5)
    return losses, training.dense_view(model)


def same(found, wanted, tolerance=1e-10):
    return found.keys() == wanted.keys() and all((found[key] - wanted[key]).abs().max() <= tolerance for key in wanted)


@pytest.mark.parametrize(
    "options",
    [{}, {"mask": "random"}, {"mask": "transposable_random"}, {"update": "recompress"}, {"dw": "exchange"}],
    ids=str,
)
def test_a_styled_model_trains_as_the_dense_one_from_the_source_ranks_weights(pair, dense, options):
    for losses, weights, kinds in pair.call(training.trained, options, seconds=60):
        assert kinds == ["BlockShockLinear", "GELU", "BlockShockLinear"]
        assert losses == pytest.approx(dense[0], abs=1e-10) and same(weights, dense[1])


def test_it_stands_beside_torchs_styles_and_takes_their_sharded_output(pair):
    for found in pair.call(training.beside_torchs_styles, seconds=60):
        assert same(found["styled"], found["dense"])


def test_what_cannot_be_converted_is_refused_and_stays_as_it_was(pair):
    for said in pair.call(training.refusals, seconds=60):
        assert said.pop("slice") == "BlockShockLinear"
        words = {
            "type": "takes an nn.Linear, not a Embedding",
            "mesh": "a mesh of one dimension",
            "sizes": "multiple",
            "hooks": "register them afterwards",
            "twice": "sharded already",
            "meta": "no weights yet",
        }
        assert said.keys() == words.keys() and all(words[name] in text for name, (text, _) in said.items()), said
        assert all(unchanged for _, unchanged in said.values())


def test_names_attributes_and_modes_survive_the_change(pair):
    for note, training_mode, names, trains in pair.call(training.kept_apart, seconds=60):
        assert note == "mine" and training_mode is False and names == list(trains)
        assert trains == {"0.weight": False, "0.bias": True, "2.weight": True, "2.bias": True}


def test_a_converted_mlp_compiles_into_one_graph(pair):
    for differences in pair.call(training.compiled, seconds=100):
        assert len(differences) == 6 and max(differences) < 1e-5
