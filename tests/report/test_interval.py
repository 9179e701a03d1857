"""The interval must hold the truth as often as it says, also where groups differ."""

import functools
import math

import numpy as np
import pytest

from blockshock_lib.files import ROOT
from blockshock_lib.report import interval as intervals
from blockshock_lib.report.interval import log_ratios, t_quantile, welch_interval


def simulate(rng, groups, samples, *, shared=0.0, own=0.0, noise=0.01):
    """Two methods of equal true time, log-normal: effects of a group that both share, of each its own, and noise."""
    both = rng.normal(0, shared, groups)
    return [
        [np.exp(both[g] + rng.normal(0, own) + rng.normal(0, noise, samples)) for g in range(groups)] for _ in range(2)
    ]


def ratio_interval(over, under):
    """By which the verdict of a single run is said."""
    (both,) = intervals.intervals([{"run": log_ratios(over, under)}])
    return both.mean


def holds(interval):
    return interval.low <= 1 <= interval.high


def logs(values):
    return [np.exp([value]) for value in values]


@pytest.mark.parametrize("groups", [2, 3, 5])
@pytest.mark.parametrize("effects", [{}, {"shared": 0.03}, {"own": 0.02}, {"shared": 0.03, "own": 0.01, "noise": 0.03}])
def test_the_99_percent_interval_holds_the_truth_in_97_percent_of_simulations(groups, effects):
    rng = np.random.default_rng(7)
    assert np.mean([holds(ratio_interval(*simulate(rng, groups, 12, **effects))) for _ in range(200)]) >= 0.97


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


def references(kind, count=2000, *, cells=20, runs=3, groups=2, machine=0.014, noise=(0.002, 0.008), seed=3):
    """`count` references of `cells` whose true ratio is 1: the logs of their runs, and of a further run of each cell. A
    run's effect is each cell's own, one that all cells share, or half of both; cells differ in their `noise`.
    """
    rng, shape = np.random.default_rng(seed), (count, cells, runs + 1)
    own, shared = rng.normal(0, machine, shape), np.broadcast_to(rng.normal(0, machine, (count, 1, runs + 1)), shape)
    effect = {"own": own, "shared": shared, "half of both": (own + shared) / 2**0.5}[kind]
    logs = effect[..., None] + rng.normal(0, 1, (*shape, groups)) * np.resize(noise, cells)[:, None, None]
    for reference in logs:
        yield [{f"run {r}": cell[r] for r in range(runs)} for cell in reference], reference[:, runs]


KINDS = ("own", "shared", "half of both")


@functools.cache
def simulated(kind, **how):
    """Of 2,000 references, in %: a further run caught, the truth held, the median half-width, 5% called."""
    found = []
    for cells, further in references(kind, **how):
        for (mean, ahead), logs in zip(intervals.intervals(cells), further, strict=True):
            half = mean.high / mean.ratio - 1
            found.append((intervals.holds(ahead, logs), mean.low <= 1 <= mean.high, half, 1.05 * mean.low > 1))
    return 100 * np.array([*np.mean(found, axis=0)[[0, 1]], *np.median(found, axis=0)[[2]], np.mean(found, axis=0)[3]])


@pytest.mark.parametrize("kind", KINDS)
def test_of_2000_references_of_three_runs_a_further_run_is_caught_and_5_percent_is_called(kind):
    caught, held, half, called = simulated(kind)
    assert caught >= 97 and held >= 98.5 and half <= 4 and called >= 90


@pytest.mark.parametrize(
    "how", [{"cells": 1}, {"cells": 6, "noise": (0.001, 0.02)}, {"groups": 1}, {"runs": 2}, {"runs": 1}]
)
@pytest.mark.parametrize("kind", ["own", "shared"])
def test_a_further_run_is_caught_with_few_cells_unequal_noise_one_group_and_one_or_two_runs(kind, how):
    if how == {"runs": 1}:
        how = {"runs": 1, "groups": 3}
    found = [
        intervals.holds(ahead, logs)
        for cells, further in references(kind, 300, **how)
        for (_, ahead), logs in zip(intervals.intervals(cells), further, strict=True)
    ]
    assert np.mean(found) >= 0.97


