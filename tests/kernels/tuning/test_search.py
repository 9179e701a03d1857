"""The search, with made-up candidates: wrong ones are never chosen, the leaders are checked and timed again."""

import contextlib
import itertools
import math
from typing import NamedTuple
from unittest import mock

import pytest

from blockshock_lib.kernels.tuning.search import Error, Found, from_json, leaders, search, to_json, words

GOOD, BAD = Error(1.0, 1.0), Error(40.0, 9.0)


class One(NamedTuple):
    number: int
    split: int = 1

    def valid(self):
        return self.split > 0


class Two(NamedTuple):
    number: int
    split: int = 1


KINDS = {"one": One, "two": Two}


def run(times, errors=(), **options):
    """Search over ways numbered so, with these times in ms; `errors` overrides the good error of some."""
    errors = dict(errors)

    def check(way):
        error = errors.get(way.number, GOOD)
        error = next(error) if isinstance(error, itertools.cycle | itertools.chain) else error
        if isinstance(error, Exception):
            raise error
        return error

    timed = lambda way: contextlib.nullcontext(lambda: times[way.number] / (2 if way.split == 4 else 1))  # noqa: E731
    trials = search([One(i) for i in times], check, timed, **options)
    return Found(tuple(trials)).best(), trials


@pytest.mark.parametrize("error", [BAD, Error(2.1, 1.0), Error(1.0, 1.3), Error(math.nan, math.nan)])
def test_a_wrong_candidate_is_never_chosen_however_fast(error):
    best, trials = run({0: 3.0, 1: 0.1, 2: 2.0}, {1: error})
    assert best.way == One(2) and [trial.wrong for trial in trials] == [False, True, False]
    assert math.isnan(trials[1].ms)


@pytest.mark.parametrize("right", [1, 2])  # times: found wrong before the finalists are timed, or after
def test_a_candidate_that_is_wrong_only_sometimes_is_caught_before_it_is_chosen(right):
    sometimes = itertools.chain([GOOD] * right, itertools.cycle([BAD]))
    best, trials = run({0: 3.0, 1: 0.1, 2: 2.0}, {1: sometimes}, finalists=1)
    assert best.way == One(2) and trials[1].wrong


def test_a_candidate_that_is_refused_when_it_is_checked_or_timed_is_left_out_with_its_reason():
    best, trials = run({0: 3.0, 1: 0.1}, {1: RuntimeError("CUSPARSE_STATUS_NOT_SUPPORTED when calling\nmore")})
    assert best.way == One(0)
    assert trials[1].refused == "CUSPARSE_STATUS_NOT_SUPPORTED when calling" and not trials[1].wrong
    clocks = [lambda: 2.0, mock.Mock(side_effect=[1.0, 1.0, RuntimeError("launch failed"), 1.0, 1.0, 1.0])]
    trials = search([One(0), One(1)], lambda way: GOOD, lambda way: contextlib.nullcontext(clocks[way.number]))
    assert [trial.refused for trial in trials] == ["", "launch failed"] and leaders(trials)[0].way == One(0)


def test_no_candidate_is_started_after_the_time_of_its_kind_is_up_but_the_first_always_is():
    best, trials = run({0: 1.0, 1: 0.5}, seconds=-1)
    assert best.way == One(0) and len(trials) == 1
    clock, now = contextlib.nullcontext(lambda: 1.0), itertools.count().__next__
    ways = [kind(i) for i in range(9) for kind in (One, Two)]
    trials = search(ways, lambda way: GOOD, lambda way: clock, seconds=3, now=now)
    assert [sum(isinstance(trial.way, kind) for trial in trials) for kind in (One, Two)] == [4, 3]


def test_a_lucky_sample_does_not_win():
    times = {0: itertools.repeat(1.0), 1: itertools.chain([0.5, 0.5], itertools.repeat(2.0))}
    clock = lambda way: contextlib.nullcontext(times[way.number].__next__)  # noqa: E731
    assert leaders(search([One(0), One(1)], lambda way: GOOD, clock, finalists=1))[0].way == One(0)


def test_a_way_comes_back_from_its_json_and_what_is_none_is_refused():
    for way in (One(3, 2), Two(3)):
        plain = to_json(way, KINDS)
        assert from_json(plain, KINDS) == way and type(from_json(plain, KINDS)) is type(way)
    assert words(One(3), KINDS) == "one number 3 split 1"
    good = {"kind": "one", "number": 3, "split": 1}
    for bad in ({"kind": "three"}, {"number": "3"}, {"number": True}, {"more": 1}, {"split": 0}, {"split": None}):
        with pytest.raises(ValueError, match="a way"):
            from_json({**good, **bad}, KINDS)
    with pytest.raises(ValueError, match="not a way"):
        from_json({"kind": "one", "number": 3}, KINDS)
