"""Pytest plugin: a committed notebook runs without GPUs, of few samples, and keeps its runs to itself."""

import os
from itertools import zip_longest
from unittest import mock

import pytest

from tools import update_notebooks as update

# Every case of a sweep is measured, of few samples: no time is compared. Two say what one could not, a spread.
FEW = {"timing.samples": 2, "timing.min_sample_ms": 0.1, "timing.lead_in_s": 0}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """The kernel that starts with a notebook's first cell inherits this, and nothing else does."""
    if item.path.suffix != ".ipynb":
        return (yield)
    # Of its own: notebooks run side by side, and one of them reads the runs that it finds.
    own = {"CUDA_VISIBLE_DEVICES": "", "BLOCKSHOCK_OUTPUTS": f".cache/nbval/{item.path.stem}"}
    with mock.patch.dict(os.environ, own):
        return (yield)


def pytest_itemcollected(item):
    """A failure says what differs in words, in place of both tables as HTML."""
    if item.path.suffix == ".ipynb":
        if "parameters" in item.cell.metadata.get("tags", ()):
            item.cell.source = item.cell.source.replace("settings = {}\n", f"settings = {FEW}\n")
        compare = item.compare_outputs

        def told(test, reference, **how):
            same = compare(test, reference, **how)
            item.comparison_traceback = [] if same else [*differs(reference, test), ACCEPT]
            return same

        item.compare_outputs = told


ACCEPT = "meant? make nbval-update"


def differs(committed, now):
    """A line a cell of a table that differs: its row, its column, what is committed and what is now."""
    lines = []
    for old, new in zip_longest(committed, now, fillvalue={}):
        if update.compared(old) == update.compared(new):
            continue
        before, after = update.rows(old), update.rows(new)
        if [len(row) for row in before] != [len(row) for row in after]:
            lines += ["- what is committed, + what is now", *update.difference(before, after)]
            continue
        for number, (row, other) in enumerate(zip(before, after, strict=True)):
            for place, (one, two) in enumerate(zip(row, other, strict=True)):
                names = [head[place] for head in before[: min(2, number)] if head[place]]
                same = ", ".join(cell for cell, twin in zip(row[:3], other, strict=False) if cell and cell == twin)
                where = f"row {number} ({same}), column {names[0] if names else place}"
                lines += [f"{where}: committed {one!r}, now {two!r}"] if one != two else []
    return lines or ["the outputs differ in what is no table: kinds, order or number of outputs"]
