"""The interval must hold the truth as often as it says, also where groups differ."""

import math

import numpy as np
import pytest

from blockshock_lib.report.interval import quotient_interval, ratio_interval, t_quantile, welch_interval


def simulate(rng, groups, samples, *, shared=0.0, own=0.0, noise=0.01):
    """Two methods of equal true time, log-normal: effects of a group that both share, of each its own, and noise."""
    both = rng.normal(0, shared, groups)
    return [
        [np.exp(both[g] + rng.normal(0, own) + rng.normal(0, noise, samples)) for g in range(groups)] for _ in range(2)
    ]


def holds(interval):
    return interval.low <= 1 <= interval.high


def logs(values):
    return [np.exp([value]) for value in values]


@pytest.mark.parametrize("groups", [2, 3, 5])
@pytest.mark.parametrize("effects", [{}, {"shared": 0.03}, {"own": 0.02}, {"shared": 0.03, "own": 0.01, "noise": 0.03}])
def test_the_99_percent_interval_holds_the_truth_in_97_percent_of_simulations(groups, effects):
    rng = np.random.default_rng(7)
    assert np.mean([holds(ratio_interval(*simulate(rng, groups, 12, **effects))) for _ in range(200)]) >= 0.97


def test_a_quotient_of_ratios_holds_the_truth_and_needs_matching_groups():
    rng, held = np.random.default_rng(11), []
    for _ in range(200):
        four = [*simulate(rng, 3, 12, shared=0.03), *simulate(rng, 3, 12, shared=0.03, own=0.01)]
        held.append(holds(quotient_interval(tuple(four[:2]), tuple(four[2:]))))
    assert np.mean(held) >= 0.97
    ones, twos = [np.array([2.0])] * 3, [np.array([4.0])] * 3
    assert quotient_interval((twos, ones), (ones, twos)).ratio == pytest.approx(4)
    for sides in (((ones, twos[:2]), (ones, twos)), (([], []), ([], []))):
        with pytest.raises(ValueError, match="same groups"):
            quotient_interval(*sides)


def test_an_effect_that_both_methods_share_in_a_group_cancels():
    over, under = simulate(np.random.default_rng(5), 3, 12, noise=0.001)
    over, under = ([values * k for values, k in zip(side, [1.0, 1.5, 2.0], strict=True)] for side in (over, under))
    interval = ratio_interval(over, under)
    assert interval.high / interval.low < 1.03


def test_the_ratio_is_that_of_the_groups_medians():
    over, under = [np.array([2.0, 4, 6]), np.array([8.0, 8, 9])], [np.array([1.0, 2, 3]), np.array([1.0, 1, 3])]
    interval = ratio_interval(over, under)
    assert np.isclose(interval.ratio, 4.0)  # the geometric mean of 2 and 8
    assert interval.low < 4.0 < interval.high
    unequal = [np.full(3, 2.0), np.full(9, 2.0)], [np.full(5, 1.0), np.full(2, 1.0)]
    assert np.allclose(ratio_interval(*unequal), 2.0), "each group counts once, however many samples it has"


def test_the_interval_is_students_on_the_groups_log_ratios_and_swaps_with_its_sides():
    values = np.array([0.1, 0.12, 0.17])
    interval = ratio_interval(logs(values), [np.ones(1)] * 3)
    reach = 9.9248432 * values.std(ddof=1) / 3**0.5
    assert np.allclose(np.log(interval), [values.mean(), values.mean() - reach, values.mean() + reach])
    back = ratio_interval([np.ones(1)] * 3, logs(values))
    assert np.allclose([back.ratio, back.low, back.high], [1 / interval.ratio, 1 / interval.high, 1 / interval.low])


@pytest.mark.parametrize("sides", [([], []), ([np.ones(2)], []), ([np.ones(2)], [np.array([])])])
def test_missing_samples_are_refused(sides):
    for interval in (ratio_interval, welch_interval):
        with pytest.raises(ValueError, match="group"):
            interval(*sides)


def test_t_quantile_has_the_values_of_printed_tables():
    known = {(0.975, 4): 2.7764451, (0.95, 7): 1.8945786, (0.9995, 3): 12.9239786, (0.975, 120): 1.9799304}
    assert [t_quantile(*one) for one in known] == pytest.approx(list(known.values()), abs=1e-6)


@pytest.mark.parametrize("p", [0.6, 0.975, 1 - 1e-5, 1 - 1e-7])
def test_t_quantile_is_the_closed_form_where_there_is_one(p):
    assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-6)
    assert t_quantile(p, 2) == pytest.approx((2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p))), rel=1e-6)


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
    interval = welch_interval(logs(one), logs(other))
    middle = np.mean(one) - np.mean(other)
    reach = t * math.sqrt(np.var(one, ddof=1) / 3 + np.var(other, ddof=1) / 4)
    assert np.allclose(np.log(interval), [middle, middle - reach, middle + reach], atol=1e-6)


@pytest.mark.parametrize("groups", [(1, 5), (5, 1), (1, 1)])
def test_one_group_gives_no_interval_nor_does_one_beyond_all_numbers(groups):
    intervals = [welch_interval(*([np.full(4, 2.0 + g) for g in range(count)] for count in groups))]
    intervals.append(ratio_interval([np.array([2.0, 2.0])], [np.array([1.0, 1.0])]))
    intervals.append(welch_interval(logs([0.0, 0.5]), logs([0.0, 0.7]), 1 - 1e-7))
    for interval in intervals:
        assert (interval.low, interval.high) == (0.0, np.inf) and 0 < interval.ratio < np.inf


@pytest.mark.parametrize("spreads", [(0.01, 0.01), (0.002, 0.03)])
@pytest.mark.parametrize("groups", [(2, 2), (3, 5), (5, 5)])
def test_of_100_comparisons_of_an_unchanged_library_at_most_one_raises_an_alarm(groups, spreads):
    rng, rows, runs, alarms = np.random.default_rng(11), 20, 150, 0
    for _ in range(runs):
        sides = [rng.normal(0, spread, (rows, count)) for count, spread in zip(groups, spreads, strict=True)]
        pairs = zip(*sides, strict=True)
        alarms += not all(holds(welch_interval(logs(b), logs(a), 1 - 0.01 / rows)) for a, b in pairs)
    assert alarms <= 0.01 * runs + 2, "1% expected of 150, and 2 more by chance at most"


def test_a_slowdown_of_10_percent_is_found_among_140_comparisons_at_five_groups_of_1_percent():
    rng = np.random.default_rng(12)
    pairs = [(rng.normal(np.log(1.1), 0.01, 5), rng.normal(0, 0.01, 5)) for _ in range(200)]
    intervals = [welch_interval(logs(slow), logs(plain), 1 - 0.01 / 140) for slow, plain in pairs]
    assert np.mean([interval.low > 1 for interval in intervals]) > 0.85
    assert all(0.9 < interval.ratio / 1.1 < 1.1 for interval in intervals)
