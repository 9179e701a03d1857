"""How a study's cases and methods are named, ordered and told apart in every table and figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# Methods of rows that are no method's: measured ceilings of the machine, and what NVML saw during a case.
CEILING, MACHINE = "ceiling", "machine"
TWIN = "twin"  # of rows of the baseline built and timed a second time: no method, in no table of methods
GENERAL = ("device", "emulated", "world_size", "dtype")  # columns of every study's cases
# Looks of methods that bring none: a method takes the one that its name chooses, or the next that is free.
_COLOURS = "#7A5195", "#8C6D31", "#1B7837", "#B2182B", "#3F6FBF"
_MARKERS = "*", (4, 1), "d", ">", "p"  # (4, 1): a star of four points
_LOOKS = [(colour, _MARKERS[(i + lap) % 5]) for lap in range(5) for i, colour in enumerate(_COLOURS)]


@dataclass(frozen=True)
class Look:
    label: str  # in tables and legends
    short: str  # beside a line
    colour: str = ""  # "": one is given
    marker: str | tuple = ""


@dataclass(frozen=True)
class Work:
    words: str  # what a metric `<stem>_kernel` or `<stem>_call` times: "a training step"
    note: str = ""  # in a list: ", step"


@dataclass(frozen=True)
class Axes:
    """What tables and figures are told of a study. Override a method where its sentence does not fit."""

    columns: tuple[str, ...]  # the case's own columns of a records frame
    x: str  # column that names the size of a case; a number unless `size` and `x_text` are overridden
    y: str  # column of the second size: rows of a heat map, one panel each in a figure of lines
    methods: Mapping[str, Look]  # in table order; those that are not named come last
    over: str  # the baseline
    under: str  # the method that is compared with it
    times: Mapping[str, Work]  # by stem, each work within the next one; the first is the narrowest
    whole: str = ""  # the method that does all work on one device
    settings: tuple[str, ...] = ()  # own columns whose values never share a figure, as a sentence names them
    panels: tuple[str, ...] = ()  # those of `settings` that lie in one figure all the same, a panel each
    checked: tuple[str, ...] = ()  # columns that name a row of the table of checks; () for `y`
    looser: bool = False  # its checks allow a multiple of the gate, each its own
    # Metric -> what it counts, in a list; only memory that is counted and not sampled.
    bytes: Mapping[str, str] = field(default_factory=lambda: {"peak_bytes": "peak memory"})
    headers: Mapping[str, str] = field(default_factory=dict)  # of columns in tables and words; "size": of `size`
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # of a column's values, in their order
    _given: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)  # method -> of _LOOKS

    def size(self, frame: pd.DataFrame) -> pd.Series:
        """The abscissa; it also orders cases, smallest first."""
        return frame[self.x].astype(float)

    def size_name(self, frame: pd.DataFrame) -> str:
        """What `size` is, with its unit, for an axis."""
        return self.header(self.x)

    def x_text(self, frame: pd.DataFrame) -> pd.Series:
        return frame[self.x].astype(str)

    def x_name(self, frame: pd.DataFrame) -> str:
        return self.header(self.x)

    def y_name(self) -> str:
        return self.header(self.y)

    work_name = "size"

    def work(self, frame: pd.DataFrame) -> pd.Series:
        """The case with the most of it is the largest one."""
        return self.size(frame)

    def case(self, row: Mapping) -> str:
        """A case in a sentence: "n=4096, order=random"."""
        return f"{self.header(self.x)}={row[self.x]}, {self.header(self.y)}={row[self.y]}"

    def setting(self, row: Mapping) -> str:
        """The study's own settings in words: "random order, float keys"."""
        return ", ".join(filter(None, (self.word(name, row[name]) for name in self.settings if name in row)))

    @property
    def case_columns(self) -> list[str]:
        return list(dict.fromkeys(["case", *self.columns, *GENERAL]))

    @property
    def all_settings(self) -> list[str]:
        return [*GENERAL, *self.settings]

    @property
    def rows(self) -> tuple[str, ...]:
        return self.checked or (self.y,)

    @property
    def stem(self) -> str:
        return next(iter(self.times))

    def header(self, column: str) -> str:
        return self.headers.get(column, column)

    def word(self, column: str, value: object) -> str:
        return self.words.get(column, {}).get(value, str(value))

    def sort(self, column: str, values: Iterable) -> list:
        """The distinct values: those in `words` in its order, then the others ascending."""
        return _in_order(values, self.words.get(column, {}))

    def look(self, method: str) -> Look:
        words = method.replace("_", " ")
        look = self.methods.get(method) or Look(words, words)
        if look.colour and look.marker:
            return look
        if method not in self._given:
            first, taken = sum(method.encode()), set(self._given.values())
            places = [5 * (step // 5) + (first + step) % 5 for step in range(len(_LOOKS))]
            self._given[method] = next((place for place in places if place not in taken), places[0])
        colour, marker = _LOOKS[self._given[method]]
        return Look(look.label, look.short, look.colour or colour, look.marker or marker)

    def line(self, method: str) -> dict:
        """How matplotlib draws it: a thin line with markers."""
        look, edge = self.look(method), {"markeredgecolor": "white", "markeredgewidth": 0.5}
        return dict(color=look.colour, marker=look.marker, markersize=5.5, linewidth=1.2, **edge)

    def label(self, method: str) -> str:
        return self.look(method).label

    def short(self, method: str) -> str:
        return self.look(method).short

    def ordered(self, methods: Iterable[str]) -> list[str]:
        """The distinct methods in table order, without the ceiling and machine rows."""
        found = _in_order(set(methods) - {CEILING, MACHINE, TWIN}, self.methods)
        for method in found:  # so that the same records give the same looks, whatever is drawn first
            self.look(method)
        return found

    def place_of(self, methods: Iterable[str]) -> dict[str, int]:
        """Method -> its place in table order, to sort by."""
        return {name: place for place, name in enumerate(self.ordered(methods))}


def _in_order(values: Iterable, known: Iterable) -> list:
    found = set(values)
    return [value for value in known if value in found] + sorted(found.difference(known))
