"""C, the masked dense rival: a term as a dense matrix. Between steps nobody keeps its holes at zero but this."""

import weakref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import masks
from blockshock_lib.kernels.sparse24.pattern import Pattern
from blockshock_lib.layers import autograd
from blockshock_lib.layers.dense import TermParallelLinear
from blockshock_lib.layers.parts import Part, term_mask
from blockshock_lib.layers.watch import describe
from blockshock_lib.layers.weight_stores import WatchedParameter

_masked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _before_step(*_: object) -> None:  # or the step would hide what was written since the last forward
    for layer in _masked:
        if autograd.has_values(layer.weight):
            layer.prepare()


def _note_step(*_: object) -> None:
    for layer in _masked:
        layer.stepped = autograd.state(layer.weight)[1]


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_note_step)


class MaskedDenseLinear(TermParallelLinear):
    """C: a term as a dense matrix, zeros in the holes, in dW too: shows what the 2:4 kernels alone are worth. A frozen
    one keeps no mask that it can draw anew, for what is loaded or written.
    """

    watched = WatchedParameter
    pattern: Pattern | None = None
    stepped = -1  # the weight's version behind an optimizer's latest step, which leaves the holes as they are

    def shard(self, weight: Tensor, keep: Tensor | None, part: Part) -> None:
        super().shard(weight, keep, part)
        self.pattern = None if self.frozen and self.drawn else Pattern.of(term_mask(keep, part))
        _masked.add(self)
        self._noted = autograd.state(self.weight)

    def prepare(self, always: bool = False) -> None:
        """Zeros in the holes again where something else than an optimizer wrote, as nn.init does to a whole tensor."""
        super().prepare()
        weight = self._parameters["weight"]
        if self.gathered and self.pattern is not None and not isinstance(weight, DTensor):
            self.pattern.masked(weight.data, out=weight.data)  # FSDP2's buffer, which comes and goes at no new version
        others, lent = self.gathered, not isinstance(weight, self.watched)
        if lent and not others and bool(weight.detach()[~self._kept().mask()].any()):
            raise UnsupportedError(f"{describe(self)} was lent a weight with more than its mask keeps: mask it first")
        if others or lent or (now := autograd.state(weight)) == self._noted:
            return
        (place, version, steps, looks), (before, known, counted, looked) = now, self._noted
        changed = place != before or looks != looked
        if changed or (version not in (known, self.stepped) if steps != counted else version != known):
            masked = self._kept().masked(weight.detach())
            if not torch.equal(masked, weight):
                if place == before:
                    weight.detach().copy_(masked)
                else:  # its data was set to what another may still read
                    weight.data = masked
        self._noted = autograd.state(weight)

    def __setattr__(self, name: str, value: object) -> None:
        plain = name == "weight" and type(value) is nn.Parameter and not (self.gathered or value.is_meta)
        like = plain and self.pattern is not None and self.weight is not None and value.shape == self.weight.shape
        if like and value.device == self.weight.device and bool(value[~self.pattern.mask()].any()):
            raise UnsupportedError(f"{describe(self)} cannot be tied to a dense weight: load_dense() copies its part")
        super().__setattr__(name, value)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        _masked.add(self)

    def part_dense(self, tensor: Tensor) -> Tensor:
        return tensor if self.pattern is None else self.pattern.masked(tensor)

    def hold_bytes(self) -> dict[str, int]:
        return super().hold_bytes() | {"pattern": self.pattern.nbytes if self.pattern else 0}

    def local_dgrad(self, dy: Tensor) -> Tensor:
        return self.place_dgrad(super().local_dgrad(dy))

    def local_wgrad(self, dy: Tensor, x: Tensor, by: str | None = None) -> Tensor:
        dense = super().local_wgrad(dy, x)
        return self._kept().masked(dense, out=dense)

    def from_dense(self, dense: Tensor) -> Tensor:
        return self._kept().masked(dense[self.rows, self.cols])

    def _kept(self) -> Pattern:
        if self.pattern is not None:
            return self.pattern
        keep = masks.make(self.mask, (self.out_features, self.in_features), device=self.weight.device)
        return Pattern.of(term_mask(keep, Part(self.term, self.rows, self.cols)))