def test_the_interval_within_one_run_does_not_hold_another_run_and_that_over_runs_is_never_narrower_than_runs_differ():
    inside, halves = [], []
    for cells, further in references("own", 300, runs=1, groups=5):
        inside += [
            intervals.holds(mean, logs) for (mean, _), logs in zip(intervals.intervals(cells), further, strict=True)
        ]
    assert np.mean(inside) < 0.7, "this is what was wrong: 99% over the groups of one run"
    for cells, _ in references("own", 50, machine=0.0):
        halves += [mean.high / mean.ratio - 1 for mean, _ in intervals.intervals(cells)]
    assert min(halves) > 2.5 * intervals.MACHINE / 3**0.5, "three equal runs do not prove that a fourth is equal"


@pytest.mark.parametrize("kind", KINDS)
def test_effects_of_twice_the_stated_size_are_learnt_from_the_runs(kind):
    simulation = references(kind, 300, machine=0.028)
    pairs = [pair for cells, further in simulation for pair in zip(intervals.intervals(cells), further, strict=True)]
    assert np.mean([intervals.holds(both.further, logs) for both, logs in pairs]) >= 0.95


def test_what_all_cells_of_a_run_share_counts_as_one_cell():
    cells = [{"a": np.array([0.0]), "b": np.array([0.05]), "c": np.array([-0.05])} for _ in range(20)]
    assert intervals.between_runs(cells).free == pytest.approx(2 + intervals.PRIOR)
    assert intervals.between_runs(cells[:1]) == pytest.approx(intervals.between_runs(cells))
    # Variance 0.0025 of two degrees, 0.014^2 of four.
    variance = (2 * 0.0025 + 4 * 0.014**2) / 6
    assert intervals.between_runs(cells).variance == pytest.approx(variance)
    ((mean, further), *_) = intervals.intervals(cells)
    assert np.log(mean.high) == pytest.approx(t_quantile(0.995, 6) * (variance / 3) ** 0.5)
    assert np.log(further.high) == pytest.approx(t_quantile(0.995, 6) * (variance * 4 / 3) ** 0.5)


def test_cells_of_phases_that_other_runs_measured_are_fitted_by_the_runs_of_their_own():
    forward, step = (next(references("own", 1, seed=seed))[0] for seed in (1, 2))
    step = [{f"other {run}": logs for run, logs in cell.items()} for cell in step[:3]]
    assert intervals.between_runs(forward + step) == intervals.between_runs(forward)
    single = [{"one": logs} for cell in forward for logs in [cell["run 0"]]]
    assert [both.mean for both in intervals.intervals(single + [{"two": one["one"]} for one in single])] == [
        both.mean for both in intervals.intervals(single)
    ] * 2, "two phases of a run each are no reference of two runs"


def test_a_drift_of_3_percent_between_two_runs_is_seen_and_none_where_there_is_none():
    seen = false = 0
    for cells, _ in references("own", 200):
        false += bool(intervals.drift(cells))
        seen += "run 2" in intervals.drift([cell | {"run 2": cell["run 2"] + 0.03} for cell in cells])
    assert seen >= 198 and false <= 4
    shift = intervals.drift([{"a": np.array([x]), "b": np.array([x + 0.03])} for x in (0.1, 0.2, 0.3001)])
    assert shift == pytest.approx({"b": np.exp(0.03)})
    assert intervals.drift([{"a": np.array([x]), "b": np.array([x + 0.005])} for x in (0.1, 0.2, 0.3001)]) == {}


def test_the_numbers_in_the_docs_are_those_of_the_simulation():
    rows = [f"| {kind} | " + " | ".join(f"{value:.1f}%" for value in simulated(kind)) + " |" for kind in KINDS]
    text = (ROOT / "docs" / "measuring.md").read_text(encoding="utf-8")
    assert all(row in text for row in rows), "\n".join(rows)
