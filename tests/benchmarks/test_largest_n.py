"""The trial of the largest N: its search, its words, and one small trial on the CPU."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from benchmarks import largest_n
from benchmarks.largest_n import NAMES, Attempt, largest, search
from blockshock_lib.engine import memory
from blockshock_lib.studies.linear import training
from blockshock_lib.studies.linear.costs import CaseCosts
from tests.cases import case

B = 32


def of(name, **changes):
    return case(phase="phase3", methods=(name,), optimizer="sgd", emulated=False, batch=B, **changes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_the_first_n_is_the_librarys_own(name, device):
    problem = CaseCosts(replace(of(name), batch=16384, device=device))
    problem.x, problem.unsupported = torch.empty(0, dtype=torch.bfloat16), problem.too_large
    bounds = set()
    for room in range(8 * memory.GIB, 140 * memory.GIB, 6 * memory.GIB):
        n, bound = training.largest_n(problem, name, room)
        assert largest(problem.case, room, training.STEP) == n > training.STEP
        bounds.add(bound)
    assert (training.LIBRARY in bounds) == (device == "cuda" and name != "row_parallel")


def searched(monkeypatch, most, fault=""):
    """(row, ceiling, the N tried) of a search that trains up to the N `most` and ends by a fault beyond."""
    seen = []

    def attempt(one, n, room, seconds):
        seen.append(n)
        return Attempt("block_shock", one.optimizer, n, 1.0, outcome="trained" if n <= most else fault)

    monkeypatch.setattr(largest_n, "attempt", attempt)
    return *search(of("block_shock"), memory.GIB, 128, 1, 1 << 30), seen


def test_where_the_formulas_n_trains_one_more_step_is_tried(monkeypatch):
    formula = largest(of("block_shock"), memory.GIB, 128)
    row, _, seen = searched(monkeypatch, formula, "out of memory in a step")
    assert seen == [formula, formula + 128] and row["largest"]["n"] == row["foretold_n"] == formula
    assert row["above"] == "out of memory in a step"
    row, _, seen = searched(monkeypatch, 1 << 30)
    assert row["largest"]["n"] == formula + 128 and row["above"] == "not tried"


def test_where_it_fails_n_goes_down_by_4_percent_until_it_trains(monkeypatch):
    formula = largest(of("block_shock"), memory.GIB, 128)
    row, ceiling, seen = searched(monkeypatch, 0.9 * formula - 1, "crashed")
    assert row["largest"]["n"] == seen[-1] < 0.9 * formula <= seen[-2] and row["above"] == "crashed"
    assert all(n % 128 == 0 and 0.02 < 1 - n / last < 0.06 for last, n in pairwise(seen))
    assert ceiling == 1 << 30


@pytest.mark.long
def test_a_small_trial_trains_the_formulas_n_in_real_processes(tmp_path, capsys):
    sizes = ["--room", "0.002", "--step", "128", "--b", "16"]
    options = ["--device", "cpu", *sizes, "--methods", "block_shock", "--optimizers", "sgd", "--json"]
    assert largest_n.main([*options, str(tmp_path / "found.json")]) == 0
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["largest"]["n"] == row["foretold_n"] > 128 and row["above"].startswith("needs more than the room")
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"block_shock sgd N={row['foretold_n']}: trained (GiB: building -, step -")
    assert said[2].split()[:2] == ["method", "optimizer"] and said[3].split()[:2] == ["block_shock", "sgd"]
