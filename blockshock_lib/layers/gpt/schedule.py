"""A schedule: when a GPT over ranks reads the partial result of each of its sublayers. Data, without torch.

Sublayers are numbered s = 0 .. 2 layers - 1: attention 2i, MLP 2i + 1; 2 layers is the end, the final norm and head.
o[t][r] is what rank r of n makes of sublayer t, without its bias. On rank r sublayer s reads
    x = embedding + sum over t of   late_t * sum over j of o[t][j]   where lands_t <= s
                                    o[t][r]                          where own_t <= s < lands_t
                                    bias_t                           where own_t <= s
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from numbers import Integral


@dataclass(frozen=True)
class Step:
    """Of a sublayer's partial result: `own`, the first sublayer that reads this rank's; `lands`, the first that reads
    all ranks' sum, `own` at the earliest. `mean`: what lands is the ranks' mean, `late` 1 / n, in the place of 1.
    """

    own: int
    lands: int
    mean: bool = False

    def late(self, ranks: int) -> float:
        return 1 / ranks if self.mean else 1.0

    @property
    def private(self) -> bool:
        return self.own < self.lands


@dataclass(frozen=True)
class Sync:
    """One all-reduce, of all `members` that land together: it can start when the last of them, `start`, was made."""

    start: int
    lands: int
    members: tuple[int, ...]

    @property
    def overlap(self) -> int:
        """Sublayers that run beside it."""
        return self.lands - self.start - 1


@dataclass(frozen=True)
class Schedule:
    """A Step for each sublayer. ValueError names the sublayer that has none, or whose partial result never lands, or
    comes too early, or at no whole number.

    `syncs`: the all-reduces of a forward in the order in which they start; a backward has as many.
    `operations`: what a forward does, in order. ("land", i) waits for the sum of syncs[i] and adds it; ("show", t) adds
    bias t and, where it is private, the rank's own partial result; ("run", s) reads and computes; ("start", i) begins
    a sum. The end has no "run": what was added by then is what the final norm reads.
    """

    name: str
    steps: tuple[Step, ...]
    syncs: tuple[Sync, ...] = field(init=False, repr=False, compare=False)
    operations: tuple[tuple[str, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "steps", tuple(self.steps))
        if not self.steps or len(self.steps) % 2:
            raise ValueError(f"schedule {self.name}: a layer has 2 sublayers, {len(self.steps)} make no layers")
        together: dict[int, list[int]] = {}
        for s, step in enumerate(self.steps):
            what = f"schedule {self.name}: the partial result of sublayer {s}"
            if not isinstance(step, Step) or not isinstance(step.mean, bool):
                raise ValueError(f"{what} has {step!r}, not a Step whose mean is True or False")
            if not all(isinstance(one, Integral) and not isinstance(one, bool) for one in (step.own, step.lands)):
                raise ValueError(f"{what} is read at {step.own} and lands at {step.lands}: sublayers are whole numbers")
            if step.lands > self.end:
                raise ValueError(f"{what} never lands: sublayer {step.lands} is beyond the end, {self.end}")
            if not s < step.own <= step.lands:
                at = f"at {step.own} and lands at {step.lands}"
                raise ValueError(f"{what} is read by this rank {at}: first {s + 1} at the earliest, then that")
            together.setdefault(step.lands, []).append(s)
        syncs = [Sync(members[-1], lands, tuple(members)) for lands, members in together.items()]
        syncs.sort(key=lambda sync: sync.start)
        done = []
        for s in range(self.end + 1):
            done += [("land", i) for i, sync in enumerate(syncs) if sync.lands == s]
            done += [("show", t) for t, step in enumerate(self.steps) if step.own == s]
            done += [("run", s)] if s < self.end else []
            done += [("start", i) for i, sync in enumerate(syncs) if sync.start == s]
        # Fields, not cached properties: a compiler reads no lock.
        object.__setattr__(self, "syncs", tuple(syncs))
        object.__setattr__(self, "operations", tuple(done))

    @property
    def end(self) -> int:
        return len(self.steps)

    @property
    def layers(self) -> int:
        return len(self.steps) // 2


def dropping(layers: int, dropped: Collection[int], mean: bool = False) -> tuple[Step, ...]:
    """The next sublayer reads each partial result at once. The sums of `dropped` sublayers, or their means, are made
    with the next one that keeps its own; the last one always does.
    """
    steps, lands = [], 2 * layers
    for s in reversed(range(2 * layers)):
        lands = lands if s in dropped else s + 1
        steps.append(Step(s + 1, lands, mean and lands > s + 1))
    return tuple(reversed(steps))


def within(what: str, given: Iterable[int], least: int, most: int) -> None:
    """ValueError names a number that is no number, or not from `least` to `most`."""
    for number in given:
        if type(number) is not int or not least <= number <= most:
            raise ValueError(f"{what} {number} is out of range: {least} to {most}")
