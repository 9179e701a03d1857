"""What the stages of one case share: its rows, the agreement of the ranks, and the check."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from blockshock_lib import records
from blockshock_lib.comm import Group
from blockshock_lib.engine import correctness
from blockshock_lib.engine.phases import PHASES, Phase
from blockshock_lib.engine.protocol import Problem
from blockshock_lib.errors import UnsupportedError, first_line

Compared = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A tensor, what rounding alone allows, and the truth."""


@dataclass
class Rows:
    """The rows of one case, as records.write takes them."""

    rows: list[dict] = field(default_factory=list)

    def add(self, method: str, metric: str, value: float, repeat: int = 0, detail: str = "", rank: int = -1) -> None:
        self.rows.append(records.row(method, metric, value, repeat=repeat, detail=detail, rank=rank))

    def miss(self, method: str, status: str, reason: str, metric: str = "check") -> None:
        """A row without a number: why there is none."""
        self.rows.append(records.row(method, metric, math.nan, status=status, reason=reason))


@dataclass
class Trial:
    """One case on this rank; `rows` grows as its stages pass."""

    problem: Problem
    group: Group
    rows: Rows

    def __post_init__(self) -> None:
        self.device = self.problem.device

    @property
    def phase(self) -> Phase:
        return PHASES[self.problem.case.phase]

    def agree(self, name: str, fn: Callable[[], Any], metric: str = "check") -> Any:
        """fn()'s result, or None on all ranks when it failed on any: no rank may then enter a collective.

        The row that says why is one of `metric`: what is no check does not condemn the method.
        """
        result, word = attempt(fn)
        rank, word = self.group.first_word(word, self.device)
        if not word:
            return result
        status, reason = word.split(": ", 1)
        self.rows.miss(name, status, f"rank {rank}: {reason}", metric=metric)
        return None

    def check(self, name: str, what: str, compared: list[Compared], *, record: bool = True, fault: str = "") -> bool:
        """The gate for one tensor of a method, on every working rank; the worst rank counts.

        Args:
            what: the tensor: "y", "dx", ...; y's rows have no detail.
            compared: one entry, one for each emulated rank, or none on a rank that stands by.
            record: whether the errors become rows. A refusal always does.
            fault: what is wrong beside it.
        """
        found = correctness.worst(correctness.gate(*one, what=what) for one in compared)
        if fault:
            found = found._replace(reason=fault)
        numbers = [found.max_ratio, found.rms_ratio, found.errors.max, found.errors.rms]
        most = self.group.largest(numbers, self.device)
        if record:
            for metric, value in zip(
                ("error_max_ratio", "error_rms_ratio", "error_max", "error_rms"), most, strict=True
            ):
                if value < float("inf"):
                    self.rows.add(name, metric, value, detail="" if what == "y" else what)
        return self.accept(name, found.reason)

    def accept(self, name: str, reason: str) -> bool:
        """Whether no rank has a reason to refuse the method; the first one becomes its row."""
        rank, reason = self.group.first_word(reason, self.device)
        if reason:
            self.rows.miss(name, "failed", f"rank {rank}: {reason}")
        return not reason


def attempt(fn: Callable[[], Any]) -> tuple[Any, str]:
    """(result, "") or (None, "status: reason") when memory ran out or the machine cannot do it; other errors rise."""
    try:
        return fn(), ""
    except torch.OutOfMemoryError as error:
        return None, f"oom: {first_line(error)}"
    except UnsupportedError as error:
        return None, f"unsupported: {first_line(error)}"
    except RuntimeError as error:
        # The CPU allocator has no exception class of its own.
        if "can't allocate memory" not in str(error):
            raise
        return None, f"oom: {first_line(error)}"
