import itertools
import math

import pytest

from blockshock_lib.sparse24.small import Config
from blockshock_lib.sparse24.tuning import Error, Found, Setting, Trial, fastest_right, search

GOOD, BAD = Error(1.0, 1.0), Error(40.0, 9.0)


def run(times, errors=(), **options):
    """Search over settings with these times, in ms; `errors` overrides the good error of some."""
    errors = dict(errors)

    def check(setting):
        error = errors.get(setting.alg_id, GOOD)
        error = next(error) if isinstance(error, itertools.cycle | itertools.chain) else error
        if isinstance(error, Exception):
            raise error
        return error

    def clock(setting, samples):
        return times[setting.alg_id] / (2 if setting.split_k == 4 else 1)

    trials = search([Setting(i) for i in times], check, clock, **options)
    return fastest_right(trials), trials


def test_the_fastest_is_chosen_when_all_are_right():
    best, trials = run({0: 3.0, 1: 1.0, 2: 2.0})
    assert best == Trial(Setting(1), GOOD, 1.0)
    assert [trial.ms for trial in trials] == [3.0, 1.0, 2.0]


@pytest.mark.parametrize("error", [BAD, Error(2.1, 1.0), Error(1.0, 1.3), Error(math.nan, math.nan)])
def test_a_wrong_candidate_is_never_chosen_however_fast(error):
    best, trials = run({0: 3.0, 1: 0.1, 2: 2.0}, {1: error})
    assert best.way == Setting(2)
    assert [trial.wrong for trial in trials] == [False, True, False]
    assert math.isnan(trials[1].ms)


def test_a_candidate_that_is_wrong_only_sometimes_is_caught_before_it_is_chosen():
    once_right = itertools.chain([GOOD, GOOD], itertools.cycle([BAD]))
    best, trials = run({0: 3.0, 1: 0.1, 2: 2.0}, {1: once_right}, finalists=1)
    assert best.way == Setting(2)
    assert trials[1].wrong


def test_a_refused_candidate_is_left_out_with_its_reason():
    best, trials = run({0: 3.0, 1: 0.1}, {1: RuntimeError("CUSPARSE_STATUS_NOT_SUPPORTED when calling\nmore")})
    assert best.way == Setting(0)
    assert trials[1].refused == "CUSPARSE_STATUS_NOT_SUPPORTED when calling" and not trials[1].wrong


def test_nothing_is_chosen_when_nothing_is_right():
    best, trials = run({0: 1.0, 1: 2.0}, {0: BAD, 1: RuntimeError("no")})
    assert best is None and len(trials) == 2


def test_splits_are_tried_on_the_leaders_only():
    best, trials = run({0: 3.0, 1: 1.0, 2: 2.0}, splits=[(2, 1), (4, 2)], finalists=1)
    assert best.way == Setting(1, 4, 2) and best.ms == 0.5
    assert len(trials) == 5 and {trial.way.alg_id for trial in trials[3:]} == {1}


def test_a_lucky_first_sample_does_not_win():
    def clock(setting, samples):
        return {0: 1.0, 1: 0.5 if samples == 1 else 2.0, 2: 1.5}[setting.alg_id]

    trials = search([Setting(i) for i in range(3)], lambda setting: GOOD, clock, finalists=1)
    assert fastest_right(trials).way == Setting(0)


def test_no_candidate_is_started_after_the_time_is_up_but_the_first_always_is():
    ticks = itertools.count()
    best, trials = run(dict.fromkeys(range(9), 1.0), seconds=3, now=lambda: next(ticks))
    assert len(trials) == 4
    best, trials = run({0: 1.0, 1: 0.5}, seconds=-1)
    assert best.way == Setting(0) and len(trials) == 1


def test_a_setting_is_tried_once_however_often_it_is_named():
    calls = []
    search([Setting(0), Setting(0)], lambda s: calls.append(s) or BAD, lambda s, n: 1.0)
    assert calls == [Setting(0)]


