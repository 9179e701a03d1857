"""What a conversion did to each layer, as rows and as the table that they print."""

from dataclasses import dataclass

import torch

from blockshock_lib.kernels.sparse24 import cslt, tune


@dataclass(frozen=True)
class Row:
    """A layer with W [N, K], or a rank's part of one: bytes of all that it holds; why it was left, "" where it was
    converted; the kind of the sparse layer that took its place.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    device: torch.device | None
    before: int
    after: int
    refused: str = ""
    made: str = ""


@dataclass(frozen=True)
class Report:
    rows: tuple[Row, ...]

    @property
    def converted(self) -> list[str]:
        return [row.name for row in self.rows if not row.refused]

    @property
    def refused(self) -> dict[str, str]:
        return {row.name: row.refused for row in self.rows if row.refused}

    @property
    def nbytes(self) -> tuple[int, int]:
        rows = [row for row in self.rows if not row.refused]
        return sum(row.before for row in rows), sum(row.after for row in rows)

    def expected(self, batch: int) -> dict[str, float]:
        """Milliseconds of each 2:4 layer's product for a batch of so many rows, where that was tuned here."""
        found = {}
        for row in self.rows:
            if not row.made.endswith("Linear24") or row.device.type != "cuda":
                continue
            problem = tune.problem_of(row.shape, cslt.padded(batch), row.dtype, row.device)
            if ways := tune.STORE.find(problem, tune.versions(row.device)):
                found[row.name] = min(ways.values())
        return found

    def __str__(self) -> str:
        before, after = self.nbytes
        head = f"{len(self.converted)} of {len(self.rows)} layers converted, {_mib(before)} before, {_mib(after)} after"
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [
            f"{row.name:{width}}  {row.kind} {'x'.join(map(str, row.shape))}  "
            + (f"left: {row.refused}" if row.refused else f"{_mib(row.before)} -> {_mib(row.after)}")
            for row in self.rows
        ]
        return "\n".join((head, *lines))


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"
