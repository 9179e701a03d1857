"""The interval must hold the truth as often as it says, also where groups differ."""

import numpy as np
import pytest

from blockshock_lib.report.interval import ratio_interval


def simulate(rng, groups, samples, *, shared=0.0, own=0.0, noise=0.01):
    """Two methods of equal true time, log-normal: effects of a group that both share, of each its own, and noise."""
    together = rng.normal(0, shared, groups)
    return [
        [np.exp(together[g] + rng.normal(0, own) + rng.normal(0, noise, samples)) for g in range(groups)]
        for _ in range(2)
    ]


def coverage(groups, trials=200, **effects):
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(trials):
        interval = ratio_interval(*simulate(rng, groups, 12, **effects))
        held += interval.low <= 1 <= interval.high
    return held / trials


@pytest.mark.parametrize("groups", [2, 3, 5])
@pytest.mark.parametrize("effects", [{}, {"shared": 0.03}, {"own": 0.02}, {"shared": 0.03, "own": 0.01, "noise": 0.03}])
def test_the_99_percent_interval_holds_the_truth_in_97_percent_of_simulations(groups, effects):
    assert coverage(groups, **effects) >= 0.97


def test_the_interval_is_narrow_enough_to_decide_at_three_groups():
    rng = np.random.default_rng(3)
    wide = [np.log(i.high / i.low) / 2 for i in (ratio_interval(*simulate(rng, 3, 12)) for _ in range(50))]
    assert np.median(wide) < 0.05, "1% noise must not blur a difference of 5%"


def test_an_effect_that_both_methods_share_in_a_group_cancels():
    rng = np.random.default_rng(5)
    over, under = simulate(rng, 3, 12, noise=0.001)
    lift = [1.0, 1.5, 2.0]
    over, under = ([values * k for values, k in zip(side, lift, strict=True)] for side in (over, under))
    interval = ratio_interval(over, under)
    assert interval.high / interval.low < 1.03


def test_the_same_samples_give_the_same_interval():
    sides = simulate(np.random.default_rng(1), 3, 12)
    assert ratio_interval(*sides) == ratio_interval(*sides)


def test_the_ratio_is_that_of_the_groups_medians():
    over, under = [np.array([2.0, 4, 6]), np.array([8.0, 8, 9])], [np.array([1.0, 2, 3]), np.array([1.0, 1, 3])]
    interval = ratio_interval(over, under)
    assert np.isclose(interval.ratio, 4.0)  # the geometric mean of 2 and 8
    assert interval.low < 4.0 < interval.high


def test_the_interval_is_students_on_the_groups_log_ratios():
    logs = np.array([0.1, 0.12, 0.17])
    interval = ratio_interval([np.exp([x]) for x in logs], [np.ones(1)] * 3)
    reach = 9.925 * logs.std(ddof=1) / 3**0.5
    assert np.allclose(np.log(interval), [logs.mean(), logs.mean() - reach, logs.mean() + reach])


def test_swapping_the_sides_inverts_the_interval():
    over, under = simulate(np.random.default_rng(2), 3, 8, own=0.02)
    there, back = ratio_interval(over, under), ratio_interval(under, over)
    assert np.allclose([back.ratio, back.low, back.high], [1 / there.ratio, 1 / there.high, 1 / there.low])


def test_one_group_gives_no_interval():
    interval = ratio_interval([np.array([2.0, 2.0])], [np.array([1.0, 1.0])])
    assert (interval.low, interval.high) == (0.0, np.inf)


def test_groups_of_unequal_length_are_drawn_from_their_own_samples_only():
    over, under = [np.full(3, 2.0), np.full(9, 2.0)], [np.full(5, 1.0), np.full(2, 1.0)]
    assert np.allclose(ratio_interval(over, under), 2.0)


@pytest.mark.parametrize("sides", [([], []), ([np.ones(2)], []), ([np.ones(2)], [np.array([])])])
def test_missing_samples_are_refused(sides):
    with pytest.raises(ValueError, match="group"):
        ratio_interval(*sides)
