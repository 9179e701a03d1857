"""What the stages of a case share: rows, the ranks' agreement, the gate (no valid check, no number), memory's meter."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from blockshock_lib.comm import Group
from blockshock_lib.engine.memory import Peak
from blockshock_lib.engine.study import Check, Metric, Problem, Runner, row
from blockshock_lib.engine.timing import Timer
from blockshock_lib.errors import UnsupportedError, first_line
from blockshock_lib.kernels.graph import try_capture

NOT_WEIGHED = math.nan

# The baseline's own RMS error may be at most this: a few roundings of the dtype, and in fp32 those of long sums. A
# wrong baseline must not excuse a method that is as wrong.
BASELINE_RMS = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-16}

# How wrong a tensor may be beside its baseline. On GPUs and CPUs 1.02 and 1.0004 are the worst that was recorded.
MAX_RATIO, RMS_RATIO = 2.0, 1.05
# A row or column of n entries may be 1 + LINE / sqrt(n) times as wrong beside that: of 40,960 lines of rounding errors,
# with noise of 1e-4 in their sums, the worst is 1 + 5 / sqrt(n) times as wrong.
LINE = 6.0
FEW = 16  # entries of a line say less of what to expect of it than the mean of all lines

CHUNK = 2**27  # entries that are turned to float64 at once: 1 GiB
METRICS = ("error_max_ratio", "error_rms_ratio", "error_max", "error_rms", "error_line_ratio")


class Refused(Exception):
    """Status and reason why a method may not go on, on no rank: raised on all of them alike."""


def errors(y: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """Largest and RMS deviation of `y` from `truth` in float64, over the truth's RMS; inf where any is NaN or Inf."""
    rows = max(1, CHUNK // max(1, truth[0].numel()))
    squares, off_squares, largest = 0.0, 0.0, 0.0
    for mine, true in zip(y.split(rows), truth.split(rows), strict=True):
        true = true.double()
        off = mine.double() - true
        squares += true.square().sum().item()
        largest = max(largest, off.abs().max().item())
        off_squares += off.square_().sum().item()
    if not squares or not math.isfinite(off_squares):
        return math.inf, math.inf
    return largest / math.sqrt(squares / truth.numel()), math.sqrt(off_squares / squares)


def worst_line(made: torch.Tensor, baseline: torch.Tensor, truth: torch.Tensor) -> tuple[float, str]:
    """(RMS error of the worst row or column over what is allowed there, its name). One dropped weight spoils one column
    of y by half a percent, which the RMS over 40,960 columns does not show. A line's error is over the baseline's
    there, or over that of all lines where rounding was kind to it; rounding is relative, so a line of larger values
    may be as much more wrong. Entries count by what their crossing line leaves to expect: a large token must not drown
    the others of its column.
    """
    if truth.dim() != 2:
        return 0.0, ""
    scales = [torch.ones(n, dtype=torch.float64, device=truth.device) for n in truth.shape]
    for side, n in enumerate(reversed(truth.shape)):
        line = squares_by_line(baseline, truth, scales)[side]
        scales[side] = (n * line + FEW * line.mean()) / (n + FEW)
        if not scales[side].all():
            return 0.0, ""  # an exact baseline allows no error at all
    worst = 0.0, ""
    sides = (squares_by_line(y, truth, scales) for y in (made, baseline, truth.new_zeros(1).expand_as(truth)))
    for name, n, mine, base, size in zip(("row", "column"), reversed(truth.shape), *sides, strict=True):
        expected = base.mean() * (size / size.mean()).clamp_min(1)
        over = (mine / torch.maximum(base, expected)).sqrt() / (RMS_RATIO * (1 + LINE / math.sqrt(n)))
        worst = max(worst, (over.max().item(), f"{name} {int(over.argmax())}"))
    return worst


def squares_by_line(y: torch.Tensor, truth: torch.Tensor, scales: list[torch.Tensor]) -> list[torch.Tensor]:
    """Mean squared deviation of each row of [n, m] and column; entries over the crossing line of `scales`."""
    step, rows, columns = max(1, CHUNK // truth.shape[1]), [], 0.0
    for mine, true, scale in zip(y.split(step), truth.split(step), scales[0].split(step), strict=True):
        off = (mine.double() - true.double()).square_()
        rows.append((off / scales[1]).mean(1))
        columns += off.div_(scale[:, None]).sum(0)
    return [torch.cat(rows), columns / len(truth)]


def judge(check: Check) -> tuple[str, dict[str, float]]:
    """Why a tensor is refused ("" where it passed), and METRICS: its error beside that of its baseline, made in the
    same dtype and sharding; both against float64. It must have the right shape and dtype and be finite, its largest
    error be at most twice the baseline's, its RMS error at most 1.05 times that, no row or column far worse than its
    others (`worst_line`), and the baseline's own error one that rounding explains. Without a baseline it must be the
    truth up to a few roundings.
    """
    made, baseline, truth, what = check.made, check.baseline, check.truth, check.what
    if made is None:
        return "", dict.fromkeys(METRICS, 0.0)
    if baseline is None:
        rms = errors(made, truth)[1]
        reason = "" if rms <= BASELINE_RMS[made.dtype] else f"{what} is off by {rms:.3g} of its RMS"
        return reason, dict.fromkeys(METRICS, 0.0)
    if made.shape != truth.shape or made.dtype != baseline.dtype:
        got, want = f"{tuple(made.shape)} {made.dtype}", f"{tuple(truth.shape)} {baseline.dtype}"
        return f"{what} is {got}, must be {want}", dict.fromkeys(METRICS, math.inf)
    mine, base = errors(made, truth), errors(baseline, truth)
    ratios = [one / other if other else math.inf if one else 1.0 for one, other in zip(mine, base, strict=True)]
    line = 0.0
    if not math.isfinite(mine[0]):
        reason = f"{what} holds NaN or Inf"
    elif not base[1] <= BASELINE_RMS[baseline.dtype] * check.depth**0.5:
        reason = f"{what}: the baseline itself is wrong: its RMS error is {base[1]:.3g} of the truth's RMS"
    else:
        most = (MAX_RATIO * check.looser, RMS_RATIO * check.looser)
        allowed = zip(("largest error", "RMS error"), ratios, most, strict=True)
        over = [f"{name} is {x:.3g}x the baseline's (allowed {most:g}x)" for name, x, most in allowed if not x <= most]
        line, name = worst_line(made, baseline, truth)
        line /= check.looser
        over += [f"RMS error of {name} is {line:.3g}x what is allowed there"] if line > 1 else []
        reason = f"{what}: {'; '.join(over)}" if over else ""
    return reason, dict(zip(METRICS, (*ratios, *mine, line), strict=True))


class CaseRun:
    """One case on this rank; `rows` grows as its stages pass."""

    timer: Timer  # there while works are made and timed

    def __init__(self, problem: Problem, metrics: Mapping[str, Metric]):
        self.problem, self.metrics, self.device = problem, metrics, problem.device
        self.rows: list[dict[str, Any]] = []
        self.peak: float | None = NOT_WEIGHED  # bytes of what was `weighed` last; None: the allocator keeps none
        self.meter = Peak(self.device)
        self.taken: Counter[tuple] = Counter()  # samples of (method, metric, detail, rank)
        self._seen: set[tuple[str, ...]] = set()

    @property
    def group(self) -> Group:
        """The ranks that are left: a problem that may lose some replaces its own."""
        return self.problem.group

    def add(self, method: str, metric: str, value: float, **more: Any) -> None:
        self.rows.append(row(self.metrics, method, metric, value, **more))

    def miss(self, method: str, status: str, reason: str, metric: str = "check") -> None:
        self.add(method, metric, math.nan, status=status, reason=reason)

    def once(self, *what: str) -> bool:
        first = what not in self._seen
        self._seen.add(what)
        return first

    def begin(self, method: str) -> None:
        """Says whose work comes next, "" for no method's, once what came before has ended: its faults are its own."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.problem.case.emulated:  # threads of one process, in turns: what one of them still has to do comes first
            self.group.max_over_ranks([0.0], self.device)
        self.problem.begins(method)

    def attempt(self, method: str, fn: Callable[[], Any], metric: str = "check") -> Any:
        """fn()'s result; None where it was refused, and a row of `metric` says why: only "check" condemns a method."""
        self.begin(method)
        try:
            return fn()
        except Refused as refused:
            self.miss(method, *refused.args, metric)
            return None

    def agree(self, fn: Callable[[], Any]) -> Any:
        """fn()'s result; Refused on all ranks, before any collective, where one lacks memory or cannot do it."""
        result, status, reason = None, "", ""
        try:
            result = fn()
        except UnsupportedError as error:
            status, reason = "unsupported", first_line(error)
        except RuntimeError as error:
            # torch.OutOfMemoryError is one; the CPU allocator has no class of its own.
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            status, reason = "oom", first_line(error)
        rank, error = self.group.first_error(f"{status}: {reason}" if status else "", self.device)
        if error:
            status, reason = error.split(": ", 1)
            raise Refused(status, f"rank {rank}: {reason}")
        return result

    def captured(self, method: str, metric: str, call: Callable[[], object], active: bool = True) -> bool:
        """Whether the timer's graphs hold the call of each rank that is `active`; else a row of `metric` says why."""

        def capture() -> bool:
            if active and self.timer.pool is not None:
                try_capture(call, self.device)
            return True

        return bool(self.attempt(method, partial(self.agree, capture), metric))

    def refuse(self, reason: str) -> None:
        """Refused on all ranks where any has a reason."""
        rank, reason = self.group.first_error(reason, self.device)
        if reason:
            raise Refused("failed", f"rank {rank}: {reason}")

    def gate(self, method: str, check: Check, *, record: bool = True) -> None:
        """Passes a tensor on every working rank, else Refused; the worst counts. `record`: its errors become rows."""
        reason, numbers = judge(check)
        if record and check.record:
            checked = check.made.numel() if check.sampled and check.made is not None else 0.0
            numbers |= dict(entries_checked=checked, entries_total=check.sampled)
            most = dict(zip(numbers, self.group.max_over_ranks([*numbers.values()], self.device), strict=True))
            for metric, value in most.items():
                if value < math.inf and (most["entries_total"] or not metric.startswith("entries")):
                    detail = check.what if check.detail is None else check.detail
                    self.add(method, metric, value, detail=detail)
        self.refuse(check.fault or reason)

    @contextlib.contextmanager
    def weighed(self, *poison: int) -> Iterator[None]:
        """Around what is weighed; the last block counts. NaN in the likely memory of `poison`, an output's shape."""
        self.meter.restart()
        if poison and self.device.type == "cuda":
            torch.full(poison, float("nan"), dtype=self.problem.dtype, device=self.device)
        yield
        # Ranks that are threads share one allocator.
        self.peak = None if self.problem.case.emulated else self.meter.read()

    def tune(self, runner: Runner) -> None:
        # Rank 0 searches first and keeps its choice in a file, where the others find it.
        for turn in (self.group.rank == 0, self.group.rank != 0):
            self.agree(lambda turn=turn: runner.tune() if turn and runner.active else None)
        if runner.active:
            runner.tune_together()
