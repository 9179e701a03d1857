"""Block-Shock: dense by superposition. W = W(0) + W(1), two complementary 2:4 terms, each packed on its own ranks."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import masks
from blockshock_lib.kernels.sparse24.backends import choose
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.kernels.sparse24.pattern import Pattern
from blockshock_lib.layers import autograd
from blockshock_lib.layers.classes import classes_of, packed_wgrad, packed_wgrad_factors
from blockshock_lib.layers.dense import TermParallelLinear
from blockshock_lib.layers.parts import Part, term_mask
from blockshock_lib.layers.watch import describe
from blockshock_lib.layers.weight_stores import Master, PackedValues, StockMaster, WatchedParameter

CHOICES = {"update": ("packed", "recompress"), "dw": ("auto", "full", "periodic", "exchange")}


class BlockShockLinear(TermParallelLinear):
    """y = sum over ranks of x W(g)^T, each product on packed 2:4 values, joined by one all-reduce.

    | piece | one rank computes | joined by |
    |---|---|---|
    | forward | x [B, k] times packed W(g) [N, k] | all-reduce of [B, N] |
    | dX | dy [B, N] times packed W(g)^T [k, N]; dense masked where the mask is not 2:4 along N | all-reduce of [B, K] |
    | dW, full | a dense product, then the mask | nothing |
    | dW, periodic | products of half the size, for a mask that repeats one tile | nothing |
    | dW, exchange | a dense product for half of the rows | the two terms swap their entries, N k / 4 values |

    Args (beside ShardedLinear's):
        product: the 2:4 backend: "auto" or one of sparse24.backends.BACKENDS.
        update: "packed": the packed values are the parameter [N, k/2], gradients and optimizer state are half as large,
            and after a step only the transposed copy is refreshed (T3). "recompress": the parameter is a dense masked
            master [N, k], masked and compressed anew after each step (T1). A frozen layer holds packed values (T2).
        dw: how dW is made; "auto": periodic where the mask is, else exchange between several ranks, else full; with
            product "torch", full.

    UnsupportedError where the machine, dtype, shape or mask cannot run what is asked. An Inf in x may give NaN where a
    dense layer gives Inf: off the 2:4 hardware each term multiplies it with the zeros in its holes too.
    """

    def __init__(self, *args, product="auto", update="packed", dw="auto", **kwargs):
        for name, value in (("update", update), ("dw", dw)):
            if value not in CHOICES[name]:
                raise ValueError(f"{name}={value!r}: there are {', '.join(CHOICES[name])}")
        self.product, self.update, self.dw = product, update, dw  # `shard` reads them
        super().__init__(*args, **kwargs)

    watched = WatchedParameter

    @classmethod
    def unsupported(cls, mask: Mask, device: torch.device, dtype: torch.dtype, product: str = "auto", **options) -> str:
        return choose(product, device).unsupported(device, dtype)

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("mask", "keep") and "store" in self.__dict__:
            raise UnsupportedError(
                f"the {name} cannot change: packed metadata is made once. load_dense() and load_state_dict() write "
                "other weights under the same mask; for another mask make a new layer from to_dense()"
            )
        if name == "weight" and isinstance(value, nn.Parameter) and self.weight is not None and not self.gathered:
            self._refuse_tied(value)
        super().__setattr__(name, value)

    def _refuse_tied(self, value: nn.Parameter) -> None:
        if isinstance(value, DTensor):
            return  # set by FSDP2
        dense = self.store.recompresses
        if dense and any(other is not self and other.weight is value for other in autograd.layers()):
            raise UnsupportedError(
                f'{describe(self)} with update="recompress" cannot hold another layer\'s weight, as each masks it: '
                "use one layer twice"
            )
        if value.shape != self.weight.shape or (dense and bool(value[~self.pattern.mask()].any())):
            raise UnsupportedError(
                f"{describe(self)} cannot be tied to a dense weight: load_dense() copies what its mask keeps"
            )

    def shard(self, weight: Tensor, keep: Tensor | None, part: Part) -> None:
        kept, w = term_mask(keep, part), weight[part.rows, part.cols]
        self.store = self._pack(w, kept)
        self.classes = self._classes(kept)
        self._theirs: Pattern | None = None  # of the other term in this rank's half of the rows
        self.weight = self._parameter(self.store.layout(w) if self.store.recompresses else self.packed.values)
        self._look()
        if not self.frozen and self.dw not in ("auto", *self.wgrad_strategies()):
            raise UnsupportedError(
                f"dw={self.dw!r} cannot run with mask {self.mask.name} on {self.group.world_size} ranks; "
                f"there are {', '.join(self.wgrad_strategies())}"
            )

    def _pack(self, dense: Tensor, keep: Tensor | None) -> PackedValues:
        backend = choose(self.product, dense.device)
        if reason := backend.unsupported(dense.device, dense.dtype) or backend.too_large(dense.shape):
            raise UnsupportedError(reason)
        kind = PackedValues
        if self.update == "recompress" and not self.frozen:
            kind = StockMaster if self.product == "torch" else Master
        return kind(backend, dense, keep, self.frozen)

    backend = property(attrgetter("store.backend"))
    packed = property(attrgetter("store.packed"))
    pattern = property(attrgetter("store.pattern"))  # the mask of this rank's term

    def weight_bytes(self) -> int:
        return self.packed.nbytes

    def hold_bytes(self) -> dict[str, int]:
        held = self.store.nbytes(self.weight)
        return held | {"pattern": held["pattern"] + (self._theirs.nbytes if self._theirs else 0)}

    def local(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        store, out = self.store, self.workspace(x) if out is None else out
        return store.backend.linear(self.columns(x), store.packed, out)

    def memory_read(self) -> list[Tensor]:
        return [*super().memory_read(), *self.packed.data]

    def tune(self, x: Tensor) -> None:
        for part in self.chunk_sizes(x):
            self.backend.tune(part[:, self.cols], self.packed)

    @property
    def dgrad_by(self) -> str:
        return "2:4" if self.store.transposable else "dense masked"

    def local_dgrad(self, dy: Tensor) -> Tensor:
        if self.dgrad_by == "2:4":
            return self.place_dgrad(self.backend.linear(dy, self.store.transposed(self.weight)))
        return self.place_dgrad(super().local_dgrad(dy))

    def dgrad_factors(self, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, self.store.dense(self.weight).detach().t()

    def tune_dgrad(self, dy: Tensor) -> None:
        if self.dgrad_by == "2:4":
            self.backend.tune(dy, self.store.transposed(self.weight))
        else:
            super().tune_dgrad(dy)

    # dW, of its kept entries: packed, [N, k/2], unless dense

    def _classes(self, kept: Tensor) -> list[tuple[slice, slice]]:
        """The classes of a periodic mask; none of another, or where `kept` is not what its mask says."""
        if self.frozen or not self.mask.periodic or self.pattern.tile is None:
            return []
        tile = masks.tile(self.mask) ^ (self.term == 1)
        return classes_of(self.mask, self.term) if torch.equal(kept[:4, :4].cpu(), tile) else []

    def wgrad_strategies(self) -> tuple[str, ...]:
        return ("full", *["periodic"] * bool(self.classes), *["exchange"] * (self.group.world_size > 1))

    @property
    def wgrad_by(self) -> str:
        if self.dw != "auto":
            return self.dw
        if isinstance(self.store, StockMaster):
            return "full"
        if self.classes:
            return "periodic"
        return "exchange" if self.group.connected else "full"

    def local_wgrad(self, dy: Tensor, x: Tensor, by: str | None = None):
        """For "exchange" (the gradient with this rank's half of the rows, the other term's entries of that half)."""
        by, x = by or self.wgrad_by, x[:, self.cols]
        if by == "periodic":
            return packed_wgrad(self.gemm, dy, x, self.classes)
        if by == "full":
            dense = self.gemm(dy.t(), x.t())
            return self.store.layout(dense, out=dense)
        mine = self._half(self.term)
        if self._theirs is None:
            self._theirs = Pattern.of(~self.pattern.rows(mine).mask())
        dense = self.gemm(dy[:, mine].t(), x.t())
        grad = dense.new_empty(self.out_features, dense.shape[1] // 2)
        self.pattern.rows(mine).gather(dense, out=grad[mine])
        return grad, self._theirs.gather(dense)

    def wgrad_factors(self, dy: Tensor, x: Tensor, by: str) -> tuple[Tensor, Tensor]:
        if by == "periodic":
            return packed_wgrad_factors(dy, x[:, self.cols], self.classes)
        return dy[:, self._half(self.term) if by == "exchange" else self.rows].t(), x[:, self.cols].t()

    def finish_wgrad(self, partial, by: str | None = None) -> Tensor:
        by = by or self.wgrad_by
        if by == "exchange":
            partial, theirs = partial
            self.group.exchange(theirs, self.group.rank ^ 1, out=partial[self._half(1 - self.term)])
        return partial if by == "full" else self.store.layout(partial)

    def _half(self, term: int) -> slice:
        """The rows of dW that the rank of this term computes for both; whole tiles."""
        middle = self.out_features // 8 * 4
        return slice(middle, self.out_features) if term else slice(0, middle)

    def post_step(self) -> dict[str, Callable[[], None]]:
        steps = {} if self.frozen else self.store.steps()
        return {name: torch.no_grad()(partial(step, self.weight)) for name, step in steps.items()}

    def refresh(self) -> None:
        if isinstance(self.weight, DTensor):
            return  # sharded: it is packed when FSDP2 has gathered it
        if self.frozen:
            self.store.packed_t = None
        super().refresh()
        self._look()

    def prepare(self, always: bool = False) -> None:
        seen, weight = self._seen, self._parameters["weight"]
        same = seen is not None and seen[0] is weight and seen[1] == autograd.state(weight)
        if (same and not (always or self.gathered)) or isinstance(weight, DTensor):
            return
        super().prepare()
        # FSDP2 gathers the weight into a buffer that comes and goes, at no raised version: a copy is multiplied.
        if (self.gathered or self.store.apart) and self.store.holds_kind_of(self.weight):
            with torch.no_grad():
                self.store.follow(self.weight)
        elif self.store.moved(self.weight):
            self._relink()
            self.refresh()
        elif (always and not self.frozen) or not same:
            self.refresh()

    def _look(self) -> None:
        """Notes the weight as it is now; one that was lent is forgotten, and so not kept alive."""
        own = isinstance(weight := self.weight, nn.Parameter) and not self.store.moved(weight)
        steady = own and not getattr(weight, "lent", False) and (weight.is_cuda or not weight.is_shared())  # Hogwild
        # No weak reference: torch could swap no tensor then.
        self._seen = (weight, autograd.state(weight)) if steady else None

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_seen": None}

    def _relink(self) -> None:
        """Packs the weight where it is now, into storage of its own, of which it becomes a view unless it is lent."""
        # What is made in inference mode could not be trained later.
        with torch.inference_mode(self.weight.is_inference()), torch.no_grad():
            weight, keep = self.weight, self.pattern.mask().to(self.weight.device)
            dense = weight if self.store.recompresses else Pattern.of(keep).scatter(weight)
            self.store, self._theirs = self._pack(dense, keep), None
            own = isinstance(weight, nn.Parameter)  # not what functional_call puts there
            if own and not (self.store.recompresses or self.gathered):
                self.store.apart = getattr(weight, "lent", False)
                if not self.store.apart:
                    Tensor.data.__set__(weight, self.packed.values)

    def from_dense(self, dense: Tensor) -> Tensor:
        return self.store.layout(dense[self.rows, self.cols])

    def part_dense(self, tensor: Tensor) -> Tensor:
        return self.store.to_dense(tensor)
