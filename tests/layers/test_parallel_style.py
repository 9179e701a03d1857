"""What BlockShockParallel takes and keeps in a plan of parallelize_module; how it trains: test_compositions.py."""

import pytest

from tests import training


def test_what_cannot_be_converted_is_refused_and_stays_as_it_was(pair):
    with pytest.raises(TypeError, match="produkt"):
        training.BlockShockParallel(produkt="auto")
    for found in pair.call(training.refusals, seconds=600):
        for words, said, unchanged in found:
            assert words in said and unchanged


def test_names_attributes_and_modes_survive_the_change(pair):
    for note, training_mode, way, names, trains in pair.call(training.kept_apart, seconds=600):
        assert note == "mine" and training_mode is False and way == "full" and names == list(trains)
        assert trains == {"0.weight": False, "0.bias": True, "2.weight": True, "2.bias": True}
