"""The interval must hold the truth as often as it says, also where groups differ."""

import math

import numpy as np
import pytest

from blockshock_lib.report.interval import quotient_interval, ratio_interval, t_quantile, welch_interval

# Student's t, 99.5% quantile, for 1, 2, ... 30 degrees of freedom, from printed tables.
T995 = (
    *(63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169),
    *(3.106, 3.055, 3.012, 2.977, 2.947, 2.921, 2.898, 2.878, 2.861, 2.845),
    *(2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750),
)


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


def test_a_quotient_of_ratios_holds_the_truth_and_needs_matching_groups():
    rng, held = np.random.default_rng(11), 0
    for _ in range(200):
        four = [*simulate(rng, 3, 12, shared=0.03), *simulate(rng, 3, 12, shared=0.03, own=0.01)]
        interval = quotient_interval(tuple(four[:2]), tuple(four[2:]))
        held += interval.low <= 1 <= interval.high
    assert held / 200 >= 0.97
    one, two = [np.array([2.0])] * 3, [np.array([4.0])] * 3
    assert quotient_interval((two, one), (one, two)).ratio == pytest.approx(4)
    for sides in (((one, two[:2]), (one, two)), (([], []), ([], []))):
        with pytest.raises(ValueError, match="same groups"):
            quotient_interval(*sides)


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
    reach = 9.9248432 * logs.std(ddof=1) / 3**0.5
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


def test_t_quantile_has_the_values_of_printed_tables():
    assert [round(t_quantile(0.995, df), 3) for df in range(1, 31)] == list(T995)
    known = {(0.975, 4): 2.7764451, (0.95, 7): 1.8945786, (0.9995, 3): 12.9239786, (0.975, 120): 1.9799304}
    for (p, df), value in known.items():
        assert t_quantile(p, df) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("p", [0.6, 0.975, 1 - 1e-5, 1 - 1e-7])
def test_t_quantile_is_the_closed_form_where_there_is_one(p):
    assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-6)
    assert t_quantile(p, 2) == pytest.approx((2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p))), rel=1e-6)


def test_t_quantile_is_odd_and_goes_to_the_normal_one():
    assert t_quantile(0.01, 5) == -t_quantile(0.99, 5)
    assert t_quantile(0.5, 9) == pytest.approx(0, abs=1e-9)
    assert t_quantile(0.995, 4001) == pytest.approx(2.5758293, abs=2e-3)


@pytest.mark.parametrize("p, df", [(0, 3), (1, 3), (0.9, 0), (0.9, 2.5), (float("nan"), 3)])
def test_no_quantile_of_nonsense(p, df):
    with pytest.raises(ValueError, match="quantile"):
        t_quantile(p, df)


def logs_as_groups(values):
    return [np.exp([value]) for value in values]


@pytest.mark.parametrize(
    "one, other, t",
    [
        # s1^2 / n1 = 0.0025 / 3, s2^2 / n2 = 0.04 / 4; df = 0.010833^2 / (0.000833^2 / 2 + 0.01^2 / 3) = 3.48, so 3.
        ([0.15, 0.2, 0.25], np.array([0.0, 0.2, 0.2, 0.4]) * math.sqrt(1.5), 5.840909),
        # 0.04 / 3 and 0.0025 / 4: df = 0.013958^2 / (0.013333^2 / 2 + 0.000625^2 / 3) = 2.19, so 2.
        ([0.0, 0.2, 0.4], np.array([0.15, 0.2, 0.2, 0.25]) * math.sqrt(1.5), 9.924843),
    ],
)
def test_welchs_interval_is_the_textbooks(one, other, t):
    interval = welch_interval(logs_as_groups(one), logs_as_groups(other))
    middle = np.mean(one) - np.mean(other)
    reach = t * math.sqrt(np.var(one, ddof=1) / 3 + np.var(other, ddof=1) / 4)
    assert np.allclose(np.log(interval), [middle, middle - reach, middle + reach], atol=1e-6)


def test_a_higher_level_gives_a_wider_interval():
    rng = np.random.default_rng(4)
    over, under = (logs_as_groups(rng.normal(0, 0.01, 5)) for _ in range(2))
    inner, outer = welch_interval(over, under, 0.99), welch_interval(over, under, 0.9999)
    assert outer.low < inner.low < inner.ratio < inner.high < outer.high and inner.ratio == outer.ratio


def test_two_runs_may_have_different_numbers_of_groups():
    assert welch_interval([np.ones(2)] * 2, [np.full(3, 2.0)] * 5) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("groups", [(1, 5), (5, 1), (1, 1)])
def test_one_group_of_either_run_gives_no_interval(groups):
    interval = welch_interval(*([np.full(4, 2.0 + g) for g in range(count)] for count in groups))
    assert (interval.low, interval.high) == (0.0, np.inf)


def test_an_interval_beyond_all_numbers_is_none():
    interval = welch_interval(logs_as_groups([0.0, 0.5]), logs_as_groups([0.0, 0.7]), 1 - 1e-7)
    assert (interval.low, interval.high) == (0.0, np.inf) and 0 < interval.ratio < np.inf


@pytest.mark.parametrize("sides", [([], [np.ones(1)]), ([np.ones(1)], []), ([np.array([])], [np.ones(1)])])
def test_two_runs_need_a_group_with_samples_each(sides):
    with pytest.raises(ValueError, match="group"):
        welch_interval(*sides)


@pytest.mark.parametrize("spreads", [(0.01, 0.01), (0.002, 0.03)])
@pytest.mark.parametrize("groups", [(2, 2), (3, 5), (5, 5)])
def test_of_100_comparisons_of_an_unchanged_library_at_most_one_raises_an_alarm(groups, spreads):
    rng, rows, runs = np.random.default_rng(11), 40, 150
    alarms = 0
    for _ in range(runs):
        logs = [rng.normal(0, spread, (rows, count)) for count, spread in zip(groups, spreads, strict=True)]
        found = [
            welch_interval(logs_as_groups(b), logs_as_groups(a), 1 - 0.01 / rows) for a, b in zip(*logs, strict=True)
        ]
        alarms += any(not one.low <= 1 <= one.high for one in found)
    assert alarms <= 0.01 * runs + 2, "1% expected of 150, and 2 more by chance at most"


def test_a_slowdown_of_10_percent_is_found_among_140_comparisons_at_five_groups_of_1_percent():
    rng = np.random.default_rng(12)
    found = [
        welch_interval(
            logs_as_groups(rng.normal(np.log(1.1), 0.01, 5)), logs_as_groups(rng.normal(0, 0.01, 5)), 1 - 0.01 / 140
        )
        for _ in range(200)
    ]
    assert np.mean([one.low > 1 for one in found]) > 0.85
    assert all(0.9 < one.ratio / 1.1 < 1.1 for one in found)
