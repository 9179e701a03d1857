"""The trial of the largest N begins where memory or the library's kernels end."""

from dataclasses import replace

import pytest

from benchmarks.largest_n import NAMES, largest, needed, square
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
