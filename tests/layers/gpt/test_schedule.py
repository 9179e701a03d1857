"""Schedules are data: what they read, when they sum, and what they refuse."""

import re

import pytest

from blockshock_lib import gpt

# Of 12 layers: all-reduces of a forward, and those beside which a sublayer runs.
SYNCS = {
    (24, 0): ["tensor_parallel"],
    (15, 0): ["selective(0, 5, 11)"],
    (12, 0): ["parallel", "spd", "desync(2)", "grouped(1)"],
    (6, 0): ["desync(4)", "grouped(2)"],
    (4, 0): ["grouped(3)"],
    (3, 0): ["grouped(4)", "grouped(5)"],
    (2, 0): ["grouped(6)"],
    (1, 0): ["desync(24)", "none"],
    (23, 22): ["ladder", "delayed(1)"],
    (20, 19): ["delayed(4)"],
}
SYNCS = {name: counts for counts, names in SYNCS.items() for name in names}


def reads(name, s, ranks=4):
    """Of the partial results that sublayer s of four layers reads, (weight of its rank's own, of the others')."""
    steps = enumerate(gpt.named(name, 4).steps)
    seen = ((t, (step.late(ranks),) * 2 if step.lands <= s else (1, 0)) for t, step in steps if step.own <= s)
    return dict(seen)


def test_what_some_sublayers_read_by_the_published_equations():
    whole, own, mean = (1, 1), (1, 0), (0.25, 0.25)
    assert reads("tensor_parallel", 3) == {0: whole, 1: whole, 2: whole}
    assert reads("parallel", 3) == {0: whole, 1: whole}
    assert reads("spd", 3) == {0: whole, 1: whole, 2: own}
    assert reads("desync(2)", 3) == {0: mean, 1: whole, 2: own}
    assert reads("desync(4)", 4) == {0: mean, 1: mean, 2: mean, 3: whole}
    assert reads("desync(3)", 8) == {0: mean, 1: mean, 2: whole, 3: mean, 4: mean, 5: whole, 6: mean, 7: whole}
    assert reads("grouped(2)", 6) == {0: whole, 1: whole, 2: whole, 3: whole, 4: own, 5: own}
    assert reads("ladder", 3) == {0: whole, 1: whole} and len(reads("ladder", 8)) == 8
    assert reads("delayed(2)", 5) == {0: whole, 1: whole, 2: whole, 3: own, 4: own}
    assert reads("selective(1)", 3) == {0: whole, 1: whole, 2: whole} and reads("selective(1)", 1) == {0: own}
    steps = gpt.schedule.dropping(4, (1, 2))  # as after training
    assert [(step.own, step.lands) for step in steps[:4]] == [(1, 1), (2, 4), (3, 4), (4, 4)]
    assert reads("none", 7) == dict.fromkeys(range(7), own) and reads("none", 8) == dict.fromkeys(range(8), whole)


def test_each_row_of_the_table_is_tested():
    assert {name.partition("(")[0] for name in SYNCS} == set(gpt.SCHEDULES)


@pytest.mark.parametrize("name", SYNCS)
def test_a_sum_of_each_partial_result_starts_when_it_is_made_and_lands_before_it_is_read(name):
    schedule = gpt.named(name, 12)
    assert (len(schedule.syncs), sum(sync.overlap > 0 for sync in schedule.syncs)) == SYNCS[name]
    assert schedule.name == name and schedule.layers == 12
    assert sorted(t for sync in schedule.syncs for t in sync.members) == list(range(24))
    place = {operation: at for at, operation in enumerate(schedule.operations)}
    assert len(place) == len(schedule.operations) == 2 * 24 + 2 * len(schedule.syncs)
    for i, sync in enumerate(schedule.syncs):
        assert max(place["run", t] for t in sync.members) < place["start", i] < place["land", i]
        assert place["run", sync.lands - 1] < place["land", i] < place.get(("run", sync.lands), len(place))
    for t, step in enumerate(schedule.steps):
        assert place["run", step.own - 1] < place["show", t] < place.get(("run", step.own), len(place))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("spt", "unknown schedule 'spt'.*did you mean 'spd'"),
        ("grouped", r"takes \(depth: int\), not \(\)"),
        ("spd(2)", r"takes \(\), not \(2\)"),
        ("grouped(0)", "depth of grouped 0 is out of range: 1 to 12"),
        ("desync(two)", "k of desync two is out of range"),
        ("delayed(25)", "delta of delayed 25 is out of range: 1 to 24"),
        ("selective(12)", "layer 12 is out of range: 0 to 11"),
        ("selective(3, 0, 3)", "selective names a layer twice: 3, 0, 3"),
    ],
)
def test_a_bad_name_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        gpt.named(text, 12)


def test_a_schedule_that_leaves_a_partial_result_unsummed_or_reads_it_too_early_is_refused():
    good = gpt.named("spd", 2).steps
    for step, words in (
        (gpt.Step(2, 5), "sublayer 1 never lands: sublayer 5 is beyond the end, 4"),
        (gpt.Step(1, 3), "sublayer 1 is read by this rank at 1 and lands at 3: first 2 at the earliest"),
        (gpt.Step(2, 2.5), "sublayer 1 is read at 2 and lands at 2.5: sublayers are whole numbers"),
        (gpt.Step(2, True), "sublayer 1 is read at 2 and lands at True: sublayers are whole numbers"),
        (gpt.Step(3, 2), "sublayer 1 is read by this rank at 3 and lands at 2"),
        (gpt.Step(2, 3, "yes"), "sublayer 1 has Step(own=2, lands=3, mean='yes'), not a Step whose mean is True or F"),
        ((2, 3), "sublayer 1 has (2, 3), not a Step"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"schedule mine: the partial result of {words}")):
            gpt.Schedule("mine", (good[0], step, *good[2:]))
    assert gpt.Schedule("mine", [*good]) == gpt.Schedule("mine", good), "a list of steps is one too, and can be hashed"
    assert hash(gpt.Schedule("mine", [*good]))
    for steps in ((), good[:3]):
        with pytest.raises(ValueError, match="make no layers"):
            gpt.Schedule("mine", steps)
    with pytest.raises(ValueError, match="0 make no layers"):
        gpt.named("ladder", 0)


def test_a_picture_shows_what_is_read_and_each_sum():
    schedule = gpt.named("delayed(2)", 3)
    ax = gpt.picture(schedule)
    shown = ax.images[0].get_array().tolist()
    assert shown[1] == [0, 0, 1, 1, 2, 2, 2] and shown[5] == [0, 0, 0, 0, 0, 0, 2]
    spans = [tuple(line.get_xdata()) for line in ax.lines if len(line.get_xdata())]
    assert spans == [(sync.start + 0.5, sync.lands - 0.5) for sync in schedule.syncs] and len(spans) == 4
    assert ax.get_title() == "delayed(2): 4 sums in 3 layers"
    ax.figure.draw_without_rendering()
