"""How a method, mask or workload is named, coloured, marked and ordered in every table and figure.

Colours are Okabe and Ito's palette (Color Universal Design, 2008), told apart with any common colour blindness;
each method also has a marker of its own, so that a figure can be read in grey.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from blockshock_lib.methods import METHODS


@dataclass(frozen=True)
class Style:
    """Look of one method: `label` in tables and legends, `short` beside a line."""

    label: str
    short: str
    colour: str
    marker: str


_LOOKS = {
    "dense": ("#4D4D4D", "s"),
    "row_parallel": ("#0072B2", "o"),
    "column_parallel": ("#56B4E9", "D"),
    "masked_dense": ("#E69F00", "^"),
    "permuted_dense": ("#009E73", "v"),
    "block_shock": ("#D55E00", "P"),
    "block_shock_recompress": ("#882255", "h"),
    "block_shock_torch": ("#CC79A7", "X"),
}
_NEWCOMERS = (("#7A5195", "8"), ("#8C6D31", "*"), ("#1B7837", "p"), ("#B2182B", "<"))

MASKS = (
    "uniform_1100",
    "uniform_1010",
    "uniform_1001",
    "random",
    "checkerboard",
    "transposable_random",
    "magnitude",
)
# The tensors that are checked, by the detail of their rows.
TENSORS = {"": "y", "dx": "dX", "dw": "dW", "db": "db", "weight": "W after steps"}
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}
WORKLOADS = ("gaussian", "uniform", "activation", "mlp_up", "mlp_down")

# Rows that are no method's: measured ceilings of the machine, and what NVML saw during a case.
CEILING, MACHINE = "ceiling", "machine"


def style(method: str) -> Style:
    """The look of `method`; one without a colour and marker of its own here gets them by its name."""
    look = _LOOKS.get(method) or _NEWCOMERS[sum(method.encode()) % len(_NEWCOMERS)]
    known = METHODS.get(method)
    words = method.replace("_", " ")
    return Style(known.label if known else words, known.short if known else words, *look)


def label(method: str) -> str:
    return style(method).label


def optimizer(name: str) -> str:
    return OPTIMIZERS.get(name, name)


def ordered(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """The distinct `names`: those in `known` in its order, then the others by name."""
    found = set(names)
    first = [name for name in known if name in found]
    return first + sorted(found.difference(first))


def methods_in(names: Iterable[str]) -> list[str]:
    """Methods among `names` in table order, without the ceiling and machine rows."""
    return [name for name in ordered(names, METHODS) if name not in (CEILING, MACHINE)]