def test_known_trials_are_not_made_again_but_can_win_and_are_confirmed():
    known = [Trial(Setting(0), GOOD, 3.0), Trial(Setting(1), crashed="SIGILL"), Trial(Setting(2), GOOD, 0.5)]
    tried = []
    best, trials = run({0: 3.0, 1: 0.1, 2: 0.6, 3: 2.0}, known=known, started=tried.append, finalists=1)
    assert tried == [Setting(3), Setting(2)]  # the new one, then the leader once more
    assert best == Trial(Setting(2), GOOD, 0.6)
    assert [trial.crashed for trial in trials] == ["", "SIGILL", "", ""] and not trials[1].right


def test_after_the_time_is_up_known_trials_are_still_confirmed():
    best, trials = run({0: 3.0, 1: 0.1}, known=[Trial(Setting(0), GOOD, 2.0)], seconds=-1)
    assert best == Trial(Setting(0), GOOD, 3.0) and len(trials) == 1


def test_each_setting_is_announced_before_it_is_tried_and_its_trial_told_after():
    told = []

    def check(setting):
        told.append("tried")
        if setting.alg_id == 0:
            raise RuntimeError("no")
        return GOOD

    search([Setting(0), Setting(1)], check, lambda s, n: 1.0, started=told.append, ended=told.append)
    right = Trial(Setting(1), GOOD, 1.0)
    assert told[:6] == [Setting(0), "tried", Trial(Setting(0), refused="no"), Setting(1), "tried", right]
    assert told[6:] == [Setting(1), "tried", "tried", right]  # the finalist


def test_fastest_right_passes_over_a_wrong_trial_that_was_timed():
    right = Trial(Setting(1), GOOD, 2.0)
    assert fastest_right([Trial(Setting(2), BAD, 0.1), right, Trial(Setting(3), None, 0.1)]) == right


def test_fastest_right_ignores_what_was_not_timed():
    assert fastest_right(
        [Trial(Setting(1), GOOD), Trial(Setting(2), GOOD, 2.0), Trial(Setting(3), GOOD, 0.0)]
    ) == Trial(Setting(2), GOOD, 2.0)
    assert fastest_right([]) is None


FEW, MANY = Config(1, 1, 1, 3, 1), Config(1, 2, 1, 3, 1)


def both(times, wrong=(), **options):
    """Search among ways of both kinds with these times in ms."""
    return search(list(times), lambda way: BAD if way in wrong else GOOD, lambda way, _: times[way], **options)


def test_one_search_finds_the_best_of_each_kind_and_the_better_of_both():
    found = Found(tuple(both({FEW: 2.0, MANY: 1.0, Setting(0): 4.0, Setting(1): 3.0})))
    assert [found.best(*kinds).way for kinds in ((), (Config,), (Setting,))] == [MANY, MANY, Setting(1)]


def test_a_wrong_way_of_either_kind_is_never_chosen_however_fast():
    times = {FEW: 2.0, MANY: 0.1, Setting(0): 4.0, Setting(1): 0.2}
    found = Found(tuple(both(times, wrong={MANY, Setting(1)})))
    assert [found.best(*kinds).way for kinds in ((), (Config,), (Setting,))] == [FEW, FEW, Setting(0)]
    assert found.wrong == 2


def test_a_failed_search_has_no_best():
    assert Found((Trial(Setting(0), GOOD, 1.0),), failed="given up").best() is None


def test_leaders_of_each_kind_are_confirmed_though_all_of_the_other_are_faster():
    tried = []
    both({FEW: 1.0, MANY: 1.1, Setting(0): 5.0, Setting(1): 4.0}, started=tried.append, finalists=2)
    assert [tried.count(way) for way in (FEW, MANY, Setting(0), Setting(1))] == [2, 2, 2, 2]


def test_each_kind_has_its_own_time():
    ticks = itertools.count()
    times = dict.fromkeys([Config(1, 1, 1, depth, 1) for depth in range(3, 12)], 1.0)
    times |= dict.fromkeys([Setting(i) for i in range(9)], 2.0)
    trials = both(times, seconds=3, now=lambda: next(ticks))
    assert [sum(isinstance(trial.way, kind) for trial in trials) for kind in (Config, Setting)] == [4, 3]


def test_only_settings_are_split():
    trials = search([FEW, Setting(0)], lambda way: GOOD, lambda way, _: 1.0, splits=[(2, 1)])
    assert [trial.way for trial in trials] == [FEW, Setting(0), Setting(0, 2, 1)]
