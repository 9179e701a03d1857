"""Block-Shock: dense by superposition. W = W(0) + W(1), two complementary 2:4 terms, each packed on its own ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import autograd, chunked
from blockshock_lib.layers.block_shock_costs import BlockShockCosts
from blockshock_lib.layers.block_shock_dw import BlockShockDw
from blockshock_lib.layers.block_shock_ways import BlockShockWays
from blockshock_lib.layers.part import Part, term_mask
from blockshock_lib.layers.term_parallel import TermParallelLinear
from blockshock_lib.params import Mask
from blockshock_lib.sparse24 import compress, stock
from blockshock_lib.sparse24.packed import Packed
from blockshock_lib.sparse24.pattern import Pattern
from blockshock_lib.sparse24.product import choose

CHOICES = {
    "update": ("packed", "recompress"),
    "dw": ("auto", "full", "periodic", "exchange"),
    "dx": ("auto", "2:4"),
}
UNPACK_COLUMNS = 1024  # columns of a term that are read off its packed form at once


class BlockShockLinear(BlockShockCosts, BlockShockDw, BlockShockWays, TermParallelLinear):
    """y = sum over ranks of x W(g)^T, each product on packed 2:4 values, joined by one all-reduce.

    | piece | one rank computes | joined by |
    |---|---|---|
    | forward | x [B, k] times packed W(g) [N, k] | all-reduce of [B, N] |
    | dX | dy [B, N] times packed W(g)^T [k, N]; dense masked where the mask is not 2:4 along N | all-reduce of [B, K] |
    | dW, full | a dense product, then the mask | nothing |
    | dW, periodic | products of half the size, for a mask that repeats one tile | nothing |
    | dW, exchange | a dense product for half of the rows | the two terms swap their entries, N k / 4 values |

    Args (beside ShardedLinear's):
        product: the 2:4 backend: "auto" or one of sparse24.product.BACKENDS.
        update: "packed": the packed values are the parameter [N, k/2], gradients and optimizer state are half as large,
            and after a step only the transposed copy is refreshed (T3). "recompress": the parameter is a dense masked
            master [N, k], masked and compressed anew after each step (T1). A frozen layer holds packed values (T2).
        dw: the strategy for dW; "auto": periodic where the mask is, else exchange between joined ranks, else full; with
            product "torch", full.
        dx: "auto", or "2:4" to refuse a mask whose dX would be a dense masked product.

    Raises: UnsupportedError where the machine, dtype, shape or mask cannot run what is asked.
    """

    def __init__(
        self, *args, product: str = "auto", update: str = "packed", dw: str = "auto", dx: str = "auto", **kwargs
    ):
        for name, value in (("update", update), ("dw", dw), ("dx", dx)):
            if value not in CHOICES[name]:
                raise ValueError(f"{name}={value!r}: there are {', '.join(CHOICES[name])}")
        self.__dict__.update(product=product, update=update, asked_dw=dw, asked_dx=dx)
        super().__init__(*args, **kwargs)

    @classmethod
    def unsupported(cls, mask: Mask, device: torch.device, dtype: torch.dtype, product: str = "auto", **options) -> str:
        return choose(product, device).unsupported(device, dtype)

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("mask", "keep") and "packed" in self.__dict__:
            raise UnsupportedError(
                f"the {name} cannot change: packed metadata is made once. load_dense() and load_state_dict() write "
                "other weights under the same mask; for another mask make a new layer from to_dense()"
            )
        super().__setattr__(name, value)

    def hold(self, weight: Tensor, keep: Tensor | None, part: Part) -> None:
        kept, w = None if keep is None else term_mask(keep, part), weight[part.rows, part.cols]
        self.recompresses = self.update == "recompress" and not self.frozen
        self.stock = self.recompresses and self.product == "torch"
        self.backend = choose(self.product, weight.device)
        if reason := self.backend.unsupported(weight.device, weight.dtype) or self.backend.too_large(w.shape):
            raise UnsupportedError(reason)
        self._pattern = None if self.frozen else Pattern.of(kept)
        self.stock_mask = kept if self.stock else None
        self.classes = self._classes(kept)
        self._other: Pattern | None = None
        packed, turned = self._pack(w, kept)
        if self.recompresses:
            self.weight = self._parameter(torch.where(kept, w, w.new_zeros(())))
        else:
            self.weight = self._parameter(packed.values)
        self.packed: Packed | None = packed
        self.packed_t: Packed | None = turned
        self._seen = self._state()
        if self.asked_dx == "2:4" and self.dx_by != "2:4":
            raise UnsupportedError(
                f'dx="2:4": mask {self.mask.name} does not keep two of every four weights along the output dimension, '
                'so W^T cannot be packed; take a transposable mask, or dx="auto" for a dense masked product'
            )
        if not self.frozen and self.asked_dw not in ("auto", *self.dw_strategies()):
            raise UnsupportedError(
                f"dw={self.asked_dw!r} cannot run with mask {self.mask.name} on {self.group.world_size} ranks; "
                f"there are {', '.join(self.dw_strategies())}"
            )

    def _pack(self, w: Tensor, kept: Tensor | None) -> tuple[Packed, Packed | None]:
        """W(g) packed, and W(g)^T too where each step will compress both: a master is then read once."""
        if self.recompresses and self.dx_by == "2:4" and self.backend.pack_both:
            return self.backend.pack_both(w, self._pattern)
        return self.backend.pack(w, kept), None

    def weight_bytes(self) -> int:
        return self.packed.nbytes

    def hold_bytes(self) -> dict[str, int]:
        """`pattern` counts a stock user's bool mask too."""
        packed, turned = self.packed.nbytes, self.packed_t.nbytes if self.packed_t else 0
        pattern = sum(p.nbytes for p in (self._pattern, self._other) if p is not None)
        pattern += self.stock_mask.nbytes if self.stock else 0
        if self.recompresses:
            return {"weights": self.weight.nbytes, "copies": packed + turned, "pattern": pattern}
        return {"weights": packed, "copies": turned, "pattern": pattern}

    # Forward

    def local(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.backend.linear(x[:, self.cols], self.packed, self.room(x) if out is None else out)

    def memory_read(self) -> list[Tensor]:
        return [*super().memory_read(), *self.packed.data]

    def tune(self, x: Tensor) -> None:
        for part in chunked.sizes(self, x):
            self.backend.tune(part[:, self.cols], self.packed)

    # dX

    @property
    def dx_by(self) -> str:
        transposable = self.mask.transposable if self._pattern is None else self._pattern.transposable
        return "2:4" if transposable else "dense masked"

    def local_dx(self, dy: Tensor) -> Tensor:
        if self.dx_by == "2:4":
            return self.place_dx(self.backend.linear(dy, self._transposed()))
        master = self.recompresses and not self._lent
        dense = self.weight if master else self.pattern.scatter(self.packed.values)
        return self.place_dx(torch.mm(dy, dense))

    def tune_dx(self, dy: Tensor) -> None:
        if self.dx_by == "2:4":
            self.backend.tune(dy, self._transposed())

    def _transposed(self) -> Packed:
        """W(g)^T packed; made when it is first needed."""
        if self.packed_t is None and self.product == "torch":
            # By value, as a stock user does. Its metadata are no mask: a kept zero may have been given another place.
            dense = self.weight if self.recompresses else self._unpack()
            self.packed_t = stock.compress(dense.t().contiguous())
        elif self.packed_t is None:
            self.packed_t = self.backend.blank(self.pattern.t(), self.packed.dtype)
            self.pattern.transpose_values(self.packed.values, out=self.packed_t.values)
        return self.packed_t

    @property
    def pattern(self) -> Pattern:
        """The mask of this rank's term. A frozen layer, which does not keep it, reads it off the packed form."""
        if self._pattern is None:
            values = self.packed.values.data  # which has a version of its own: the weight does not change
            held = values.clone()
            values.fill_(1)
            self._pattern = Pattern.of(self._unpack() != 0)
            values.copy_(held)
            self._seen = self._state()
        return self._pattern

    def _unpack(self) -> Tensor:
        """The packed term as dense [N, k], by its products with the columns of the identity."""
        columns = self.packed.shape[1]
        dense = torch.empty(self.packed.shape, dtype=self.packed.dtype, device=self.packed.values.device)
        for start in range(0, columns, UNPACK_COLUMNS):
            one = torch.eye(min(UNPACK_COLUMNS, columns - start), columns, dtype=dense.dtype, device=dense.device)
            dense[:, start : start + one.shape[0]] = self.backend.linear(one.roll(start, 1), self.packed).t()
        return dense

    # What must follow a change of the weight

    def stages(self) -> dict[str, Callable[[], None]]:
        if self.frozen:
            return {}
        if self.recompresses:
            return {"remask": self._remask, "compress": self._compress}
        return {"refresh": self._refresh_transposed} if self.dx_by == "2:4" else {}

    @torch.no_grad()
    def _remask(self) -> None:
        if self._lent:
            return
        if self.stock:
            torch.where(self.stock_mask, self.weight, self.weight.new_zeros(()), out=self.weight)
        else:
            self.pattern.masked(self.weight, out=self.weight.detach())

    @torch.no_grad()
    def _compress(self) -> None:
        """The metadata of a known mask never change, so only values are moved; a stock user compresses all anew."""
        if not self.stock:
            if self.packed_t is None:
                self.pattern.gather(self.weight, out=self.packed.values)
            else:
                compress.values_of_both(self.weight, self.pattern, self.packed.values, self.packed_t.values)
            return
        turned, self.packed, self.packed_t = self.packed_t is not None, None, None
        self.packed = stock.compress(self.weight.detach())
        if turned:
            self._transposed()

    @torch.no_grad()
    def _refresh_transposed(self) -> None:
        if self.packed_t is not None:
            self.pattern.transpose_values(self.packed.values, out=self.packed_t.values)

    def refresh(self) -> None:
        if self.frozen:
            self.packed_t = None
        super().refresh()
        self._seen = self._state()

    def prepare(self, always: bool = False) -> None:
        moved = self.packed is None or self._moved()
        if moved:
            self._relink()
        if moved or (always and not self.frozen) or self._changed():
            self.refresh()

    def _state(self) -> tuple:
        """The weight, and numbers that change when it may have changed."""
        w = self.weight
        numbers = (0 if w.is_inference() else w._version, 0 if self.frozen else autograd.optimizer_steps())
        return weakref.ref(w), w.data_ptr(), *numbers

    def _changed(self) -> bool:
        (seen, *numbers), (now, *others) = self._seen, self._state()
        return seen() is not now() or numbers != others

    @property
    def _lent(self) -> bool:
        """Whether the weight is another's, as in `torch.func.functional_call`: it may be read, never written."""
        return not isinstance(self.weight, nn.Parameter)

    def _moved(self) -> bool:
        """Whether the weight is no longer what was packed: a copy of the layer, another dtype or device."""
        if self.recompresses:
            return (self.weight.dtype, self.weight.device) != (self.packed.dtype, self.packed.values.device)
        return self.weight.data_ptr() != self.packed.values.data_ptr()

    @torch.no_grad()
    def _relink(self) -> None:
        """Packs the weight where it is now, into storage of its own, and makes the parameter a view of that."""
        weight, mask = self.weight, self.pattern.mask().to(self.weight.device)
        self._pattern, self._other = Pattern.of(mask), None
        self.stock_mask = mask if self.stock else None
        self.backend = choose(self.product, weight.device)
        if reason := self.backend.unsupported(weight.device, weight.dtype):
            raise UnsupportedError(reason)
        dense = weight if self.recompresses else self.pattern.scatter(weight)
        self.packed, self.packed_t = self._pack(dense, mask)
        if not self.recompresses and not self._lent:
            weight.data = self.packed.values

    def __getstate__(self) -> dict:
        """A copy makes its packed forms anew: from a master both, from packed values the transposed one."""
        state = self.__dict__ | {"packed_t": None}
        return state | {"packed": None} if self.recompresses else state

    # Layout

    def from_dense(self, dense: Tensor) -> Tensor:
        part = dense[self.rows, self.cols]
        return self.pattern.masked(part) if self.recompresses else self.pattern.gather(part)

    def part_dense(self, tensor: Tensor) -> Tensor:
        return tensor if self.recompresses else self.pattern.scatter(tensor)
