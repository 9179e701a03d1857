"""How Block-Shock makes dW of its kept entries: full, periodic or exchange; see the table in block_shock.py."""

from __future__ import annotations

import torch
from torch import Tensor

from blockshock_lib.layers import periodic
from blockshock_lib.sparse24 import masks


class BlockShockDw:
    """Mixed into the layer: see `ShardedLinear` for what each says. A gradient is packed, [N, k/2], unless dense."""

    def _classes(self, kept: Tensor) -> list[tuple[slice, slice]]:
        """The classes of a periodic mask; none of another, or where `kept` is not what its mask says."""
        if self.frozen or not self.mask.periodic or self._pattern.tile is None:
            return []
        tile = masks.tile(self.mask)
        tile = tile if self.term == 0 else ~tile
        return periodic.classes_of(self.mask, self.term) if torch.equal(kept[:4, :4].cpu(), tile) else []

    def dw_strategies(self) -> tuple[str, ...]:
        return ("full", *["periodic"] * bool(self.classes), *["exchange"] * (self.group.world_size > 1))

    @property
    def dw_by(self) -> str:
        if self.asked_dw != "auto":
            return self.asked_dw
        if self.stock:
            return "full"
        if self.classes:
            return "periodic"
        return "exchange" if self.group.reference is not None and self.group.world_size > 1 else "full"

    def local_dw(self, dy: Tensor, x: Tensor, by: str | None = None):
        by, x = by or self.dw_by, x[:, self.cols]
        if by == "periodic":
            return periodic.packed_dw(dy, x, self.classes)
        if by == "exchange":
            return self._half_dw(dy, x)
        dense = torch.mm(dy.t(), x)
        if self.stock:
            return torch.where(self.stock_mask, dense, dense.new_zeros(()))
        return self.pattern.masked(dense, out=dense) if self.recompresses else self.pattern.gather(dense)

    def _half_dw(self, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(the gradient [N, k/2] with this rank's half of the rows written, the other term's entries of that half)."""
        mine = self._half(self.term)
        if self._other is None:
            self._other = self.pattern.rows(mine).complement()
        dense = torch.mm(dy[:, mine].t(), x)
        grad = dense.new_empty(self.out_features, dense.shape[1] // 2)
        self.pattern.rows(mine).gather(dense, out=grad[mine])
        return grad, self._other.gather(dense)

    def _half(self, term: int) -> slice:
        """The rows of dW that the rank of this term computes for both; whole tiles."""
        middle = self.out_features // 8 * 4
        return slice(middle, self.out_features) if term else slice(0, middle)

    def finish_dw(self, partial, by: str | None = None) -> Tensor:
        if (by or self.dw_by) == "exchange":
            partial, theirs = partial
            self.group.exchange(theirs, self.group.rank ^ 1, out=partial[self._half(1 - self.term)])
        return self.in_layout(partial)

    def combine_dw(self, partials: list, by: str | None = None) -> list[Tensor]:
        if (by or self.dw_by) == "exchange":
            for rank, (grad, _) in enumerate(partials):
                grad[self._half(1 - rank % 2)] = partials[rank ^ 1][1]
            partials = [grad for grad, _ in partials]
        return partials

    def in_layout(self, values: Tensor) -> Tensor:
        """A gradient's packed values in the layout of the weight; a master's may be dense already."""
        return self.pattern.scatter(values) if self.recompresses and values.shape != self.weight.shape else values
