from blockshock_lib.report import labels
from tests.report.training_frames import METHODS


def test_every_method_has_a_colour_and_a_marker_of_its_own():
    looks = [labels.style(method) for method in METHODS]
    for field in ("label", "short", "colour", "marker"):
        assert len({getattr(look, field) for look in looks}) == len(METHODS)


def test_a_method_that_nobody_listed_still_gets_a_look():
    look = labels.style("my_new_method")
    assert look.label == "my new method"
    assert look == labels.style("my_new_method")


def test_methods_come_in_table_order_without_ceiling_and_machine_rows():
    found = labels.methods_in(["zebra", "block_shock", "machine", "dense", "ceiling", "block_shock"])
    assert found == ["dense", "block_shock", "zebra"]


def test_optimizers_are_written_as_their_authors_do_and_unknown_ones_as_given():
    assert [labels.optimizer(name) for name in ("sgd", "adamw", "lion", "")] == ["SGD", "AdamW", "lion", ""]
