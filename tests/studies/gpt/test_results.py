"""The study's page, from whatever records are there."""

import pandas as pd
import pytest

from blockshock_lib.studies.gpt import hypotheses, results, saved
from blockshock_lib.studies.gpt.methods import METHODS
from tests.studies.gpt.test_reports import records
from tests.studies.gpt.test_saved import both, timed

FEW = {"tensor_parallel": 0.0, "spd": 0.05}


@pytest.mark.parametrize(
    "frame, said, unsaid",
    [
        (
            records(FEW, seeds=1),
            [
                "Not answered with fewer than 4 seeds: SPD costs least, +0.0505 (1 seed)",
                "No record of gpt_latency on these machines is shipped yet.",
            ],
            ["## Time saved"],
        ),
        (
            records({"spd": 0.0}, seeds=2),
            ["Not answered: no schedule was trained to its end beside"],
            ["## Time saved"],
        ),
        (
            timed(),
            ["; time: ", "No record of gpt_training on these machines is shipped yet.", "up to 50.0% ["],
            ["## What a dropped"],
        ),
        (
            timed()[lambda rows: rows["group"].eq(0)],
            ["; time: no claim, for an interval is missing; by the points up to 50.0% [no interval] of tensor"],
            [],
        ),
        (
            pd.concat([timed(), timed(link="slow", step={"spd": 0.25})]),
            ["up to 50.0% [", "fast link); up to 75.0% [", "slow link)."],
            [],
        ),
        (timed()[lambda rows: rows["method"].eq("tensor_parallel")], ["Not answered: no case holds valid times"], []),
        (both(), ["S3 fast: ", "384 wide, 3.28M tokens", "## After training", "9 of 9 times"], ["No record"]),
        (both(device="cpu"), ["no claim about speed: CPU"], ["times that await their sums"]),
    ],
)
def test_the_page_says_what_is_there_and_what_is_missing(frame, said, unsaid):
    text = results.answer(frame) + results.page(frame)
    for words in said:
        assert words in text, words
    for words in unsaid:
        assert words not in text, words


def test_headline_cells_are_at_most_twenty_and_say_on_how_many_runs_they_rest():
    assert len(hypotheses.HEADLINE["cases"]) * len(hypotheses.HEADLINE["methods"]) <= 20
    one = timed(width=768, batch=128)
    three = pd.concat([one.assign(run=f"t{n}") for n in range(3)])
    for frame, rests in (
        (one, "one run, too few"),
        (pd.concat([one, one.assign(run="t2")]), "2 runs, too few"),
        (three, "3 runs"),
    ):
        table = results.headline(frame[frame["method"].ne("ladder")]).set_index(["work", "width", "schedule"])
        assert table.loc[("step 65536", "768", METHODS["spd"].label), "rests on"] == rests
        assert table.loc[("prefill 2048", "768", METHODS["spd"].label), "saved"].endswith("]")
        assert table.loc[("prefill 2048", "768", METHODS["ladder"].label), "rests on"] == "not measured"
        assert set(table.loc[("decode 1024", "768"), "rests on"]) == {"not measured"}


def test_times_that_are_not_their_parts_are_named():
    (said,) = saved.summary(timed(off=1.0))
    assert said == "9 of 9 times that await their sums are within 5% of their parts"
    (said,) = saved.summary(timed(off=1.5))
    assert "tensor" not in said and "TP prefill 2048, 384 wide, 4 ranks 1." in said and "ladder" not in said
