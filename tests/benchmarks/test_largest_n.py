"""The trial of the largest N: its search, its words, and one small trial on the CPU."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks import largest_n
from benchmarks.largest_n import NAMES, Attempt, largest, needed, search, square
from blockshock_lib.engine import memory
from tests.cases import case

B, STEP = 32, 4096


def of(name, **changes):
    return case(phase="phase3", methods=(name,), optimizer="sgd", emulated=False, batch=B, **changes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_the_first_n_fits_and_the_next_does_not_or_the_library_multiplies_it_wrongly(name, device):
    one, bounds = replace(of(name), batch=16384, device=device), set()
    for room in range(8 * memory.GIB, 140 * memory.GIB, 6 * memory.GIB):
        n = largest(one, room, STEP)
        assert n > STEP and needed(one, n) <= room and not square(one, n).too_large(name)
        bounds.add("memory" if needed(one, n + STEP) > room else square(one, n + STEP).too_large(name))
    assert "" not in bounds and (len(bounds) > 1) == (device == "cuda" and name != "row_parallel")


@pytest.mark.parametrize("share", [1, 2, 0.9])
def test_n_goes_one_step_up_where_it_trains_and_down_by_4_percent_where_it_fails(monkeypatch, share):
    formula, tried = largest(of("block_shock"), memory.GIB, 128), []

    def attempt(one, n, room, seconds):
        tried.append(n)
        return Attempt("block_shock", one.optimizer, n, 1.0, "trained" if n <= share * formula else "out of memory")

    monkeypatch.setattr(largest_n, "attempt", attempt)
    row, ceiling = search(of("block_shock"), memory.GIB, 128, 1, 1 << 30)
    assert row["foretold_n"] == formula and row["above"] == ("not tried" if share == 2 else "out of memory")
    assert row["largest"]["n"] == (formula + 128 if share == 2 else tried[-1 if share < 1 else 0])
    if share < 1:
        assert all(n % 128 == 0 and 0.02 < 1 - n / last < 0.06 for last, n in pairwise(tried))
        assert tried[-1] <= share * formula < tried[-2] and ceiling == 1 << 30
    else:
        assert tried == [formula, formula + 128]


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
